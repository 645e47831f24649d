"""Count what a GPU has to do for a training step and a decoded token, without one, and predict the MFU from it.

    python benchmarks/gpu_counts.py             count; write the results, the page and the predicted MFU
    python benchmarks/gpu_counts.py --check     count; exit status 1 if anything is more than in the results

The step of `benchmarks/gpu_cases.py` runs at its real sizes on a device that computes nothing (`tests/fake_device.py`),
with one and with two layers: the difference is a layer. A launch is a kernel or a copy; an operator that CUDA runs as
several kernels counts once. Bytes are those of the operands and results of each.

The time of a step is predicted as the sum over its launches of the longest of FLOPs, bytes and launching, with rates
of which `gpu_predicted.json` has the lowest and the highest that are known of such kernels. That is no measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COUNTS, PREDICTED, PAGE = (
    RESULTS / "gpu_counts.json",
    RESULTS / "gpu_predicted.json",
    ROOT / "docs/results/gpu-counts.md",
)
LAYERS, LENGTH, SAMPLES = 24, 2048, 4
RUNS = {"gpt2 bf16 H100": ("gpt2", "bf16"), "llama bf16 H100": ("llama", "bf16"), "gpt2 fp16 V100": ("gpt2", "fp16")}
SEQUENCES, MOVED = 8, 1e-3  # how much more than counted before is no growth: a torch may add a small tensor

WHAT = {
    "launches a layer": "of one micro-batch, forward and backward",
    "MiB a layer": "read and written by these, 4 samples of 2048 tokens",
    "launches of the rest": "of one micro-batch: embedding, last norm, loss",
    "bytes a logit": "read and written by the loss beside the matrix products, both passes",
    "launches of the optimizer": "norm, clipping, AdamW, rounded weights: 1 layer",
    "launches of the optimizer, 2 layers": "the same for a deeper model",
    "host waits a step": "",
    "attention calls a layer and decoded token": f"of {SEQUENCES} sequences that decode together",
    "launches a decoded token": "2 layers",
    "host waits a decoding step": f"of all {SEQUENCES} tokens",
}


def count() -> dict[str, dict[str, float]]:
    """Return the counts of each run."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from tests import fake_device
    from tests.devices import H100, V100

    found = {}
    for name, (style, precision) in RUNS.items():
        device = fake_device.install(V100 if "V100" in name else H100)
        with fake_device.shapes_only():
            one, two = (step(style, precision, layers, device) for layers in (1, 2))
        launches = [sum(run["step"].launches.values()) / 2 for run in (one, two)]
        moved = [sum(run["step"].bytes.values()) / 2 for run in (one, two)]
        found[name] = {
            "launches a layer": launches[1] - launches[0],
            "MiB a layer": round((moved[1] - moved[0]) / 2**20),
            "launches of the rest": 2 * launches[0] - launches[1],
            "launches of the optimizer": sum(one["update"].launches.values()),
            "launches of the optimizer, 2 layers": sum(two["update"].launches.values()),
            "host waits a step": len(two["step"].waits) + len(two["update"].waits),
            "bytes a logit": round(loss_bytes(precision, device), 1),
            **decoding(style, precision, device),
        }
        if precision == "bf16":
            found[name]["_work"] = extrapolated(one, two)  # type: ignore[assignment]
    return found


def step(style: str, precision: str, layers: int, device: Any) -> dict[str, Any]:
    """Return what is recorded of the second step of a model of the sizes of 1.3B: the update apart from the rest."""
    from gpu_cases import MICRO_BATCHES, parser, random_batches, step_flags
    from tests import fake_device

    from megalith.assemble.model import build_chunks, build_run_optimizer
    from megalith.assemble.schedule import build_schedule
    from megalith.config import load
    from megalith.distributed.context import ParallelContext
    from megalith.distributed.rng import RandomStreams
    from megalith.train.state import TrainState
    from megalith.train.step import train_step

    words = f"step --device cpu --style {style} --precision {precision} --size {layers}x2048x16 --length {LENGTH} "
    options = parser().parse_args(f"{words} --micro-batch {SAMPLES}".split())
    config, context = load(step_flags(options), {}, files=False), ParallelContext.solo(device)
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, options.vocabulary, context, streams.own)
    optimizer = build_run_optimizer(config, chunks, context)
    state = TrainState(chunks, optimizer, streams, build_schedule(config), context=context)
    batches, update = random_batches(options), fake_device.Record()
    train_step(state, batches, MICRO_BATCHES)
    for method in ("measure", "complete_step"):
        setattr(optimizer, method, apart(getattr(optimizer, method), update))
    with fake_device.recorded() as record:
        train_step(state, batches, MICRO_BATCHES)
    for name in ("launches", "bytes"):
        getattr(record, name).subtract(getattr(update, name))
    record.waits = record.waits[len(update.waits) :]
    record.work = list(minus(record.work, update.work))
    return {"step": record, "update": update}


def minus(work: list[tuple[int, int]], less: list[tuple[int, int]]) -> list[tuple[int, int]]:
    left = list(work)
    for one in less:
        left.remove(one)
    return left


def apart(method: Callable[..., Any], into: Any) -> Callable[..., Any]:
    """Return a method that records what it does."""
    from tests import fake_device

    def run(*args: Any, **kwargs: Any) -> Any:
        with fake_device.recorded() as record:
            found = method(*args, **kwargs)
        into.launches.update(record.launches)
        into.bytes.update(record.bytes)
        into.waits += record.waits
        into.work += record.work
        return found

    return run


def loss_bytes(precision: str, device: Any) -> float:
    """Return the bytes of the loss for each logit: of hidden states so small that nothing else counts."""
    import torch
    from tests import fake_device

    from megalith.nn.loss import LogitsBuffer, vocabulary_loss

    tokens, vocabulary, dtype = 4096, 50304, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with fake_device.shapes_only(), fake_device.recorded() as record:
        hidden = torch.empty(tokens, 8, dtype=dtype, device=device, requires_grad=True)
        weight = torch.nn.Parameter(torch.empty(vocabulary, 8, dtype=dtype, device=device))
        targets = torch.zeros(tokens, dtype=torch.int64, device=device)
        vocabulary_loss(hidden, weight, targets, None, LogitsBuffer()).sum().backward()
    products = sum(moved for name, moved in record.bytes.items() if name.split(".")[0] in ("mm", "addmm"))
    return (sum(record.bytes.values()) - products) / (tokens * vocabulary)


def decoding(style: str, precision: str, device: Any) -> dict[str, float]:
    """Return the counts of a decoding step of a small model with values."""
    import torch
    from tests import fake_device
    from tests.unit.serve.models import STYLES, Letters, model_of

    from megalith.models.gpt import GPT
    from megalith.serve.engine import Engine
    from megalith.serve.model_runner import ModelRunner
    from megalith.serve.request import Request, Sampling

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = GPT(STYLES[style], 32, dtype=dtype, device=device)
    model.load_state_dict(model_of(style).state_dict())
    engine = Engine(ModelRunner(model, 64, 4), Letters())
    for length in range(2, 2 + SEQUENCES):
        engine.submit(Request((1,) * length, 9, sampling=Sampling(temperature=0.0), stop_ids=()))
    for _ in range(3):
        engine.step()
    with fake_device.recorded() as record:
        engine.step()
    calls = sum(count for name, count in record.launches.items() if "attention" in name or name.startswith("_softmax"))
    return {
        "attention calls a layer and decoded token": calls / len(model.decoder.layers) / SEQUENCES,
        "launches a decoded token": sum(record.launches.values()) / SEQUENCES,
        "host waits a decoding step": len(record.waits),
    }


# --- prediction -------------------------------------------------------------------------------------------------------


def extrapolated(one: dict[str, Any], two: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Return the launches of a step that do not depend on the depth, those of a layer, and those of both updates."""
    layer = minus(two["step"].work, one["step"].work)
    return [minus(one["step"].work, layer), layer, one["update"].work, two["update"].work]


def seconds(work: list[tuple[int, int]], peak: float, constants: dict[str, Any], end: int) -> float:
    """Return the time of launches one after the other, with the lowest (0) or the highest rates (1)."""
    shares, total = {name: value[end] for name, value in constants.items() if isinstance(value, list)}, 0.0
    for moved, flops in work:
        compute = flops / (peak * shares["share of the peak"])
        memory = moved / (constants["bytes a second"] * shares["share of the bandwidth"])
        total += max(compute, memory, shares["seconds a launch"])
    return total


def predicted(found: dict[str, Any], constants: dict[str, Any]) -> dict[str, list[float]]:
    """Return the MFU of a step of 1.3B with the lowest and with the highest rates."""
    from gpu_cases import parser, step_flags

    from megalith.config import load
    from megalith.config.flops import step_flops
    from megalith.datasheet import find_accelerator

    card = find_accelerator("NVIDIA H100 80GB HBM3")
    assert card is not None
    peak, mfu = 1e12 * card.teraflops["bf16"], {}
    for name, counts in found.items():
        if "_work" not in counts:
            continue
        rest, layer, first, second = counts["_work"]
        style = name.split()[0]
        options = parser().parse_args(f"step --device cpu --style {style} --size 1.3B --length {LENGTH}".split())
        flops = step_flops(load(step_flags(options), {}, files=False).model, options.vocabulary, LENGTH, 2 * SAMPLES)
        ends = []
        for end in (0, 1):
            of = [seconds(work, peak, constants["H100"], end) for work in (rest, layer, first, second)]
            whole = of[0] + LAYERS * of[1] + of[2] + (LAYERS - 1) * (of[3] - of[2])
            ends.append(round(flops / whole / peak, 3))
        mfu[f"{style} 1.3B eager"] = ends
    return mfu


# --- results ----------------------------------------------------------------------------------------------------------


def page(now: dict[str, Any], before: dict[str, Any], mfu: dict[str, list[float]]) -> str:
    """Return the page: what was counted, and what would follow from it."""
    lines = [
        "# What a GPU has to do, by counting",
        "",
        "Written by `python benchmarks/gpu_counts.py`, which says how it counts. Nothing of it was measured on a GPU.",
        "Tests fail when a count grows. *Before*: the same counts at commit 8107b342, before windows, losses,",
        "gathers and the optimizer were made for GPUs.",
    ]
    for name, counts in now.items():
        lines += ["", f"## {name}, 2048 wide", "", "| what | | before | now |", "|---|---|---|---|"]
        for what, about in WHAT.items():
            old = before.get(name, {}).get(what)
            lines.append(f"| {what} | {about} | {'' if old is None else f'{old:g}'} | {counts[what]:g} |")
    lines += ["", "## Predicted MFU of 1.3B on an H100", ""]
    lines += ["With the lowest and the highest rates of `benchmarks/results/gpu_predicted.json`; no measurement.", ""]
    lines += [f"- {name}: {100 * low:.0f} to {100 * high:.0f} %" for name, (low, high) in mfu.items()]
    return "\n".join(lines) + "\n"


def grown(now: dict[str, Any], bounds: dict[str, Any]) -> list[str]:
    """Return what is more than its bound."""
    return [
        f"{run}: {what} {now[run][what]:g}, was {most:g}"
        for run, counts in bounds.items()
        for what, most in counts.items()
        if now[run][what] > most * (1 + MOVED)
    ]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="write nothing")
    made.add_argument("--as-before", action="store_true", help="write the counts into the column of the past")
    options = made.parse_args()
    found = count()
    plain = {name: {what: counts[what] for what in WHAT} for name, counts in found.items()}
    known = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {"before": {}, "now": {}}
    if options.check:
        more = grown(plain, known["now"])
        print("\n".join(more))
        sys.stdout.flush()
        os._exit(bool(more))
    known["before" if options.as_before else "now"] = plain
    COUNTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if not options.as_before:
        record = json.loads(PREDICTED.read_text(encoding="utf-8"))
        record["mfu"] = {"H100": predicted(found, record["rates"])}
        PREDICTED.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(plain, known["before"], record["mfu"]["H100"]), encoding="utf-8")
    print(json.dumps(plain, indent=1), flush=True)
    os._exit(0)  # a thread of torch may end in an abort on such a device


if __name__ == "__main__":
    main()
