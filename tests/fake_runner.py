"""A model without weights in place of the port `serve.runner.Runner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalith.serve.runner import Batch, Chunk


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
        rows = [row for chunk in batch.chunks for row in self._read(chunk)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _read(self, chunk: Chunk) -> list[Tensor]:
        size = self.block_size
        for position, token in enumerate(chunk.tokens, chunk.start):
            self.blocks[chunk.blocks[position // size]][position % size] = token
        length = chunk.start + len(chunk.tokens)
        held = [self.blocks[chunk.blocks[position // size]][position % size] for position in range(length)]
        known = [token for token in held if token is not None]
        assert len(known) == length, "a token was never read"
        return [self._logits(known[: length - back]) for back in reversed(range(chunk.num_logits))]

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
