"""Data parallelism: replicas that see parts of a batch train as one process does that sees all of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.flat import ALIGNMENT
from megalith.layout import Layout
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.placement import local_part
from megalith.optim import Optimizer, build_optimizer
from megalith.parallel.data import ReplicatedRows
from megalith.parallel.tensor import SequenceParallel, TensorParallel

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    max_position_embeddings=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
VOCABULARY = 48
MICRO_BATCHES = 2
BATCH = 4  # samples of a micro-batch over all replicas
SEQUENCE = 8
UNUSED_POSITIONS = 4
SMALL = 2000  # elements of a bucket: several of them in these models

PRECISIONS = {
    "fp64": (torch.float64, PrecisionConfig()),
    "fp32": (torch.float32, PrecisionConfig()),
    "bf16": (torch.bfloat16, PrecisionConfig(bf16=True)),
    "fp16": (torch.float16, PrecisionConfig(fp16=True, initial_loss_scale=64.0, hysteresis=1)),
    "fp16-fp32": (
        torch.float16,
        PrecisionConfig(fp16=True, initial_loss_scale=64.0, hysteresis=1, accumulate_allreduce_grads_in_fp32=True),
    ),
}
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-5}


def _context(layout: Layout, observer: Any = None) -> ParallelContext:
    return ParallelContext.create(layout, torch.device("cpu"), observer=observer)


def _model(dtype: torch.dtype, *, tied: bool = True) -> GPT:
    config = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=not tied)
    model = GPT(config, VOCABULARY, dtype=dtype)
    initialise(model, 1)
    return model


def _tokens(step: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def _backward(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> None:
    losses = model(tokens[:, :-1], labels_BS=tokens[:, 1:])
    (losses.mean() / MICRO_BATCHES * optimizer.loss_scale).backward()


def _accumulate(model: nn.Module, optimizer: Optimizer, step: int, data: Axis) -> None:
    """The forward and backward passes of one step on this replica's part of each micro-batch."""
    optimizer.zero_grad(MICRO_BATCHES)
    for micro_batch in range(MICRO_BATCHES):
        _backward(model, optimizer, comm.own_part(_tokens(step, micro_batch), data))


def _whole_gradients(optimizer: Optimizer, context: ParallelContext) -> dict[str, Tensor]:
    """The reduced gradients put together from what each replica owns; NaN where none does."""
    gradients = optimizer.gradients
    own = {name: (gradients.owned_range(name), grad.clone()) for name, grad in gradients.grads.items()}
    whole = {name: torch.full_like(grad, math.nan) for name, grad in gradients.grads.items()}
    for parts in comm.all_gather_objects(own, context.flatten_axes("cp", "dp")):
        for name, ((start, stop), grad) in parts.items():
            whole[name].view(-1)[start:stop] = grad.view(-1)[start:stop]
    return whole


def _whole_state(optimizer: Optimizer, context: ParallelContext) -> dict[str, Tensor]:
    """The optimizer's state put together from the boxes of all replicas; NaN where none has it."""
    own = [(box.name, box.tensor.detach(), box.offset, box.shape) for box in optimizer.state_boxes()]
    whole: dict[str, Tensor] = {}
    for boxes in comm.all_gather_objects(own, context.flatten_axes("cp", "dp")):
        for name, tensor, offset, shape in boxes:
            target = whole.setdefault(name, torch.full(shape, math.nan, dtype=tensor.dtype))
            target[tuple(slice(o, o + e) for o, e in zip(offset, tensor.shape, strict=True))] = tensor
    return whole


def _trained(
    precision: str, context: ParallelContext, *, steps: int = 4, clip: float = 1.0, lr: float = 0.01, **how: Any
) -> dict[str, Any]:
    """Train; returns what one process and each replica must agree on."""
    dtype, settings = PRECISIONS[precision]
    model = _model(dtype)
    optimizer = build_optimizer(
        model, OptimizerConfig(clip_grad=clip), settings, count_zeros=True, context=context, **how
    )
    outcomes = []
    for step in range(steps):
        _accumulate(model, optimizer, step, context.dp)
        outcomes.append(optimizer.step(lr, 0.1))
    optimizer.finish_param_sync()
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "state": _whole_state(optimizer, context),
        "norms": [outcome.grad_norm for outcome in outcomes],
        "zeros": [outcome.num_zeros for outcome in outcomes],
        "params_norm": optimizer.params_norm(),
        "steps": optimizer.step_count,
    }


def _replica(layout: Layout, precision: str, how: dict[str, Any]) -> dict[str, Any]:
    return _trained(precision, _context(layout), **how)


def _close(actual: Tensor, wanted: Tensor, tolerance: float, name: str) -> None:
    difference = (actual.double() - wanted.double()).abs().max()
    assert difference <= tolerance * wanted.double().abs().max(), (name, float(difference))


def _same_training(results: list[dict[str, Any]], wanted: dict[str, Any], tolerance: float) -> None:
    for result in results:
        assert result["norms"] == results[0]["norms"], "every rank has the same norm"
        assert (result["steps"], result["zeros"]) == (wanted["steps"], results[0]["zeros"])
        assert result["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
        assert result["params_norm"] == pytest.approx(wanted["params_norm"], rel=tolerance)
        assert result["state"].keys() == wanted["state"].keys()
        for kind in ("weights", "state"):
            for name, value in wanted[kind].items():
                assert torch.equal(result[kind][name], results[0][kind][name]), f"{name} differs over the replicas"
                _close(result[kind][name], value, tolerance, name)


@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_train_as_one_process(ranks: Any, world_size: int, precision: str, zero1: bool) -> None:
    how = {"zero1": zero1, "bucket_size": SMALL, "clip": 0.1, "lr": 0.01 if precision == "fp64" else 1e-4}
    wanted = _trained(precision, ParallelContext.solo(), clip=0.1, lr=how["lr"])
    assert min(wanted["norms"]) > 0.1, "clipping is active"
    results = ranks.run(world_size, _replica, Layout(dp=world_size), precision, how)
    _same_training(results, wanted, TOLERANCE[precision])


@pytest.mark.parametrize(("world_size", "precision"), [(2, "bf16"), (4, "bf16"), (2, "fp16"), (2, "fp16-fp32")])
def test_replicas_of_half_precision(ranks: Any, world_size: int, precision: str) -> None:
    """Close to one process as far as rounding lets them; divided state is the same state."""
    lr, steps = 1e-4, 4
    how = {"bucket_size": SMALL, "clip": 0.1, "lr": lr, "steps": steps}
    alone = _trained(precision, ParallelContext.solo(), clip=0.1, lr=lr, steps=steps)
    replicated, divided = (
        ranks.run(world_size, _replica, Layout(dp=world_size), precision, how | {"zero1": zero1})
        for zero1 in (False, True)
    )
    _same_training(divided, replicated[0], 1e-5)
    assert replicated[0]["norms"] == pytest.approx(alone["norms"], rel=1e-2)
    assert min(alone["norms"]) > 0.1, "clipping is active"
    for name, value in alone["weights"].items():
        # What is analytically zero is noise, which Adam makes steps of about its rate of.
        difference = (replicated[0]["weights"][name].double() - value.double()).abs()
        assert (difference <= 2 * lr * steps + 2**-7 * value.double().abs()).all(), name
        assert difference.median() <= lr / 10 + 2**-8 * value.double().abs().median(), name


def _gradients(precision: str, context: ParallelContext, **how: Any) -> dict[str, Tensor]:
    """The reduced gradients of one step, whole."""
    dtype, settings = PRECISIONS[precision]
    model = _model(dtype)
    optimizer = build_optimizer(model, OptimizerConfig(), settings, context=context, **how)
    for step in range(2):  # the second one reduces during the backward pass
        _accumulate(model, optimizer, step, context.dp)
        optimizer.gradients.finish()
    optimizer.gradients.finish()
    return _whole_gradients(optimizer, context)


def _replica_gradients(layout: Layout, precision: str, how: dict[str, Any]) -> dict[str, Tensor]:
    return _gradients(precision, _context(layout), **how)


@pytest.mark.parametrize("bucket_size", [1, SMALL, None])
@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_gradient_is_that_of_the_whole_batch(
    ranks: Any, world_size: int, zero1: bool, bucket_size: int | None
) -> None:
    wanted = _gradients("fp64", ParallelContext.solo())
    how = {"zero1": zero1, "bucket_size": bucket_size}
    for result in ranks.run(world_size, _replica_gradients, Layout(dp=world_size), "fp64", how):
        assert result.keys() == wanted.keys()
        for name, value in wanted.items():
            _close(result[name], value, 1e-12, name)


def test_context_parallel_gradients_are_summed_and_replicas_averaged(ranks: Any) -> None:
    """2 replicas of 2 context-parallel ranks: each rank's gradient is its rank + 1, so the result is (1+2+3+4) / 2."""
    for result in ranks.run(4, _sum_of_ranks):
        assert result == [5.0, 5.0]


def _sum_of_ranks() -> list[float]:
    context = _context(Layout(cp=2, dp=2))
    results = []
    for zero1 in (False, True):
        model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(), context=context, zero1=zero1)
        optimizer.zero_grad(1)
        (model(torch.ones(1, 3, dtype=torch.float64)) * (context.rank + 1.0)).sum().backward()
        optimizer.gradients.finish()
        results.append(_whole_gradients(optimizer, context)["weight"].mean().item())
    return results


class _Log:
    """An observer that writes down what happens, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    def before(self, operation: str, axis: Axis, tensor: Tensor | None, detail: str = "") -> None:
        self.events.append((operation, axis.name, 0 if tensor is None else tensor.numel()))

    def after(self, operation: str, axis: Axis) -> None: ...

    def waiting(self, peer: int | None = None) -> None:
        self.note("wait")

    def waited(self) -> None: ...

    def note(self, what: str) -> None:
        self.events.append((what, "", 0))


def _observed(zero1: bool, tied: bool) -> tuple[list[tuple[str, str, int]], int]:
    """What happens in the second step, between the marks of its micro-batches; and the elements of the model."""
    log = _Log()
    context = _context(Layout(dp=2), log)
    model = _model(torch.float32, tied=tied)
    optimizer = build_optimizer(
        model, OptimizerConfig(), PrecisionConfig(), context=context, zero1=zero1, bucket_size=SMALL
    )
    for step in range(2):
        log.events.clear()
        optimizer.zero_grad(MICRO_BATCHES)
        for micro_batch in range(MICRO_BATCHES):
            tokens = comm.own_part(_tokens(step, micro_batch), context.dp)
            loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
            log.note("backward")
            loss.backward()
            log.note("end of backward")
        optimizer.step(0.01, 0.1)
    return log.events, sum(parameter.numel() for parameter in model.parameters())


def _names(events: list[tuple[str, str, int]]) -> list[str]:
    return [name for name, _, _ in events]


def _starts(events: list[tuple[str, str, int]]) -> list[str]:
    return [name for name in _names(events) if name != "wait"]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
def test_buckets_are_reduced_while_the_last_backward_pass_runs(ranks: Any, zero1: bool, tied: bool) -> None:
    operation = "reduce_scatter" if zero1 else "all_reduce"
    for events, _ in ranks.run(2, _observed, zero1, tied):
        names = _starts(events)
        first_end = names.index("end of backward")
        assert names[:first_end] == ["backward"], "an earlier micro-batch communicates"
        last = names[first_end + 1 :]
        end = last.index("end of backward")
        early = last[1:end]
        assert set(early) == {operation} and len(early) >= 2
        # With everything used once per micro-batch, or the tied weight twice, nothing is left for the end.
        gradients = [entry for entry in events if entry[0] == operation and entry[2] > 1]
        assert len(early) == len(gradients)


@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
def test_a_step_communicates_no_more_than_it_must(ranks: Any, zero1: bool) -> None:
    for events, elements in ranks.run(2, _observed, zero1, True):
        sizes: dict[str, int] = {}
        counts: dict[str, int] = {}
        scalars = 0
        for name, axis, size in events:
            if size == 1:
                scalars += 1  # the norm
            elif size:
                assert axis == "cp+dp"
                sizes[name], counts[name] = sizes.get(name, 0) + size, counts.get(name, 0) + 1
        assert scalars <= 1
        padding = 2 * ALIGNMENT * max(counts.values())
        if not zero1:
            assert set(sizes) == {"all_reduce"}
            assert elements <= sizes["all_reduce"] < elements + padding
            continue
        # An all-gather is given the own half of its result.
        assert set(sizes) == {"reduce_scatter", "all_gather"}
        assert elements <= sizes["reduce_scatter"] < elements + padding
        assert sizes["all_gather"] * 2 == sizes["reduce_scatter"]


def _with_an_infinity(precision: str, zero1: bool, bad_rank: int, where: str) -> dict[str, Any]:
    """A step in which one rank's gradient of one weight is not finite, and one in which all are."""
    context = _context(Layout(dp=2))
    dtype, settings = PRECISIONS[precision]
    model = _model(dtype)
    optimizer = build_optimizer(model, OptimizerConfig(), settings, context=context, zero1=zero1, bucket_size=SMALL)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _accumulate(model, optimizer, 0, context.dp)
    if context.rank == bad_rank:
        optimizer.gradients.grads[where].view(-1)[3] = math.inf
    bad = optimizer.step(0.01, 0.1)
    same = all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    scale = optimizer.loss_scale
    _accumulate(model, optimizer, 1, context.dp)
    good = optimizer.step(0.01, 0.1)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"bad": bad, "same": same, "scale": scale, "good": good, "steps": optimizer.step_count, "weights": weights}


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_an_overflow_of_one_rank_is_skipped_by_all(ranks: Any, precision: str, zero1: bool, bad_rank: int) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    first, second = ranks.run(2, _with_an_infinity, precision, zero1, bad_rank, name)
    for result in (first, second):
        assert not result["bad"].applied and result["same"]
        assert result["good"].applied and result["steps"] == 1
        assert result["scale"] == (32.0 if precision == "fp16" else 1.0)
    assert first["good"] == second["good"]
    assert all(torch.equal(value, second["weights"][key]) for key, value in first["weights"].items())


def _late_write() -> str:
    """A weight that is used once more in the second step than it was in the first."""
    context = _context(Layout(dp=2))
    model = nn.Linear(3, 1, bias=False)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(), context=context)
    for passes in (1, 2):
        optimizer.zero_grad(1)
        try:
            for _ in range(passes):
                model(torch.ones(1, 3)).sum().backward()
        except AssertionError as error:
            return str(error)
        optimizer.step(0.1, 0.0)
    return "nothing was noticed"


def test_a_gradient_after_the_last_one_is_an_error(ranks: Any) -> None:
    for message in ranks.run(2, _late_write):
        assert message.startswith("weight ") and "2 " in message and "1 micro-batches" in message


def _sometimes_unused(zero1: bool) -> list[Tensor]:
    """A layer that one replica does not use in the second step: its bucket is reduced at the end."""
    context = _context(Layout(dp=2))
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))
    optimizer = build_optimizer(
        layers, OptimizerConfig(clip_grad=0.0), PrecisionConfig(), context=context, zero1=zero1, bucket_size=1
    )
    for step in range(3):
        optimizer.zero_grad(1)
        x = torch.ones(1, 3, dtype=torch.float64)
        for number, layer in enumerate(layers):
            if not (step == 1 and number == 1 and context.rank == 1):
                x = layer(x)
        (x.sum() * (context.rank + 1)).backward()
        optimizer.gradients.finish()
        if step == 1:
            return list(_whole_gradients(optimizer, context).values())
        optimizer.step(0.0, 0.0)
    raise AssertionError


@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
def test_a_layer_that_one_replica_does_not_use_counts_as_zero_there(ranks: Any, zero1: bool) -> None:
    torch.manual_seed(0)
    first, second = (nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(2))
    ones = torch.ones(1, 3, dtype=torch.float64)
    (second(first(ones)).sum() / 2 + first(ones).sum() * 2 / 2).backward()
    for results in ranks.run(2, _sometimes_unused, zero1):
        for result, layer in zip(results, (first, second), strict=True):
            assert layer.weight.grad is not None
            torch.testing.assert_close(result, layer.weight.grad, rtol=1e-12, atol=0.0)


def _overlapped(precision: str, tied: bool, overlap: bool) -> dict[str, Any]:
    """Train and evaluate; where the waits fall in the second step's forward pass."""
    log = _Log()
    context = _context(Layout(dp=2), log)
    dtype, settings = PRECISIONS[precision]
    model = _model(dtype, tied=tied)
    optimizer = build_optimizer(
        model,
        OptimizerConfig(),
        settings,
        context=context,
        zero1=True,
        bucket_size=SMALL,
        overlap_gather=overlap,
    )
    losses = []
    for step in range(3):
        log.events.clear()
        log.note("forward")
        tokens = comm.own_part(_tokens(step, 0), context.dp)
        optimizer.zero_grad(1)
        loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
        log.note("backward")
        loss.backward()
        losses.append(loss.item())
        optimizer.step(0.01, 0.1)
    log.events.append(("end", "", 0))
    with torch.no_grad():  # an evaluation waits too
        losses.append(model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean().item())
    optimizer.finish_param_sync()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "weights": weights, "names": _names(log.events)}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_may_arrive_during_the_next_forward_pass(ranks: Any, precision: str, tied: bool) -> None:
    together = ranks.run(2, _overlapped, precision, tied, True)
    at_once = ranks.run(2, _overlapped, precision, tied, False)
    for result, wanted in zip(together, at_once, strict=True):
        assert result["losses"] == wanted["losses"]
        for name, value in wanted["weights"].items():
            assert torch.equal(result["weights"][name], value), name
        # In the forward pass of a later step: waits between its beginning and its end, none of them at the update.
        forward = result["names"][: result["names"].index("backward")]
        assert forward.count("wait") >= 3
        after_update = result["names"][len(result["names"]) - 1 - result["names"][::-1].index("all_gather") :]
        assert "wait" not in after_update[: after_update.index("end")]
        assert "wait" not in wanted["names"][: wanted["names"].index("backward")]


def _first_wait_per_part() -> list[int]:
    """For each layer the number of its weights that are still on their way when it begins."""
    context = _context(Layout(dp=2))
    model = _model(torch.float32, tied=False)
    optimizer = build_optimizer(
        model, OptimizerConfig(), PrecisionConfig(), context=context, zero1=True, bucket_size=1, overlap_gather=True
    )
    memory = optimizer._param_sync
    assert memory is not None
    ready: list[set[str]] = []
    layout = optimizer.gradients.layout

    def note(part: nn.Module, args: Any) -> None:
        pending = {name for number in memory._pending for name in layout.buckets[number].names}
        ready.append(pending & {name for name, p in model.named_parameters() if any(p is q for q in part.parameters())})

    _accumulate(model, optimizer, 0, context.dp)
    optimizer.step(0.01, 0.1)
    blocks = list(model.decoder.layers.values())
    for block in blocks:
        block.register_forward_pre_hook(note)  # behind the hook that waits
    tokens = _tokens(0, 0)
    model(tokens[:, :-1])
    return [len(pending) for pending in ready]


def test_a_layer_has_its_weights_when_it_is_called(ranks: Any) -> None:
    for left in ranks.run(2, _first_wait_per_part):
        assert left == [0, 0]


def _shared_by_ranks(sequence_parallel: bool, zero1: bool, groups: int) -> dict[str, Any]:
    """Gradients, norms and weights of a tensor-parallel model with replicas, by the rows of the global tensors."""
    context = _context(Layout(tp=2, dp=2))
    region = (SequenceParallel if sequence_parallel else TensorParallel)(context.tp)
    model = GPT(_grouped(groups), VOCABULARY, region=region, dtype=torch.float64)
    initialise(model, 1)
    optimizer = build_optimizer(
        model,
        OptimizerConfig(clip_grad=0.1),
        PrecisionConfig(),
        count_zeros=True,
        context=context,
        zero1=zero1,
        bucket_size=SMALL,
    )
    gradients, outcomes = {}, []
    for step in range(3):
        _accumulate(model, optimizer, step, context.dp)
        optimizer.gradients.finish()
        gradients = _whole_gradients(optimizer, context)
        outcomes.append(optimizer.step(0.01, 0.1))
    return {
        "gradients": gradients,
        "weights": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "state": _whole_state(optimizer, context),
        "outcomes": [(outcome.grad_norm, outcome.num_zeros) for outcome in outcomes],
        "params_norm": optimizer.params_norm(),
        "place": context.tp.index,
    }


def _grouped(groups: int) -> ModelConfig:
    return dataclasses.replace(
        MODEL,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=groups,
        max_position_embeddings=SEQUENCE + UNUSED_POSITIONS,
    )


@pytest.mark.parametrize("groups", [1, 2], ids=["shared-heads", "own-heads"])
@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_what_tensor_parallel_ranks_hold_alike_is_summed_and_counted_once(
    ranks: Any, sequence_parallel: bool, zero1: bool, groups: int
) -> None:
    solo = ParallelContext.solo()
    model = GPT(_grouped(groups), VOCABULARY, dtype=torch.float64)
    initialise(model, 1)
    optimizer = build_optimizer(model, OptimizerConfig(clip_grad=0.1), PrecisionConfig(), count_zeros=True)
    gradients, outcomes = {}, []
    for step in range(3):
        _accumulate(model, optimizer, step, solo.dp)
        optimizer.gradients.finish()
        gradients = {name: grad.clone() for name, grad in optimizer.gradients.grads.items()}
        outcomes.append(optimizer.step(0.01, 0.1))
    weights = dict(model.named_parameters())
    state = optimizer.state_tensors()
    for result in ranks.run(4, _shared_by_ranks, sequence_parallel, zero1, groups):
        for (norm, zeros), outcome in zip(result["outcomes"], outcomes, strict=True):
            assert norm == pytest.approx(outcome.grad_norm, rel=1e-12)
            # The gradient of the keys' bias is zero up to rounding, and counts or not.
            for count in (zeros, outcome.num_zeros):
                assert abs(count - UNUSED_POSITIONS * MODEL.hidden_size) <= groups * MODEL.hidden_size // 4
        assert result["params_norm"] == pytest.approx(optimizer.params_norm(), rel=1e-12)
        for name, placement in model.placements().items():
            place = (placement, 2, result["place"])
            _close(result["gradients"][name], local_part(gradients[name], *place), 1e-10, name)
            _close(result["weights"][name], local_part(weights[name].detach(), *place), 1e-9, name)
            for kind in ("exp_avg", "exp_avg_sq"):
                wanted = local_part(state[f"{kind}.{name}"], *place)
                _close(result["state"][f"{kind}.{name}"], wanted, 1e-9, name)


def _tied_ends(zero1: bool) -> dict[str, Any]:
    """Two stages with a copy of one weight each, and a weight of their own; two replicas."""
    context = _context(Layout(pp=2, dp=2))
    assert context.ends is not None
    stage, scale = context.pp.index, 1.0 + context.rank
    model = nn.ModuleDict({"tied": nn.Linear(5, 7, bias=False), f"own{stage}": nn.Linear(5 + 8 * stage, 3, bias=False)})
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    replicated_rows = {
        "tied.weight": (ReplicatedRows(context.ends, is_first_replica=context.ends.is_first, partial=True),)
    }
    optimizer = build_optimizer(
        model,
        OptimizerConfig(clip_grad=0.0),
        PrecisionConfig(),
        count_zeros=True,
        context=context,
        zero1=zero1,
        replicated_rows=replicated_rows,
    )
    for _ in range(2):
        optimizer.zero_grad(1)
        for layer in model.values():
            assert isinstance(layer, nn.Linear)
            (layer(torch.ones(1, layer.in_features, dtype=torch.float64)).sum() * scale).backward()
        outcome = optimizer.step(0.1, 0.0)
    return {
        "gradients": {name: grad.unique().tolist() for name, grad in _whole_gradients(optimizer, context).items()},
        "norm": outcome.grad_norm,
        "tied": model.get_parameter("tied.weight").detach().clone(),
        "params_norm": optimizer.params_norm(),
    }


@pytest.mark.parametrize("zero1", [False, True], ids=["replicated", "zero1"])
def test_the_copies_of_a_tied_weight_are_summed_over_the_ends_and_counted_once(ranks: Any, zero1: bool) -> None:
    results = ranks.run(4, _tied_ends, zero1)
    # Gradients are rank + 1; ranks 0 and 1 are the replicas of the first stage, 2 and 3 those of the last.
    for rank, result in enumerate(results):
        assert result["gradients"]["tied.weight"] == [1.5 + 3.5]
        assert result["gradients"][f"own{rank // 2}.weight"] == [1.5 if rank < 2 else 3.5]
        assert result["norm"] == pytest.approx(math.sqrt(35 * 5.0**2 + 15 * 1.5**2 + 39 * 3.5**2), rel=1e-12)
        assert result["params_norm"] == pytest.approx((0.5 - 2 * 0.1) * math.sqrt(35 + 15 + 39), rel=1e-6)
        assert torch.equal(result["tied"], results[0]["tied"])
