"""The port between the engine and whatever computes logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that are to be read."""

    tokens: Sequence[int]
    start: int  # position of the first of them; the keys and values of all before it are in the blocks
    blocks: Sequence[int]  # of the sequence: position p is in row p % block_size of blocks[p // block_size]
    wanted: int = 1  # of how many of the last of these tokens logits are wanted
    source: int = 0  # first tokens that an encoder reads, padded to whole blocks before those of the decoder


@dataclass(frozen=True, slots=True)
class Batch:
    """What is computed in one step."""

    pieces: Sequence[Piece]
    copies: Sequence[tuple[int, int]] = field(default=())  # (from, to): blocks that are copied before anything is read


class Runner(Protocol):
    """Reads tokens into blocks of keys and values, and computes the logits of what follows."""

    vocab_size: int
    context_length: int  # of the model; positions are below it, those of a text and of its answer alike
    block_size: int  # tokens in a block
    num_blocks: int

    def run(self, batch: Batch) -> Tensor:
        """Read the pieces; return the logits of the wanted tokens [wanted, V]. `PeerError` if a rank is gone."""
        ...

    def ping(self) -> None:
        """Tell the other ranks that there is nothing to do; they take silence for death."""
        ...

    def close(self) -> None:
        """Release the other ranks."""
        ...


def decoding_step(runner: Runner, *, encodes: bool = False) -> Batch:
    """Return a typical step of decoding, one new token of each of eight sequences, after a text if the model `encodes`.

    It writes over the first blocks of the cache: run it before anything is served.
    """
    rows = range(min(8, runner.num_blocks))
    if not encodes:
        return Batch([Piece([0], 0, [row]) for row in rows])
    pairs = [[row % runner.num_blocks, (row + 1) % runner.num_blocks] for row in rows]
    return Batch([Piece([0], runner.block_size, blocks, source=1) for blocks in pairs])
