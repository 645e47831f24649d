"""Speed of the serving engine against Hugging Face `generate` with its cache, and against the machine.

    python benchmarks/serve.py --size 124M --threads 2 --rounds 5 --out benchmarks/results/serve-cpu.json

Same weights, same prompts, greedy, no stop tokens, one process, the same threads. Each round measures all contenders,
one after the other; a ratio is the median over rounds of the ratio within a round.

  single       one request; against HF, and against the weight bandwidth: the time in which every weight matrix is
               multiplied once with one vector, which every token needs at least
  concurrent   16 requests of mixed lengths; against HF one by one, and HF in one static batch, padded on the left,
               which runs until the longest is done. Tokens that were not asked for do not count
  arrivals     the 16 requests come at equal distances in two thirds of the time that `concurrent` took: time to first
               token and between tokens, percentiles
  cache        memory of the cache against 2 x layers x groups x head size x bytes for each token that it can hold, and
               how many of the blocks in use are really filled
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.serve.engine import Engine, Limits, Ticket
from megalith.serve.model_runner import ModelRunner
from megalith.serve.request import Request, Sampling, Token

VOCABULARY, CONTEXT = 50304, 1024
SIZES = {"1M": (2, 16, 2), "10M": (6, 128, 4), "10M-deep": (12, 144, 4), "124M": (12, 768, 12)}
"""Layers, hidden size, heads."""
REQUESTS = 16
GREEDY = Sampling(temperature=0.0)
PERCENTILES = (50, 90, 99)


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


def paired(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, Any]:
    """Times of each contender, and how many times as long as ours the others take."""
    for action in contenders.values():
        action()
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
                torch.nn.functional.linear(vectors[matrix.shape[1]], matrix)

    return read


def single(model: GPT, theirs: Any, rounds: int, count: int) -> dict[str, Any]:
    engine = build_engine(model)
    prompt = tuple(Random(0).choices(range(1, 50000), k=64))
    request = Request(prompt, count, GREEDY, stop_ids=())

    def ours() -> list[int]:
        forget(engine)
        return [event.id for event in engine.run(request) if isinstance(event, Token)]

    assert ours()[:8] == their_answer(theirs, [prompt], 8)[0].tolist(), "not the same model"
    weights = weight_pass(model)
    result = paired(
        {
            "megalith": ours,
            "huggingface": lambda: their_answer(theirs, [prompt], count),
            "weights": lambda: [weights() for _ in range(count)],
        },
        rounds,
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


def build_engine(model: GPT) -> Engine:
    return Engine(ModelRunner(model, REQUESTS * 32, 16), cast("Any", Numbers()), Limits(running=REQUESTS))


def forget(engine: Engine) -> None:
    """No prompt is found in the cache again: only new work is measured."""
    engine._scheduler.blocks._known.clear()
    engine._scheduler.blocks._digest = [None] * engine.runner.num_blocks


def serve_all(engine: Engine, requests: Sequence[Request], distance: float = 0.0) -> list[dict[str, Any]]:
    """When each request came and when each of its tokens did."""
    forget(engine)
    began, waiting, open_ = time.perf_counter(), list(requests), dict[Ticket, dict[str, Any]]()
    while waiting or engine.has_work:
        now = time.perf_counter() - began
        while waiting and (len(requests) - len(waiting)) * distance <= now:
            due = (len(requests) - len(waiting)) * distance
            open_[engine.submit(waiting.pop(0))] = {"came": due, "tokens": []}
        if not engine.has_work:
            time.sleep(0.001)
            continue
        events = engine.step()
        now = time.perf_counter() - began
        for ticket, event in events:
            if isinstance(event, Token):
                open_[ticket]["tokens"].append(now)
    return list(open_.values())


def concurrent(model: GPT, theirs: Any, rounds: int) -> dict[str, Any]:
    engine, requests = build_engine(model), mixed_requests()
    longest = max(request.max_new_tokens for request in requests)
    result = paired(
        {
            "megalith": lambda: serve_all(engine, requests),
            "huggingface one by one": lambda: [
                their_answer(theirs, [request.prompt], request.max_new_tokens) for request in requests
            ],
            "huggingface static batch": lambda: their_answer(theirs, [r.prompt for r in requests], longest),
        },
        rounds,
    )
    total = sum(request.max_new_tokens for request in requests)
    result["tokens_per_second"] = total / statistics.median(result["seconds"]["megalith"])
    return result


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 5) for p in PERCENTILES}


def arrivals(model: GPT, window: float) -> dict[str, Any]:
    served = serve_all(build_engine(model), mixed_requests(), window / REQUESTS)
    gaps = [b - a for row in served for a, b in zip(row["tokens"], row["tokens"][1:], strict=False)]
    return {
        "window_seconds": window,
        "first_token_seconds": percentiles([row["tokens"][0] - row["came"] for row in served]),
        "between_tokens_seconds": percentiles(gaps),
    }


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
        held = sum(sequence.read for sequence in engine._scheduler.running)
        if used := engine.stats().blocks_used:
            shares.append(held / (used * runner.block_size))
    return {
        "bytes_per_token": runner.cache.bytes / capacity,
        "theory_bytes_per_token": theory,
        "share_of_used_blocks_filled": statistics.mean(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="may be repeated; 10M and 124M by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of the single answer")
    parser.add_argument("--only", choices=("single", "concurrent"), help="a part of it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import transformers

    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "load_before": os.getloadavg()[0],
    }
    for size in options.size or ["10M", "124M"]:
        model = build_model(size)
        theirs = build_theirs(model)
        found: dict[str, Any] = {"parameters": sum(weight.numel() for weight in model.parameters())}
        if options.only != "concurrent":
            found["single"] = single(model, theirs, options.rounds, options.tokens)
        if options.only != "single":
            found["concurrent"] = concurrent(model, theirs, options.rounds)
            window = statistics.median(found["concurrent"]["seconds"]["megalith"]) * 2 / 3
            found["arrivals"] = arrivals(model, window)
            found["cache"] = cache(model)
        results[size] = found
        print(size, json.dumps(found, indent=1), flush=True)
    results["load_after"] = os.getloadavg()[0]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
