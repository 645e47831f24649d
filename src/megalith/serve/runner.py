"""The port between the engine and whatever computes logits, and its test double."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence that are to be read.

    Attributes:
        tokens: The new ones.
        start: Position of the first of them; the keys and values of all before it are in the blocks.
        blocks: Where the keys and values of the sequence are, the new ones included: position p is in row
            p % block_size of block blocks[p // block_size].
        wanted: Of how many of the last of these tokens logits are wanted.
        source: How many of the sequence's first tokens are the text that an encoder reads, which fills whole blocks;
            the decoder reads those behind these blocks. 0 where there is no encoder.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    wanted: int = 1
    source: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What is computed in one step.

    Attributes:
        pieces: Of different sequences.
        copies: (from, to): blocks that are copied before anything is read.
    """

    pieces: Sequence[Piece]
    copies: Sequence[tuple[int, int]] = field(default=())


class Runner(Protocol):
    """Reads tokens into blocks of keys and values, and says what may follow.

    Attributes:
        vocab_size: number of logits.
        context_length: of the model; positions are below it, those of a text and of its answer alike.
        block_size: tokens in a block.
        num_blocks: how many there are.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def run(self, batch: Batch) -> Tensor:
        """Read the pieces; the logits of the wanted tokens, [number of them, V], in the order of the pieces.

        Raises:
            PeerError: a rank that shares the model is gone.
        """
        ...

    def ping(self) -> None:
        """Tell the other ranks that there is nothing to do; they take silence for death.

        Raises:
            PeerError: one of them is gone.
        """
        ...

    def close(self) -> None:
        """Let the other ranks go."""
        ...


class FakeRunner:
    """A model without weights: the logits depend on the whole sequence as `follow` says.

    It keeps the tokens in the blocks in place of keys and values, so that a wrong block table gives wrong answers.

    Args:
        follow: The most likely next token of a sequence; by default a mixture of all its tokens.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context_length: int = 128,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        follow: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self.vocab_size, self.context_length = vocab_size, context_length
        self.block_size, self.num_blocks = block_size, num_blocks
        self.blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.batches: list[Batch] = []
        self._follow = follow or self._mixture

    def _mixture(self, tokens: Sequence[int]) -> int:
        state = 17
        for token in tokens:
            state = (state * 31 + token * 7 + 3) % 1_000_003
        return state % self.vocab_size

    def run(self, batch: Batch) -> Tensor:
        self.batches.append(batch)
        for source, target in batch.copies:
            self.blocks[target] = list(self.blocks[source])
        rows = [row for piece in batch.pieces for row in self._read(piece)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _read(self, piece: Piece) -> list[Tensor]:
        size = self.block_size
        for position, token in enumerate(piece.tokens, piece.start):
            self.blocks[piece.blocks[position // size]][position % size] = token
        length = piece.start + len(piece.tokens)
        held = [self.blocks[piece.blocks[position // size]][position % size] for position in range(length)]
        known = [token for token in held if token is not None]
        assert len(known) == length, "a token was never read"
        return [self._logits(known[: length - back]) for back in reversed(range(piece.wanted))]

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """The best one is clearly ahead, the others are all different."""
        best = self._follow(tokens)
        rest = (torch.arange(self.vocab_size) * 37 + best) % self.vocab_size
        logits = -rest.double() / self.vocab_size
        logits[best] = 1.0
        return logits

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass
