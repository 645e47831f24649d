"""The routers of MoE layers over a training step: auxiliary losses, expert load, biases and offsets of the routers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.models.language_model import LanguageModel
from megalith.nn.moe.router import NAMES, Router
from megalith.train.state import TrainState
from megalith.train.step_hooks import StepHook

if TYPE_CHECKING:
    from megalith.train.step import MicroBatchRunner


class MoEHook(StepHook):
    """Balances the routers of a step's MoE layers, and reports their auxiliary losses and the load of each expert."""

    def __init__(self, state: TrainState) -> None:
        self._state, self._model = state, state.model.config
        self._names = loss_names(self._model)
        self._auxiliary, self._load_LE = list[float](), list[list[float]]()

    def begin(self, runner: MicroBatchRunner) -> None:
        per_token = self._model.calculate_per_token_loss
        begin_step(runner.chunks, runner.loss_scale / (1 if per_token else runner.num_micro_batches))

    def values_to_reduce(self, runner: MicroBatchRunner) -> Tensor:
        chunks, context = self._state.chunks, self._state.context
        auxiliary = auxiliary_losses(chunks, self._names, runner.num_micro_batches, context)
        load_LE = expert_load(chunks, context)
        return torch.cat([auxiliary, load_LE.flatten()])

    def on_reduced(self, sums: list[float]) -> None:
        named, experts = len(self._names), self._model.num_experts or 1
        self._auxiliary = sums[:named]
        self._load_LE = [sums[start : start + experts] for start in range(named, len(sums), experts)]

    def after_update(self) -> None:
        chunks, context = self._state.chunks, self._state.context
        move_biases(chunks, context, self._model.moe_router_bias_update_rate)
        set_offsets(chunks, context, self._model.moe_router_quantile_balancing_ema)

    def report(self) -> dict[str, Any]:
        last = self._model.num_layers - 1
        return {
            "auxiliary_losses": dict(zip(self._names, self._auxiliary, strict=True)),
            "expert_load": {
                layer: tuple(map(round, choices))
                for layer, choices in enumerate(self._load_LE)
                if self._model.experts[min(layer, last)]
            },
        }


def routers(chunks: Iterable[LanguageModel]) -> list[Router]:
    """Return the routers of this rank."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def begin_step(chunks: Sequence[LanguageModel], scale: float) -> None:
    """Clear the numbers of the previous step; `scale` is that of the main loss of a micro-batch."""
    for chunk in chunks:
        chunk.auxiliary.scale = scale
        chunk.auxiliary.recorded.clear()
    for router in routers(chunks):
        router.begin_step()


def loss_names(model: ModelConfig) -> list[str]:
    """Return the auxiliary losses of a model, as Megatron names them."""
    if not any(model.experts):  # --moe-layer-freq may leave all layers dense
        return []
    return [NAMES[kind] for kind in model.balancing] + (["z_loss"] if model.moe_z_loss_coeff is not None else [])


def auxiliary_losses(
    chunks: Sequence[LanguageModel], names: Sequence[str], num_micro_batches: int, context: ParallelContext
) -> Tensor:
    """Return the share of this replica in the mean of each loss over layers, micro-batches and replicas, [names], fp64.

    The sum over context-parallel ranks and replicas is that mean; tensor-parallel ranks and stages have the same.
    """
    if not names:
        return torch.zeros(0, dtype=torch.float64, device=context.device)
    model = chunks[0].config
    mixtures = sum(1 for experts in (*model.experts, *model.experts[-1:] * model.predictions) if experts)
    sums = torch.zeros(len(names), dtype=torch.float64, device=context.device)
    for chunk in chunks:
        for number, name in enumerate(names):
            for value in chunk.auxiliary.recorded.get(name, {}).values():
                sums[number].add_(value)
    return _of_all_layers(sums / (mixtures * num_micro_batches * context.dp.size), chunks, context)


@torch.no_grad()
def expert_load(chunks: Sequence[LanguageModel], context: ParallelContext) -> Tensor:
    """Count how often the tokens of this rank chose each expert in this step, [layers x experts], fp64.

    Dense layers have zeros; layers of multi-token prediction come last. The result is equal on tensor-parallel ranks
    and pipeline stages; its sum over context-parallel ranks and replicas counts all tokens.
    """
    model = chunks[0].config
    layers = model.num_layers + model.predictions
    load_LE = torch.zeros(layers, model.num_experts or 0, dtype=torch.float64, device=context.device)
    for router in routers(chunks):
        load_LE[router.layer] = router.load_E
    return _of_all_layers(load_LE, chunks, context) if model.mixture else load_LE


def _of_all_layers(sums: Tensor, chunks: Sequence[LanguageModel], context: ParallelContext) -> Tensor:
    """Combine the sums of this rank's layers and tokens with those of other stages and sequence shards."""
    sums = sums.to(context.device)
    if chunks[0].region.needs_grad_reduce:
        sums = comm.all_reduce(sums, context.tp)
    return comm.all_reduce(sums, context.pp)


@torch.no_grad()
def set_offsets(chunks: Sequence[LanguageModel], context: ParallelContext, memory: float) -> None:
    """Update the expert offsets of quantile balancing with those that the routers computed in this step.

    The new offsets are a running average, with decay `memory`, of the mean over the micro-batches of all replicas.
    Their mean over the experts, which affects no choice, is subtracted.

    Source: Megatron-LM pull request 5349 (June 2026).
    """
    for router in routers(chunks):
        if router.qb_beta is not None:
            batches = max(router.offset_batches, 1) * context.dp.size
            asked_E = comm.all_reduce(router.offsets_E / batches, context.dp)
            offsets_E = memory * router.qb_beta + (1.0 - memory) * asked_E
            router.qb_beta.copy_(offsets_E - offsets_E.mean())


@torch.no_grad()
def move_biases(chunks: Sequence[LanguageModel], context: ParallelContext, rate: float) -> None:
    """Raise the bias of each expert that had less than its share of this step's choices, and lower that of the others.

    Ranks with the same tokens count them again, which does not change who is above the mean.

    Source: arXiv:2408.15664, algorithm 1, with the sign as Megatron has it.
    """
    for router in routers(chunks):
        if router.expert_bias is not None:
            load = router.load_E.clone()
            for axis in (context.tp, context.cp, context.dp):
                load = comm.all_reduce(load, axis)
            router.expert_bias += rate * torch.sign(load.mean() - load)
