"""One step: the gradient it follows, the loss it reports, what a skip leaves alone."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from megalith.config import PrecisionConfig
from megalith.train.step import train_step

from .conftest import MICRO_BATCH, SEQUENCE, batches, make_state


def test_the_gradient_is_the_average_of_the_micro_batches_means_and_the_loss_weighs_tokens_alike() -> None:
    state = make_state(dropout=0.0)
    means, sums = [], []
    for batch in islice(batches(masked=True), 2):
        losses, mask = state.model(batch["tokens"], labels_BS=batch["labels"]), batch["loss_mask"]
        means.append((losses * mask).sum() / mask.sum())
        sums.append(torch.stack([(losses * mask).sum(), mask.sum()]).detach())
    assert sums[0][1] != sums[1][1], "the two means must weigh tokens differently for this test to say anything"
    reference = make_state(dropout=0.0)
    expected = torch.autograd.grad(
        sum(
            (reference.model(batch["tokens"], labels_BS=batch["labels"]) * batch["loss_mask"]).sum()
            / batch["loss_mask"].sum()
            / 2
            for batch in islice(batches(masked=True), 2)
        ),
        list(reference.model.decoder.final_layernorm.parameters()),
    )
    result = train_step(state, batches(masked=True), 2)
    clip = min(1.0, 1.0 / (result.grad_norm or 1.0))
    names = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")
    for name, grad in zip(names, expected, strict=True):
        torch.testing.assert_close(state.optimizer.gradients.grads[name], grad * clip, rtol=1e-4, atol=1e-7)
    total = torch.stack(sums).sum(dim=0)
    assert result.loss == pytest.approx(float(total[0] / total[1]), rel=1e-6)
    assert result.loss != pytest.approx(float(sum(means).detach()) / 2, rel=1e-6)
    assert result.num_tokens == 2 * MICRO_BATCH * SEQUENCE


def test_the_first_step_uses_the_rate_of_the_warm_up_s_start() -> None:
    state = make_state()
    before = {name: value.clone() for name, value in state.model.named_parameters()}
    result = train_step(state, batches(), 2)
    # Rate 0: nothing moves, yet the step counts and the rate printed is already that of the next step.
    assert all(torch.equal(value, before[name]) for name, value in state.model.named_parameters())
    assert result.applied and state.lr_schedule_samples == 4
    assert result.learning_rate == pytest.approx(1e-3 * 4 / 12)
    train_step(state, batches(), 2)
    assert any(not torch.equal(value, before[name]) for name, value in state.model.named_parameters())


def test_an_overflow_consumes_samples_but_leaves_schedule_and_weights() -> None:
    # A scale of 2**126 overflows every fp16 gradient.
    state = make_state(PrecisionConfig(fp16=True, initial_loss_scale=2.0**126, hysteresis=1), torch.float16)
    before = {name: value.clone() for name, value in state.model.named_parameters()}
    result = train_step(state, batches(), 2)
    assert not result.applied and result.grad_norm is None
    assert (state.iteration, state.consumed_samples, state.lr_schedule_samples) == (1, 4, 0)
    assert result.loss_scale == 2.0**125
    assert all(torch.equal(value, before[name]) for name, value in state.model.named_parameters())


def test_the_params_norm_is_that_of_the_weights() -> None:
    state = make_state()
    train_step(state, batches(), 1)
    expected = torch.cat([value.detach().flatten() for value in state.model.parameters()]).norm()
    assert state.optimizer.params_norm() == pytest.approx(float(expected), rel=1e-5)
