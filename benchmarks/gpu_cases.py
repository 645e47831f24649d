"""What `benchmarks/gpu.py` measures, each in a process of its own; the last line of its output is the result as JSON.

    python benchmarks/gpu_cases.py step --style llama --size 1.3B --length 2048 --micro-batch 4 --compile

  environment  devices, driver, versions, what torch was built for, and what `megalith doctor` says
  peak         `measure_peak` twice in one process: a first value far below the second is a fault of the warm-up
  attention    SDPA forward and backward with each kernel of the device, causal, at the shape of a 1.3B step
  step         the step of `megalith train`: forward and backward of two micro-batches, norm, clipping, AdamW
  serve        tokens per second of greedy answers to one client and to many, by the engine or over HTTP

A step has random tokens. Seconds are those of each measured step, the device waited for at both ends. FLOPs are those
of `megalith.config.flops.step_flops` (attention by half of its square, recomputation not counted), MFU is over the
dense rate of the datasheet. An MFU above 1 is no result but a mistake, and ends the program. Exit code 3: out of
memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HERE = Path(__file__).parent
VOCABULARY, MICRO_BATCHES, OUT_OF_MEMORY = 50304, 2, 3
SIZES = {"124M": "12x768x12", "345M": "24x1024x16", "1.3B": "24x2048x16", "tiny": "2x64x4"}
"""Layers x hidden size x heads."""
STYLES = {
    "gpt2": "",
    "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --ffn-hidden-size {ffn}",
    "experts": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size {hidden} "
    "--moe-aux-loss-coeff 0.01",
}
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 4096"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATE_BYTES = {"fp32": 16, "bf16": 18, "fp16": 16}
"""Bytes a parameter keeps: weight, fp32 master weight if it is another, gradient (fp32, under --fp16 fp16), moments."""
KINDS = {
    "attention": ("flash", "attention", "fmha", "sdpa"),
    "matrix products": ("gemm", "matmul", "aten::mm", "addmm", "cutlass", "nvjet", "xmma"),
    "optimizer": ("adam", "foreach", "multi_tensor"),
    "copies": ("memcpy", "memset", "copy_"),
}
"""A part of the name of an operation, in lower case; the rest is elementwise work, norms and the loss."""
KERNELS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work`, the device waited for at both ends."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


# --- environment ------------------------------------------------------------------------------------------------------


def environment(options: argparse.Namespace) -> dict[str, Any]:
    from megalith.cli import doctor
    from megalith.distributed.launch import available_backends

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = doctor.run([])
    return {
        "devices": cards() if options.device == "cuda" else [],
        "driver": driver() if options.device == "cuda" else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "architectures": torch.cuda.get_arch_list(),
        "backends": available_backends(),
        "doctor_exit_code": code,
        "doctor": output.getvalue().replace(str(Path.home()), "~").splitlines(),
    }


def cards() -> list[dict[str, Any]]:
    """Return name, compute capability, memory and what it can do of each device that torch sees."""
    from megalith.device import capability_of

    found = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        memory = round(about.total_memory / 2**30, 1)
        able, architecture = capability_of(torch.device("cuda", number)), [about.major, about.minor]
        can = {"bf16": torch.bfloat16 in able.half, "compiles": able.compiles}
        found.append({"name": about.name, "capability": architecture, "gib": memory, **can})
    return found


def driver() -> str:
    """Return the version of the driver that nvidia-smi names; "" without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return next(iter(subprocess.run(command, capture_output=True, text=True).stdout.splitlines()), "").strip()


# --- peak -------------------------------------------------------------------------------------------------------------


def peak(options: argparse.Namespace) -> dict[str, Any]:
    from megalith.train.throughput import datasheet_peak, measure_peak

    device, dtype = torch.device(options.device), DTYPES[options.precision]
    known = datasheet_peak(device, dtype)
    return {
        "teraflops": [measure_peak(device, dtype) / 1e12 for _ in range(2)],
        "datasheet": known and {"device": known[0], "teraflops": known[1] / 1e12},
    }


# --- attention --------------------------------------------------------------------------------------------------------


def attention(options: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(options.device), DTYPES[options.precision]
    batch, heads, length, size = (int(word) for word in options.shape.split("x"))
    make = torch.Generator(device).manual_seed(1)
    q, k, v, grad = (torch.randn(batch, heads, length, size, generator=make, device=device).to(dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    milliseconds, unavailable = dict[str, float](), dict[str, str]()

    def both_passes() -> None:
        torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), inputs, grad)

    def measure(name: str, chosen: contextlib.AbstractContextManager[object]) -> None:
        try:
            with chosen, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says at length why a kernel cannot be used
                for _ in range(3):
                    both_passes()
                milliseconds[name] = 1e3 * min(timed(both_passes, device) for _ in range(options.steps))
        except (RuntimeError, ImportError) as error:
            unavailable[name] = str(error).splitlines()[0]

    for name, backend in KERNELS.items():
        measure(name, contextlib.nullcontext() if backend is None else sdpa_kernel(backend))
    for name in listed_implementations():
        measure(f"flash by {name}", implementation(name))
    return {"milliseconds": milliseconds, "unavailable": unavailable}


def listed_implementations() -> list[str]:
    """Return the further flash implementations that torch lists (FA3, FA4), from the version on that has a list."""
    listing = getattr(torch.nn.attention, "list_flash_attention_impls", None)
    return list(listing()) if listing is not None else []


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    torch.nn.attention.activate_flash_attention_impl(name)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


# --- step -------------------------------------------------------------------------------------------------------------


def step_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of the run whose step is measured."""
    layers, hidden, heads = SIZES.get(options.size, options.size).split("x")
    ffn = (int(hidden) * 8 // 3 + 127) // 128 * 128
    flags = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --mock-data "
    flags += f"--seq-length {options.length} --max-position-embeddings {options.length} --lr 1e-4 --train-iters 1000 "
    flags += f"--micro-batch-size {options.micro_batch} --global-batch-size {options.micro_batch * MICRO_BATCHES} "
    flags += "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer "
    flags += f"--vocab-size {options.vocabulary - 1} --device {options.device} {PRECISIONS[options.precision]} "
    flags += STYLES[options.style].format(ffn=ffn, hidden=hidden) + " --compile" * options.compile
    return [*flags.split(), *options.flags.split()]


def step(options: argparse.Namespace) -> dict[str, Any]:
    from megalith.assemble.model import build_chunks, build_run_optimizer, choose_device, draw_weights
    from megalith.assemble.schedule import build_schedule
    from megalith.config import load
    from megalith.config.flops import step_flops
    from megalith.distributed.context import ParallelContext
    from megalith.distributed.rng import RandomStreams
    from megalith.train.state import TrainState
    from megalith.train.step import train_step
    from megalith.train.throughput import datasheet_peak

    config = load(step_flags(options), {}, files=False)
    device = choose_device(config.train.device)
    context = ParallelContext.solo(device)
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, options.vocabulary, context, streams.own)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    state = TrainState(chunks, optimizer, streams, build_schedule(config), context=context)
    batches = random_batches(options)
    results = []

    def one() -> None:
        results.append(train_step(state, batches, MICRO_BATCHES))

    started = time.perf_counter()
    for _ in range(3):
        one()
    wait(device)
    warm_up = time.perf_counter() - started
    torch.compiler.set_stance("fail_on_recompile" if options.compile else "default")
    seconds = [timed(one, device) for _ in range(options.steps)]
    torch.compiler.set_stance("default")
    if not all(result.applied for result in results):
        raise SystemExit("steps were skipped: their time is not that of a step")
    flops = step_flops(config.model, options.vocabulary, options.length, options.micro_batch * MICRO_BATCHES)
    known = datasheet_peak(device, DTYPES[options.precision])
    median = sorted(seconds)[len(seconds) // 2]
    mfu = flops / median / known[1] if known else None
    if mfu is not None and mfu > 1:
        raise SystemExit(f"{mfu:.0%} of the peak of {known} cannot be; the peak or the clock is wrong")
    parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    memory = memory_mib(device)  # before the profiler takes some
    return {
        "parameters": parameters,
        "precision": options.precision,
        "length": options.length,
        "micro_batch": options.micro_batch,
        "micro_batches": MICRO_BATCHES,
        "seconds": seconds,
        "warm_up_seconds": warm_up,
        "tokens_per_second": round(options.micro_batch * MICRO_BATCHES * options.length / median),
        "teraflops": flops / median / 1e12,
        "mfu": mfu,
        "losses": [results[0].loss, results[-1].loss],
        "memory_mib": memory,
        "counted_state_mib": round(parameters * STATE_BYTES[options.precision] / 2**20),
        "host_waits": host_waits(one, device),
        "trace": trace(one, device, median),
    }


def random_batches(options: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (options.micro_batch, options.length)
    positions = torch.arange(options.length).expand(shape)
    while True:
        ids = torch.randint(0, options.vocabulary, (shape[0], shape[1] + 1), generator=generator)
        yield {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "position_ids": positions,
            "loss_mask": torch.ones(shape),
        }


def memory_mib(device: torch.device) -> dict[str, int]:
    """Return what is allocated between steps, the most that was, and the most that torch had reserved."""
    if device.type != "cuda":
        return {}
    figures = {
        "state": torch.cuda.memory_allocated(device),
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
    }
    return {name: round(value / 2**20) for name, value in figures.items()}


def host_waits(work: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Return how often the host waits for the device, by the place that does; None on a device that cannot tell."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return wait_places(caught)


def wait_places(caught: list[warnings.WarningMessage]) -> dict[str, int]:
    """Return the number of warnings about a synchronizing operation by `file:line`, from the package on."""
    places = (
        f"{re.split('site-packages/|/src/', warning.filename)[-1]}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    )
    return dict(Counter(places))


def trace(work: Callable[[], object], device: torch.device, seconds: float) -> dict[str, Any]:
    """Summarize one step under torch's profiler.

    Args:
        seconds: of a step without the profiler.

    Returns:
        `kinds`: shares of the device's time; `busy`: that time over `seconds`; `launches` of kernels (on a CPU the
        operations); `longest`: operations, with milliseconds and calls.
    """
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        wait(device)
    spent = dict.fromkeys([*KINDS, "the rest"], 0.0)
    launches, operations = 0, list[tuple[float, int, str]]()
    for event in profiler.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            launches += event.count * ("LaunchKernel" in event.key)
            continue  # what starts a kernel has the kernel's time too
        if getattr(event, "is_user_annotation", False):
            continue  # a range around kernels that are counted
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "the rest")
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        spent[kind] += own
        launches += 0 if on_gpu else event.count
        operations.append((own, event.count, event.key))
    total = sum(spent.values())
    longest = sorted(operations, reverse=True)[:8]
    return {
        "kinds": {kind: value / total for kind, value in spent.items()} if total else {},
        "busy": total / 1e6 / seconds,
        "launches": launches,
        "longest": [[name[:80], own / 1e3, count] for own, count, name in longest],
    }


# --- serve ------------------------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each round, by the number of clients, and how many tokens it has."""
    sys.path.insert(0, str(HERE / "peers"))
    from generate import engine, http, requests

    kind, device = {"engine": engine, "http": http}[options.kind], torch.device(options.device)
    answer = kind(options.folder, options.precision, options.device)
    found: dict[str, Any] = {}
    for streams in options.streams:
        answer([(prompt, min(count, 8)) for prompt, count in requests(streams, 0)])
        seconds = []
        for number in range(1, options.steps + 1):
            asked = requests(streams, number)
            started = time.perf_counter()
            tokens = answer(asked)
            seconds.append(time.perf_counter() - started)
        median = sorted(seconds)[len(seconds) // 2]
        row = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / median}
        if options.kind == "engine":
            asked = requests(streams, options.steps + 1)
            launches = trace(lambda asked=asked: answer(asked), device, median)["launches"]
            row["launches_per_token"] = launches / tokens
        found[str(streams)] = row
    return {"streams": found}


CASES = {"environment": environment, "peak": peak, "attention": attention, "step": step, "serve": serve}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("case", choices=tuple(CASES))
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16")
    made.add_argument("--steps", type=int, default=10, help="how many are measured (default: %(default)s)")
    made.add_argument("--shape", default="4x16x2048x128", help="of attention: batch x heads x length x head size")
    made.add_argument("--style", choices=tuple(STYLES), default="gpt2")
    made.add_argument("--size", default="124M", help=f"{', '.join(SIZES)}, or LAYERSxHIDDENxHEADS")
    made.add_argument("--length", type=int, default=1024, help="tokens of a sample (default: %(default)s)")
    made.add_argument("--micro-batch", type=int, default=8, help="samples (default: %(default)s)")
    made.add_argument("--vocabulary", type=int, default=VOCABULARY)
    made.add_argument("--compile", action="store_true")
    made.add_argument("--flags", default="", help="more flags of the run: --flags=--optimizer-cpu-offload")
    made.add_argument("--folder", type=Path, help="checkpoint to serve")
    made.add_argument("--kind", choices=("engine", "http"), default="engine")
    made.add_argument("--streams", type=int, nargs="+", default=[1, 16], help="clients at once")
    return made


def main() -> None:
    options = parser().parse_args()
    try:
        found = CASES[options.case](options)
    except torch.OutOfMemoryError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        raise SystemExit(OUT_OF_MEMORY) from None
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
