"""What this rank does in a step: its chunks of the model on its micro-batches, in the order of a pipeline schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.models.language_model import Inputs, LanguageModel
from megalith.nn.precision import at_least_fp32
from megalith.schedules.pipeline import Op
from megalith.train.faults import Probe, no_probe
from megalith.train.spoil import Spoiler
from megalith.train.timers import Timers

Batch = Mapping[str, Tensor]
"""One micro-batch: the fields of its samples, [B, ...] each; which ones is the business of the family of the model.

A loss_mask [B, S] is among them. GPT's are tokens, labels, position_ids [B, S] int64; attention stays inside documents
if it has document_ids [B, S] int32. Samples are counted by where they come from if it has dataset_id [B] int64.
"""


class StageWork:
    """The forward passes of the chunks of this rank over the micro-batches of a step: a `pipeline.StageRunner`.

    Args:
        chunks: the parts of the model here.
        batches: where the micro-batches come from, in order; each is held from its first use here to its last.
        context: the ranks.
        num_micro_batches, loss_scale: the loss is divided by the one and multiplied by the other.
        training: whether the loss is to be differentiated.
        probe: called at the points of a step.
        step: the iteration that the probe is told.
        timers: are told how long the data takes.
        spoiler: puts in wrong numbers, for tests.

    Attributes:
        at: the operation that is under way.
        sums: of each micro-batch that was predicted here the sum and the number of terms of each loss, [2 x losses].
        num_samples, num_tokens: of all micro-batches.
        samples_of: number of a source -> samples of it, where the batches say so.
    """

    def __init__(
        self,
        chunks: Sequence[LanguageModel],
        batches: Iterator[Batch],
        context: ParallelContext,
        *,
        num_micro_batches: int = 1,
        loss_scale: float = 1.0,
        training: bool = True,
        probe: Probe = no_probe,
        step: int = 0,
        timers: Timers | None = None,
        spoiler: Spoiler | None = None,
    ) -> None:
        self._chunks, self._batches, self._context = chunks, batches, context
        self._num_micro_batches, self._loss_scale, self._training = num_micro_batches, loss_scale, training
        self._probe, self._step, self._timers = probe, step, timers or Timers()
        self._spoiler = spoiler
        self.at: Op | None = None
        self._held: dict[int, Inputs] = {}
        self._drawn = 0
        self._unmasked: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.num_samples = 0
        self.num_tokens = 0
        self.samples_of: Counter[int] = Counter()

    def border(self, micro_batch: int) -> tuple[tuple[int, int, int], torch.dtype]:
        """Shape [S, B, D] and dtype of the hidden states that go from stage to stage."""
        return self._chunks[0].border(self._batch(micro_batch))

    def before(self, op: Op) -> None:
        """Draw the data of a forward pass; tell the probe where the step is."""
        if not self._training:
            return
        self.at = op
        if self._spoiler is not None:
            self._spoiler.on(op.micro_batch)
        if op.kind == "F":
            self._probe("data", self._step)
            self._batch(op.micro_batch)
            self._probe("fwd", self._step)
        elif op.kind == "B":
            self._probe("bwd", self._step)

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Hidden states for the next chunk, or the loss to differentiate.

        That is the sum of the weighed losses, each a mean over its terms in the micro-batch (GPT's: unmasked tokens),
        those of other context-parallel ranks included, over the number of micro-batches, times the loss scale; the
        gradients of these ranks are parts that add up. Under --calculate-per-token-loss it is the sum over these terms
        times the loss scale (see `train_step`).
        """
        inputs, model = self._batch(micro_batch), self._chunks[chunk]
        if not model.stage.predicts:
            return model.part(inputs, hidden)
        losses = model.losses(inputs, hidden)
        summed, counts = torch.stack([loss.summed for loss in losses]), torch.stack([loss.count for loss in losses])
        if self._spoiler is not None and self._training:
            summed = self._spoiler.loss(summed, micro_batch)
        self._remember(model, summed.detach(), counts)
        summed = summed * summed.new_tensor([loss.weight for loss in losses])
        if model.config.calculate_per_token_loss:
            return summed.sum() * self._loss_scale
        if self._context.cp.size > 1:
            counts = comm.all_reduce(counts, self._context.cp)
        return (summed / counts.clamp(min=1.0)).sum() / self._num_micro_batches * self._loss_scale

    def _remember(self, model: LanguageModel, summed: Tensor, counts: Tensor) -> None:
        if model.reports_means:
            summed, counts = summed / counts.clamp(min=1.0), torch.ones_like(counts)
        self.sums.append(torch.stack((summed, counts), dim=1).flatten())

    def end(self, micro_batch: int) -> None:
        """Nothing more is done for this micro-batch here."""
        del self._held[micro_batch]

    def total(self) -> Tensor:
        """The sum of `sums`; zeros on a stage that predicts nothing."""
        if self.sums:
            return torch.stack(self.sums).sum(dim=0)
        losses = len(self._chunks[0].loss_names)
        return torch.zeros(2 * losses, dtype=at_least_fp32(self._chunks[0].dtype), device=self._context.device)

    def unmasked_tokens(self) -> Tensor:
        """Of all micro-batches of all replicas that were drawn; every rank of the replicas calls this."""
        return comm.all_reduce(torch.stack(self._unmasked).sum(), self._context.join("cp", "dp"))

    def _batch(self, micro_batch: int) -> Inputs:
        while self._drawn <= micro_batch:
            with self._timers.time("batch-generator", level=2):
                whole = next(self._batches)
            model, own = self._chunks[0], dict(whole)
            self.num_samples += whole[model.tokens_field].shape[0]
            self.num_tokens += whole[model.tokens_field].numel()
            if (sources := own.pop("dataset_id", None)) is not None:
                self.samples_of.update(sources.tolist())
            inputs = model.prepare(own)
            inputs = replace(inputs, tensors=on_device(inputs.tensors, model.device))
            self._held[self._drawn] = inputs
            self._unmasked.append(inputs.tensors["loss_mask"].sum())
            self._drawn += 1
        return self._held[micro_batch]


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is; to a GPU it goes through pinned memory, beside the computation."""
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}
    return {name: tensor.to(device) for name, tensor in batch.items()}
