"""The gradient noise scale of a case where it is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megalith.train.loop import LoopConfig, TrainingRun, train
from megalith.train.results import GradientNoise, Hook
from megalith.train.state import NoiseScale

from .conftest import batches, make_state


def test_the_scale_is_the_trace_of_the_covariance_over_the_squared_gradient() -> None:
    draw, true = torch.Generator().manual_seed(1), torch.full((1000,), 0.1)  # |G|^2 = 10, tr(S) = 1000 * 4
    found = NoiseScale()
    for _ in range(300):
        samples = true + 2.0 * torch.randn(64, 1000, generator=draw)
        scale = found.add(4, float(samples[:4].mean(0).norm()), 64, float(samples.mean(0).norm()))
    assert scale == pytest.approx(400.0, rel=0.2)


def test_without_a_signal_there_is_no_scale() -> None:
    assert NoiseScale().add(1, 10.0, 4, 1.0) is None


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_norms_that_are_no_numbers_are_left_out(norm: float) -> None:
    found = NoiseScale(2.0, 3.0)
    assert found.add(1, 1.0, 8, norm) is None and found.add(1, norm, 8, 1.0) is None
    assert found == NoiseScale(2.0, 3.0)


def test_a_run_reports_it_and_is_not_changed_by_it(make_loop_config: Callable[..., LoopConfig]) -> None:
    class Reports(Hook):
        def __init__(self) -> None:
            self.found: list[GradientNoise] = []

        def after_noise(self, noise: GradientNoise) -> None:
            self.found.append(noise)

    curves, reports = [], Reports()
    for log_noise in (False, True):
        loop_config = make_loop_config(log_noise=log_noise)
        run = TrainingRun(loop_config, make_state(), batches(), hook=reports)
        curves.append([(result.loss, result.grad_norm) for result in train(run)])
    assert curves[0] == curves[1]
    assert [(noise.iteration, noise.small, noise.large) for noise in reports.found] == [(2, 2, 4), (4, 2, 4), (6, 2, 4)]
    assert all(noise.small_norm > noise.large_norm for noise in reports.found)
