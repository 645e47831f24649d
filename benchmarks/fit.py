"""How much memory the most loaded GPU of a run needs, counted by running a step of it without data or devices.

    python benchmarks/fit.py --config recipes/gpt3-1.3b-4gpu.toml --gpus 4 [FLAGS OF megalith train]

Each stage of the pipeline is built on torch's meta device, whose tensors have shapes and no memory, with the layout and
the capability of the card that the run is for, and without the other ranks: collectives return what they are given. The
bytes of all tensors are followed through forward and backward passes of as many micro-batches as the pipeline schedule
has under way on that stage, and through the update. What is not seen: the context of the device and of NCCL, the memory
that cuBLAS takes, and the gaps between blocks of torch's allocator (`RESERVED`). Attention is that of torch's flash or
memory-efficient kernel. How many tokens the experts of a rank get follows from values: `ROWS` says what is assumed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith import device as devices
from megalith.assemble.model import build_chunks, build_run_optimizer
from megalith.config import RunConfig, load
from megalith.device import Capability, nvidia
from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.distributed.p2p import AsyncHandle
from megalith.distributed.rng import Stream
from megalith.errors import MegalithError
from megalith.models.language_model import LanguageModel
from megalith.nn.moe import grouped, permutation
from megalith.optim.optimizer import Optimizer
from megalith.parallel import experts
from megalith.train.step import MicroBatchRunner

META = torch.device("meta")
MIB = 2**20
RESERVED = 1.5, 0.92
"""GiB of a card for contexts, NCCL and cuBLAS; and the part of the rest that torch's allocator fills with blocks."""
ROWS = 2
"""Times the tokens that a balanced router would send to the experts of one rank, where other ranks hold others."""
CARDS = {
    16: nvidia("Tesla T4", (7, 5), 16 * 2**30),
    24: nvidia("NVIDIA GeForce RTX 4090", (8, 9), 24 * 2**30),
    32: nvidia("Tesla V100S-PCIE-32GB", (7, 0), 32 * 2**30),
    40: nvidia("NVIDIA A100-SXM4-40GB", (8, 0), 40 * 2**30),
    80: nvidia("NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30),
}
"""A card of each size that recipes name, in GiB."""


@dataclass(frozen=True)
class Need:
    """Bytes of one rank.

    Attributes:
        weights: in the dtype of the model.
        gradients: their buffers.
        optimizer: fp32 master weights and moments.
        kept: activations that one micro-batch keeps from its forward to its backward pass.
        peak: the most at once.
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int
    kept: int
    peak: int


def room(gib: int) -> int:
    """Return the bytes of a card that a run may count on."""
    gap, part = RESERVED
    return int((gib - gap) * part * 2**30)


class Live(TorchDispatchMode):
    """Follows the bytes of all tensors on the meta device: `now` and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device == META:
                self.add(tensor)
        return out

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, unless it is known."""
        memory = tensor.untyped_storage()
        if memory in self._known:
            return
        self._known.add(memory)
        size = -(-memory.nbytes() // 512) * 512  # of a block of torch's allocator
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count further bytes within the block."""
        self.now += size
        self.peak = max(self.peak, self.now)
        yield
        self.now -= size


def context_of(run: RunConfig, rank: int) -> ParallelContext:
    """Return the context of a rank without process groups."""
    layout = run.layout
    solo = ParallelContext.solo(META)
    axes = {}
    for names in solo.axes:
        ordered = solo.axes[names].name.split("+")
        (ranks,) = (ranks for ranks in layout.groups(*ordered) if rank in ranks)
        axes[names] = Axis("+".join(ordered), ranks, ranks.index(rank))
    ends = None
    for ranks in layout.groups("pp") if layout.pp > 1 else ():
        pair = (ranks[0], ranks[-1])
        ends = Axis("ends", pair, pair.index(rank)) if rank in pair else ends
    return ParallelContext(layout, rank, META, axes, ends)


def _sdpa(able: Capability) -> Callable[..., Tensor]:
    """Return torch SDPA as the fused kernel of a card, which the meta device itself has not."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, **options: Any
    ) -> Tensor:
        scale, aten = options["scale"], torch.ops.aten
        if mask is None and "flash" in able.attention:
            return torch.as_tensor(aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        kernel = aten._scaled_dot_product_efficient_attention
        return torch.as_tensor(kernel(q, k, v, mask, True, dropout, causal, scale=scale)[0])

    return attend


@contextmanager
def routed(run: RunConfig) -> Iterator[None]:
    """Let the experts of the rank get `ROWS` times their share of all tokens, and others what a balanced router sends.

    Numbers of tokens are tensors on the host here.
    """
    chosen, ranks = run.model.moe_router_topk, run.layout.ep
    places, by_all_to_all = min(chosen, ranks), run.model.moe_token_dispatcher_type != "allgather"

    def balanced(choices: Tensor, number: int) -> Tensor:
        """Count the choices of each of `number` - 1 experts or ranks, and those that are left out: none."""
        return torch.tensor([*_divided(choices.numel(), number - 1), 0])

    def sent(choices: Tensor, number: int) -> Tensor:
        return balanced(choices[: choices.numel() * places // chosen], number)  # each token once to a rank

    def local(experts_TK: Tensor, here: range) -> permutation.Order:
        received = experts_TK.numel()  # choices, of other ranks' experts too
        own = received // places if by_all_to_all else min(received, ROWS * received // ranks)
        return permutation.order_by_expert(experts_TK, len(here), _divided(own, len(here)))

    def exchanged(x: Tensor, *where: Any, **dims: int) -> Tensor:
        return x * ROWS if x.device != META else all_to_all(x, *where, **dims)

    all_to_all = comm.all_to_all
    with (
        mock.patch.object(permutation, "count_choices", balanced),
        mock.patch.object(experts, "count_choices", sent),
        mock.patch.object(experts, "_order_local", local),
        mock.patch.object(comm, "all_to_all", exchanged),
        mock.patch.object(grouped, "to_device", lambda x, device: x.to(device)),
    ):
        yield


def _divided(total: int, number: int) -> list[int]:
    return [total // number + (place < total % number) for place in range(number)]


def count(words: Sequence[str], gib: int, *, vocab_size: int = 50304, world_size: int = 1) -> list[Need]:
    """Count the bytes of the first rank of each stage of the pipeline.

    Args:
        words: of the command line of `megalith train`.
        gib: memory of the card, one of `CARDS`.
        vocab_size: padded.
        world_size: number of GPUs.
    """
    run = load(list(words), {"RANK": "0", "WORLD_SIZE": str(world_size)}, files=False)
    if run.fully_sharded:
        raise MegalithError("FSDP2 cannot be counted without memory and other ranks")
    first_ranks = [run.layout.rank({"tp": 0, "cp": 0, "dp": 0, "pp": stage}) for stage in range(run.layout.pp)]
    with (
        mock.patch.dict(devices.DESCRIBED, {META: CARDS[gib]}),
        mock.patch.object(comm, "_start", lambda *_: None),
        mock.patch.object(comm, "start_ring_shift", lambda x, axis: AsyncHandle(torch.empty_like(x))),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _sdpa(CARDS[gib])),
        routed(run),
    ):
        return [_count_rank(run, rank, vocab_size) for rank in dict.fromkeys((first_ranks[0], first_ranks[-1]))]


def _count_rank(run: RunConfig, rank: int, vocab_size: int) -> Need:
    context = context_of(run, rank)
    with Live() as live:
        chunks = build_chunks(run, vocab_size, context, Stream(1))
        weights = live.now
        optimizer = build_run_optimizer(run, chunks, context)
        gradients = _bytes([optimizer.gradients.flat])  # type: ignore[union-attr]
        fixed = live.now
        kept = _passes(run, context, chunks, optimizer, live)
        optimizer.measure()
        optimizer.complete_step([0.0, 1e6, 0.0], 1e-4, 0.1)
    return Need(rank, weights, gradients, fixed - weights - gradients, kept, live.peak)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _passes(
    run: RunConfig, context: ParallelContext, chunks: Sequence[LanguageModel], optimizer: Optimizer, live: Live
) -> int:
    """Run the passes of a step; return the bytes that one micro-batch of one chunk keeps."""
    stages, number = run.layout.pp, run.num_micro_batches
    ahead = min(number * len(chunks), (stages - context.pp.index) + (len(chunks) - 1) * stages)
    shape = (run.train.micro_batch_size, run.data.seq_length)
    ids = {name: torch.zeros(shape, dtype=torch.int64, device=META) for name in ("tokens", "labels", "position_ids")}
    batch = {**ids, "loss_mask": torch.ones(shape, device=META)}
    run_here = min(ahead, 1 + len(chunks))  # the others keep what the last of these does
    runner = MicroBatchRunner(chunks, iter([batch] * (run_here + 1)), context, num_micro_batches=number)
    optimizer.zero_grad(number)
    for model in chunks:
        model.train()
    outputs, kept = [], 0
    for micro_batch in range(run_here):
        before, chunk, hidden = live.now, micro_batch % len(chunks), None
        if not chunks[chunk].stage.is_first:
            size, dtype = runner.activation_shape(micro_batch)
            hidden = torch.empty(size, dtype=dtype, device=META, requires_grad=True)
        outputs.append(runner.forward(chunk, micro_batch, hidden))
        kept = live.now - before
    with live.held((ahead - run_here) * kept):
        _differentiate(outputs.pop(0))
    while outputs:
        _differentiate(outputs.pop(0))
    return kept


def _differentiate(output: Tensor) -> None:
    output.backward(None if output.dim() == 0 else torch.empty_like(output))


def needed(path: Path, *, vocab_size: int = 50304) -> tuple[int, list[Need]]:
    """Return the GiB of a card that the head of a recipe names, and what its ranks need."""
    text = path.read_text(encoding="utf-8")
    gpus, gib = (re.search(rf"^# {name}: (\d+)", text, re.MULTILINE) for name in ("GPUs", "GiB of a GPU"))
    if gpus is None or gib is None:
        raise MegalithError(f"{path}: its head does not say '# GPUs: N' and '# GiB of a GPU: N'")
    return int(gib[1]), count(
        ["--config", str(path)], int(gib[1]), vocab_size=vocab_size, world_size=max(1, int(gpus[1]))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (default: %(default)s)")
    parser.add_argument(
        "--gib", type=int, default=24, choices=CARDS, help="memory of each in GiB (default: %(default)s)"
    )
    parser.add_argument("--vocab-size", type=int, default=50304, help="padded (default: %(default)s)")
    options, words = parser.parse_known_args()
    needs = count(words, options.gib, vocab_size=options.vocab_size, world_size=options.gpus)
    for need in needs:
        print(
            json.dumps({name: round(value / MIB) if name != "rank" else value for name, value in asdict(need).items()})
        )
    most = max(need.peak for need in needs)
    limit = room(options.gib)
    print(f"{most / 2**30:.1f} GiB; {limit / 2**30:.1f} of a card of {options.gib} are there")
    return 0 if most <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
