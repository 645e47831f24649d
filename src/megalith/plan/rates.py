"""Rates of the machine that this runs on: measured by `megalith doctor --measure`, read by plans for such devices.

Measured are products of square matrices, passes over memory by size and kind, fused attention, what training steps of
tiny models take for each launch and beside them, and an all-reduce between ranks on this machine. On a CPU all this is
measured by one rank, with its threads, and by one rank for each core, all at once: these share caches and memory. There
the steps of small models then show how much slower all is together: data are in no cache, ranks wait for each other.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from megalith.distributed.machine import try_to_write, usable_cores
from megalith.errors import ConfigError
from megalith.layout import Layout
from megalith.plan.calibration import calibrated
from megalith.plan.devices import DEVICES, Device, Link, Rates, find_device
from megalith.plan.remember import cache_folder

_SAMPLES, _SECONDS = 5, 0.02
_ROUNDS = 7  # of the tiny models
_LAYERS, _MICRO_BATCHES = (2, 8), 4
_SMALL, _LARGE = 2**16, 2**24  # bytes of collectives
_CALLS = 20  # of each, in each sample
_TINY = (  # of which nothing but launches counts
    "--num-layers {} --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --num-workers 0 --eval-iters 0 --split 100,0,0"
)
_OF_TINY = (  # with more and more launches in a layer
    "--hidden-dropout 0 --attention-dropout 0",
    "--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm --position-embedding-type rope",
    "--swiglu --normalization RMSNorm --position-embedding-type rope --recompute-granularity selective",
)
_TINIES = [f"{_TINY.format(layers)} {more}".split() for more in _OF_TINY for layers in _LAYERS]
_SMALL_MODELS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --hidden-dropout 0 --attention-dropout 0",
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --position-embedding-type rope --swiglu",
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8",
)
_OF_SMALL = (
    "--seq-length 256 --max-position-embeddings 256 --lr 1e-3 --micro-batch-size 2 --global-batch-size {} "
    "--train-iters 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --padded-vocab-size 4096 "
    "--num-workers 0 --eval-iters 0 --split 100,0,0"
)
_DTYPES = {"fp32": "", "bf16": "--bf16"}


def table_of(device: Device) -> Path:
    """Return the file of the rates that were measured of a device."""
    return cache_folder() / f"rates-{device.file_name}.json"


def with_measured(device: Device, ranks: int) -> Device:
    """Return a device as it was measured here, as given where it was not.

    Its rates are those of as many ranks of a machine (`megalith doctor --measure`), corrected by finished runs.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(table_of(device).read_text(encoding="utf-8"))
        rates = _from_json(saved[min(saved, key=lambda number: (abs(int(number) - ranks), number))])
        device = replace(device, rates=rates)
    return calibrated(device)


def _from_json(saved: dict[str, Any]) -> Rates:
    tables = {
        name: {kind: [(size, rate) for size, rate in table] for kind, table in saved[name].items()}
        for name in ("products", "memory")
    }
    links = {name: Link(*saved[name]) for name in ("inside", "between")}
    operations = {name: Link(*link) for name, link in saved["operations"].items()}
    return Rates(**{**saved, **tables, **links, "operations": operations})


def measure_here(device: Device) -> Iterator[str]:
    """Measure the CPU or the first GPU of this machine, save the table, and yield a line about each of its entries.

    Raises:
        ConfigError: the table cannot be written.
    """
    path = table_of(device)
    try:  # before the minutes that measuring takes
        try_to_write(path.parent)
    except OSError as error:
        why = f"{path.parent} cannot be written: {error.strerror}"
        raise ConfigError(f"--measure: {why}; set XDG_CACHE_HOME to a folder that can") from error
    import torch

    from megalith.distributed.forked import run_forked
    from megalith.plan.plan import plan_run

    threads, found = torch.get_num_threads(), dict[int, dict[str, Any]]()
    if device.compute is None:
        worlds = dict.fromkeys((1, max(2, usable_cores())), 1) | {1: threads}
        for ranks, each in worlds.items():
            found[ranks] = run_forked(ranks, _measure, "cpu", each, ranks, seconds=300)[0] | {"threads": each}
    else:
        found[1] = _measure(0, "cuda", threads, 1) | {"threads": threads}
    numbers = list[float]()  # of the launches of tiny models
    for words in _TINIES:
        work = plan_run(words, device, world_size=1).ranks[0].work
        passes = {name: sum(op.number for op in one.ops) for name, one in work.items()}
        numbers.append(_MICRO_BATCHES * (passes["F"] + passes["B"]) + passes["step"])
    entries = {}
    for ranks, seen in found.items():
        each = seen.pop("threads")
        by = f"megalith doctor --measure, {ranks} ranks of {each} threads"
        launch, host, layer = _launches(numbers, seen.pop("tiny"), device.rates.asynchronous)
        inside = seen.get("operations", {}).get("all_reduce", device.rates.inside)
        source = f"measured on {date.today()} by {by}"
        rates = replace(device.rates, **seen, launch=launch, host=host, layer=layer, inside=inside, source=source)
        if device.compute is None:
            rates = replace(rates, steps=_of_steps(replace(device, rates=rates), ranks, each))
        entries[ranks] = rates
        best = max(rate for table in seen["products"].values() for _, rate in table)
        memory = seen["memory"]["memory"][-1][1]
        found_steps = "".join(f", {dtype} steps at {speed:.2f} of this" for dtype, speed in rates.steps.items())
        yield (
            f"{ranks} ranks: products {best / 1e9:.0f} GFLOP/s, memory {memory / 1e9:.1f} GB/s, "
            f"{1e6 * launch:.1f} us a launch and {1e6 * layer:.0f} us a layer, "
            f"link {1e6 * inside.alpha:.0f} us and {inside.beta / 1e9:.1f} GB/s{found_steps}"
        )
    path.write_text(json.dumps({ranks: asdict(rates) for ranks, rates in entries.items()}), encoding="utf-8")
    yield f"saved in {path}: megalith plan --gpus reads it"


def _launches(numbers: list[float], seconds: list[float], asynchronous: bool) -> tuple[float, float, float]:
    """Return seconds of a launch, of a micro-batch, and of a layer in it (0 if launches go ahead) of tiny models."""
    import torch

    layers = [0 if asynchronous else _MICRO_BATCHES * count for _ in _OF_TINY for count in _LAYERS]
    rows = [(number, _MICRO_BATCHES, count) for number, count in zip(numbers, layers, strict=True)]
    # of relative errors; a column of zeros gets none
    scaled = torch.tensor(rows, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    solved = torch.linalg.lstsq(scaled, torch.ones(len(rows), 1, dtype=torch.float64), driver="gelsd").solution
    launch, host, layer = (max(0.0, float(one)) for one in solved.flatten())
    return launch, host, layer


def _of_steps(device: Device, ranks: int, threads: int) -> dict[str, float]:
    """Return `Rates.steps`: of each dtype the median of planned over measured times of small models."""
    from megalith.distributed.forked import run_forked
    from megalith.plan.plan import plan_run, time_of

    found = {}
    for dtype, flag in _DTYPES.items():
        speeds = list[float]()
        for model in _SMALL_MODELS:
            words = [*model.split(), *_OF_SMALL.format(8 * ranks).split(), *flag.split()]
            seconds = max(run_forked(ranks, step_seconds, words, ranks, threads, seconds=300))
            plan = plan_run(words, device, world_size=ranks)
            planned = time_of(plan.run, plan.run.data.padded_vocab_size or 0, device, plan.ranks, 1)
            speeds.append(planned.step_seconds / seconds)
        found[dtype] = statistics.median(speeds)
    return found


def step_seconds(rank: int, words: Sequence[str], ranks: int, threads: int = 1) -> float:
    """Train on a CPU as one rank of a group that is joined (`run_forked`); return the median seconds of a step."""
    import torch

    from megalith.assemble.training import build_run
    from megalith.config import load
    from megalith.distributed.comm import barrier
    from megalith.distributed.context import ParallelContext
    from megalith.kernels.cpu.process import keep_freed_memory
    from megalith.train.step import train_step

    torch.set_num_threads(threads)
    keep_freed_memory(ranks)  # as `megalith train` does
    host = torch.device("cpu")
    run = load(words, {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}, files=False)
    context = ParallelContext.create(run.layout, host) if ranks > 1 else ParallelContext.solo(host)
    built, times = build_run(run, context).run, list[float]()
    batches = iter(built.train)
    for _ in range(1 + _SAMPLES):
        barrier(context.world)
        start = time.perf_counter()
        train_step(built.state, batches, run.num_micro_batches, pipeline_schedule=run.pipeline_schedule)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def this_device() -> Device:
    """Return the device of this machine that trains, its GPU or the CPU; ConfigError for a GPU that plans lack."""
    import torch

    from megalith.device import capability_of, is_cuda

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not is_cuda(accelerator):
        return DEVICES["CPU"]
    name = capability_of(torch.device(accelerator.type, 0)).name
    if device := find_device(name):
        return device
    raise ConfigError(f"--measure: {name} is no device of megalith plan, which knows {', '.join(DEVICES)}")


def _measure(rank: int, kind: str, threads: int, ranks: int) -> dict[str, Any]:
    import torch

    from megalith.kernels.cpu.process import keep_freed_memory

    torch.set_num_threads(threads)
    if kind == "cpu":
        keep_freed_memory(ranks)
    clock = _Clock(torch.device(kind))
    found: dict[str, Any] = {"products": clock.products(), "memory": clock.memory()}
    found["tiny"] = clock.tiny_steps(_TINIES)
    found["attention"] = clock.attention(found["products"])
    if ranks > 1:
        found["operations"] = clock.links(ranks)
    return found


class _Clock:
    """Times operations on a device."""

    def __init__(self, device: Any) -> None:
        import torch

        from megalith.device import is_host

        self.torch, self.device = torch, device
        self.host = is_host(device)
        self.sizes = (64, 128, 256, 512, 1024) if self.host else (256, 512, 1024, 2048, 4096, 8192)
        tiny = torch.ones(1, device=device)
        self.empty = 0.0
        self.empty = self.seconds(lambda: tiny.add_(1))

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call, without that of a call that does nothing."""
        call()
        times, number = list[float](), 1
        while len(times) < _SAMPLES:
            self.wait()
            start = time.perf_counter()
            for _ in range(number):
                call()
            self.wait()
            took = time.perf_counter() - start
            if not times and took < _SECONDS:
                number = max(2 * number, int(number * _SECONDS / max(took, 1e-7)))
                if took < _SECONDS / 2:
                    continue
            times.append(took / number)
        took = statistics.median(times)
        return max(took / 4, took - self.empty)

    def wait(self) -> None:
        if not self.host:
            self.torch.accelerator.synchronize(self.device)

    def products(self) -> dict[str, list[tuple[float, float]]]:
        """Return the table of `Rates.products`."""
        from megalith.nn.precision import product_dtype_on

        names = {"fp32": self.torch.float32, "bf16": self.torch.bfloat16, "fp16": self.torch.float16}
        fast = {name: dtype for name, dtype in names.items() if product_dtype_on(self.device, dtype) == dtype}
        return {
            name: [(2.0 * size**3, 2.0 * size**3 / self._product(size, dtype)) for size in self.sizes]
            for name, dtype in fast.items()
        }

    def _product(self, size: int, dtype: Any) -> float:
        a, b = (self.torch.rand(size, size, device=self.device).sub_(0.5).to(dtype) for _ in range(2))
        return self.seconds(lambda: a @ b)

    def memory(self) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for power in range(12, 25 if self.host else 29, 2):
            for kind, size, call in self._passes(2**power):
                found.setdefault(kind, []).append((size, size / self.seconds(call)))
        return found

    def _passes(self, elements: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
        x = self.torch.rand(elements, device=self.device)
        y = self.torch.empty_like(x)
        yield "memory", 12.0 * elements, lambda: self.torch.add(x, y, out=y)
        yield "math", 8.0 * elements, lambda: self.torch.exp(x, out=y)
        yield "gelu", 8.0 * elements, lambda: self.torch.ops.aten.gelu.out(x, approximate="tanh", out=y)
        half, out = x.bfloat16(), y.bfloat16()
        yield "math bf16", 4.0 * elements, lambda: self.torch.exp(half, out=out)
        yield "gelu bf16", 4.0 * elements, lambda: self.torch.ops.aten.gelu.out(half, approximate="tanh", out=out)
        yield "random", 4.0 * elements, lambda: y.bernoulli_(0.9)
        bits = self.torch.empty(elements, dtype=self.torch.int32, device=self.device)
        yield "bits", 4.0 * elements, lambda: bits.random_()

    def attention(self, products: dict[str, list[tuple[float, float]]]) -> float:
        """Return the rate of causal attention over that of products, forward and backward."""
        dtype = self.torch.float32 if self.host else self.torch.bfloat16
        size = (4, 8, 512, 32) if self.host else (4, 16, 2048, 128)
        q, k, v = (self.torch.rand(size, device=self.device, dtype=dtype, requires_grad=True) for _ in range(3))
        attend = self.torch.nn.functional.scaled_dot_product_attention
        flops = 3.5 * 2 * q.numel() * size[2]
        best = products["fp32" if self.host else "bf16"][-2][1]
        return flops / self.seconds(lambda: attend(q, k, v, is_causal=True).sum().backward()) / best

    def tiny_steps(self, models: list[list[str]]) -> list[float]:
        """Return the seconds of a training step of each tiny model; in turns, as all of them are fitted together."""
        steps = [self._tiny_step(words) for words in models]
        rounds = [[self.seconds(step) for step in steps] for _ in range(_ROUNDS)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _tiny_step(self, words: list[str]) -> Callable[[], object]:
        from megalith.assemble.training import build_run
        from megalith.config import load
        from megalith.distributed.context import ParallelContext
        from megalith.train.step import train_step

        run = load([*words, "--device", self.device.type], {}, files=False)
        built = build_run(run, ParallelContext.solo(self.device)).run
        batches = iter(built.train)
        return lambda: train_step(built.state, batches, run.num_micro_batches)

    def _beside_products(self, call: Callable[[Any], Any], x: Any, world: Any) -> float:
        """Return the mean time of a call behind a millisecond of products, with which ranks wait for each other."""
        from megalith.distributed import comm

        a = self.torch.rand(256, 256)
        comm.barrier(world)
        start = time.perf_counter()
        for _ in range(_CALLS):
            for _ in range(3):
                a @ a
            call(x)
        return (time.perf_counter() - start) / _CALLS

    def links(self, ranks: int) -> dict[str, Link]:
        """Return latency and bandwidth of collectives, as `time.Clock.collective` has them."""
        from megalith.distributed import comm
        from megalith.distributed.context import ParallelContext

        world = ParallelContext.create(Layout(dp=ranks), self.device).world
        calls: dict[str, Callable[[Any], Any]] = {
            "all_reduce": lambda x: comm.all_reduce(x, world),
            "all_gather": lambda x: comm.all_gather(x[: len(x) // ranks], world),
            "reduce_scatter": lambda x: comm.start_reduce_scatter(x, world).wait(),
            "all_to_all": lambda x: comm.all_to_all(x, world, 0, 0),
        }
        found = {}
        for name, call in calls.items():
            medians = []
            for size in (_SMALL, _LARGE):
                x = self.torch.ones(size // 4 // ranks * ranks)
                rounds = [
                    self._beside_products(call, x, world) - self._beside_products(lambda _: None, x, world)
                    for _ in range(_SAMPLES)
                ]
                medians.append(max(0.0, statistics.median(rounds)))
            steps = 2 if name == "all_reduce" else 1
            beta = steps * (_LARGE - _SMALL) * (ranks - 1) / ranks / max(1e-9, medians[1] - medians[0])
            alpha = medians[0] / steps - _SMALL * (ranks - 1) / ranks / beta
            found[name] = Link(max(1e-6, alpha) / math.log2(ranks), beta)
        return found
