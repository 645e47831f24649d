"""Optimizers that users register: update rules of their own, and classes of `torch.optim`."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config import OptimizerConfig, PrecisionConfig, all_settings, from_values
from megalith.distributed.context import ParallelContext
from megalith.errors import ConfigError, MegalithError
from megalith.optim import Optimizer, UpdateBatch, UpdateRule, build_optimizer
from megalith.optim.groups import make_groups, registered_optimizers
from megalith.registry import Entry, Registered, Registry

FP16 = PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1)


@dataclass
class SignSettings:
    sign_momentum: float = 0.5


class Sign(UpdateRule):
    """The sign of a running mean."""

    state_names = ("mean",)

    def __init__(self, settings: SignSettings) -> None:
        self.momentum = settings.sign_momentum

    def group_settings(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def update(self, batch: UpdateBatch) -> None:
        for param, grad, mean in zip(batch.params, batch.grads, batch.states["mean"], strict=True):
            mean.lerp_(grad, 1.0 - self.momentum)
            param.mul_(1.0 - batch.lr * batch.weight_decay).sub_(mean.sign(), alpha=batch.lr)


def chosen(thing: Any, settings: type | None = None, values: Any = None, **options: Any) -> Registered:
    return Registered(Entry("optimizer", "my-opt", thing, settings, options), values)


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)).to(dtype)


def _train(model: nn.Module, optimizer: Optimizer, steps: int = 4) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(optimizer.step_count, optimizer.step_count + steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 2 + step, 24).view(4, 6).to(dtype)
        (model(x).float().square().mean() * optimizer.loss_scale).backward()
        assert optimizer.step(0.01 / (step + 1), 0.1).applied


def _weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_weights(one), _weights(other), strict=True))


def test_names_and_units_of_this_package_agree_with_the_configuration() -> None:
    entries = {entry.name: entry for entry in registered_optimizers().entries}
    assert set(entries) == set(all_settings()["optimizer"].about.choices)
    for name, entry in entries.items():
        assert (entry.options["unit"] == "matrix") == OptimizerConfig(optimizer=name).updates_matrices
        assert issubclass(entry.thing, UpdateRule)


def test_a_rule_gets_its_settings_the_rates_and_clipped_gradients() -> None:
    model, reference = _model(), _model()
    name = chosen(Sign, SignSettings, SignSettings(0.25))
    optimizer = build_optimizer(model, OptimizerConfig(optimizer=name, clip_grad=0.0), PrecisionConfig())
    _train(model, optimizer, steps=1)
    reference(torch.linspace(-1, 2, 24).view(4, 6)).square().mean().backward()
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert wanted.grad is not None
        decay = 0.1 if wanted.dim() > 1 else 0.0
        torch.testing.assert_close(parameter, wanted * (1 - 0.01 * decay) - 0.01 * wanted.grad.sign())
    assert [group["momentum"] for group in optimizer.scalars()["param_groups"]] == [0.25, 0.25]
    assert set(optimizer.state_tensors()) == {f"mean.{name}" for name, _ in model.named_parameters()}


@pytest.mark.parametrize("precision", [PrecisionConfig(bf16=True), FP16], ids=["bf16", "fp16"])
def test_master_weights_and_loss_scale(precision: PrecisionConfig) -> None:
    dtype = torch.float16 if precision.fp16 else torch.bfloat16
    model, wide = _model(dtype), _model()
    config = OptimizerConfig(optimizer=chosen(Sign, SignSettings))
    optimizer = build_optimizer(model, config, precision)
    _train(model, optimizer)
    state = optimizer.state_tensors()
    for name, parameter in model.named_parameters():
        assert state[f"fp32_param.{name}"].dtype == torch.float32
        assert torch.equal(state[f"fp32_param.{name}"].to(dtype), parameter)
        assert not torch.equal(parameter.float(), wide.get_parameter(name))
    parameter = next(model.parameters())
    before = parameter.detach().clone()
    if precision.fp16:
        optimizer.zero_grad()
        (model(torch.ones(4, 6, dtype=dtype)).sum() * float("inf")).backward()
        assert not optimizer.step(0.01, 0.1).applied and torch.equal(parameter, before)


def test_states_are_rounded_between_steps() -> None:
    class Mean(Sign):
        state_names = ("exp_avg",)

        def update(self, batch: UpdateBatch) -> None:
            assert {tensor.dtype for tensor in (*batch.params, *batch.grads, *batch.states["exp_avg"])} == {
                torch.float32
            }
            super().update(UpdateBatch(**{**vars(batch), "states": {"mean": batch.states["exp_avg"]}}))

    rounded: dict[str, Any] = {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": "bf16",
        "exp_avg_dtype": "bf16",
    }
    model, name = _model(), chosen(Mean, SignSettings)
    optimizer = build_optimizer(model, OptimizerConfig(optimizer=name, **rounded), PrecisionConfig())
    _train(model, optimizer)
    assert {tensor.dtype for tensor in optimizer.state_tensors().values()} == {torch.bfloat16}
    wide, close = _model(), _model()
    _train(wide, build_optimizer(wide, OptimizerConfig(optimizer=chosen(torch.optim.NAdam)), PrecisionConfig()))
    of_torch = OptimizerConfig(optimizer=chosen(torch.optim.NAdam), **rounded)
    _train(close, build_optimizer(close, of_torch, PrecisionConfig()))
    for one, other in zip(_weights(wide), _weights(close), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)
    assert not _equal(wide, close)
    with pytest.raises(ConfigError, match="exp-avg-dtype"):
        build_optimizer(_model(), OptimizerConfig(optimizer=chosen(Sign, SignSettings), **rounded), PrecisionConfig())


TORCH: Mapping[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "nadam": (torch.optim.NAdam, {"momentum_decay": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adamax": (torch.optim.Adamax, {}),
    "radam": (torch.optim.RAdam, {}),
    "adadelta": (torch.optim.Adadelta, {}),
}


def _of_torch(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], **more: Any) -> Registered:
    settings = dataclass(type("Settings", (), {**options, "__annotations__": {key: Any for key in options}}))
    return chosen(kind, settings if options else None, **more)


@pytest.mark.parametrize("case", TORCH)
def test_classes_of_torch_give_the_same_bits_also_after_a_resume(case: str) -> None:
    kind, options = TORCH[case]
    config = OptimizerConfig(optimizer=_of_torch(kind, options), clip_grad=0.0)
    model, reference = _model(), _model()
    optimizer = build_optimizer(model, config, PrecisionConfig())
    _train(model, optimizer, 3)
    resumed = copy.deepcopy(model)
    second = build_optimizer(resumed, config, PrecisionConfig())
    for name, tensor in second.state_tensors().items():
        tensor.copy_(optimizer.state_tensors()[name])
    second.load_scalars(optimizer.scalars())
    _train(model, optimizer, 2)
    _train(resumed, second, 2)
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in reference.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    theirs = kind(groups, lr=1.0, **options)  # type: ignore[call-arg]
    for step in range(5):
        for group in theirs.param_groups:
            group["lr"] = 0.01 / (step + 1)
        theirs.zero_grad()
        reference(torch.linspace(-1, 2 + step, 24).view(4, 6)).square().mean().backward()
        theirs.step()
    assert _equal(model, reference) and _equal(resumed, reference)


class NeedsNorm(torch.optim.SGD):
    """Keeps a number that depends on the gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["largest"] = param.grad.abs().max()
        return super().step(closure)


@pytest.mark.parametrize(
    ("thing", "options", "named"),
    [
        (torch.optim.Adafactor, {}, "row_var"),
        (torch.optim.ASGD, {}, "eta"),
        (NeedsNorm, {}, "largest"),
        (torch.optim.LBFGS, {}, "LBFGS"),
        (torch.optim.NAdam, {"no_such": 1.0}, "no_such"),
        (torch.optim.NAdam, {"lr": 1.0}, "lr"),
        (lambda: object(), {}, "UpdateRule"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(thing: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_optimizer(_model(), OptimizerConfig(optimizer=_of_torch(thing, options)), PrecisionConfig())


class Whitened(UpdateRule):
    """A state of another shape for each matrix."""

    state_names = ("rows", "mean")

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {"rows": (shape[0], shape[0]), "mean": shape}

    def update(self, batch: UpdateBatch) -> None:
        for number, (param, grad) in enumerate(zip(batch.params, batch.grads, strict=True)):
            assert param.dim() == 2
            batch.states["rows"][number].add_(grad @ grad.t())
            batch.states["mean"][number].lerp_(grad, 0.5)
            param.sub_(batch.states["rows"][number] @ batch.states["mean"][number], alpha=batch.lr)


def test_a_rule_of_matrices_gets_the_matrices_of_layers_and_adam_the_rest() -> None:
    model = _model()
    config = OptimizerConfig(optimizer=chosen(Whitened, unit="matrix"))
    optimizer = build_optimizer(model, config, PrecisionConfig())
    _train(model, optimizer)
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.state_tensors().items()}
    assert shapes["rows.0.weight"] == (5, 5) and shapes["mean.0.weight"] == (5, 6)
    assert shapes["exp_avg.0.bias"] == (5,) and "mean.0.bias" not in shapes
    whole = {box.name for box in optimizer.state_boxes() if box.replicated}
    assert whole == {"rows.0.weight", "rows.2.weight"}
    with pytest.raises(ConfigError, match="unit"):
        build_optimizer(model, OptimizerConfig(optimizer=chosen(Whitened, unit="element")), PrecisionConfig())


def test_muon_of_torch_updates_matrices() -> None:
    model, reference = _model(), _model()
    config = OptimizerConfig(optimizer=chosen(torch.optim.Muon, unit="matrix"), clip_grad=0.0)
    groups = make_groups(dict(model.named_parameters()), config, ParallelContext.solo().tp, {})
    assert [group.names for group in groups][0] == ("0.weight", "2.weight")
    optimizer = build_optimizer(model, config, PrecisionConfig())
    _train(model, optimizer, 1)
    theirs = torch.optim.Muon([p for p in reference.parameters() if p.dim() == 2], lr=0.01, weight_decay=0.1)
    reference(torch.linspace(-1, 2, 24).view(4, 6)).square().mean().backward()
    theirs.step()
    assert torch.equal(model.get_parameter("0.weight"), reference.get_parameter("0.weight"))


def test_weight_decay_that_a_class_does_not_take_is_refused() -> None:
    class NoDecay(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad, alpha=group["lr"])

    with pytest.raises(ConfigError, match="weight-decay"):
        build_optimizer(_model(), OptimizerConfig(optimizer=chosen(NoDecay)), PrecisionConfig())
    build_optimizer(_model(), OptimizerConfig(optimizer=chosen(NoDecay), weight_decay=0.0), PrecisionConfig())


def test_parts_on_the_host_are_updated_alike() -> None:
    models = []
    for offload in (0.0, 0.5, 1.0):
        models.append(_model())
        config = OptimizerConfig(optimizer=_of_torch(torch.optim.NAdam, {}))
        _train(models[-1], build_optimizer(models[-1], config, PrecisionConfig(), offload=offload))
    assert _equal(models[0], models[1]) and _equal(models[0], models[2])


class _Failing(torch.optim.SGD):
    """Fails in its fifth step, behind those that find its states."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 5:
            raise KeyError("gone")
        return super().step(closure)


class _FailingRule(UpdateRule):
    def update(self, batch: UpdateBatch) -> None:
        raise KeyError("gone")


class _FailingShapes(_FailingRule):
    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        raise KeyError("gone")


@dataclass(frozen=True)
class _FailingFrozenRule(_FailingRule):
    pass


def _fail_to_build() -> UpdateRule:
    raise KeyError("gone")


@pytest.mark.parametrize("thing", [_FailingRule, _FailingFrozenRule, _FailingShapes, _Failing, _fail_to_build])
@pytest.mark.parametrize("unit", ["element", "matrix"])
def test_an_exception_in_a_registered_optimizer_names_it_and_the_line(thing: Any, unit: str) -> None:
    config = OptimizerConfig(optimizer=chosen(thing, unit=unit))
    named = rf"--optimizer my-opt: (update: )?KeyError: 'gone' at {re.escape(__file__)}:\d+$"
    with pytest.raises(MegalithError, match=named) as caught:
        model = _model()
        _train(model, build_optimizer(model, config, PrecisionConfig()), 5)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_exception_in_an_update_of_rounded_states_names_optimizer_and_line() -> None:
    rounded = OptimizerConfig(
        optimizer=chosen(_FailingRule), use_precision_aware_optimizer=True, main_grads_dtype="bf16"
    )
    model = _model()
    with pytest.raises(MegalithError, match=r"--optimizer my-opt.*KeyError: 'gone' at .*\.py:\d+$"):
        _train(model, build_optimizer(model, rounded, PrecisionConfig()), 1)


WHOLE = {"use_distributed_optimizer": True}, {"use_torch_fsdp2": True}, {"optimizer_cpu_offload": True}
ROUNDED = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "bf16": True, "grad_reduce_in_bf16": True}
RUN = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 4,
    "max_position_embeddings": 4,
    "micro_batch_size": 1,
    "train_iters": 4,
    "lr": 1.0,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 10,
}


@pytest.mark.parametrize("values", [*WHOLE, ROUNDED], ids=lambda values: next(iter(values)))
def test_what_needs_elements_is_refused_for_matrices(values: dict[str, Any]) -> None:
    of_matrices = Entry("optimizer", "of-matrices", Whitened, options={"unit": "matrix"})
    registry = Registry((Entry("optimizer", "of-elements", Sign, SignSettings), of_matrices))
    from_values({**RUN, **values, "optimizer": "of-elements"}, registry=registry)
    with pytest.raises(ConfigError, match="of-matrices"):
        from_values({**RUN, **values, "optimizer": "of-matrices"}, registry=registry)
