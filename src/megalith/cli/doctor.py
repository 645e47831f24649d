"""`megalith doctor`: report on this installation and machine, with a quick test of each device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megalith import __version__
from megalith.cli.arguments import CommandParser
from megalith.distributed.machine import bound_cores, machine_memory, memory_limit, processor, usable_cores
from megalith.errors import install_command

if TYPE_CHECKING:
    import torch

# Package -> the feature that needs it, and the extra that installs it; "" where pip installs it by its name.
_EXTRAS = {
    "tensorboard": ("--tracker tensorboard, --tensorboard-dir", "track"),
    "wandb": ("--tracker wandb, --wandb-project", "track"),
    "trackio": ("--tracker trackio", ""),
    "mlflow": ("--tracker mlflow", ""),
    "swanlab": ("--tracker swanlab", ""),
    "modelscope_hub": ("ms:ORG/NAME, models and datasets of ModelScope", ""),
    "sentencepiece": ("SentencePiece tokenizers: Llama2Tokenizer, GPTSentencePieceTokenizer", "data"),
    "gigatoken": ("faster byte-level BPE in preprocessing", "data"),
    "pyarrow": ("parquet and arrow files in preprocessing", "data"),
    "zstandard": (".zst files in preprocessing", "data"),
    "orjson": ("faster reading of jsonl in preprocessing", "data"),
    "fastapi": ("megalith serve", "serve"),
    "uvicorn": ("megalith serve", "serve"),
    "pydantic": ("megalith serve", "serve"),
    "jinja2": ("chat templates in megalith serve", "serve"),
    "transformers": ("comparing an exported model with Hugging Face's", "hf"),
    "gguf": ("checkpoint export --to gguf", "gguf"),
    "llama_cpp": ("comparing an exported GGUF file with llama.cpp", "bench"),
    "lm_eval": ("lm-evaluation-harness", "eval"),
    "matplotlib": ("pictures of curves", "plot"),
}
_NEEDED = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "rich")
_SMALL_SHARED_MEMORY = 1 << 30
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
# Environment variables that change what a run computes, how fast, or where it records, such as NCCL_IB_DISABLE and
# NCCL_P2P_DISABLE.
_VARIABLES = re.compile(
    r"(NCCL|GLOO|TP|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS|CUDA|CUBLAS|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|MEGALITH)_\w+|"
    r"HF_HUB_OFFLINE|HF_ENDPOINT|(WANDB|SWANLAB)_MODE|TRACKIO_DIR|MLFLOW_TRACKING_URI|LD_PRELOAD|NO_COLOR|TERM|CXX"
)
_PRIVATE = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|USER|ADDR|HOST|COMM_ID")
_HARMLESS = re.compile(r"[\w.,:;=+-]{1,80}")
_MARKS = {"ok": ("  ok      ", "green"), "note": ("  -       ", ""), "bad": ("  WRONG   ", "bold red")}


@dataclass(frozen=True)
class Finding:
    """One line of the report: level "ok", "note" or "bad", and text."""

    level: str
    text: str


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="megalith doctor",
        description="Report what is installed, which devices, dtypes and attention kernels work here, and what is "
        "missing for which feature. Each device is tested with a matrix product and an attention step. Exit code 0: "
        "everything that training needs works; 1: something does not.",
    )
    parser.add_argument(
        "--report", action="store_true", help="print it as a Markdown block for an issue, without paths and host names"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's rates for the times of megalith plan (two minutes)",
    )
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the report; return 1 if something that training needs does not work."""
    options = make_parser().parse_args(argv)
    show = _show_shareable if options.report else _printer()
    sections: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("Installation", _installation),
        ("Machine", _machine),
        ("Devices", _devices),
        ("Several processes", _processes),
        ("Environment", _environment),
        ("Optional packages", _extras),
    ]
    if options.measure:
        sections = [("Measured", _measured)]
    wrong = 0
    if show is _show_shareable:
        print("```text")
    for title, find in sections:
        show(title, "bold", "")
        for finding in find():
            show(*_MARKS[finding.level], finding.text)
            wrong += finding.level == "bad"
    if not options.measure:  # which looks at nothing else
        show(f"{wrong} problems found" if wrong else "everything that training needs works here", "bold", "")
    if show is _show_shareable:
        print("```")
    return 1 if wrong else 0


def _printer() -> Callable[[str, str, str], None]:
    """Return the function that prints a mark in a style, and a text; without colours where rich is missing."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return lambda mark, style, text: print(mark + text, flush=True)
    console = Console(highlight=False)
    return lambda mark, style, text: console.print(Text.assemble((mark, style), text), soft_wrap=True)


def _show_shareable(mark: str, style: str, text: str) -> None:
    print(mark + shareable(text), flush=True)


def shareable(text: str) -> str:
    """Return text with the last parts of paths only, and without the names of the host, the folder and the clone."""
    folders = {Path.cwd(): "this folder", Path(__file__).resolve().parents[3]: "CLONE", Path.home(): "HOME"}
    for folder in sorted(folders, key=lambda path: -len(str(path))):
        if folder != Path("/"):
            text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", folders[folder], text)
    text = re.sub(r"(?<![\w/.~-])~?/(?!dev/)[^\s:;,'\")]*?([^/\s:;,'\")]*)(?=[\s:;,'\")]|$)", r".../\1", text)
    host = re.escape(platform.node())
    return re.sub(rf"(?<![\w-]){host}(?![\w-])", "HOST", text) if host else text


def _installation() -> Iterator[Finding]:
    yield Finding("ok", f"megalith {__version__} in {Path(__file__).parents[1]}")
    version = platform.python_version()
    supported = sys.version_info >= (3, 10)
    yield Finding("ok" if supported else "bad", f"Python {version}{'' if supported else ': 3.10 or newer is needed'}")
    for package in _NEEDED:
        try:
            yield Finding("ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("bad", f"{package} is missing: pip install {package}")


def _machine() -> Iterator[Finding]:
    usable = usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS")
    limit, machine = memory_limit(), machine_memory()
    memory = f"{_gigabytes(machine):.1f} GB memory"
    if limit < machine:
        memory += f", limited to {_gigabytes(limit):.2f} GB (cgroup or ulimit -v)"
    cores = f"{usable} cores" if usable == bound_cores() else f"the time of {usable} of {bound_cores()} cores"
    yield Finding("ok", f"{platform.system()} {platform.machine()}, {cores}, {memory}")
    yield Finding("ok", f"{platform.release()}, {' '.join(platform.libc_ver())}; {processor()}")
    if threads:
        yield Finding("note", f"OMP_NUM_THREADS={threads}: tensor operations use {threads} of {usable} cores")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        if size < _SMALL_SHARED_MEMORY:
            yield Finding(
                "note",
                f"/dev/shm has {size / 2**20:.0f} MB: too small for NCCL on one machine (docker run --shm-size 16G); "
                "data loading does not use it",
            )
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("ok", f"{_gigabytes(free):.1f} GB free in {Path.cwd()}")


def _measured() -> Iterator[Finding]:
    from megalith.plan.rates import measure_here, this_device

    for line in measure_here(this_device()):
        yield Finding("ok", line)


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # whatever a broken installation raises
        yield Finding("bad", f"torch cannot be imported: {error}")
        return
    from megalith.assemble.nvidia import find_driver, unused_gpu
    from megalith.device import capability_of, is_cuda

    yield from _device(torch.device("cpu"), f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}")
    unused = unused_gpu()
    if unused:
        yield Finding("bad", f"{unused}. Until then use --device cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not is_cuda(accelerator):
        built = torch.version.cuda
        why = f"torch is built for CUDA {built} but finds no device" if built else "torch is built without CUDA"
        if not unused:
            yield Finding("note", f"no CUDA device: {why}")
        yield _compiler(torch.device("cpu"))
        return
    yield Finding("ok", f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    if driver := find_driver():
        yield Finding("ok", str(driver))
    for number in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, number)
        able = capability_of(device)
        yield from _device(device, f"{device} {able.title}, {_gigabytes(able.memory):.1f} GB")
    yield _compiler(torch.device(accelerator.type, 0))


def _device(device: torch.device, name: str) -> Iterator[Finding]:
    """Test what a device can compute."""
    import torch

    yield Finding("ok", name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield _precision(device, dtype)
    yield Finding("ok", f"    attention: {_attention(device)}")


def _precision(device: torch.device, dtype: torch.dtype) -> Finding:
    """Multiply matrices in a dtype and report whether the result is right and how training computes it."""
    import torch

    from megalith.device import capability_of, is_host
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
            "bad", f"    {short} ({flag}): a matrix product has error {error:g}; the device or its driver is broken"
        )
    remark = ""
    if product_dtype_on(device, dtype) != dtype:
        remark = f": stored in {short}, multiplied in fp32, which is faster on this CPU"
    elif not is_host(device) and dtype == torch.bfloat16 and dtype not in capability_of(device).half:
        return Finding("note", "    bfloat16 (--bf16): emulated by this GPU, slow; use --fp16")
    return Finding("ok", f"    {short} ({flag}){remark}")


def _attention(device: torch.device) -> str:
    """Return the attention kernels that work on a device, found by running each."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from megalith.device import capability_of, is_host

    if is_host(device):
        return "torch's flash kernel; blocked attention for dropout and bf16; unfused with --attention-backend unfused"
    q = torch.zeros(1, 2, 128, 64, device=device, dtype=capability_of(device).fastest)
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
    without = "" if "flash" in works else "; no flash kernel for this GPU (needs sm80)"
    return f"torch's {', '.join([*works, 'math'])}{without}"


def _compiler(device: torch.device) -> Finding:
    from megalith.device import is_host

    if not is_host(device):
        triton = importlib.util.find_spec("triton") is not None
        return Finding("ok" if triton else "note", f"--compile: triton is {'installed' if triton else 'missing'}")
    from megalith.kernels.torch_private import cpp_compiler

    found = shutil.which(compiler := cpp_compiler(os.environ))
    text = f"C++ compiler {found}" if found else f"needs a C++ compiler, and {compiler} is not found"
    return Finding("ok" if found else "note", f"--compile: {text}")


def _processes() -> Iterator[Finding]:
    from megalith.distributed.launch import available_backends

    backends = available_backends()
    available = "gloo" in backends
    yield Finding("ok" if available else "bad", f"gloo (CPU): {'available' if available else 'missing'}")
    if "nccl" in backends:
        yield Finding("ok", f"NCCL {backends['nccl']}")
    else:
        yield Finding("note", "NCCL: not in this torch; --distributed-backend nccl becomes gloo without a GPU")
    launchers = [name for name in ("torchrun", "srun", "mpirun") if shutil.which(name)]
    yield Finding("ok", f"launchers: megalith train --nproc N{''.join(f', {name}' for name in launchers)}")


def _environment() -> Iterator[Finding]:
    for name, value in sorted(os.environ.items()):
        if _VARIABLES.fullmatch(name):
            shown = not _PRIVATE.search(name) and _HARMLESS.fullmatch(value)
            yield Finding("note", f"{name}={value}" if shown else f"{name} is set")


def _extras() -> Iterator[Finding]:
    for package, (use, extra) in _EXTRAS.items():
        if importlib.util.find_spec(package) is not None:
            yield Finding("ok", f"{package} {_version(package)}: {use}")
        else:
            command = install_command(extra) if extra else f"pip install {package}"
            yield Finding("note", f"{package} is missing: {use} ({command})")


def _version(package: str) -> str:
    """Return the version of the first installed distribution that an importable name may come from; "" if unknown."""
    for name in (package.replace("_", "-"), f"{package}-skinny", f"{package.replace('_', '-')}-python"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _gigabytes(number: float) -> float:
    return number / 1e9
