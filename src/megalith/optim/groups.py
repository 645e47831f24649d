"""Parameter groups as Megatron forms them, each with its update rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megalith.config import OptimizerConfig
from megalith.distributed.context import Axis
from megalith.errors import ConfigError
from megalith.nn.placement import Placement
from megalith.optim import elementwise, matrix_rules
from megalith.optim.elementwise import AdamW
from megalith.optim.matrix_rules import GatheredMatrices, is_layer_matrix
from megalith.optim.rules import Fp32Arithmetic, UpdateRule
from megalith.optim.torch_rule import TorchRule
from megalith.registry import Entry, Registered, Registry, marked_in, naming_errors

_QK_NORMS = ("q_layernorm", "k_layernorm")
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight", "lm_head.output_layer.weight")


@dataclass(frozen=True)
class Group:
    """Parameters with one update rule and the same factors of learning rate and weight decay."""

    # wd_mult, lr_mult: factors of the weight decay and the learning rate
    wd_mult: float
    decoupled: bool  # True if their learning rate is `--decoupled-lr`
    rule: UpdateRule
    names: tuple[str, ...]
    lr_mult: float = 1.0


def decays(name: str, parameter: Tensor, config: OptimizerConfig) -> bool:
    """Return whether weight decay applies to a parameter: not to biases and other one-dimensional parameters.

    With `decays_qk_layernorm` it also applies to weights and biases of the query and key norms, as in Megatron.
    """
    if config.decays_qk_layernorm and name.rpartition(".")[0].rpartition(".")[2] in _QK_NORMS:
        return True
    return not (name.endswith(".bias") or parameter.dim() == 1)


def registered_optimizers() -> Registry:
    """Return the optimizers of this package, by the names that `--optimizer` takes."""
    return Registry((*marked_in(elementwise), *marked_in(matrix_rules)))


def _entry(name: str) -> Entry:
    """Return the registered optimizer that a setting names."""
    entry = name.entry if isinstance(name, Registered) else registered_optimizers().find("optimizer", name)
    assert entry is not None, f"--optimizer {name}: its choices are the registered names"
    return entry


@dataclass(frozen=True, order=True)
class _Treatment:
    """The key that parameters of a group share; groups are sorted by it."""

    decoupled: bool
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
    """Return Megatron's groups in its order: with weight decay, then without, then those of `--decoupled-lr`.

    Where the unit of the optimizer is the matrix, the matrices of the layers precede other parameters with decay.

    Args:
        placements: of the parameters over the tensor-parallel `axis`; needed by optimizers of matrices.
        scaling: of the rates by the width of the model; none by default.
    """
    members: dict[_Treatment, tuple[str, ...]] = {}
    mup = str(_entry(config.optimizer).options.get("mup", ""))
    for name, parameter in parameters.items():
        treatment = _treatment(name, parameter, config, mup, scaling or WidthScaling())
        members[treatment] = (*members.get(treatment, ()), name)
    return [
        Group(
            0.0 if treatment.no_decay else 1.0,
            treatment.decoupled,
            _elementwise_rule(config, treatment.eps_mult)
            if treatment.elementwise
            else _matrix_rule(config, axis, placements),
            members[treatment],
            treatment.lr_mult,
        )
        for treatment in sorted(members)
    ]


def _treatment(name: str, parameter: Tensor, config: OptimizerConfig, mup: str, scaling: WidthScaling) -> _Treatment:
    decoupled = config.decoupled_lr is not None and name in _TABLES
    by_matrix = config.updates_matrices and is_layer_matrix(name, parameter)
    scaled = not decoupled and not (by_matrix and mup == "muon")
    return _Treatment(
        decoupled,
        not decays(name, parameter, config),
        not by_matrix,
        scaling.rate(name, parameter, mup) if scaled else 1.0,
        scaling.epsilon(name, parameter, mup),
    )


def _elementwise_rule(config: OptimizerConfig, epsilon_factor: float) -> UpdateRule:
    """Return a rule for the parameters that are updated element by element."""
    name = config.elementwise_optimizer
    rule = _registered_rule(config) if isinstance(name, Registered) else _entry(name).thing.from_config(config)
    if isinstance(rule, AdamW):
        rule = replace(rule, eps=rule.eps * epsilon_factor)
    return Fp32Arithmetic(rule) if config.stores_low_precision else rule


def _matrix_rule(config: OptimizerConfig, axis: Axis, placements: Mapping[str, Placement]) -> UpdateRule:
    """Return a rule for the matrices of the layers."""
    entry = _entry(config.optimizer)
    if isinstance(config.optimizer, Registered):
        return GatheredMatrices(_registered_rule(config), axis, placements)
    if entry.options.get("gathers"):
        rule: UpdateRule = entry.thing.from_config(config, axis, placements)
        return rule
    return GatheredMatrices(entry.thing.from_config(config), axis, placements)


def _registered_rule(config: OptimizerConfig) -> UpdateRule:
    """Return a rule of the optimizer that `--import` registered.

    Raises:
        ConfigError: It is not an update rule, or has states that its unit or the flags do not allow.
    """
    chosen = config.optimizer
    assert isinstance(chosen, Registered)
    thing = chosen.entry.thing
    if isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer):
        own = chosen.settings
        settings = {} if own is None else {field.name: getattr(own, field.name) for field in fields(own)}
        torch_rule = TorchRule(thing, str(chosen), settings, of_matrices=config.updates_matrices)
        if max(config.weight_decay, config.end_weight_decay or 0.0) and not torch_rule.takes_weight_decay:
            raise ConfigError(f"--optimizer {chosen}: {thing.__name__} has no weight_decay; use --weight-decay 0")
        rule: UpdateRule = torch_rule
    else:
        rule = chosen()
    flag = f"--optimizer {chosen}"
    with naming_errors(flag):
        _check(rule, config)
    object.__setattr__(rule, "__megalith_flag__", flag)  # which a frozen dataclass allows
    return rule


def _check(rule: UpdateRule, config: OptimizerConfig) -> None:
    chosen, problems = f"--optimizer {config.optimizer}", []
    if not isinstance(rule, UpdateRule):
        raise ConfigError(
            f"{chosen}: {type(rule).__name__} is neither a subclass of megalith.api.UpdateRule nor of "
            "torch.optim.Optimizer; derive it from one of them"
        )
    reserved = {"fp32_param", "param", "step"}
    problems += [
        f"{chosen}: {state!r} cannot be the name of a state; use another identifier"
        for state in rule.state_names
        if not state.isidentifier() or state in reserved
    ]
    if rule.replicated_states("", (6, 4)) and not config.updates_matrices:
        problems.append(
            f"{chosen}: its state_shapes differ from the shape of the parameter, which unit='element' does not allow; "
            "register it with unit='matrix'"
        )
    problems += [
        f"--{state.replace('_', '-')}-dtype {dtype} with {chosen}: it has no state {state}; leave the flag out"
        for state, dtype in (("exp_avg", config.exp_avg_dtype), ("exp_avg_sq", config.exp_avg_sq_dtype))
        if dtype != "fp32" and state not in rule.state_names
    ]
    if problems:
        raise ConfigError(problems)


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

    A rate set by `--decoupled-lr` is not scaled. The whole schedule is scaled, including its start and its minimum; the
    weight decay is not, as the rate is one of its factors.
    """

    multiplier: float = 1.0  # m, 1 without muP
    tied: Collection[str] = ()  # parameters that are copies of the word embedding, by name

    def rate(self, name: str, parameter: Tensor, mup: str) -> float:
        """Return the factor of the learning rate of a parameter; `mup` is that option of the registered optimizer."""
        if mup == "sgd":
            return 1.0 if self._is_matrix(name, parameter) else self.multiplier
        return 1.0 / self.multiplier if self._is_matrix(name, parameter) else 1.0

    def epsilon(self, name: str, parameter: Tensor, mup: str) -> float:
        """Return the factor of the epsilon of a parameter; arguments as of `rate`."""
        return 1.0 / self.multiplier if mup == "adam" and self._is_matrix(name, parameter) else 1.0

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Return whether the fan-in of a parameter grows with the width."""
        return parameter.dim() > 1 and not name.startswith("embedding.") and name not in self.tied
