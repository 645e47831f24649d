"""Errors of a GPU and of NCCL as messages: what failed, and what to do about it.

torch raises them as RuntimeErrors, most of them at a later call than the one that failed. `Watchdog` adds rank, step
and phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

_STACK = ("Exception raised from ", "frame #", "C++ CapturedTraceback")  # start of the stack that torch appends
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")
# Words of an error of CUDA -> what to do. The first that fits counts.
_ADVICE = {
    "uncorrectable": "this GPU or its links have a hardware fault (nvidia-smi -q, Xid in dmesg): resume without it",
    "no kernel image": "this build of torch has no kernels for this GPU: megalith doctor says which one has",
    "": "kernels run asynchronously, so that an earlier call may have failed: with CUDA_LAUNCH_BLOCKING=1 the "
    "traceback names it",
}


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a GPU ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


def is_of_nccl(error: Exception) -> bool:
    """Return whether NCCL failed, which another rank may have caused."""
    return isinstance(error, RuntimeError) and "NCCL" in str(error) and not is_out_of_memory(error)


def explain(error: Exception, memory_flags: Sequence[str] = ()) -> str:
    """Return what failed and what to do; "" unless a GPU or NCCL failed.

    Args:
        memory_flags: flags with which a run needs less memory.
    """
    if is_out_of_memory(error):
        # Requested, total, free, allocated and reserved bytes, as of the moment of the error.
        figures = without_stack(error).partition(" See documentation")[0].rstrip(".")
        return f"{figures}. Less memory: {'; '.join(memory_flags)}" if memory_flags else figures
    if is_of_nccl(error):
        return without_stack(error)
    text = str(error)
    if not isinstance(error, torch.AcceleratorError) and not text.startswith("CUDA error"):
        return ""
    return f"{text.partition(chr(10))[0]}: {next(advice for words, advice in _ADVICE.items() if words in text)}"


def without_stack(error: BaseException) -> str:
    """Return the whole message of a backend: NCCL names the cause, such as two ranks on one GPU, in its last lines."""
    lines = takewhile(lambda line: not line.startswith(_STACK), str(error).splitlines())
    return " ".join(filter(None, map(str.strip, lines))) or type(error).__name__
