"""Staging: host memory that tensors are copied into, so that they can be written while training continues.

Saved tensors change only in the update of the optimizer. So threads copy them during the next forward and backward
passes, and the update waits for the copies that are not complete.

The memory is allocated once, with as many bytes as the tensors have, and reused by each save. For tensors on a GPU it
is pinned, and copies run on a separate stream at the speed of the bus.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.content import Chunk, balanced
from megalith.device import cuda_runtime, is_cuda, is_host
from megalith.errors import CheckpointError

_ALIGNMENT = 64
_PAGE = 4096
_PIECE = 2**24  # bytes that a thread copies at once
_THREADS = 4  # at most; few threads saturate the memory bandwidth


class Staging:
    """Copies of the tensors of one save at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._copying: list[Future[None]] = []

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def reserve(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the memory for copies of these chunks, so that the first save does not wait for it."""
        needed = sum(map(_aligned_nbytes, chunks))
        if needed > self._memory.nbytes:
            self.release()
            try:
                self._memory = _host_memory(needed)
            except OSError as error:
                raise CheckpointError(
                    f"--async-save needs {needed} bytes ({needed / 2**30:.2f} GiB) of this host's memory for a copy of "
                    f"the saved tensors: {error.strerror}; without --async-save they are not copied"
                ) from error
            if any(is_cuda(chunk.tensor.device) for chunk in chunks):
                # Register this memory, as torch pins powers of two. If that fails, copies are slower.
                status = cuda_runtime().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
                self._pinned = int(status) == 0

    def plan(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks with host tensors, which `begin` starts to fill; they are valid until the next call."""
        wait(self._copying)  # copies of an abandoned save
        self._copying = []
        self.reserve(chunks)
        copies, start = [], 0
        for chunk in chunks:
            part = self._memory[start : start + chunk.nbytes]
            copies.append(replace(chunk, tensor=part.view(chunk.tensor.dtype).view(chunk.tensor.shape)))
            start += _aligned_nbytes(chunk)
        self._pairs = [(copy.tensor, chunk.tensor) for copy, chunk in zip(copies, chunks, strict=True)]
        return copies

    def begin(self) -> None:
        """Start the planned copies; the originals must not change before `wait_for_copies` returns."""
        self._copying, self._pairs = _begin_copies(self._pairs), []

    def wait_for_copies(self) -> None:
        """Wait until all started copies are complete. Any thread may call it."""
        for part in self._copying:
            part.result()

    def release(self) -> None:
        """Free the memory; staged copies are invalid afterwards."""
        wait(self._copying)
        self._copying = []
        if self._pinned:
            cuda_runtime().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False


def _aligned_nbytes(chunk: Chunk) -> int:
    """Return the bytes of a chunk, rounded up so that the next one is aligned."""
    return -(-chunk.nbytes // _ALIGNMENT) * _ALIGNMENT


def _host_memory(nbytes: int) -> Tensor:
    """Map private memory and touch every page; forked processes do not inherit it."""
    memory = mmap.mmap(-1, -(-nbytes // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(
        mmap, "MADV_DONTFORK"
    ):  # Linux; else a forked data worker would keep a copy of each page that is written later
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(0)


def _begin_copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Future[None]]:
    """Start to copy each second tensor to the first.

    CPU memory is copied in pieces by several threads, which synchronise once: torch's copy does so for each tensor, and
    on a busy machine each synchronisation costs a scheduler's time slice.
    """
    on_devices: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    pieces: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        if not is_host(source.device):
            on_devices.setdefault(source.device, []).append((target, source))
            continue
        plain = source.is_contiguous() and source.numel() > 0
        divided = (_octets(target).split(_PIECE), _octets(source).split(_PIECE)) if plain else ([target], [source])
        pieces += zip(*divided, strict=True)
    threads = max(1, min(_THREADS, torch.get_num_threads()))
    shares = balanced([target.nbytes for target, _ in pieces], threads)
    pool = ThreadPoolExecutor(len(on_devices) + threads, thread_name_prefix="checkpoint-copy")
    copying = []
    for device, part in on_devices.items():
        # The tensors have the values to save from there on.
        reached = torch.accelerator.current_stream(device).record_event()
        copying.append(pool.submit(_copy_from, device, reached, part))
    copying += [pool.submit(_copy_all, [pieces[number] for number in share]) for share in shares if share]
    pool.shutdown(wait=False)  # the threads end with their work
    return copying


def _copy_from(device: torch.device, reached: torch.Event, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors off a device while it computes; return when all copies are complete."""
    stream = torch.Stream(device)
    stream.wait_event(reached)
    with stream, torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    stream.synchronize()


@torch.no_grad()
def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        if target.dtype == torch.uint8 and source.is_contiguous():
            np.copyto(target.numpy(), source.numpy())  # lets other threads run meanwhile
        else:
            target.copy_(source)


def _octets(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
