"""The vocabulary loss against torch's cross-entropy, with and without a sink."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalith.nn import loss
from megalith.nn.loss import LogitsBuffer, vocabulary_loss
from megalith.optim.gradients import GradientBuffers


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the softmax: that of CPUs and that of other devices."""
    monkeypatch.setattr(loss, "_has_fused_softmax", lambda logits: request.param)


pytestmark = pytest.mark.usefixtures("fused")


def _reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, -2), targets.flatten(), reduction="none")


@pytest.mark.parametrize("chunk", [1 << 20, 40])
@pytest.mark.parametrize("with_sink", [False, True])
def test_loss_and_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int, with_sink: bool) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(11, 6, dtype=torch.float64) * 3)
    targets, upstream = torch.randint(0, 11, (3, 4)), torch.rand(12, dtype=torch.float64)
    wanted = torch.autograd.grad((_reference(hidden, weight, targets) * upstream).sum(), (hidden, weight))

    buffers = GradientBuffers([("weight", weight)], torch.float64)
    ours = vocabulary_loss(hidden, weight, targets, buffers if with_sink else None, LogitsBuffer())
    torch.testing.assert_close(ours.flatten(), _reference(hidden, weight, targets), rtol=1e-12, atol=1e-12)
    (ours.flatten() * upstream).sum().backward()
    torch.testing.assert_close(hidden.grad, wanted[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(buffers.grads["weight"], wanted[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("chunk", [1 << 20, 40])
def test_label_smoothing_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Torch gives its part to all tokens, the target among them: 0.2 of ours is 0.2 * 11 / 10 of torch's."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(11, 6, dtype=torch.float64))
    targets, upstream = torch.randint(0, 11, (5,)), torch.rand(5, dtype=torch.float64)
    ours = vocabulary_loss(hidden, weight, targets, None, LogitsBuffer(), smoothing=0.2)
    wanted = nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="none", label_smoothing=0.22)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(ours, (hidden, weight), upstream)
    for mine, reference in zip(gradients, torch.autograd.grad(wanted, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-13)


def test_two_losses_in_flight_do_not_share_their_logits() -> None:
    torch.manual_seed(0)
    buffer = LogitsBuffer()
    weight = nn.Parameter(torch.randn(9, 4, dtype=torch.float64))
    batches = [(torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randint(0, 9, (5,))) for _ in "ab"]
    losses = [vocabulary_loss(hidden, weight, targets, None, buffer).sum() for hidden, targets in batches]
    for one in losses:
        one.backward()
    for hidden, targets in batches:
        (wanted,) = torch.autograd.grad(_reference(hidden, weight, targets).sum(), hidden)
        torch.testing.assert_close(hidden.grad, wanted, rtol=1e-11, atol=1e-13)


def test_evaluation_returns_the_memory_of_the_logits() -> None:
    buffer, weight = LogitsBuffer(), nn.Parameter(torch.randn(9, 4))
    with torch.no_grad():
        vocabulary_loss(torch.randn(5, 4), weight, torch.arange(5), None, buffer)
    first = buffer.take(5, 9, torch.float32, weight.device)
    buffer.give_back(first)
    vocabulary_loss(torch.randn(5, 4, requires_grad=True), weight, torch.arange(5), None, buffer).sum().backward()
    assert buffer.take(5, 9, torch.float32, weight.device).data_ptr() == first.data_ptr()


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[3e4, 0.0]])
    weight = nn.Parameter(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    values = vocabulary_loss(hidden.expand(2, 2), weight, torch.tensor([0, 1]), None, LogitsBuffer())
    assert values.tolist() == [0.0, 6e4]


def test_a_bias_and_positions_without_a_target() -> None:
    torch.manual_seed(3)
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight, bias = (nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((11, 8), (11,)))
    targets = torch.tensor([3, -1, 0, 10, -1])
    logits = hidden @ weight.t() + bias
    chosen = torch.where(targets >= 0, logits.gather(1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    expected = logits.logsumexp(-1) - chosen
    found = vocabulary_loss(hidden, weight, targets, None, LogitsBuffer(), bias=bias, absent=-1)
    assert torch.allclose(found, expected, atol=1e-12)
    along, leaves = torch.randn(5, dtype=torch.float64), [hidden, weight, bias]
    theirs = torch.autograd.grad(expected, leaves, along)
    for one, other in zip(torch.autograd.grad(found, leaves, along), theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("each", [0.0, 0.01])
@pytest.mark.parametrize(
    ("dtype", "rounding", "least"), [(torch.float64, 1e-12, 1e-13), (torch.bfloat16, 2.0**-8, 1e-6)]
)
def test_the_gradient_of_a_part_of_the_vocabulary(
    each: float, dtype: torch.dtype, rounding: float, least: float
) -> None:
    torch.manual_seed(0)
    whole = (torch.randn(7, 12, dtype=torch.float64) * 5).to(dtype)
    here = whole[:, 5:].clone()
    rows, grad = torch.tensor([0, 6, 3, 0, 2, 0, 1]), torch.rand(7, dtype=torch.float64)
    held = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)  # two targets are on another rank
    log_sum = whole.double().logsumexp(-1)
    exact = here.double().sub(log_sum[:, None]).exp().sub(each)
    exact[torch.arange(7), rows] -= held
    own, _, log_probability = loss._log_sum_exp(here, rows, here.gather(1, rows[:, None]).squeeze(1), with_sum=False)
    torch.testing.assert_close(own.double(), here.double().logsumexp(-1), rtol=0, atol=least)
    total, *of_tokens = (x.to(own.dtype) for x in (log_sum, held, grad))
    if log_probability is None:
        loss._logits_gradient(here, total, rows, *of_tokens, each)
    else:
        loss._fused_logits_gradient(here, own - total, log_probability, rows, *of_tokens, each)
    torch.testing.assert_close(here.double(), exact * grad[:, None], rtol=rounding, atol=least)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_fused_form_is_exact_where_a_target_is_almost_certain(
    monkeypatch: pytest.MonkeyPatch, smoothing: float
) -> None:
    """The gradient p - 1 of a target of probability p is as exact as fp32 has p, not as it has large logits."""
    monkeypatch.setattr(loss, "_has_fused_softmax", lambda logits: True)
    logits = torch.tensor([[12.0, 0.0, 0.0], [30.0, 16.0, 0.0]])
    targets = torch.tensor([0, 0])
    weight, hidden = nn.Parameter(torch.eye(3)), logits.clone().requires_grad_()
    vocabulary_loss(hidden, weight, targets, None, LogitsBuffer(), smoothing=smoothing).sum().backward()
    wide = logits.double().requires_grad_()
    wanted = nn.functional.cross_entropy(wide, targets, reduction="sum", label_smoothing=smoothing * 3 / 2)
    (reference,) = torch.autograd.grad(wanted, wide)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), reference, rtol=0, atol=2**-22)
