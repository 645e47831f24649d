"""Host memory that tensors are copied into, so that they can be written while training goes on with the originals.

The memory is taken once and used again by each save: as many bytes as the tensors have. Where the tensors are on a GPU
it is pinned, so that the copies run at the speed of the bus.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.content import Chunk
from megalith.errors import CheckpointError

_ALIGNMENT = 64
_PAGE = 4096
_PIECE = 2**24  # bytes that a thread copies at once


class Staging:
    """Copies of the tensors of one save at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are held."""
        return self._memory.nbytes

    def reserve(self, chunks: Sequence[Chunk]) -> None:
        """Take the memory for copies of these chunks, so that the first save need not wait for it.

        Raises:
            CheckpointError: the system refuses it.
        """
        needed = sum(map(_room, chunks))
        if needed > self._memory.nbytes:
            self.release()
            try:
                self._memory = _host_memory(needed)
            except OSError as error:
                raise CheckpointError(
                    f"--async-save needs {needed} bytes ({needed / 2**30:.2f} GiB) of this host's memory for a copy of "
                    f"what is saved: {error.strerror}; leave it out to save from where the tensors are"
                ) from error
            if any(chunk.tensor.is_cuda for chunk in chunks):
                self._pin()

    def copied(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with copies of their tensors, which hold until the next call.

        Raises:
            CheckpointError: as `reserve`.
        """
        self.reserve(chunks)
        copies, start = [], 0
        for chunk in chunks:
            octets = self._memory[start : start + chunk.nbytes]
            copies.append(replace(chunk, tensor=octets.view(chunk.tensor.dtype).view(chunk.tensor.shape)))
            start += _room(chunk)
        _copy((copy.tensor, chunk.tensor) for copy, chunk in zip(copies, chunks, strict=True))
        return copies

    def release(self) -> None:
        """Give the memory back; copies hold no longer."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _pin(self) -> None:
        """Pin exactly this memory, since torch's own comes in powers of two. Where that fails, copies are slower."""
        status = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
        self._pinned = int(status) == 0


def _room(chunk: Chunk) -> int:
    """Bytes for a chunk, so that the next one is aligned."""
    return -(-chunk.nbytes // _ALIGNMENT) * _ALIGNMENT


def _host_memory(nbytes: int) -> Tensor:
    """Memory of this process alone, with each page in its place; processes that it forks do not get it."""
    memory = mmap.mmap(-1, -(-nbytes // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux; a process forked for data would keep every page that is written anew
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(0)


@torch.no_grad()
def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor to the first; returns when all copies are there.

    Plain memory is copied in pieces by as many threads as torch has, which wait for each other once: torch's own copy
    does so for each tensor, and on a machine that is busy each wait takes a slice of its time.
    """
    devices, pieces = set[torch.device](), list[tuple[Tensor, Tensor]]()
    for target, source in pairs:
        if source.device.type == "cpu" and source.is_contiguous():
            pieces += zip(_octets(target).split(_PIECE), _octets(source).split(_PIECE), strict=True)
        else:
            target.copy_(source, non_blocking=True)
        if source.is_cuda:
            devices.add(source.device)
    if pieces:
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="checkpoint-copy") as pool:
            list(pool.map(lambda piece: np.copyto(piece[0].numpy(), piece[1].numpy()), pieces))
    for device in devices:
        torch.cuda.synchronize(device)


def _octets(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
