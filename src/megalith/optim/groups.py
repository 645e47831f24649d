"""Which parameters decay, have a rate of their own, and change by which rule: the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megalith.config import OptimizerConfig
from megalith.distributed.context import Axis
from megalith.nn.placement import Placement
from megalith.optim.low_precision import Widened
from megalith.optim.muon import COEFFICIENTS, AdaptiveMuon, Muon, is_muons
from megalith.optim.rules import SGD, AdamW, Lion, UpdateRule

_QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike, by name in module order.

    Attributes:
        wd_mult: what the weight decay is multiplied by.
        decoupled: whether their learning rate is `--decoupled-lr`.
        rule: how they change.
    """

    wd_mult: float
    decoupled: bool
    rule: UpdateRule
    names: tuple[str, ...]


def decays(name: str, parameter: Tensor, config: OptimizerConfig) -> bool:
    """Whether the weight decay acts on a parameter: not on biases and what is one-dimensional, unless told so."""
    if config.decays_qk_layernorm and name.endswith(_QK_NORMS):
        return True
    return not (name.endswith(".bias") or parameter.dim() == 1)


def make_groups(
    parameters: Mapping[str, Tensor], config: OptimizerConfig, axis: Axis, placements: Mapping[str, Placement]
) -> list[Group]:
    """Megatron's groups in its order: what decays, then what does not, then what has a rate of its own.

    Under Muon the matrices of the layers stand before the rest of what decays.

    Args:
        parameters: by name, in module order.
        config: which rule, and what it acts on.
        axis: over which matrices are divided.
        placements: how; needed for Muon.
    """
    plain, of_matrices = _elementwise(config), _of_matrices(config, axis, placements)
    members: dict[tuple[bool, bool, bool], tuple[str, ...]] = {}
    for name, parameter in parameters.items():
        apart = config.decoupled_lr is not None and name in _TABLES
        by_muon = of_matrices is not None and is_muons(name, parameter)
        key = (apart, not decays(name, parameter, config), not by_muon)
        members[key] = (*members.get(key, ()), name)
    return [
        Group(0.0 if no_decay else 1.0, apart, plain if of_matrices is None or not_muon else of_matrices, members[key])
        for key in sorted(members)
        for apart, no_decay, not_muon in (key,)
    ]


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
    if not config.orthogonalises:
        return None
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
