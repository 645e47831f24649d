"""Speed of the serving engine against Hugging Face `generate` with its cache, and against the machine.

    python benchmarks/serve.py --out benchmarks/results/serve-cpu.json --plot benchmarks/results/serve-cpu.png

Same weights, same prompts, greedy, no stop tokens, the same threads; one process, but for http and load. Each round
measures all contenders, one after the other; a ratio is the median over rounds of the ratio within a round.

  single       one request; against HF, and against the weight bandwidth: the time in which every weight matrix is
               multiplied once with one vector, which every token needs at least
  concurrent   16 requests of mixed lengths; against HF one by one, and HF in one static batch, padded on the left,
               which runs until the longest is done. Tokens that were not asked for do not count
  http         what HTTP adds to a token: the same requests, one alone and all 16, through a server in a process of its
               own and by an engine in another one like it, against one another in turn, both with as many threads as
               `megalith serve` takes for this model (serving_threads)
  load         clients who come at random (Poisson) with 0.5, 0.7 and 0.9 of the tokens per second that `concurrent`
               reached, over HTTP: percentiles of the time to the first token, between tokens, to the last; --plot
  crowd        500 clients who come at once, and again every half second until they are served, to a server of the 1M
               model that works on 4 and lets 8 wait: what `/health` takes meanwhile; it ends within a minute. Once,
               whatever --size says
  cache        memory of the cache against 2 x layers x groups x head size x bytes for each token that it can hold, and
               how many of the blocks in use are really filled
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import serve_http
import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.kernels.cpu.process import keep_freed_memory, tune_num_threads
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.linear import linear
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import ModelRunner
from megalith.serve.request import Request, Sampling, Token
from megalith.serve.runner import decoding_step

VOCABULARY, CONTEXT = 50304, 1024
SIZES = {"1M": (2, 16, 2), "10M": (6, 128, 4), "10M-deep": (12, 144, 4), "124M": (12, 768, 12)}
"""Layers, hidden size, heads."""
REQUESTS = 16
GREEDY = Sampling(temperature=0.0)
LOADS, CLIENTS = (0.5, 0.7, 0.9), 32
PARTS = ("single", "concurrent", "http", "load", "cache", "crowd")
CROWD, CROWD_SECONDS = 500, 60.0


class Numbers:
    """A tokenizer whose text is ids: the cost of text is not measured here."""

    vocab_size, eod, pad = VOCABULARY, 0, None

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def build_model(size: str) -> GPT:
    layers, hidden, heads = SIZES[size]
    config = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=CONTEXT
    )
    model = GPT(config, VOCABULARY)
    initialise(model, 1)
    return model.eval().requires_grad_(False)


def build_theirs(model: GPT) -> Any:
    """Hugging Face's GPT-2 with the same weights."""
    import transformers

    layers, hidden, heads = model.config.num_layers, model.config.hidden_size, model.config.num_attention_heads
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            activation_function="gelu",
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )  # fmt: skip
    )
    ours: dict[str, Tensor] = dict(model.named_parameters())
    state: dict[str, Tensor] = {
        "transformer.wte.weight": ours["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": ours["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": ours["decoder.final_layernorm.weight"],
        "transformer.ln_f.bias": ours["decoder.final_layernorm.bias"],
    }
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "pre_mlp_layernorm",
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for layer in range(layers):
        for name, own in names.items():
            for kind in ("weight", "bias"):
                value = ours[f"decoder.layers.{layer}.{own}.{kind}"]
                if name == "attn.c_attn":  # head by head q, k, v -> all q, all k, all v
                    value = value.unflatten(0, (heads, 3, hidden // heads)).transpose(0, 1).flatten(0, 2)
                state[f"transformer.h.{layer}.{name}.{kind}"] = value.t() if value.dim() == 2 else value
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return theirs.eval().requires_grad_(False)


def their_answer(theirs: Any, prompts: Sequence[Sequence[int]], count: int) -> Tensor:
    """Greedy answers to prompts padded on the left, [B, count]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        answer: Tensor = theirs.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
    return answer[:, longest:]


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def paired(contenders: dict[str, Callable[[], object]], rounds: int, warm: Callable[[], object]) -> dict[str, Any]:
    """Times of each contender, and how many times as long as ours the others take; `warm` comes before all."""
    warm()
    times = [{name: seconds(action) for name, action in contenders.items()} for _ in range(rounds)]
    names = list(contenders)
    return {
        "seconds": {name: [round(row[name], 4) for row in times] for name in names},
        "ratio": {name: statistics.median(row[name] / row[names[0]] for row in times) for name in names[1:]},
    }


def weight_pass(model: GPT) -> Callable[[], object]:
    """Multiply each weight matrix with one vector: what a token costs at least."""
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "position" not in name]
    vectors = {matrix.shape[1]: torch.randn(1, matrix.shape[1]) for matrix in matrices}

    def read() -> None:
        with torch.inference_mode():
            for matrix in matrices:
                linear(vectors[matrix.shape[1]], matrix, None, None)

    return read


def single(model: GPT, theirs: Any, rounds: int, count: int) -> dict[str, Any]:
    engine = build_engine(model)
    prompt = tuple(Random(0).choices(range(1, 50000), k=64))
    request = Request(prompt, count, GREEDY, stop_ids=())

    def ours() -> list[int]:
        forget(engine)
        return [event.id for event in engine.run(request) if isinstance(event, Token)]

    weights = weight_pass(model)

    def warm() -> None:
        assert ours()[:8] == their_answer(theirs, [prompt], 8)[0].tolist(), "not the same model"
        weights()

    result = paired(
        {
            "megalith": ours,
            "huggingface": lambda: their_answer(theirs, [prompt], count),
            "weights": lambda: [weights() for _ in range(count)],
        },
        rounds,
        warm,
    )
    result["tokens_per_second"] = count / statistics.median(result["seconds"]["megalith"])
    result["share_of_weight_bandwidth"] = result["ratio"].pop("weights")
    return result


def mixed_requests() -> list[Request]:
    chance = Random(1)
    return [
        Request(
            tuple(chance.choices(range(1, 50000), k=chance.randrange(16, 257))),
            chance.randrange(32, 129),
            GREEDY,
            stop_ids=(),
        )
        for _ in range(REQUESTS)
    ]


def build_engine(model: GPT, limits: Limits | None = None) -> Engine:
    return Engine(
        ModelRunner(model, REQUESTS * 32, 16), cast("Any", Numbers()), limits or Limits(max_num_seqs=REQUESTS)
    )


def forget(engine: Engine) -> None:
    """No prompt is found in the cache again: only new work is measured."""
    engine._scheduler.blocks._cached.clear()
    engine._scheduler.blocks._block_hashes = [None] * engine.runner.num_blocks


def serve_all(engine: Engine, requests: Sequence[Request]) -> list[serve_http.Served]:
    """When each token of these requests came, which came together."""
    forget(engine)
    began = time.perf_counter()
    served = {engine.submit(request): serve_http.Served(0.0) for request in requests}
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - began
        for ticket, event in events:
            if isinstance(event, Token):
                served[ticket].tokens.append(now)
    return list(served.values())


def concurrent(model: GPT, theirs: Any, rounds: int) -> dict[str, Any]:
    engine, requests = build_engine(model), mixed_requests()
    longest = max(request.max_new_tokens for request in requests)

    def warm() -> None:
        serve_all(engine, requests)
        their_answer(theirs, [request.prompt for request in requests], 8)

    result = paired(
        {
            "megalith": lambda: serve_all(engine, requests),
            "huggingface one by one": lambda: [
                their_answer(theirs, [request.prompt], request.max_new_tokens) for request in requests
            ],
            "huggingface static batch": lambda: their_answer(theirs, [r.prompt for r in requests], longest),
        },
        rounds,
        warm,
    )
    total = sum(request.max_new_tokens for request in requests)
    result["tokens_per_second"] = total / statistics.median(result["seconds"]["megalith"])
    return result


def serving_engine(size: str, threads: int) -> Engine:
    """The engine of the server's process."""
    torch.set_num_threads(threads)
    return build_engine(build_model(size))


def crowded_engine() -> Engine:
    """The engine of the server that a crowd comes to: of a small model, and with a short queue."""
    torch.set_num_threads(1)
    return build_engine(build_model("1M"), Limits(max_num_seqs=4, max_waiting=8))


def crowd() -> dict[str, Any]:
    with serve_http.server(crowded_engine, CONTEXT) as port:
        return serve_http.crowd(port, CROWD, CROWD_SECONDS)


def count_threads(engine: Engine, _: Sequence[Request]) -> int:
    """Those that `megalith serve` takes."""
    step = functools.partial(engine.runner.run, decoding_step(engine.runner))
    return tune_num_threads(step, torch.get_num_threads(), torch.set_num_threads)


def fresh(requests: Sequence[Request], number: int) -> list[Request]:
    """The same requests with another first token: nothing of them is in the cache of a server."""
    return [dataclasses.replace(request, prompt=(number, *request.prompt[1:])) for request in requests]


def http(
    engine: Callable[[Sequence[Request]], list[serve_http.Served]], port: int, rounds: int, count: int
) -> dict[str, Any]:
    """Milliseconds of a token with and without HTTP; the prompt of `single` is not counted."""
    numbers = iter(range(1, 1000))
    alone = [Request(tuple(Random(0).choices(range(1, 50000), k=64)), count, GREEDY, stop_ids=())]
    crowd = mixed_requests()

    def decode_time(served: Sequence[serve_http.Served]) -> float:
        return served[0].tokens[-1] - served[0].tokens[0]

    def whole_time(served: Sequence[serve_http.Served]) -> float:
        return max(row.tokens[-1] for row in served)

    found: dict[str, Any] = {}
    for name, requests, time_of in (("single", alone, decode_time), ("concurrent", crowd, whole_time)):
        tokens = sum(request.max_new_tokens for request in requests) - (1 if name == "single" else 0)
        rows = []
        for _ in range(rounds + 1):
            asked, dues = fresh(requests, next(numbers)), [0.0] * len(requests)
            direct, over = time_of(engine(asked)), time_of(serve_http.ask_all(port, asked, dues))
            rows.append((direct / tokens * 1000, over / tokens * 1000))
        del rows[0]  # the first of all warms both up
        found[name] = {
            "engine_ms_per_token": [round(direct, 3) for direct, _ in rows],
            "http_ms_per_token": [round(over, 3) for _, over in rows],
            "added_ms_per_token": round(statistics.median(over - direct for direct, over in rows), 4),
        }
    return found


def load(port: int, tokens_per_second: float) -> dict[str, dict[str, list[float]]]:
    """Load -> kind of latency -> seconds."""
    found = {}
    for number, share in enumerate(LOADS):
        requests = fresh((mixed_requests() * (CLIENTS // REQUESTS + 1))[:CLIENTS], 2000 + number)
        requests = [
            dataclasses.replace(r, prompt=(*r.prompt[:1], 1 + i, *r.prompt[2:])) for i, r in enumerate(requests)
        ]
        mean = statistics.mean(request.max_new_tokens for request in requests)
        dues = serve_http.poisson(CLIENTS, share * tokens_per_second / mean, number)
        found[f"{share:g}"] = serve_http.latencies(serve_http.ask_all(port, requests, dues))
    return found


def cache(model: GPT) -> dict[str, Any]:
    engine = build_engine(model)
    runner, config = cast("ModelRunner", engine.runner), model.config
    theory = 2 * config.num_layers * config.query_groups * config.head_size * model.dtype.itemsize
    capacity = runner.num_blocks * runner.block_size
    for request in mixed_requests():
        engine.submit(request)
    shares = []
    while engine.has_work:
        engine.step()
        held = sum(sequence.num_computed for sequence in engine._scheduler.running)
        if used := engine.stats().blocks_used:
            shares.append(held / (used * runner.block_size))
    return {
        "bytes_per_token": runner.cache.bytes / capacity,
        "theory_bytes_per_token": theory,
        "share_of_used_blocks_filled": statistics.mean(shares),
    }


def measure(size: str, parts: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The parts, one by one: (name, what was found)."""
    model = build_model(size)
    yield "parameters", sum(weight.numel() for weight in model.parameters())
    theirs = build_theirs(model)
    tokens_per_second = 0.0
    if "single" in parts:
        yield "single", single(model, theirs, options.rounds, options.tokens)
    if "concurrent" in parts:
        found = concurrent(model, theirs, options.rounds)
        tokens_per_second = found["tokens_per_second"]
        yield "concurrent", found
    if "cache" in parts:
        yield "cache", cache(model)
    if not {"http", "load"} & set(parts):
        return
    with serve_http.engine_apart(functools.partial(serving_engine, size, options.threads), count_threads) as count:
        threads = options.serving_threads or count([])
    yield "serving_threads", threads
    build = functools.partial(serving_engine, size, threads)
    with serve_http.server(build, CONTEXT) as port:
        if "http" in parts:
            with serve_http.engine_apart(build, serve_all) as engine:
                found = http(engine, port, options.rounds, options.tokens)
            yield "http", found
            tokens_per_second = tokens_per_second or 1000 / statistics.median(found["concurrent"]["http_ms_per_token"])
        if "load" in parts:
            assert tokens_per_second, "load is a share of what concurrent or http has found; measure one of them too"
            yield "load", load(port, tokens_per_second)


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Write the figures, if they are wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="may be repeated; 10M and 124M by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--serving-threads", type=int, help="of the server; those that `megalith serve` takes if absent"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="of the single answer")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of it; may be repeated")
    parser.add_argument("--out", type=Path, help="the figures; written after each part")
    parser.add_argument("--plot", type=Path, help="a PNG of the latencies under load")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory(1)  # as `megalith serve` does; the peer has it too
    import transformers

    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "load_before": os.getloadavg()[0],
    }
    pictured = {}
    parts = list(options.only or PARTS)
    if "crowd" in parts:
        parts.remove("crowd")
        results["crowd"] = crowd()
        print("crowd", json.dumps(results["crowd"], indent=1), flush=True)
        write(options.out, results)
    for size in (options.size or ["10M", "124M"]) if parts else ():
        found = results[size] = {}
        for name, value in measure(size, parts, options):
            if name == "load":
                pictured[size] = value
                value = {share: {k: serve_http.percentiles(v) for k, v in row.items()} for share, row in value.items()}
            found[name] = value
            print(size, name, json.dumps(value, indent=1), flush=True)
            results["load_after"] = os.getloadavg()[0]
            write(options.out, results)
    if options.plot and pictured:
        serve_http.draw(options.plot, pictured)


if __name__ == "__main__":
    main()
