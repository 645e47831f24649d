"""Port between the engine and the model: batches of tokens in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence in a batch: a chunk of its prompt, or one decoded token."""

    tokens: Sequence[int]
    start: int  # position of the first new token; keys and values of all positions before it are in the cache
    blocks: Sequence[int]  # block table: position p is in row p % block_size of blocks[p // block_size]
    num_logits: int = 1  # logits are returned of this many last tokens
    encoder_length: int = 0  # encoder tokens; they come first, padded to whole blocks
    adapter: int = 0  # number of the LoRA adapters that the tokens pass through; 0 for none


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of the model: new tokens of several sequences."""

    chunks: Sequence[Chunk]
    copies: Sequence[tuple[int, int]] = field(default=())  # (from, to): blocks to copy first


class Runner(Protocol):
    """Computes a batch: writes keys and values into the paged KV cache and returns logits of next tokens."""

    vocab_size: int
    context_length: int  # maximum positions of the model, of encoder and decoder alike
    block_size: int  # tokens per block
    num_blocks: int

    def run(self, batch: Batch) -> Tensor:
        """Compute the batch; return the requested logits [sum of `num_logits`, V]. `PeerError` if a rank is gone."""
        ...

    def ping(self) -> None:
        """Send other ranks, if any, a heartbeat; without one they assume that this rank has died."""
        return

    def close(self) -> None:
        """End the loops of other ranks, if any."""
        return


def decoding_step(runner: Runner, *, encodes: bool = False) -> Batch:
    """Return a typical decoding step: one new token for each of eight sequences, with an encoder input if `encodes`.

    It overwrites the first blocks of the cache: run it before serving.
    """
    rows = range(min(8, runner.num_blocks))
    if not encodes:
        return Batch([Chunk([0], 0, [row]) for row in rows])
    pairs = [[row % runner.num_blocks, (row + 1) % runner.num_blocks] for row in rows]
    return Batch([Chunk([0], runner.block_size, blocks, encoder_length=1) for blocks in pairs])
