"""Peers of `megalith serve` in decoding: the same greedy answers by other means, and by the engine without HTTP.

    python benchmarks/peers/generate.py huggingface FOLDER --streams 1 16 --precision bf16

  http         `megalith serve` and a client that streams `/v1/completions`; FOLDER is a checkpoint
  engine       the server's engine in a loop on the main thread, without HTTP; FOLDER is a checkpoint
  huggingface  `generate` of transformers, all streams in one static batch padded on the left; FOLDER is an export
  llama.cpp    by llama-cpp-python, all streams in one batch; FOLDER is a GGUF file

One stream: 64 tokens after a prompt of 64. Sixteen: mixed lengths (16 to 256, 32 to 128 tokens) that come together;
tokens that were not asked for do not count. A line after the warm-up (8 tokens of each stream), and one per round of
all streams, with the number of tokens in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

Asked = tuple[list[int], int]
"""Prompt and number of new tokens."""

_LATE = b"HTTP/1.1 408"
"""Beginning of the answer to a request that did not come in time: the bench had stopped client and server meanwhile."""


def requests(streams: int, number: int, *, uniform: bool = False) -> list[Asked]:
    """The requests of a round; the first tokens of each prompt differ, so that no prefix is in a cache."""
    chance = Random(1)
    if streams == 1 or uniform:
        return [([number, 1 + index, *chance.choices(range(1, 100), k=62)], 64) for index in range(streams)]
    return [
        ([number, 1 + index, *chance.choices(range(1, 50000), k=chance.randrange(14, 255))], chance.randrange(32, 129))
        for index in range(streams)
    ]


class Server:
    """`megalith serve` in a process of its own; as a context it gives its port and ends with it."""

    def __init__(self, folder: Path, precision: str, *flags: str) -> None:
        dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]
        program = Path(sys.executable).with_name("megalith")
        command = [str(program)] if program.exists() else [sys.executable, "-m", "megalith"]
        command += ["serve", str(folder), "--port", "0", "--dtype", dtype, *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = next(int(line.rsplit(":", 1)[1]) for line in self._process.stdout if "Running on" in line)
        threading.Thread(target=self._process.stdout.read, daemon=True).start()  # a full pipe would stop the server

    def __enter__(self) -> int:
        return self.port

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def completion_request(port: int, asked: Asked) -> bytes:
    """Return the bytes of a request that streams `/v1/completions`."""
    prompt, count = asked
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


async def stream(port: int, asked: Asked) -> list[float]:
    """Stream `/v1/completions`; return when each token came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(completion_request(port, asked))
    times, rest = list[float](), b""
    while received := await reader.read(1 << 16):
        *lines, rest = (rest + received).split(b"\n")
        tokens = sum(line.startswith(b'data: {"') and b'"finish_reason":null' in line for line in lines)
        times += [time.perf_counter()] * tokens
    writer.close()
    assert len(times) == asked[1], f"{len(times)} of {asked[1]} tokens came"
    return times


def http(folder: Path, precision: str, device: str = "cpu") -> Callable[[Sequence[Asked]], int]:
    """`megalith serve`, asked over HTTP."""
    return client(Server(folder, precision, "--device", device).port)


def client(port: int) -> Callable[[Sequence[Asked]], int]:
    """Requests by plain sockets: what a client computes, it takes from the server's cores."""

    def ask(asked: Sequence[Asked]) -> int:
        received: dict[socket.socket, list[bytes]] = {}
        with selectors.DefaultSelector() as waiting:
            for one in asked:
                connection = socket.create_connection(("127.0.0.1", port))
                connection.sendall(completion_request(port, one))
                waiting.register(connection, selectors.EVENT_READ, received.setdefault(connection, []))
            while waiting.get_map():
                for key, _ in waiting.select():
                    try:
                        data = key.fileobj.recv(1 << 16)
                    except ConnectionResetError:  # stopped before the server had read the headers
                        data, key.data[:] = b"", [_LATE]
                    key.data.append(data)
                    if not data:
                        waiting.unregister(key.fileobj)
                        key.fileobj.close()
        answers = [b"".join(parts) for parts in received.values()]
        again = [one for one, answer in zip(asked, answers, strict=True) if answer.startswith(_LATE)]
        tokens = sum(answer.count(b'"finish_reason":null') for answer in answers)
        return tokens + (ask(again) if again else 0)

    return ask


def engine(folder: Path, precision: str, device: str = "cpu") -> Callable[[Sequence[Asked]], int]:
    """The engine in this thread, on a CPU with the allocator of the server and as many threads as it takes."""
    import torch

    from megalith.assemble.trained import load_trained
    from megalith.kernels.cpu.process import keep_freed_memory, tune_num_threads
    from megalith.serve.engine import Engine, Limits
    from megalith.serve.model_runner import runner_of
    from megalith.serve.request import Request, Sampling, Token
    from megalith.serve.runner import decoding_step

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    if device == "cpu":
        keep_freed_memory(1)
    trained = load_trained(folder, torch.device(device), dtype=dtype)
    runner: Any = runner_of(trained.writer, 2048, packs_weights=True)
    made = Engine(runner, trained.tokenizer, Limits(max_num_seqs=64))
    if device == "cpu":
        tune_num_threads(lambda: runner.run(decoding_step(runner)), torch.get_num_threads(), torch.set_num_threads)

    def answer(asked: Sequence[Asked]) -> int:
        for prompt, count in asked:
            made.submit(Request(tuple(prompt), count, Sampling(temperature=0.0), stop_ids=()))
        tokens = 0
        while made.has_work:
            tokens += sum(isinstance(event, Token) for _, event in made.step())
        return tokens

    return answer


def huggingface(folder: Path, precision: str) -> Callable[[Sequence[Asked]], int]:
    """`generate` on the exported model."""
    import torch
    from transformers import AutoModelForCausalLM

    from megalith.kernels.cpu.process import keep_freed_memory

    keep_freed_memory(1)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def answer(asked: Sequence[Asked]) -> int:
        longest, count = max(len(prompt) for prompt, _ in asked), max(count for _, count in asked)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in asked])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in asked])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return sum(count for _, count in asked)

    return answer


def llama(file: Path, precision: str) -> Callable[[Sequence[Asked]], int]:
    """llama.cpp, all streams in one batch as its own server has them; the precision is that of the file."""
    import llama_cpp
    import numpy as np

    tokens_at_once, tokens_of_a_stream = 4096, 512
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max, settings.n_batch = 16 * tokens_of_a_stream, 16, tokens_at_once
    settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(tokens_at_once, 0, 1)

    def likeliest(entries: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Take in (token, position, stream, whether it is the stream's last); returns the next token of each stream."""
        for place, (token, position, stream, is_last) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, is_last
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, stream
        batch.n_tokens = len(entries)
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return {
            stream: int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, place), (vocabulary,)).argmax())
            for place, (_, _, stream, is_last) in enumerate(entries)
            if is_last
        }

    def answer(asked: Sequence[Asked]) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        made = [0] * len(asked)
        entries = [
            (token, position, stream, position == len(prompt) - 1)
            for stream, (prompt, _) in enumerate(asked)
            for position, token in enumerate(prompt)
        ]
        while entries:
            found, entries = likeliest(entries), []
            for stream, token in found.items():
                prompt, count = asked[stream]
                made[stream] += 1
                if made[stream] < count:
                    entries.append((token, len(prompt) + made[stream] - 1, stream, True))
        return sum(made)

    return answer


PEERS = {"http": http, "engine": engine, "huggingface": huggingface, "llama.cpp": llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="of successive rounds, over and over")
    parser.add_argument("--uniform", action="store_true", help="the length of a single stream, however many there are")
    parser.add_argument("--rounds", type=int, default=10**9)
    options = parser.parse_args()
    answer = PEERS[options.peer](options.folder, options.precision)
    for streams in set(options.streams):
        answer([(prompt, min(count, 8)) for prompt, count in requests(streams, 0, uniform=options.uniform)])
    print("warm-up: done", flush=True)
    for number in range(1, options.rounds + 1):
        streams = options.streams[(number - 1) % len(options.streams)]
        asked = requests(streams, number, uniform=options.uniform)
        tokens, wanted = answer(asked), sum(count for _, count in asked)
        assert tokens == wanted, f"{tokens} of {wanted} tokens came"
        print(f"round {number}: {tokens} tokens", flush=True)
        time.sleep(0.02)  # it is stopped here, with no request on its way


if __name__ == "__main__":
    main()
