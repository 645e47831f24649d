"""How main parameters change: update rules without state of their own, and which parameters change alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megalith.config import OptimizerConfig
from megalith.distributed.context import Axis
from megalith.kernels.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_
from megalith.nn.placement import Placement
from megalith.nn.precision import at_least_fp32
from megalith.optim.matrix_rules import COEFFICIENTS, AdaptiveMuon, Muon, Soap, is_of_layers

States = Mapping[str, Sequence[Tensor]]
"""Kind of state -> the tensor of each parameter."""


@dataclass(frozen=True)
class Work:
    """What one step of an update rule is about."""

    names: Sequence[str]
    # params, grads: of one dtype each; the parameters are changed in place
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: States  # of each parameter, as of the rule's `kinds`; changed in place
    # lr, weight_decay: of these parameters in this step
    lr: float
    weight_decay: float
    step: int  # applied steps before this one


class UpdateRule(Protocol):
    """A way to change parameters.

    Attributes:
        kinds: names of the states of a parameter, which begin as zeros.
    """

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def settings(self) -> dict[str, Any]:
        """What the groups in a checkpoint say of the rule, beside the rate and the decay."""
        ...

    def update(self, work: Work) -> None:
        """Change the parameters and their states in place."""
        ...


_ADAM_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}


@dataclass(frozen=True)
class AdamW:
    """Loshchilov and Hutter 2019, arXiv:1711.05101; the arithmetic is torch's fused kernel's."""

    beta1: float
    beta2: float
    eps: float

    kinds = ("exp_avg", "exp_avg_sq")

    def settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, **_ADAM_FIXED}

    def update(self, work: Work) -> None:
        params, states = list(work.params), work.states
        counts = torch.full((len(params),), float(work.step), dtype=torch.float32, device=params[0].device)
        adamw(
            params,
            list(work.grads),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
            [],
            list(counts.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=work.lr,
            weight_decay=work.weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, and with the weight decay in the gradient, as Megatron's is.

    Source: docs/reference/training.md#optimizers.
    """

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def settings(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "dampening": 0,
            "nesterov": False,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": True,
        }

    def update(self, work: Work) -> None:
        # A buffer of zeros and no dampening make the first step what it is without a buffer: the gradient itself.
        buffers: list[Tensor | None] = [None] * len(work.params)
        if self.momentum:
            buffers = list(work.states["momentum_buffer"])
        sgd(
            list(work.params),
            list(work.grads),
            buffers,
            fused=True,
            weight_decay=work.weight_decay,
            momentum=self.momentum,
            lr=work.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675)."""

    beta1: float
    beta2: float

    kinds = ("exp_avg",)

    def settings(self) -> dict[str, Any]:
        return {"betas": (self.beta1, self.beta2)}

    def update(self, work: Work) -> None:
        moments, params, grads = list(work.states["exp_avg"]), list(work.params), list(work.grads)
        updates = foreach_lerp(moments, grads, 1.0 - self.beta1)
        foreach_sign_(updates)
        foreach_mul_(params, 1.0 - work.lr * work.weight_decay)
        foreach_add_(params, updates, alpha=-work.lr)
        foreach_lerp_(moments, grads, 1.0 - self.beta2)


PIECE_ON_CPU, PIECE_ELEMENTS = 1 << 18, 1 << 24
"""Of a piece: with its companions in fp32 4 MiB on a CPU, within the cache of a core, and 256 MiB elsewhere."""


@dataclass
class Widened:
    """An elementwise rule over tensors of several dtypes (`--use-precision-aware-optimizer`), with arithmetic in fp32.

    What is stored is rounded, what is computed is not: each piece of a parameter is widened, updated and rounded again,
    a piece at a time, so that the fp32 copies stay in the cache and never exist for a whole model. The numbers are
    stored without a scale per tensor: that is enough for bf16 moments and for fp16 main parameters, and not for moments
    in fp16 or fp8, whose squares would vanish; a rule of the configuration refuses these.
    """

    rule: UpdateRule
    _rooms: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.rule.kinds

    def settings(self) -> dict[str, Any]:
        return self.rule.settings()

    def update(self, work: Work) -> None:
        self.update_scaled(work, 1.0, None)

    def update_scaled(self, work: Work, scale: float, weights: Sequence[Tensor] | None) -> None:
        """Update with `scale` x the gradients, and round the new parameters to `weights` where there are such.

        Both are done while a piece is in the cache: in passes of their own they would take half as long again.
        """
        piece = PIECE_ON_CPU if work.params[0].device.type == "cpu" else PIECE_ELEMENTS
        for number, name in enumerate(work.names):
            held = [work.params[number], work.grads[number], *(work.states[kind][number] for kind in self.kinds)]
            flat = [tensor.view(-1) for tensor in held]
            weight = None if weights is None else weights[number].view(-1)
            for start in range(0, flat[0].numel(), piece):
                parts = [tensor[start : start + piece] for tensor in flat]
                wide = [self._wide(place, part) for place, part in enumerate(parts)]
                if scale != 1.0:
                    wide[1].mul_(scale)
                states = {kind: [wide[2 + place]] for place, kind in enumerate(self.kinds)}
                self.rule.update(replace(work, names=[name], params=wide[:1], grads=wide[1:2], states=states))
                for part, result in zip((parts[0], *parts[2:]), (wide[0], *wide[2:]), strict=True):
                    if part is not result:
                        part.copy_(result)
                if weight is not None:
                    weight[start : start + piece].copy_(parts[0])

    def _wide(self, place: int, part: Tensor) -> Tensor:
        """The part itself where it is wide enough, else a copy in a room that is used again."""
        dtype = at_least_fp32(part.dtype)
        if part.dtype == dtype:
            return part
        room = self._rooms.get((place, part.device))
        if room is None or room.numel() < part.numel():
            room = self._rooms[place, part.device] = torch.empty(part.numel(), dtype=dtype, device=part.device)
        return room[: part.numel()].copy_(part)


STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of the command line."""


_QK_NORMS = ("q_layernorm.", "k_layernorm.")
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight", "lm_head.output_layer.weight")


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike, by name in module order."""

    # wd_mult, lr_mult: what the weight decay and the rate are multiplied by
    wd_mult: float
    decoupled: bool  # whether their learning rate is `--decoupled-lr`
    rule: UpdateRule
    names: tuple[str, ...]
    lr_mult: float = 1.0


def decays(name: str, parameter: Tensor, config: OptimizerConfig) -> bool:
    """Whether the weight decay acts on a parameter: not on biases and what is one-dimensional.

    The norms of queries and keys decay if that is asked for, weights and biases as in Megatron.
    """
    if config.decays_qk_layernorm and any(part in name for part in _QK_NORMS):
        return True
    return not (name.endswith(".bias") or parameter.dim() == 1)


@dataclass(frozen=True, order=True)
class _Treatment:
    """What makes a group, in the order of the groups."""

    apart: bool
    no_decay: bool
    elementwise: bool
    lr_mult: float = 1.0
    eps_mult: float = 1.0


def make_groups(
    parameters: Mapping[str, Tensor],
    config: OptimizerConfig,
    axis: Axis,
    placements: Mapping[str, Placement],
    scaling: WidthScaling | None = None,
) -> list[Group]:
    """Megatron's groups in its order: what decays, then what does not, then what has a rate of its own.

    Under Muon and SOAP the matrices of the layers stand before the rest of what decays.

    Args:
        placements: how; needed for Muon and SOAP.
        scaling: of the rates by the width of the model; none by default.
    """
    members: dict[_Treatment, tuple[str, ...]] = {}
    for name, parameter in parameters.items():
        treatment = _treatment(name, parameter, config, scaling or WidthScaling())
        members[treatment] = (*members.get(treatment, ()), name)
    plain, of_matrices = _elementwise(config), _of_matrices(config, axis, placements)
    return [
        Group(
            0.0 if treatment.no_decay else 1.0,
            treatment.apart,
            _with_epsilon(plain, treatment.eps_mult) if treatment.elementwise else of_matrices or plain,
            members[treatment],
            treatment.lr_mult,
        )
        for treatment in sorted(members)
    ]


def _treatment(name: str, parameter: Tensor, config: OptimizerConfig, scaling: WidthScaling) -> _Treatment:
    apart = config.decoupled_lr is not None and name in _TABLES
    by_matrix, optimizer = config.sees_matrices and is_of_layers(name, parameter), config.optimizer
    scaled = not (by_matrix and config.orthogonalises)
    return _Treatment(
        apart,
        not decays(name, parameter, config),
        not by_matrix,
        scaling.rate(name, parameter, optimizer) if scaled and not apart else 1.0,
        scaling.epsilon(name, parameter, optimizer),
    )


def _with_epsilon(rule: UpdateRule, factor: float) -> UpdateRule:
    """The rule with an epsilon that is multiplied by a factor."""
    if isinstance(rule, Widened):
        return Widened(_with_epsilon(rule.rule, factor)) if factor != 1.0 else rule
    return replace(rule, eps=rule.eps * factor) if isinstance(rule, AdamW) else rule


def _elementwise(config: OptimizerConfig) -> UpdateRule:
    name = config.muon_scalar_optimizer if config.orthogonalises else config.optimizer
    rule: UpdateRule
    if name == "sgd":
        rule = SGD(config.sgd_momentum)
    elif name == "lion":
        rule = Lion(config.lion_beta1, config.lion_beta2)
    else:
        rule = AdamW(config.adam_beta1, config.adam_beta2, config.adam_eps)
    return Widened(rule) if config.stores_rounded else rule


def _of_matrices(config: OptimizerConfig, axis: Axis, placements: Mapping[str, Placement]) -> UpdateRule | None:
    if not config.sees_matrices:
        return None
    if config.optimizer == "soap":
        return Soap(
            config.adam_beta1,
            config.adam_beta2,
            config.adam_eps,
            config.soap_shampoo_beta,
            config.soap_precondition_frequency,
            axis,
            placements,
        )
    kind = AdaptiveMuon if config.optimizer == "adaptive_muon" else Muon
    return kind(
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        scale_mode=config.muon_scale_mode,
        extra_scale=config.muon_extra_scale_factor,
        coefficients=COEFFICIENTS[config.muon_coefficient_type],
        steps=config.muon_num_ns_steps,
        split_qkv=config.muon_split_qkv,
        blockwise=config.muon_tp_mode == "blockwise",
        matmul_precision=config.muon_fp32_matmul_prec,
        axis=axis,
        placements=placements,
    )


@dataclass(frozen=True)
class WidthScaling:
    """muP: the rate and the epsilon of a parameter by the width of its model (Yang et al. 2022, arXiv:2203.03466).

    With m the width multiplier, Megatron's rules:

    | optimizer                      | matrices of hidden states, output layer | embeddings, biases, norms |
    |--------------------------------|-----------------------------------------|---------------------------|
    | AdamW                          | rate / m, epsilon / m                   | as given                  |
    | Lion, SOAP, the rest of Muon   | rate / m                                | as given                  |
    | Muon's own matrices            | as given: its updates have their scale  |                           |
    | SGD                            | as given                                | rate x m                  |

    A rate that is given by `--decoupled-lr` stays as it is. The whole schedule is scaled, its start and its lowest rate
    too; the weight decay is not, of which the rate is a factor.
    """

    multiplier: float = 1.0  # m, 1 without muP
    tied: Collection[str] = ()  # parameters that are copies of the word embedding, by name

    def rate(self, name: str, parameter: Tensor, optimizer: str) -> float:
        """What the rate of a parameter is multiplied by, of one that `--optimizer` names so."""
        if optimizer == "sgd":
            return 1.0 if self._is_matrix(name, parameter) else self.multiplier
        return 1.0 / self.multiplier if self._is_matrix(name, parameter) else 1.0

    def epsilon(self, name: str, parameter: Tensor, optimizer: str) -> float:
        """What the epsilon of a parameter is multiplied by; arguments as of `rate`."""
        return 1.0 / self.multiplier if optimizer == "adam" and self._is_matrix(name, parameter) else 1.0

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Whether both extents of a parameter grow with the width, or the one that is summed over."""
        return parameter.dim() > 1 and not name.startswith("embedding.") and name not in self.tied
