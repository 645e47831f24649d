"""What a rank of a miniature computes and holds: every printed number, gradient, weight and moment, in fp64."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from megalith.assemble import training
from megalith.checkpoint import DirectoryStore
from megalith.config import OptimizerConfig, RunConfig
from megalith.distributed.context import ParallelContext
from megalith.models import initialise
from megalith.models.language_model import LanguageModel
from megalith.nn.dropout import HiddenDropout
from megalith.nn.moe.experts import name_among_all
from megalith.nn.placement import dim_of, global_shape, local_pieces
from megalith.optim import elementwise
from megalith.optim.matrix_rules import Soap
from megalith.prove.miniature import SAVED, Miniature
from megalith.train.checkpoint_content import chunks_to_load
from megalith.train.loop import TrainingRun, train
from megalith.train.results import Evaluation, Hook, StepResult
from megalith.train.state import TrainState
from megalith.train.step_hooks import BeforeUpdate

SOAP_TIE_BREAKER = 1.0
"""That of miniatures, in place of a small one: see `_well_conditioned`."""


class Piece(NamedTuple):
    """A box of a global tensor: where it begins there, the shape of all of it, and its elements (NaN: not owned)."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor


Pieces = dict[str, list[Piece]]


@dataclass
class Record:
    """What one rank saw and holds.

    Attributes:
        numbers: Step, 0 for those of the whole run -> name -> value, equal on all ranks.
        gradients: Of each step, reduced and before clipping.
        outputs: Layer -> norms of its output vectors in the first step.
        state: Weights and optimizer states after the last step, by their keys in a checkpoint.
        saved: Those after the step that is saved; of a run that resumes there, those that it starts with.
        updates: Largest change of a weight by Adam in the whole run.
        amplified: The same over the rounding of its gradient, if the gradient has nothing else: Adam divides it by
            eps, as the second moment is far below.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    gradients: list[Pieces] = field(default_factory=list)
    outputs: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    state: Pieces = field(default_factory=dict)
    saved: Pieces = field(default_factory=dict)
    updates: float = 0.0
    amplified: float = 1.0


def record(rank: int, miniature: Miniature, *, exact: bool = True, killed_after: int = 0, **settings: Any) -> Record:
    """Train a miniature as `megalith train` does, on this rank, with other `settings` if any.

    Args:
        exact: In fp64, from weights that the run's precision represents; else in that precision.
        killed_after: Step after which, within the next one, this process ends by SIGKILL; 0 for none.
    """
    miniature = miniature if exact else miniature.rounded()
    config, device = miniature.config(rank, **settings), torch.device("cpu")
    context = ParallelContext.solo(device)
    if miniature.world_size > 1:
        context = ParallelContext.create(config.layout, device)
    updates = config.train_iters * max(config.schedule.lr, config.optimizer.decoupled_lr or 0.0)
    found = Record(updates=updates, amplified=max(1.0, updates / config.optimizer.adam_eps))
    with ExitStack() as stack:
        for place in config.checkpoint.save_folders:
            stack.enter_context(DirectoryStore(place, context).claim())
        training.measure_peak = no_peak
        Soap.from_config = partial(_well_conditioned, Soap.from_config)  # type: ignore[method-assign]
        elementwise.foreach_sign_ = _smooth_signs  # type: ignore[assignment]
        initialise.draw_ = partial(_with_adapters, initialise.draw_)
        built = training.build_run(config, context, dtype=torch.float64 if exact else None)
        run = built.run
        stack.callback(built.loaders.close)
        stack.callback(run.close)
        run.hook = _Numbers(found.numbers)
        observe(run, found, killed_after)
        HiddenDropout.drop = staticmethod(dropped_by_value)  # type: ignore[method-assign]
        if exact and built.resumed_at is None:
            for parameter in chain.from_iterable(chunk.parameters() for chunk in run.state.chunks):
                parameter.data.copy_(parameter.data.to(getattr(torch, miniature.dtype)))
        if built.resumed_at is not None:
            found.saved = state_pieces(run.state, config)
        for result in train(run):
            if result.iteration == SAVED:
                found.saved = state_pieces(run.state, config)
    found.numbers["model FLOPs"] = run.state.flops
    found.state = state_pieces(run.state, config)
    return found


def no_peak(device: torch.device, dtype: torch.dtype, budget_seconds: float = 0.0) -> float:
    """Return a peak for MFU, which is not compared, in place of a quarter of a second's measurement."""
    return 1.0


def _well_conditioned(make: Callable[[OptimizerConfig], Soap], config: OptimizerConfig) -> Soap:
    """Return SOAP whose eigenvalues are far apart, and whose `eps` exceeds the rounding of gradients.

    Gradients of a miniature have few directions: `TIE_BREAKER` alone decides the eigenvectors of the others, by 1e-9 in
    fp64, and rounding divided by its own root is an update along them.
    """
    return dataclasses.replace(make(config), tie_breaker=SOAP_TIE_BREAKER, eps=1e-3)


def _smooth_signs(tensors: tuple[Tensor, ...] | list[Tensor]) -> None:
    """Replace elements by their signs in place, small ones (1e-3 by one half) by less: rounding decides theirs."""
    for tensor in tensors:
        tensor.div_(tensor.abs() + 1e-3)


def _with_adapters(
    draw: Callable[[Tensor, LanguageModel, str, Generator], None],
    whole: Tensor,
    model: LanguageModel,
    name: str,
    generator: Generator,
) -> None:
    """Draw B of adapters like other weights: from 0 it is Adam's first steps alone, whose signs rounding may decide.

    The gradient of A is then not 0 in the first step either.
    """
    draw(whole, model, name, generator)
    if name.endswith(".lora_B.weight"):
        whole.normal_(0.0, 0.02, generator=generator)


def dropped_by_value(x: Tensor, probability: float) -> Tensor:
    """Drop elements by digits of theirs: the same ones in every layout, and where they are recomputed."""
    return x * ((x.detach().abs() * 1e4) % 1.0 >= probability) / (1.0 - probability)


def observe(run: TrainingRun, found: Record, killed_after: int = 0) -> None:
    """Make the steps of a run record their gradients, and the first one the outputs of layers."""
    state, vectors = run.state, dict[str, list[Tensor]]()

    def before_update() -> None:
        if 0 < killed_after == state.iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        found.gradients.append(gradient_pieces(state))
        for handle in handles:
            handle.remove()
        for name, norms in vectors.items():
            found.outputs[name] = np.sort(torch.cat(norms).numpy())
        vectors.clear()

    def after(name: str, module: nn.Module, _: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if module.training and isinstance(hidden, Tensor):
            vectors.setdefault(name, []).append(hidden.detach().double().norm(dim=-1).flatten())

    handles = []
    for chunk in state.chunks:
        blocks = set(chunk.blocks())
        handles += [
            module.register_forward_hook(partial(after, name))
            for name, module in chunk.named_modules()
            if module in blocks
        ]
    step = run.take_step
    assert isinstance(step, partial)
    run.take_step = partial(step, hooks=[*step.keywords["hooks"], BeforeUpdate(before_update)])


class _Numbers(Hook):
    """Keeps everything that a run prints, but seconds."""

    def __init__(self, numbers: dict[str, float]) -> None:
        self._numbers = numbers

    def after_step(self, result: StepResult) -> None:
        self._add(f"step {result.iteration}", dataclasses.asdict(result))

    def after_evaluation(self, evaluation: Evaluation) -> None:
        moment = f"{evaluation.split} after step {evaluation.iteration}{', final' if evaluation.final else ''}"
        self._add(moment, {**dataclasses.asdict(evaluation), "perplexity": math.exp(min(20.0, evaluation.loss))})

    def _add(self, moment: str, values: Mapping[Any, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                self._add(f"{moment}, {name}", value)
            elif isinstance(value, list | tuple):
                self._add(f"{moment}, {name}", dict(enumerate(value)))
            elif isinstance(value, int | float) and name != "seconds":
                self._numbers[f"{moment}, {name}"] = float(value)


def gradient_pieces(state: TrainState) -> Pieces:
    """Return the gradients that are here, by the global names of their parameters."""
    buffers = state.optimizer.gradients
    scaled = buffers.dtype in (torch.bfloat16, torch.float16)  # else `measure` has divided them by the loss scale
    scale, dtype = (state.optimizer.loss_scale, torch.float32) if scaled else (1.0, buffers.dtype)
    pieces: Pieces = {}
    for chunk in state.chunks:
        for name, placement in chunk.placements().items():
            if name == chunk.copied_weight or name not in buffers.shapes:  # or it is frozen
                continue
            tp = state.context.etp if ".mlp.experts." in name else state.context.tp
            start, stop = buffers.owned_range(name)
            grad = torch.full(buffers.shapes[name], torch.nan, dtype=dtype)
            if start < stop:
                grad.view(-1)[start:stop] = buffers.grad_shards[name].reshape(-1).to(dtype) / scale
            dim, shape = dim_of(placement), global_shape(grad.shape, placement, tp.size)
            everywhere = name_among_all(name, chunk)
            for piece in local_pieces(placement, shape[dim], tp.size, tp.index):
                rows = grad.narrow(dim, piece.local, piece.length).clone()
                offset = tuple(piece.whole * (axis == dim) for axis in range(len(shape)))
                pieces.setdefault(everywhere, []).append(Piece(offset, tuple(shape), rows))
    return pieces


def state_pieces(state: TrainState, config: RunConfig) -> Pieces:
    """Return the weights and optimizer states that are here, replicas included, by their keys in a checkpoint."""
    pieces: Pieces = {}
    for chunk in chunks_to_load(state, config, with_optimizer=True):
        pieces.setdefault(chunk.key, []).append(Piece(chunk.offset, chunk.global_shape, chunk.tensor.detach().clone()))
    return pieces
