"""Choose the next token of each sequence from its logits, and the next tokens of a beam search.

Sampling takes one uniform number u per token from the sequence's own stream, and the first token whose cumulative
probability exceeds u. So a seed gives the same tokens in every batch and layout but for rounding: an error of the
logits, which depends on the other rows of a product, changes a choice only if u is that close to a border.

Shapes: B sequences, V vocabulary, N candidates.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.device import is_host
from megalith.nn.precision import at_least_fp32
from megalith.serve.request import Sampling, TopLogprobs

_TOP_P_CANDIDATES = 128  # candidates that are sorted for top-p before all of them are


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """What the next token of one sequence depends on besides its logits."""

    sampling: Sampling
    uniform: float  # from [0, 1); unused where the choice is greedy
    prompt: Sequence[int]  # decoder tokens before the output; none if an encoder reads the prompt
    output: Sequence[int]  # tokens generated so far
    logprobs: int | None = None  # how many of the most likely ones are wanted; None for no log-probabilities at all


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token; `problem` says why there is none."""

    token: int = -1
    logprob: float | None = None
    top: TopLogprobs = ()
    problem: str = ""


def choose_tokens(logits_BV: Tensor, rows: Sequence[SamplingInput]) -> list[SampledToken]:
    """Choose the next token of each row; -inf marks a token that cannot be chosen.

    A row with a logit that is NaN or +inf, or without any finite one, has a problem instead; the others do not.
    """
    logits_BV = logits_BV.to(at_least_fp32(logits_BV.dtype))
    largest, tokens = _max_logits(logits_BV)
    special = [
        index
        for index, row in enumerate(rows)
        if (row.sampling.changes_logits or not row.sampling.greedy) and math.isfinite(largest[index])
    ]
    if special:
        chosen = _choose_with_options(logits_BV[special], [rows[index] for index in special])
        for index, token in zip(special, chosen, strict=True):
            tokens[index] = token
    if all(row.logprobs is None for row in rows) and all(map(math.isfinite, largest)):
        return [SampledToken(token) for token in tokens]
    return [
        _sampled_token(logits_V, row, token, top)
        for logits_V, row, token, top in zip(logits_BV, rows, tokens, largest, strict=True)
    ]


def _max_logits(logits_BV: Tensor) -> tuple[list[float], list[int]]:
    """Return the maximum of each row, NaN if it has one, and its token, the first of equals."""
    if not is_host(logits_BV.device):
        values, places = torch.stack([found.double() for found in logits_BV.max(-1)]).tolist()  # one wait for both
        return values, [int(place) for place in places]
    # torch's search for a place on a CPU takes 10 times as long as numpy's, to which NaN is the largest too.
    found = logits_BV.numpy()
    places = found.argmax(-1)
    return np.take_along_axis(found, places[:, None], -1)[:, 0].tolist(), places.tolist()


def score_tokens(logits_BV: Tensor, tokens: Sequence[int], count: int) -> list[tuple[float, TopLogprobs]]:
    """Return the log-probability of a token in each row, and the `count` most likely tokens with theirs."""
    logits_BV = logits_BV.to(at_least_fp32(logits_BV.dtype))
    total_B = logits_BV.logsumexp(-1, keepdim=True)
    own_B = (logits_BV.gather(1, torch.tensor(tokens, device=logits_BV.device)[:, None]) - total_B).squeeze(1)
    values, ids = torch.topk(logits_BV, min(count, logits_BV.shape[1]), dim=-1)
    tops = zip(ids.tolist(), (values - total_B).tolist(), strict=True)
    return [(own, tuple(zip(*top, strict=True))) for own, top in zip(own_B.tolist(), tops, strict=True)]


def _sampled_token(logits_V: Tensor, row: SamplingInput, token: int, largest: float) -> SampledToken:
    if not math.isfinite(largest):
        return SampledToken(
            problem=f"the model's logits are not finite (their maximum is {largest}): the training that wrote this "
            "checkpoint diverged, or the weights overflow in their precision; take an earlier iteration"
        )
    if row.logprobs is None:
        return SampledToken(token)
    ((logprob, top),) = score_tokens(logits_V[None], [token], row.logprobs)
    return SampledToken(token, logprob, top)


def _choose_with_options(logits_BV: Tensor, rows: Sequence[SamplingInput]) -> list[int]:
    """Choose tokens for rows that sample or whose options change the logits."""
    if any(row.sampling.changes_logits for row in rows):
        logits_BV = logits_BV.clone()
        for logits_V, row in zip(logits_BV, rows, strict=True):
            apply_penalties(logits_V, row.sampling, row.prompt, row.output)
    chosen = [-1] * len(rows)
    kinds: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(_num_candidates(row, logits_BV.shape[1]), []).append(index)
    for count, members in kinds.items():
        some_BV = logits_BV if len(members) == len(rows) else logits_BV[members]
        for index, token in zip(members, _draw(some_BV, [rows[index] for index in members], count), strict=True):
            chosen[index] = token
    return chosen


def apply_penalties(logits_V: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Apply penalties, bias and bans to the logits [V] of one sequence, in place."""
    size = logits_V.shape[0]

    def ids(tokens: Sequence[int]) -> Tensor:
        return torch.tensor([token for token in tokens if token < size], dtype=torch.int64, device=logits_V.device)

    if sampling.repetition_penalty != 1.0:
        seen = ids(sorted({*prompt, *output}))
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and output:
        counts = Counter(token for token in output if token < size)
        penalties = [sampling.presence_penalty + sampling.frequency_penalty * count for count in counts.values()]
        logits_V[ids(list(counts))] -= torch.tensor(penalties, dtype=logits_V.dtype, device=logits_V.device)
    for token, bias in sampling.logit_bias.items():
        if token < size:
            logits_V[token] += bias
    before = output or prompt
    last = before[-1] if before else None
    banned = [*sampling.banned, *(then for first, then in sampling.banned_after if first == last)]
    if banned:
        kept = logits_V.clone()
        logits_V[ids(banned)] = -math.inf
        if not math.isfinite(logits_V.max()):  # everything is banned: then nothing is
            logits_V.copy_(kept)


def _num_candidates(row: SamplingInput, size: int) -> int:
    """Return how many of the most likely tokens to sort: 0 for none, as all are candidates."""
    sampling = row.sampling
    if sampling.greedy:
        return 1
    if sampling.top_k:
        return min(sampling.top_k, size)
    cuts = 0.0 < sampling.top_p_at(len(row.output)) < 1.0 or sampling.min_p > 0.0
    return min(_TOP_P_CANDIDATES, size) if cuts else 0


def _draw(logits_BV: Tensor, rows: Sequence[SamplingInput], count: int) -> list[int]:
    """Choose in each row among the `count` most likely tokens (0: all)."""
    if count == 1:
        greedy: list[int] = logits_BV.argmax(-1).tolist()
        return greedy
    like: dict[str, Any] = {"dtype": torch.float64, "device": logits_BV.device}
    temperature_B1 = torch.tensor([[row.sampling.temperature] for row in rows], **like)
    u_B1 = torch.tensor([[row.uniform] for row in rows], **like)
    scaled_BV = logits_BV / temperature_B1.to(logits_BV.dtype)
    if count == 0:
        cumulated_BV = scaled_BV.softmax(-1).cumsum(-1, dtype=torch.float64)
        return _first_above(cumulated_BV, u_B1 * cumulated_BV[:, -1:])
    values_BN, ids_BN = torch.topk(scaled_BV, count, dim=-1)
    by_k = [row.sampling.top_k > 0 for row in rows]
    sums = zip(by_k, values_BN, scaled_BV, strict=True)
    total_B1 = torch.stack([(among if k else whole).to(torch.float64).logsumexp(-1) for k, among, whole in sums])[
        :, None
    ]
    cumulated_BN = (values_BN.to(torch.float64) - total_B1).exp().cumsum(-1)
    p = [row.sampling.top_p_at(len(row.output)) for row in rows]
    p_B1 = torch.tensor([[p if 0.0 < p < 1.0 else 2.0] for p in p], **like)
    # The candidates are those before whom less than p has been reached.
    kept_B1 = (cumulated_BN < p_B1).sum(-1, keepdim=True)
    kept_B1 = torch.minimum(kept_B1, _min_p_cutoff(values_BN, [row.sampling.min_p for row in rows]))
    enough = ((kept_B1 < count).squeeze(1) | torch.tensor(by_k, device=logits_BV.device)).tolist()
    mass_B1 = cumulated_BN.gather(1, kept_B1.clamp(max=count - 1))
    places = torch.tensor(_first_above(cumulated_BN, u_B1 * mass_B1), device=logits_BV.device)[:, None]
    chosen: list[int] = ids_BN.gather(1, places).squeeze(1).tolist()
    for index, done in enumerate(enough):
        if not done and count < logits_BV.shape[1]:  # a flat distribution: look at all
            (chosen[index],) = _draw(logits_BV[index : index + 1], rows[index : index + 1], logits_BV.shape[1])
    return chosen


def _min_p_cutoff(values_BN: Tensor, min_p: Sequence[float]) -> Tensor:
    """Return the index [B, 1] of the last candidate that min_p keeps, of descending logits; N if it keeps all."""
    ratio_B1 = torch.tensor([[math.log(p) if p else -math.inf] for p in min_p], dtype=torch.float64).to(
        values_BN.device
    )
    kept_B1 = (values_BN.double() - values_BN[:, :1].double() >= ratio_B1).sum(-1, keepdim=True)
    return torch.where(kept_B1 < values_BN.shape[1], (kept_B1 - 1).clamp(min=0), kept_B1)


def _first_above(cumulated_BN: Tensor, share_B1: Tensor) -> list[int]:
    """Return in each row the first index whose cumulative probability exceeds the share."""
    places = torch.searchsorted(cumulated_BN, share_B1, right=True).squeeze(1)
    return [int(place) for place in places.clamp(max=cumulated_BN.shape[1] - 1).tolist()]


class BeamSearch:
    """The decisions of one beam search, as in Megatron's classic server; the caller keeps the beams.

    Of all continuations of all beams the 2 x width best are considered. A stop token among the `width` best completes a
    hypothesis; the first `width` of the others become the new beams. The search ends when no beam can beat the worst of
    `width` hypotheses. The score of a hypothesis is the sum of its log-probabilities / length ** penalty, including its
    stop token. Source: Megatron-LM `megatron/text_generation/{generation,beam_utils}.py`, of the releases 23.x to
    24.x.
    """

    def __init__(self, width: int, length_penalty: float, stop_ids: frozenset[int]) -> None:
        self.width, self.length_penalty, self.stop_ids = width, length_penalty, stop_ids
        self.scores = [0.0]  # sums of log-probabilities of the current beams
        self._found: list[tuple[float, list[int]]] = []

    def step(self, logits_WV: Tensor, outputs: Sequence[list[int]]) -> list[tuple[int, int]]:
        """Add one token, given the logits [W, V] of the beams and their outputs, which have equal lengths.

        Returns the new beams, best first, as (index of the previous beam, next token); none at the end.
        """
        length = len(outputs[0]) + 1
        logits_WV = logits_WV.to(at_least_fp32(logits_WV.dtype))
        base_W1 = torch.tensor(self.scores, dtype=logits_WV.dtype, device=logits_WV.device)[:, None]
        sums_WV = logits_WV.log_softmax(-1) + base_W1
        size = sums_WV.shape[1]
        values, places = torch.topk(sums_WV.flatten(), 2 * self.width)
        continuations: list[tuple[int, int]] = []
        sums: list[float] = []
        best = values[0].item()
        for rank, (total, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            beam, token = divmod(place, size)
            if token in self.stop_ids:
                if rank < self.width:
                    self._keep(outputs[beam], total, length)
            else:
                continuations.append((beam, token))
                sums.append(total)
            if len(continuations) == self.width:
                break
        if len(self._found) == self.width and self._found[-1][0] >= self._score(best, length):
            return []
        self.scores = sums
        return continuations

    def best(self, outputs: Sequence[list[int]]) -> list[tuple[list[int], float]]:
        """Return all hypotheses, best first; the open beams with these outputs count too, if there are any."""
        for output, total in zip(outputs, self.scores, strict=False):
            self._keep(output, total, len(output))
        return [(output, score) for score, output in self._found]

    def _keep(self, output: Sequence[int], total: float, length: int) -> None:
        self._found.append((self._score(total, length), list(output)))
        self._found.sort(key=lambda found: -found[0])
        del self._found[self.width :]

    def _score(self, total: float, length: int) -> float:
        """Return total / length ** penalty, or the nearest finite float: clients choose the penalty."""
        try:
            return max(total / length**self.length_penalty, -sys.float_info.max)
        except OverflowError:
            return 0.0
        except ZeroDivisionError:
            return -sys.float_info.max if total < 0.0 else 0.0
