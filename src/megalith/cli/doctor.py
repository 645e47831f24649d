"""`megalith doctor`: what this installation and this machine have, tried where that is quick, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalith import __version__
from megalith.distributed.machine import machine_memory, memory_limit
from megalith.errors import ConfigError, install_command

if TYPE_CHECKING:
    import torch

_HELP = """usage: megalith doctor

Says what is installed, which devices, number formats and attention kernels work here, and what is missing for what.
Each device multiplies a matrix and takes an attention step to show that it computes. Exit code 0: everything that
training needs works; 1: something does not."""

# Package -> what it is for, and the extra that brings it.
_EXTRAS = {
    "tensorboard": ("--tensorboard-dir", "track"),
    "wandb": ("--wandb-project", "track"),
    "sentencepiece": ("SentencePiece tokenizers: Llama2Tokenizer, GPTSentencePieceTokenizer", "data"),
    "pyarrow": ("parquet and arrow files in preprocessing", "data"),
    "zstandard": (".zst files in preprocessing", "data"),
    "orjson": ("faster reading of jsonl in preprocessing", "data"),
    "fastapi": ("megalith serve", "serve"),
    "uvicorn": ("megalith serve", "serve"),
    "transformers": ("comparing an exported model with Hugging Face's", "hf"),
    "lm_eval": ("lm-evaluation-harness", "eval"),
}
_NEEDED = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "rich")
_SMALL_SHARED_MEMORY = 1 << 30
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "CUDA_VISIBLE_DEVICES")
_MARKS = {"ok": "  ok      ", "note": "  -       ", "bad": "  WRONG   "}


@dataclass(frozen=True)
class Finding:
    level: str
    text: str


def run(argv: Sequence[str]) -> int:
    """Print what is found; 1 if something that training needs does not work."""
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if argv:
        raise ConfigError(f"megalith doctor takes no words: {' '.join(argv)}")
    sections: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Installation", _installation),
        ("Machine", _machine),
        ("Devices", _devices),
        ("Several processes", _processes),
        ("Optional packages", _extras),
    ]
    wrong = 0
    for title, find in sections:
        print(title)
        for finding in find():
            print(f"{_MARKS[finding.level]}{finding.text}", flush=True)
            wrong += finding.level == "bad"
    print(f"{wrong} things are wrong" if wrong else "everything that training needs works here")
    return 1 if wrong else 0


def _installation() -> Iterator[Finding]:
    yield Finding("ok", f"megalith {__version__} in {Path(__file__).parents[1]}")
    version = platform.python_version()
    sound = sys.version_info >= (3, 10)
    yield Finding("ok" if sound else "bad", f"Python {version}{'' if sound else ': 3.10 or newer is needed'}")
    for package in _NEEDED:
        try:
            yield Finding("ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("bad", f"{package} is missing: pip install {package}")


def _machine() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    limit, machine = memory_limit(), machine_memory()
    memory = f"{_gigabytes(machine):.1f} GB memory"
    if limit < machine:
        memory += f", of which a process here may hold {_gigabytes(limit):.2f} GB (control group or ulimit -v)"
    yield Finding("ok", f"{platform.system()} {platform.machine()}, {usable} cores, {memory}")
    if threads:
        yield Finding("note", f"OMP_NUM_THREADS={threads}: tensor operations use so many of the {usable} cores")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        if size < _SMALL_SHARED_MEMORY:
            yield Finding(
                "note",
                f"/dev/shm has {size / 2**20:.0f} MB: training needs none of it (its data workers are threads); NCCL "
                "on one machine does (docker run --shm-size 16G)",
            )
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("ok", f"{_gigabytes(free):.1f} GB free in {Path.cwd()}")


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        yield Finding("bad", f"torch cannot be imported: {error}")
        return
    from megalith.assemble.nvidia import unused_gpu

    yield from _device(torch.device("cpu"), f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}")
    unused = unused_gpu()
    if unused:
        yield Finding("bad", f"{unused}. Until then only --device cpu works")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} and finds none" if built else "torch is built without CUDA"
        if not unused:
            yield Finding("note", f"no CUDA device: {why}")
        yield _compiler(torch.device("cpu"))
        return
    yield Finding("ok", f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        name = f"cuda:{number} {about.name}, sm{about.major}{about.minor}, {_gigabytes(about.total_memory):.1f} GB"
        yield from _device(torch.device("cuda", number), name)
    yield _compiler(torch.device("cuda", 0))


def _device(device: torch.device, name: str) -> Iterator[Finding]:
    """What a device can do, tried."""
    import torch

    yield Finding("ok", name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield _precision(device, dtype)
    yield Finding("ok", f"    attention: {_attention(device)}")


def _precision(device: torch.device, dtype: torch.dtype) -> Finding:
    """Whether a product in this format is right, and what a run in it does here."""
    import torch

    from megalith.nn.precision import product_dtype_on

    short = str(dtype).removeprefix("torch.")
    flag = {"float32": "default", "bfloat16": "--bf16", "float16": "--fp16"}[short]
    try:
        ones = torch.full((64, 64), 0.125, device=device, dtype=dtype)
        error = float((ones @ ones - 1.0).abs().max())
    except RuntimeError as problem:
        return Finding("bad" if short == "float32" else "note", f"    {short} ({flag}): {str(problem).splitlines()[0]}")
    if error > _TOLERANCE[short]:
        return Finding(
            "bad", f"    {short} ({flag}): a product is off by {error:g}; the device or its driver is broken"
        )
    remark = ""
    if product_dtype_on(device.type, dtype) != dtype:
        remark = f": kept in {short} and multiplied in fp32, for which this processor has fast instructions"
    elif device.type == "cuda" and short == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding("note", "    bfloat16 (--bf16): only emulated by this GPU, and slow; use --fp16")
    return Finding("ok", f"    {short} ({flag}){remark}")


def _attention(device: torch.device) -> str:
    """Which kernel training takes, found out by asking for each in turn."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type == "cpu":
        return (
            "torch's flash kernel, blocked products with dropout and in bf16; --attention-backend unfused is by steps"
        )
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    q = torch.zeros(1, 2, 128, 64, device=device, dtype=half)
    works = []
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    for name, backend in backends.items():
        try:
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            works.append(name)
        except RuntimeError:
            continue
    without = "" if "flash" in works else "; no flash kernel for this GPU (it begins with sm80)"
    return f"torch's {', '.join([*works, 'math'])}{without}"


def _compiler(device: torch.device) -> Finding:
    if device.type == "cuda":
        there = importlib.util.find_spec("triton") is not None
        return Finding("ok" if there else "note", f"--compile: triton is {'there' if there else 'missing'}")
    compiler = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    said = f"C++ compiler {compiler}" if compiler else "needs a C++ compiler, and there is none; all else needs none"
    return Finding("ok" if compiler else "note", f"--compile: {said}")


def _processes() -> Iterator[Finding]:
    from megalith.distributed.launch import available_backends

    backends = available_backends()
    yield Finding("ok" if "gloo" in backends else "bad", f"gloo (CPU): {'there' if 'gloo' in backends else 'missing'}")
    if "nccl" in backends:
        yield Finding("ok", f"NCCL {backends['nccl']}")
    else:
        yield Finding("note", "NCCL: not in this torch; --distributed-backend nccl becomes gloo where there is no GPU")
    launchers = [name for name in ("torchrun", "srun", "mpirun") if shutil.which(name)]
    yield Finding("ok", f"launchers: megalith train --nproc N{''.join(f', {name}' for name in launchers)}")
    for name in _VARIABLES:
        if name in os.environ:
            yield Finding("note", f"{name}={os.environ[name]} is set")


def _extras() -> Iterator[Finding]:
    for package, (use, extra) in _EXTRAS.items():
        if importlib.util.find_spec(package) is not None:
            yield Finding("ok", f"{package} {_version(package)}: {use}")
        else:
            yield Finding("note", f"{package} is missing: {use} ({install_command(extra)})")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gigabytes(number: float) -> float:
    return number / 1e9
