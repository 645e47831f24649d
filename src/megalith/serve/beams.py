"""Beam search with the semantics of Megatron's classic server: which beams go on, and which hypotheses are kept.

Of all continuations of all beams the 2 x width best are looked at. One by the stop token among the `width` best ends a
hypothesis; of the others the first `width` go on. The search ends when no beam can beat the worst of `width`
hypotheses any more. The score of a hypothesis is the sum of its log-probabilities / length ** penalty, its stop token
counted.
Source: Megatron-LM `megatron/text_generation/{generation,beam_utils}.py`, of the releases 23.x to 24.x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.nn.precision import at_least_fp32


class BeamSearch:
    """The decisions of one search; whoever computes the logits keeps the beams.

    Attributes:
        scores: of the beams that go on, the sums of their log-probabilities.
    """

    def __init__(self, width: int, length_penalty: float, stop_ids: frozenset[int]) -> None:
        self.width, self.length_penalty, self.stop_ids = width, length_penalty, stop_ids
        self.scores = [0.0]
        self._found: list[tuple[float, list[int]]] = []

    def step(self, logits_WV: Tensor, answers: Sequence[list[int]]) -> list[tuple[int, int]]:
        """Take one more token.

        Args:
            logits_WV: Of each beam, [W, V].
            answers: The tokens of each beam behind the prompt, all equally many.

        Returns:
            The beams that go on, best first: (the beam that it continues, its next token). None at the end.
        """
        length = len(answers[0]) + 1
        logits_WV = logits_WV.to(at_least_fp32(logits_WV.dtype))
        base_W1 = torch.tensor(self.scores, dtype=logits_WV.dtype, device=logits_WV.device)[:, None]
        sums_WV = logits_WV.log_softmax(-1) + base_W1
        size = sums_WV.shape[1]
        values, places = torch.topk(sums_WV.flatten(), 2 * self.width)
        following: list[tuple[int, int]] = []
        sums: list[float] = []
        best = values[0].item()
        for rank, (total, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            beam, token = divmod(place, size)
            if token in self.stop_ids:
                if rank < self.width:
                    self._keep(answers[beam], total, length)
            else:
                following.append((beam, token))
                sums.append(total)
            if len(following) == self.width:
                break
        if len(self._found) == self.width and self._found[-1][0] >= best / length**self.length_penalty:
            return []
        self.scores = sums
        return following

    def best(self, answers: Sequence[list[int]]) -> list[tuple[list[int], float]]:
        """All hypotheses, best first; the open beams with these answers count too, if there are any."""
        for answer, total in zip(answers, self.scores, strict=False):
            self._keep(answer, total, len(answer))
        return [(answer, score) for score, answer in self._found]

    def _keep(self, answer: Sequence[int], total: float, length: int) -> None:
        """Keep a hypothesis if it is among the best."""
        self._found.append((total / length**self.length_penalty, list(answer)))
        self._found.sort(key=lambda found: -found[0])
        del self._found[self.width :]
