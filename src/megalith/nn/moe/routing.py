"""Routing: the experts of each token, and their weights.

Shapes: T tokens, E experts, K experts for each token, G groups of experts.

Scores are a softmax over all experts, a softmax over the chosen ones (Mixtral, arXiv:2401.04088), or functions of one
logit: sigmoid (DeepSeek-V3, arXiv:2412.19437) or square root of softplus (DeepSeek-V4). `sinkhorn` routes by an
optimal-transport normalisation of the logits (arXiv:2103.16716) and weighs by the plain scores. With quantiles experts
are chosen by the logits minus an offset per expert, which `quantile_offsets` balances, and weighed by the logits (https://openathena.ai/blog/quantile-balancing).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.device import is_host
from megalith.errors import ConfigError
from megalith.nn.precision import at_least_fp32
from megalith.registry import Registered

_EPSILON = 1e-20
_MAX_ROUNDS = 1000


def _root_of_softplus(x: Tensor) -> Tensor:
    """Return sqrt(log(1 + e^x)); the logarithm is kept above 0, where the root has no finite derivative."""
    return torch.nn.functional.softplus(x).clamp(min=torch.finfo(x.dtype).tiny).sqrt()


SEPARATE_SCORES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "sqrtsoftplus": _root_of_softplus}
"""Scores of an expert that do not depend on the logits of others."""


@dataclass(frozen=True)
class RoutingRule:
    """How tokens choose their experts.

    Attributes:
        score: softmax, sigmoid or sqrtsoftplus.
        pre_softmax: the softmax is taken over all experts, before the choice.
        groups, top_groups: the experts form G groups; a token chooses from the `top_groups` groups with the greatest
            sum of their `top_k // top_groups` best scores.
        scaling: the weights are multiplied by this.
        sinkhorn: the choice in training follows `sinkhorn_plan` of the logits.
        quantiles: the choice follows the logits minus an offset per expert.
        capacity_factor: an expert takes at most `ceil(T K / E x factor)` tokens; no limit if None.
        own: a registered function that chooses, in place of all above.
        drop_by_position: beyond its capacity an expert takes the first tokens, not those with the greatest weights.
    """

    experts: int
    top_k: int = 2
    score: str = "softmax"
    pre_softmax: bool = False
    groups: int | None = None
    top_groups: int | None = None
    scaling: float | None = None
    sinkhorn: bool = False
    quantiles: bool = False
    capacity_factor: float | None = None
    drop_by_position: bool = False
    own: Registered | None = None


@dataclass(frozen=True)
class Choice:
    """The experts of each token, in no particular order.

    Attributes:
        experts_TK: their numbers, int64.
        weights_TK: what their outputs are multiplied by, in the dtype of the logits.
    """

    experts_TK: Tensor
    weights_TK: Tensor


def choose(logits_TE: Tensor, rule: RoutingRule, *, bias_E: Tensor | None = None, training: bool = True) -> Choice:
    """Choose the experts of each token by their logits.

    Args:
        logits_TE: in the dtype that routing computes in.
        rule: options of the choice.
        bias_E: added to sigmoid or softplus scores for the choice, but not for the weights (arXiv:2408.15664); with
            quantiles subtracted from the logits.
        training: whether `sinkhorn` decides.
    """
    if rule.own is not None:
        return _choose_by_own(logits_TE, rule.own, rule.top_k)
    if rule.sinkhorn:
        return _choose_by_sinkhorn(logits_TE, rule, training=training)
    chosen_TK = None
    if rule.quantiles and bias_E is not None:
        chosen_TK = (at_least(logits_TE.detach()) - bias_E).topk(rule.top_k, dim=-1).indices
    if rule.score in SEPARATE_SCORES:
        scores_TE = SEPARATE_SCORES[rule.score](at_least(logits_TE)).to(logits_TE.dtype)
        if chosen_TK is None:
            chosen_TK = best_experts(scores_TE if bias_E is None else scores_TE + bias_E, rule)
        weights_TK = scores_TE.gather(1, chosen_TK)
        if rule.top_k > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _EPSILON)
    elif rule.pre_softmax:
        scores_TE = _softmax(logits_TE)
        chosen_TK = best_experts(scores_TE, rule) if chosen_TK is None else chosen_TK
        weights_TK = scores_TE.gather(1, chosen_TK)
    else:
        chosen_TK = best_experts(logits_TE, rule) if chosen_TK is None else chosen_TK
        weights_TK = _softmax(logits_TE.gather(1, chosen_TK))
    return Choice(chosen_TK, weights_TK if rule.scaling is None else weights_TK * rule.scaling)


def _choose_by_own(logits_TE: Tensor, own: Registered, top_k: int) -> Choice:
    """Choose by a registered function; ConfigError if it returns something else."""
    found, wanted = own(logits_TE, top_k), (len(logits_TE), top_k)
    parts = found if isinstance(found, tuple) else (found,)
    shapes = [(tuple(part.shape), part.dtype) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    if [shape[0] for shape in shapes] != [wanted, wanted] or parts[0].dtype != torch.int64:
        raise ConfigError(
            f"--moe-router {own}: for logits {list(logits_TE.shape)} it returns {shapes}; return the experts of each "
            f"token, int64 {list(wanted)}, and their weights {list(wanted)}"
        )
    experts_TK, weights_TK = parts
    if is_host(experts_TK.device) and not 0 <= int(experts_TK.min()) <= int(experts_TK.max()) < logits_TE.shape[1]:
        raise ConfigError(
            f"--moe-router {own} chooses experts {int(experts_TK.min())} to {int(experts_TK.max())}; --num-experts "
            f"{logits_TE.shape[1]} has 0 to {logits_TE.shape[1] - 1}"
        )
    return Choice(experts_TK, weights_TK.to(logits_TE.dtype))


def at_least(x: Tensor) -> Tensor:
    """Return `x` in at least fp32."""
    return x.to(at_least_fp32(x.dtype))


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1, dtype=at_least_fp32(x.dtype)).to(x.dtype)


def best_experts(scores_TE: Tensor, rule: RoutingRule) -> Tensor:
    """Return the K experts with the greatest scores [T, K], from the best groups only if there are groups."""
    scores_TE = scores_TE.detach()
    if rule.top_groups is not None:
        assert rule.groups is not None, "a rule of the configuration"
        scores_TGN = scores_TE.view(len(scores_TE), rule.groups, -1)
        of_group_TG = scores_TGN.topk(rule.top_k // rule.top_groups, dim=-1).values.sum(-1)
        chosen_TG = torch.zeros_like(of_group_TG, dtype=torch.bool)
        chosen_TG.scatter_(1, of_group_TG.topk(rule.top_groups, dim=-1).indices, True)
        scores_TE = scores_TGN.masked_fill(~chosen_TG.unsqueeze(-1), -math.inf).view_as(scores_TE)
    return scores_TE.topk(rule.top_k, dim=-1).indices


def quantile_offsets(logits_TE: Tensor, rule: RoutingRule, offsets_E: Tensor) -> Tensor:
    """Return the offsets [E] to subtract from the logits so that these tokens choose all experts equally often.

    For each token the (K + 1)-th largest logit minus offset is the threshold below which an expert is not chosen. The
    margin of an expert is its logit minus this threshold. The T K / E tokens with the largest margins are the equal
    share of an expert; its offset is the margin of the next token.

    Source: Megatron-LM pull request 5349 (June 2026), one step of dual coordinate descent.
    """
    logits_TE = at_least(logits_TE.detach())
    first_left_T1 = (logits_TE - offsets_E).topk(rule.top_k + 1, dim=-1).values[:, -1:]
    share = len(logits_TE) * rule.top_k // rule.experts
    return (logits_TE - first_left_T1).topk(share + 1, dim=0).values[-1]


def _choose_by_sinkhorn(logits_TE: Tensor, rule: RoutingRule, *, training: bool) -> Choice:
    scores_TE = torch.sigmoid(logits_TE) if rule.top_k == 1 else _softmax(logits_TE)
    deciding_TE = sinkhorn_plan(at_least(logits_TE.detach())) if training else scores_TE.detach()
    experts_TK = deciding_TE.topk(rule.top_k, dim=-1).indices
    return Choice(experts_TK, scores_TE.gather(1, experts_TK))


def sinkhorn_plan(logits_TE: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Return exp(logits), scaled until all rows, and all columns, have equal sums (Sinkhorn 1964).

    Rows and columns are scaled in turn until the scales of the columns change by at most `tolerance` on average, or
    for a thousand rounds (logits that are not finite or far apart do not converge).
    """
    cost_TE = logits_TE.exp()
    tokens, experts = cost_TE.shape
    columns = cost_TE.new_ones(experts)
    rows = cost_TE.new_ones(tokens)
    for _ in range(_MAX_ROUNDS):
        rows = 1.0 / (tokens * ((cost_TE * columns).sum(1) + 1e-8))
        before, columns = columns, 1.0 / (experts * ((cost_TE * rows.unsqueeze(1)).sum(0) + 1e-8))
        if not float((before - columns).abs().mean()) > tolerance:
            break
    return columns * cost_TE * rows.unsqueeze(1)


def capacity(tokens: int, rule: RoutingRule) -> int:
    """Return the capacity of an expert: the maximum number of tokens, of `tokens` in all, that it takes."""
    assert rule.capacity_factor is not None
    return math.ceil(tokens * rule.top_k / rule.experts * rule.capacity_factor)


def count_choices(experts_N: Tensor, experts: int) -> Tensor:
    """Return how often each expert is chosen, [E]; torch.bincount would make the host wait for the largest number."""
    return experts_N.new_zeros(experts).scatter_add_(0, experts_N, torch.ones_like(experts_N))


def within_capacity(choice: Choice, rule: RoutingRule) -> Tensor:
    """Return which choices [T, K] fit the capacity: the greatest weights, or the first tokens, also in a tie."""
    experts_TK, weights_TK = choice.experts_TK, choice.weights_TK.detach()
    tokens, chosen = experts_TK.shape
    room = capacity(tokens, rule)
    flat = experts_TK.flatten()
    order = torch.arange(flat.numel(), device=flat.device)
    if not rule.drop_by_position:
        order = weights_TK.flatten().sort(descending=True, stable=True).indices
    order = order[flat[order].sort(stable=True).indices]  # by expert, in the order of preference
    counts = count_choices(flat, rule.experts)
    rank = torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = rank < room
    return kept.view(tokens, chosen)
