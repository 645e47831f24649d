"""Preallocated gradient buffers: the sink that layers write their weight gradients to, reduced as they fill.

One flat buffer holds the gradient of every parameter. The first write of a step overwrites and later writes add, so a
step neither clears nor allocates. A hook moves the gradients that autograd returns (biases, norms, and all gradients if
no sink is attached) into the buffer as soon as they are complete.

With several replicas the buffer is divided into buckets in the reverse order of the modules, roughly the order of the
backward pass. A bucket is reduced once per step, asynchronously, as soon as its last gradient is written:

- The number of writes to a parameter per micro-batch (two if the output layer shares the embedding) is learned from
  earlier steps; with the number of micro-batches it determines the last write. Order does not matter, so pipelines may
  interleave the micro-batches of their chunks and defer weight gradients.
- Buckets start in order, so that all ranks start the same collectives in the same order; buckets of experts, whose
  replicas are other ranks, have a separate order.
- Buckets whose last write is unknown (the first step; a parameter that is not always used) start at `finish`.
- A write after the last one raises, since it would be lost.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from megalith.device import is_host
from megalith.distributed.comm import AsyncHandle
from megalith.distributed.context import ParallelContext
from megalith.flat import Bucket, FlatLayout, Kind, lay_out_gradients
from megalith.kernels.cpu.memory import lazy_zeros
from megalith.nn.precision import product_dtype
from megalith.parallel.data import (
    DataParallel,
    ReplicaSlice,
    Replicated,
    ReplicatedRows,
    extra_reduction,
    partial_slices,
    reduce_partial_grads,
)

EXPERTS = "experts"  # first word of the kind of a bucket of experts

SCRATCH_ELEMENTS = 1 << 22  # of a product that is rounded before it is added: 8 MiB of bf16, within the cache of a CPU
SCRATCH_ELEMENTS_ON_DEVICE = 1 << 24  # 32 MiB: one product for all but the largest weights


class GradientBuffers:
    """Gradients of named parameters in one flat memory.

    Args:
        named: Parameters with their names, in module order.
        dtype: Of the memory: fp32 where gradients accumulate in fp32, else that of the parameters.
        experts: Names of the parameters that are divided over expert-parallel ranks.
        bucket_size: Elements at which a bucket is full; Megatron's rule by default.

    Attributes:
        grads: Views of it by parameter name, in the shapes of the parameters. After `finish` each holds the gradient of
            the step where this rank owns it (`owned_range`).
    """

    defers = False

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        dtype: torch.dtype,
        *,
        data: DataParallel | None = None,
        replicated_rows: Mapping[str, tuple[ReplicatedRows, ...]] | None = None,
        experts: Collection[str] = (),
        expert_data: DataParallel | None = None,
        bucket_size: int | None = None,
    ) -> None:
        self._data = data or Replicated(ParallelContext.solo())
        self._expert_data, self._experts = expert_data or self._data, frozenset(experts)
        self._replicated_rows = replicated_rows or {}
        self.layout = self._lay_out(named, bucket_size)
        device = named[0][1].device
        self.flat = lazy_zeros((self.layout.size,), dtype, device)
        self.shapes, self.device, self.dtype = self.layout.shapes, device, dtype
        self.grads = {name: self.layout.view(self.flat, name) for name, _ in named}
        self._grad_of = {p: self.grads[name] for name, p in named}
        self._written: set[Parameter] = set()
        self._finished = False
        self._writes = _WriteCounter(self.layout, dict(named), self._start) if self._num_replicas > 1 else None
        self._pending: list[AsyncHandle] = []
        self._scratch = torch.empty(0, device=device)
        self._scratch_elements = SCRATCH_ELEMENTS if is_host(device) else SCRATCH_ELEMENTS_ON_DEVICE
        for _, parameter in named:
            parameter.register_post_accumulate_grad_hook(_weak_hook(self._accept_autograd_grad))

    @property
    def _num_replicas(self) -> int:
        """Least common multiple of the number of replicas of dense parameters and of experts."""
        return math.lcm(self._data.axis.size, self._expert_data.axis.size if self._experts else 1)

    def _lay_out(self, named: Sequence[tuple[str, Parameter]], bucket_size: int | None) -> FlatLayout:
        shapes = {name: tuple(parameter.shape) for name, parameter in named}
        replicas = self._num_replicas
        kinds = {name: self._kind(name) for name in shapes}
        return lay_out_gradients(shapes, kinds, replicas, bucket_size)

    def _kind(self, name: str) -> Kind:
        return (EXPERTS,) * (name in self._experts) + (extra_reduction(self._replicated_rows.get(name, ())) or ())

    def replicas_of(self, bucket: Bucket) -> DataParallel:
        """Return the replicas that share the update of a bucket."""
        return self._expert_data if EXPERTS in bucket.kind else self._data

    def owned_range(self, name: str) -> tuple[int, int]:
        """Return the elements [start, stop) of a flattened parameter that this rank updates; (0, 0) for none."""
        first, last = self.layout.span(name)
        bucket = self.layout.bucket_of(name)
        start, stop = self.replicas_of(bucket).owned_range(bucket.start, bucket.stop)
        start, stop = max(start, first), min(stop, last)
        return (start - first, stop - first) if start < stop else (0, 0)

    def owned_shard(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a tensor shaped like a parameter: the tensor itself if that is all, else 1-D."""
        start, stop = self.owned_range(name)
        return tensor if stop - start == tensor.numel() else tensor.view(-1)[start:stop]

    @cached_property
    def grad_shards(self) -> Mapping[str, Tensor]:
        """Shard of each gradient that this rank owns; valid after `finish`."""
        grad_shards = {name: self.owned_shard(name, grad) for name, grad in self.grads.items()}
        return {name: owned_shard for name, owned_shard in grad_shards.items() if owned_shard.numel() > 0}

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Start a step: whatever the memory holds is stale. Without `num_micro_batches` only `finish` reduces."""
        self._written.clear()
        self._finished = False
        if self._writes is not None:
            self._writes.begin(num_micro_batches)

    @torch.no_grad()
    def finish(self) -> None:
        """End the backward passes of a step: reduce the gradients over all replicas, those of single rows included.

        A parameter that received nothing has a zero gradient. Every rank calls this; calling it again does nothing.
        """
        if self._finished:
            return
        self._finished = True
        for parameter, grad in self._grad_of.items():
            if parameter not in self._written:
                grad.zero_()
        if self._writes is not None:
            self._writes.finish()
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        if self._replicated_rows:
            self._reduce_partial_grads()

    def _start(self, bucket: int) -> None:
        part = self.layout.buckets[bucket]
        self._pending.append(self.replicas_of(part).reduce(self.flat[part.start : part.stop]))

    def _reduce_partial_grads(self) -> None:
        for bucket in self.layout.buckets:
            if set(bucket.kind) - {EXPERTS}:
                start, stop = self.replicas_of(bucket).owned_range(bucket.start, bucket.stop)
                reduce_partial_grads(self.flat[start:stop], self._partial_slices(bucket, start, stop))

    def _partial_slices(self, bucket: Bucket, start: int, stop: int) -> list[ReplicaSlice]:
        """Return the partial gradients among the elements [start, stop) of the memory, counted from `start`."""
        return [
            part
            for name in bucket.names
            for part in partial_slices(
                self._replicated_rows[name], self.shapes[name], self.layout.offsets[name], start, stop
            )
        ]

    def _mark_written(self, parameter: Parameter) -> bool:
        first = parameter not in self._written
        self._written.add(parameter)
        return first

    def _count_write(self, parameter: Parameter) -> None:
        if self._writes is not None:
            self._writes.count(parameter)

    def accumulate_linear(
        self, parameter: Parameter, grad_TO: Tensor, x_TI: Tensor, *, buffer_reused: bool = False
    ) -> None:
        """Add grad^T @ x [O, I], rounded to the dtype of the operands as autograd rounds it."""
        buffer, first = self._grad_of[parameter], self._mark_written(parameter)
        if buffer.dtype == grad_TO.dtype == product_dtype(grad_TO):
            if first:
                torch.mm(grad_TO.t(), x_TI, out=buffer)
            else:
                buffer.addmm_(grad_TO.t(), x_TI)
        else:
            self._add_rounded(buffer, first, grad_TO, x_TI)
        self._count_write(parameter)

    def _add_rounded(self, buffer: Tensor, first: bool, grad_TO: Tensor, x_TI: Tensor) -> None:
        dtype = product_dtype(grad_TO)
        x = x_TI.to(dtype)
        rows = max(1, self._scratch_elements // x.shape[1])
        for start in range(0, buffer.shape[0], rows):
            part = buffer[start : start + rows]
            product = torch.mm(grad_TO[:, start : start + rows].to(dtype).t(), x, out=self._scratch_for(part, dtype))
            rounded = product.to(grad_TO.dtype)
            if first:
                part.copy_(rounded)
            else:
                part.add_(rounded)

    def _scratch_for(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        if self._scratch.dtype != dtype or self._scratch.numel() < part.numel():
            self._scratch = torch.empty(max(part.numel(), self._scratch_elements), dtype=dtype, device=part.device)
        return self._scratch[: part.numel()].view_as(part)

    def accumulate_embedding(self, parameter: Parameter, ids_T: Tensor, grad_TD: Tensor) -> None:
        """Add the rows of `grad_TD` to the rows of the gradient that `ids_T` names."""
        buffer = self._grad_of[parameter]
        if self._mark_written(parameter):
            buffer.zero_()
        rows = grad_TD.to(buffer.dtype)
        if is_host(buffer.device):
            buffer.index_add_(0, ids_T, rows)
        else:
            # sorts the ids, so that the sum does not depend on timing as index_add_'s does
            buffer.index_put_((ids_T,), rows, accumulate=True)
        self._count_write(parameter)

    def _accept_autograd_grad(self, parameter: Tensor) -> None:
        assert isinstance(parameter, Parameter)
        if parameter.grad is None:  # its gradient went to the sink
            return
        buffer = self._grad_of[parameter]
        if self._mark_written(parameter):
            buffer.copy_(parameter.grad)
        else:
            buffer.add_(parameter.grad)
        parameter.grad = None
        self._count_write(parameter)


class _WriteCounter:
    """Counts the writes to each parameter and starts each bucket when it is complete, in the order of its chain."""

    def __init__(self, layout: FlatLayout, parameters: Mapping[str, Parameter], start: Callable[[int], None]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._bucket_of = {parameters[name]: n for n, bucket in enumerate(layout.buckets) for name in bucket.names}
        self._sizes = [len(bucket.names) for bucket in layout.buckets]
        of_experts = [EXPERTS in bucket.kind for bucket in layout.buckets]
        self._chains = [[n for n, expert in enumerate(of_experts) if expert is kind] for kind in (False, True)]
        self._start = start
        self._writes_per_micro_batch: dict[Parameter, int] = {}  # 0: not the same in all steps, or not known
        self._counts: dict[Parameter, int] = {}
        self._num_micro_batches: int | None = None
        self._missing: list[int] = []
        # of each chain the buckets that have not started, the next one last
        self._unstarted: tuple[list[int], ...] = ()

    def begin(self, num_micro_batches: int | None) -> None:
        """Start a step."""
        self._num_micro_batches = num_micro_batches
        self._counts = dict.fromkeys(self._names, 0)
        self._missing = list(self._sizes)
        self._unstarted = tuple(chain[::-1] for chain in self._chains)

    def count(self, parameter: Parameter) -> None:
        """Count a write that was made, and start the buckets that it completes."""
        bucket = self._bucket_of[parameter]
        self._counts[parameter] += 1
        assert any(bucket in unstarted for unstarted in self._unstarted), (
            f"{self._names[parameter]} got a gradient after its last one: write {self._counts[parameter]} of a step of "
            f"{self._num_micro_batches} micro-batches with {self._writes_per_micro_batch.get(parameter)} writes each; "
            "the sum over the data-parallel ranks had started without it"
        )
        if self._num_micro_batches is None or not self._writes_per_micro_batch.get(parameter):
            return
        if self._counts[parameter] == self._writes_per_micro_batch[parameter] * self._num_micro_batches:
            self._missing[bucket] -= 1
            for unstarted in self._unstarted:
                while unstarted and self._missing[unstarted[-1]] == 0:
                    self._start(unstarted.pop())

    def finish(self) -> None:
        """End a step: start the remaining buckets, and learn the writes per micro-batch."""
        for unstarted in self._unstarted:
            while unstarted:
                self._start(unstarted.pop())
        if self._num_micro_batches is None:
            return
        for parameter, count in self._counts.items():
            each, rest = divmod(count, self._num_micro_batches)
            known = self._writes_per_micro_batch.setdefault(parameter, each)
            if rest or known != each:
                self._writes_per_micro_batch[parameter] = 0


def _weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook with a weak reference to the method's object, whose memory tensors' hooks would keep for ever."""
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        bound = reference()
        if bound is not None:
            bound(parameter)

    return hook
