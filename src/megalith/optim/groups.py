"""Which parameters decay, have a rate of their own, and change by which rule: the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megalith.config import OptimizerConfig
from megalith.distributed.context import Axis
from megalith.nn.placement import Placement
from megalith.optim.matrix_rules import COEFFICIENTS, AdaptiveMuon, Muon, Soap, is_of_layers
from megalith.optim.rules import SGD, AdamW, Lion, UpdateRule, Widened

_QK_NORMS = ("q_layernorm.", "k_layernorm.")
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight", "lm_head.output_layer.weight")


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike, by name in module order.

    Attributes:
        wd_mult, lr_mult: what the weight decay and the rate are multiplied by.
        decoupled: whether their learning rate is `--decoupled-lr`.
        rule: how they change.
    """

    wd_mult: float
    decoupled: bool
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
        parameters: by name, in module order.
        config: which rule, and what it acts on.
        axis: over which matrices are divided.
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

    Attributes:
        multiplier: m, 1 without muP.
        tied: parameters that are copies of the word embedding, by name.
    """

    multiplier: float = 1.0
    tied: Collection[str] = ()

    def rate(self, name: str, parameter: Tensor, optimizer: str) -> float:
        """What the rate of a parameter is multiplied by.

        Args:
            name, parameter: which one.
            optimizer: that updates it, as `--optimizer` names it.
        """
        if optimizer == "sgd":
            return 1.0 if self._is_matrix(name, parameter) else self.multiplier
        return 1.0 / self.multiplier if self._is_matrix(name, parameter) else 1.0

    def epsilon(self, name: str, parameter: Tensor, optimizer: str) -> float:
        """What the epsilon of a parameter is multiplied by; arguments as of `rate`."""
        return 1.0 / self.multiplier if optimizer == "adam" and self._is_matrix(name, parameter) else 1.0

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Whether both extents of a parameter grow with the width, or the one that is summed over."""
        return parameter.dim() > 1 and not name.startswith("embedding.") and name not in self.tied
