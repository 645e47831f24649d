"""Weight gradients that are deferred: the same sums later, and an error where an operand was overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.sink import GradientSink, attach_sink
from megalith.optim.gradients import GradientBuffers
from megalith.parallel.pipeline import DeferredWeightGrads, run
from megalith.schedules.pipeline import Op, Schedule, make_schedule

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=12,
    init_method_std=0.3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
WEIGHT = Parameter(torch.zeros(3, 2, dtype=torch.float64))


class Notes:
    """A sink that notes what it is given."""

    def __init__(self) -> None:
        self.gifts: list[tuple[str, Tensor, Tensor]] = []

    def accumulate_linear(
        self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        self.gifts.append(("linear", grad_TO, x_TI))

    def accumulate_embedding(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        self.gifts.append(("embedding", ids_T, grad_TD))


def _operands() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 3), torch.ones(4, 2)


def test_what_is_collected_waits_for_its_own_key() -> None:
    notes = Notes()
    sink = DeferredWeightGrads(notes)
    first, second = _operands(), _operands()
    with sink.collect(1):
        sink.accumulate_linear(WEIGHT, *first)
        sink.accumulate_embedding(WEIGHT, torch.tensor([0]), torch.ones(1, 2))
    with sink.collect(2):
        sink.accumulate_linear(WEIGHT, *second)
    assert notes.gifts == []
    sink.run_deferred(2)
    assert [gift[0] for gift in notes.gifts] == ["linear"] and notes.gifts[0][1] is second[0]
    sink.run_deferred(1)
    assert [gift[0] for gift in notes.gifts[1:]] == ["linear", "embedding"] and notes.gifts[1][2] is first[1]


def test_outside_of_a_collection_everything_passes_at_once() -> None:
    notes = Notes()
    sink = DeferredWeightGrads(notes)
    sink.accumulate_linear(WEIGHT, *_operands())
    sink.accumulate_embedding(WEIGHT, torch.tensor([0]), torch.ones(1, 2))
    assert len(notes.gifts) == 2


def test_a_product_of_reused_memory_is_not_deferred() -> None:
    notes = Notes()
    sink = DeferredWeightGrads(notes)
    with sink.collect(0):
        sink.accumulate_linear(WEIGHT, *_operands(), buffer_reused=True)
        assert len(notes.gifts) == 1
    sink.run_deferred(0)
    assert len(notes.gifts) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_an_operand_that_is_overwritten_is_an_error(which: int) -> None:
    """Through another view of its memory too, as a buffer that is used again."""
    memory = torch.ones(100)
    operands = [memory[:12].view(4, 3), memory[50:58].view(4, 2)]
    sink = DeferredWeightGrads(Notes())
    with sink.collect(0):
        sink.accumulate_linear(WEIGHT, *operands)
    torch.mul(memory[50 * which :], 2.0, out=memory[50 * which :])
    with pytest.raises(AssertionError, match="buffer_reused"):
        sink.run_deferred(0)


def test_one_collection_at_a_time_and_each_key_once() -> None:
    sink = DeferredWeightGrads(Notes())
    with sink.collect(0), pytest.raises(AssertionError), sink.collect(1):
        pass
    with pytest.raises(AssertionError), sink.collect(0):
        pass


class WholeModel:
    """A GPT as the only stage."""

    def __init__(self, model: GPT, lengths: list[int]) -> None:
        self.model, self.lengths = model, lengths

    def activation_shape(self, micro_batch: int) -> tuple[tuple[int, ...], torch.dtype]:
        raise AssertionError("one stage receives nothing")

    def prepare(self, op: Op) -> None:
        pass

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        generator = torch.Generator().manual_seed(micro_batch)
        tokens, labels = torch.randint(0, 40, (2, 3, self.lengths[micro_batch]), generator=generator)
        loss: Tensor = self.model(tokens, labels_BS=labels).mean()
        return loss

    def release(self, micro_batch: int) -> None:
        pass


def _gradients(schedule: Schedule, lengths: list[int], *, tied: bool, with_sink: bool = True) -> dict[str, Tensor]:
    config = ModelConfig(**{**vars(CONFIG), "untie_embeddings_and_output_weights": not tied})
    model = GPT(config, 40, dtype=torch.float64)
    initialise(model, seed=3)
    gradients = GradientBuffers(list(model.named_parameters()), torch.float64)
    deferred = DeferredWeightGrads(gradients)
    sink: GradientSink = deferred if schedule.is_split else gradients
    attach_sink(model, sink if with_sink else None)
    gradients.begin()
    run(schedule.program(0), WholeModel(model, lengths), None, deferred)
    gradients.finish()
    return gradients.grads


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_has_the_same_gradients_however_late_they_are(tied: bool) -> None:
    """All weight gradients at the end; the memory of the logits is used by several micro-batches in between."""
    lengths = [5, 12, 7]
    expected = _gradients(make_schedule("1f1b", 1, 1, 3), lengths, tied=tied, with_sink=False)
    late = [Op(kind, 0, number) for number in range(3) for kind in ("F", "B")] + [Op("W", 0, n) for n in range(3)]
    for schedule in (make_schedule("zb-h1", 1, 1, 3), Schedule("late", 1, 1, 3, (tuple(late),))):
        for name, grad in _gradients(schedule, lengths, tied=tied).items():
            assert expected[name].abs().max() > 1e-9, name
            assert (grad - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


def test_layers_without_a_sink_have_nothing_to_put_off() -> None:
    expected = _gradients(make_schedule("1f1b", 1, 1, 2), [5, 6], tied=True, with_sink=False)
    found = _gradients(make_schedule("zb-h1", 1, 1, 2), [5, 6], tied=True, with_sink=False)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_a_split_program_needs_a_deferred_sink() -> None:
    with pytest.raises(AssertionError, match="needs a DeferredWeightGrads"):
        run(make_schedule("zb-h1", 1, 1, 1).program(0), WholeModel(GPT(CONFIG, 40), [5]))
