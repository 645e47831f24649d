"""How the next token is chosen from the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.errors import MegalithError
from megalith.nn.precision import at_least_fp32
from megalith.serve.request import Sampling


def _keep_top_k(logits_V: Tensor, k: int) -> Tensor:
    lowest = torch.topk(logits_V, min(k, logits_V.shape[-1])).values[-1]
    return logits_V.masked_fill(logits_V < lowest, -math.inf)


def _keep_top_p(logits_V: Tensor, p: float) -> Tensor:
    """Keep the most likely tokens up to and including the one that reaches probability p."""
    ordered, order = torch.sort(logits_V, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return logits_V.masked_fill(torch.zeros_like(logits_V, dtype=torch.bool).scatter(0, order, before >= p), -math.inf)


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose a token id from the logits [V] of one position; -inf stands for a token that cannot be chosen.

    Raises:  MegalithError if a logit is NaN or +inf, or none is finite.
    """
    logits_V = logits_V.to(at_least_fp32(logits_V.dtype))
    if not math.isfinite(logits_V.max()):  # NaN wins every maximum
        raise MegalithError(
            f"the model's logits are not finite (their maximum is {float(logits_V.max())}): the training that wrote "
            "this checkpoint diverged, or the weights overflow in their precision; take an earlier iteration"
        )
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        return int(logits_V.argmax())
    logits_V = logits_V / sampling.temperature
    if sampling.top_k:
        logits_V = _keep_top_k(logits_V, sampling.top_k)
    if 0.0 < sampling.top_p < 1.0:
        logits_V = _keep_top_p(logits_V, sampling.top_p)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))
