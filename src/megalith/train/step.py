"""One optimizer step: micro-batches forward and backward, then the update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megalith.models.gpt import GPT
from megalith.train.faults import Probe, no_probe
from megalith.train.results import StepResult
from megalith.train.state import TrainState

Batch = Mapping[str, Tensor]
"""One micro-batch: tokens, labels, position_ids [B, S] int64 and loss_mask [B, S] float32."""


def train_step(
    state: TrainState,
    batches: Iterator[Batch],
    num_micro_batches: int,
    *,
    with_params_norm: bool = False,
    probe: Probe = no_probe,
) -> StepResult:
    """Take one step on the next `num_micro_batches` micro-batches and advance the counters of `state`.

    The gradient is that of the average over micro-batches of each one's mean loss per unmasked token. The reported loss
    weighs all tokens of the step alike. A step that the loss scaler skips consumes its samples but leaves the schedule.

    Source: spec/training-behaviour.md sections 2, 5 and 11 (points 7, 9, 12).
    """
    started = time.perf_counter()
    step = state.iteration + 1
    state.model.train()
    state.optimizer.zero_grad()
    loss_scale = state.optimizer.loss_scale
    sums, num_samples, num_tokens = [], 0, 0
    for _ in range(num_micro_batches):
        probe("data", step)
        batch = on_device(next(batches), device_of(state.model))
        probe("fwd", step)
        sums.append(loss_and_tokens(state.model, batch))
        loss = sums[-1][0] / sums[-1][1].clamp(min=1.0) / num_micro_batches
        probe("bwd", step)
        (loss * loss_scale).backward()
        sums[-1] = sums[-1].detach()
        num_samples += batch["tokens"].shape[0]
        num_tokens += batch["tokens"].numel()
    probe("opt", step)
    weight_decay = state.weight_decay
    state.updating = True
    outcome = state.optimizer.step(state.learning_rate, weight_decay)
    state.iteration = step
    state.consumed_samples += num_samples
    if outcome.applied:
        state.schedule_samples += num_samples
    state.updating = False
    return StepResult(
        iteration=step,
        loss=mean_loss(torch.stack(sums).sum(dim=0)),
        applied=outcome.applied,
        learning_rate=state.learning_rate,
        weight_decay=weight_decay,
        loss_scale=state.optimizer.loss_scale,
        grad_norm=outcome.grad_norm,
        num_zeros=outcome.num_zeros,
        params_norm=state.optimizer.params_norm() if with_params_norm else None,
        consumed_samples=state.consumed_samples,
        num_samples=num_samples,
        num_tokens=num_tokens,
        seconds=time.perf_counter() - started,
    )


def loss_and_tokens(model: GPT, batch: Batch) -> Tensor:
    """The summed loss over unmasked tokens and their number, [2] in at least fp32."""
    losses_BS = model(batch["tokens"], position_ids_BS=batch["position_ids"], labels_BS=batch["labels"])
    mask = batch["loss_mask"].reshape(-1)
    return torch.stack([torch.sum(losses_BS.reshape(-1) * mask), mask.sum()])


def mean_loss(sums: Tensor) -> float:
    """Loss per token from [summed loss, tokens], divided in the precision of the sums; waits for the device."""
    return (sums[0] / sums[1].clamp(min=1.0)).item()


def device_of(model: GPT) -> torch.device:
    """Where the model computes."""
    return model.output_weight.device


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is; to a GPU it goes through pinned memory, beside the computation."""
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
    return {name: tensor.to(device) for name, tensor in batch.items()}
