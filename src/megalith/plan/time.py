"""Time of a training step, predicted from what each kind of rank computes and sends; without torch.

A pass is a number of launches, each a matrix product or a pass over memory, and of collectives. A launch takes what its
FLOPs, its bytes or the launch itself take, whichever is longest; on a CPU, which launches nothing ahead, the launch
comes on top. A collective takes alpha and its bytes over the bandwidth of the narrowest link of its axis, less the time
of the products that the code computes meanwhile (nn/linear.py, parallel/context.py, optim/shards.py).

Launches are those that were seen of the real step on tensors without memory (`measure`), or follow from the
configuration (`Layers`), so that a search can rank thousands of layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2

from megalith.config import ModelConfig, RunConfig
from megalith.config.flops import attention_products, feed_forward_weights, step_flops
from megalith.plan.devices import Device, Link
from megalith.plan.work import Op, Sent, Work

PARTS = ("products", "memory", "launches", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer")
"""What a step's seconds consist of: matrix products with attention, passes over memory, launches that are longer than
what they start, communication of each axis that nothing hides, idle time of the pipeline, and the update."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the slowest rank, and the parts (`PARTS`) that they are the sum of.

    Attributes:
        mfu: model FLOPs over what the device multiplies at best (datasheet; of a CPU the best of its table).
        tokens_per_second: of all devices together.
        passes: of a micro-batch in each stage: forward, backward, and of the backward pass the weight gradients.
    """

    step_seconds: float
    mfu: float
    tokens_per_second: float
    parts: Mapping[str, float]
    passes: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Course:
    """The whole run at a step's predicted time.

    Attributes:
        tokens: that it trains.
        days: with saves, and with failures at `FAILURES` and what they undo.
        kwh: of the devices and their share of the nodes.
        goodput: part of the days in which steps are computed that are not undone.
    """

    tokens: int
    days: float
    kwh: float
    goodput: float


FAILURES = 419 / (54 * 86400 * 16384)
"""Interruptions in a second of a GPU: Llama 3 405B, arXiv:2407.21783, section 3.3.4."""
RESTART = 600.0
"""Seconds from a failure to the first step after it: assumed."""
STORAGE = 2e9
"""Bytes a second that a node writes: assumed."""
BUS, HOST_MEMORY = 1e10, 1e10
"""Bytes a second of a rank between device and host, and of an update there (`--optimizer-cpu-offload`): assumed."""


def course(run: RunConfig, time: StepTime, device: Device, *, nodes: int = 1, checkpoint: int | None = None) -> Course:
    """Return how long a run takes; saves without `--async-save` stop it, and a failure undoes half an interval.

    Args:
        checkpoint: its bytes; by default what the FLOPs of a dense model say.
    """
    length, size, world = run.data.seq_length, run.global_batch_size, run.launch.world_size
    tokens = run.batch_sizes.consumed_after(run.train_iters, 0) * length
    failures = world * FAILURES if device.compute else 0.0
    seconds = run.train_iters * time.step_seconds
    interval = min(seconds, (run.checkpoint.save_interval or run.train_iters) * time.step_seconds)
    if checkpoint is None:
        flops = time.mfu * device.peak(dtype_of(run)) * world * time.step_seconds
        checkpoint = int(14 * flops / (6 * size * length))
    saved = run.checkpoint.save is not None and not run.checkpoint.async_save
    save = checkpoint / (STORAGE * nodes) if saved else 0.0
    lost = save / interval + failures * (interval / 2 + RESTART)
    goodput = 1 / (1 + lost)
    days = tokens / time.tokens_per_second / goodput / 86400
    return Course(tokens, days, days * 24 * world * device.rates.watts / 1000, goodput)


Seen = Mapping[int, Mapping[str, Work]]
"""Stage -> operation (F, B, W, step) -> what was seen of it (`memory.RankMemory.work`)."""


def step_time(run: RunConfig, vocab_size: int, device: Device, *, nodes: int = 1, seen: Seen | None = None) -> StepTime:
    """Predict the time of a step of a run on `nodes` machines of such devices.

    Without `seen` it takes under a millisecond: a search calls it for each layout, with `dataclasses.replace` of the
    groups of one run.
    """
    return _Step(run, vocab_size, device, nodes, seen or {}).time()


def transfers(schedule: str, stages: int, chunks: int, number: int) -> float:
    """Return how many messages of a pipeline of stages that are alike nothing hides, as the simulator has them.

    1F1B waits for one there and back in nearly every micro-batch; the other schedules only as they fill and empty.
    """
    if schedule == "zb-h1":
        return 4 * (stages - 1)
    if chunks > 1 or number < stages:
        return 2 * (stages * chunks - 1)
    return 2 * (stages - 1) * number / stages + 2 * (stages - 2)


def dtype_of(run: RunConfig) -> str:
    """Return the name of the dtype of weights and activations in tables."""
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[run.precision.params_dtype]


def bubble(schedule: str, passes: Sequence[tuple[float, float, float]], chunks: int) -> float:
    """Return the idle seconds of the slowest stage of a pipeline.

    While it fills and empties, each other stage computes one micro-batch of one chunk (Narayanan et al. 2021, arXiv:
    2104.04473, section 2.2). ZB-H1 computes weight gradients meanwhile (Qi et al. 2023, arXiv:2401.10241, section 2.2).

    Args:
        passes: forward and backward seconds of a micro-batch in each stage, and of these the weight gradients'.
    """
    idle = [f + b - (2 * w if schedule == "zb-h1" else 0.0) for f, b, w in passes]
    slowest = max(range(len(passes)), key=lambda stage: sum(passes[stage][:2]))
    return sum(max(0.0, one) for stage, one in enumerate(idle) if stage != slowest) / chunks


def adapted_features(model: ModelConfig) -> int:
    """Return the inputs and outputs of the projections of a layer that have an adapter (`--lora-targets`)."""
    hidden, size = model.hidden_size, model.head_size
    queries, keys = hidden + model.num_attention_heads * size, hidden + model.query_groups * size
    own = {"q_proj": queries, "o_proj": queries, "k_proj": keys, "v_proj": keys}
    return sum(own.get(name, hidden + model.ffn_size) for name in model.lora_projections)


class Clock:
    """Seconds of launches and collectives on a device in a layout."""

    def __init__(self, run: RunConfig, device: Device, nodes: int) -> None:
        self.rates, self.layout = device.rates, run.layout
        self.dtype = dtype_of(run)
        self.local = min(max(1, run.launch.world_size // nodes), self.rates.node)

    def op(self, op: Op) -> tuple[float, float, float]:
        """Return the seconds of launches as products, passes over memory, and launching."""
        rates, (kind, _, dtype) = self.rates, op.kind.partition(" ")
        products = op.flops / rates.product(dtype, op.flops, attention=kind == "attention") if op.flops else 0.0
        memory = op.bytes / rates.passes(op.kind, op.bytes)
        product, moved = (products, 0.0) if products >= memory else (0.0, memory)
        if not rates.asynchronous:
            return product * op.number, moved * op.number, rates.launch * op.number
        if rates.launch > product + moved:
            return 0.0, 0.0, rates.launch * op.number
        return product * op.number, moved * op.number, 0.0

    def ops(self, ops: Iterable[Op]) -> float:
        return sum(sum(self.op(op)) for op in ops)

    def parts(self, work: Work) -> dict[str, float]:
        """Return the seconds of a pass by part."""
        found = dict.fromkeys(PARTS[:6], 0.0)
        for op in work.ops:
            found["products"], found["memory"], found["launches"] = (
                before + seconds for before, seconds in zip(found.values(), self.op(op), strict=False)
            )
        for one in work.sent:
            axis = {"etp": "tp", "edp": "ep"}.get(one.axis, one.axis)
            found[axis if axis in found else "tp"] += one.number * self.exposed(one)
        return found

    def exposed(self, one: Sent) -> float:
        """Return the seconds of a collective that nothing hides."""
        hidden = self.ops(one.under) if self.rates.asynchronous else 0.0
        return max(0.0, self.collective(one.axis, one.operation, one.bytes) - hidden)

    def collective(self, axis: str, operation: str, size: float) -> float:
        """Return the seconds of a collective of an axis, "edp" and "replicas" among them."""
        layout = self.layout
        ranks, stride = {
            "tp": (layout.tp, 1),
            "etp": (layout.expert_tp, 1),
            "cp": (layout.cp, layout.tp),
            "ep": (layout.ep, layout.expert_tp),
            "edp": (layout.tp * layout.cp * layout.dp // (layout.expert_tp * layout.ep), layout.expert_tp * layout.ep),
            "dp": (layout.cp * layout.dp, layout.tp),
            "pp": (layout.pp, layout.tp * layout.cp * layout.dp),
        }.get(axis, (layout.tp * layout.cp * layout.dp, 1))  # joined ones: sums of a few numbers
        if ranks == 1:
            return 0.0
        link = self.link(ranks, stride)
        if ranks * stride <= self.local:
            link = self.rates.operations.get(operation, link)
        if operation in ("send", "ring_shift"):
            return link.alpha + size / link.beta
        steps = 2 if operation == "all_reduce" else 1
        return steps * (link.alpha * log2(ranks) + size * (ranks - 1) / ranks / link.beta)

    def link(self, ranks: int, stride: int) -> Link:
        """Return the narrowest link between so many ranks, each `stride` after the other."""
        inside, between = self.rates.inside, self.rates.between
        if ranks * stride <= self.local:
            return inside
        together = max(1, self.local // stride)  # ranks of a node, each with its own way out
        return Link(between.alpha, min(inside.beta, between.beta * together))


class _Step:
    """Adds up the time of a step."""

    def __init__(self, run: RunConfig, vocab_size: int, device: Device, nodes: int, seen: Seen) -> None:
        self.run, self.vocab_size, self.device, self.seen = run, vocab_size, device, seen
        self.clock, self.layers, self.stages = Clock(run, device, nodes), Layers(run, vocab_size), run.stages
        self._experts, self._windows, self._recompute = run.model.experts, run.model.windows, run.recompute
        self._passes: dict[tuple[int, int | None], dict[str, dict[str, float]]] = {}

    def time(self) -> StepTime:
        run, layout = self.run, self.run.layout
        number, chunks = run.num_micro_batches, len(self.stages[0])
        stages = self._all_stages()
        sums = [sum(f.values()) + sum(b.values()) for f, b, _ in stages]
        slowest = max(range(layout.pp), key=lambda stage: sums[stage])
        forward, backward, _ = stages[slowest]
        parts = dict.fromkeys(PARTS, 0.0)
        for name in PARTS[:6]:
            parts[name] = number * (forward[name] + backward[name])
        parts["launches"] += number * (self.clock.rates.host + self.clock.rates.layer * self._layer_passes(slowest))
        passes = [(sum(f.values()), sum(b.values()), w) for f, b, w in stages]
        parts["bubble"] = bubble(run.pipeline_schedule, passes, chunks)
        if layout.pp > 1:
            sent = transfers(run.pipeline_schedule, layout.pp, chunks, number)
            parts["pp"] = sent * self.clock.collective("pp", "send", self.layers.hidden_bytes)
        self._update(slowest, sum(forward.values()), sum(backward.values()), parts)
        slower = 1 / self.clock.rates.efficiency / self.clock.rates.steps.get(self.clock.dtype, 1.0)
        parts = {name: slower * value for name, value in parts.items()}
        passes = [(slower * f, slower * b, slower * w) for f, b, w in passes]
        seconds, length = sum(parts.values()), run.data.seq_length
        flops = step_flops(run.model, self.vocab_size, length, run.global_batch_size)
        peak = self.device.peak(self.clock.dtype) * layout.world_size
        speed = run.global_batch_size * length / seconds
        return StepTime(seconds, flops / seconds / peak, speed, parts, passes)

    def _all_stages(self) -> list[tuple[dict[str, float], dict[str, float], float]]:
        """Return `_stage` of each, computed once for those that are alike."""
        if len(set(zip(self._experts, self._windows, strict=True))) > 1:
            return [self._stage(stage) for stage in range(len(self.stages))]
        keys = [(n == 0, n == len(self.stages) - 1, *map(len, chunks)) for n, chunks in enumerate(self.stages)]
        found = {key: self._stage(number) for key, number in {key: n for n, key in enumerate(keys)}.items()}
        return [found[key] for key in keys]

    def _layer_passes(self, stage: int) -> int:
        """Return the number of layers of a stage, those that are recomputed twice."""
        return sum(len(chunk) + len(self._repeated(len(chunk))) for chunk in self.stages[stage])

    def _repeated(self, layers: int) -> set[int]:
        """Return which layers of a chunk of so many are recomputed."""
        groups = self._recompute.groups(layers) if self._recompute else ()
        return {layer for group in groups if group.again for layer in group.layers}

    def _stage(self, stage: int) -> tuple[dict[str, float], dict[str, float], float]:
        """Return the parts of forward and backward passes of a micro-batch, and the seconds of weight gradients."""
        if stage in self.seen:
            forward, backward, weight = (self.clock.parts(self.seen[stage][name]) for name in ("F", "B", "W"))
            return forward, _sum(backward, weight), sum(weight.values())
        recompute = self._recompute
        forward, backward, delayed = self.clock.parts(Work()), self.clock.parts(Work()), 0.0
        kinds: Counter[tuple[int, int | None, bool]] = Counter()
        for chunk in self.stages[stage]:
            repeated = self._repeated(len(chunk))
            kinds.update((self._experts[n], self._windows[n], place in repeated) for place, n in enumerate(chunk))
        for (experts, window, again), times in kinds.items():
            passes = self._layer(experts, window)
            more = passes["F"] if again else passes["core"] if recompute and not recompute.method else {}
            for name in PARTS[:6]:
                forward[name] += times * passes["F"][name]
                backward[name] += times * (passes["B"][name] + more.get(name, 0.0))
            delayed += times * sum(passes["W"].values())
        if stage == 0:
            forward = _sum(forward, self.clock.parts(self.layers.embedding()))
        if stage == len(self.stages) - 1:
            backward = _sum(backward, self.clock.parts(self.layers.loss()))
        return forward, backward, delayed

    def _layer(self, experts: int, window: int | None) -> dict[str, dict[str, float]]:
        if (experts, window) not in self._passes:
            works = self.layers.passes(experts, window)
            self._passes[experts, window] = {name: self.clock.parts(work) for name, work in works.items()}
        return self._passes[experts, window]

    @property
    def _offloaded(self) -> float:
        return self.run.optimizer.offloaded if self.device.compute else 0.0

    def _update(self, stage: int, forward: float, backward: float, parts: dict[str, float]) -> None:
        """Add the communication of gradients and weights between replicas, and the update."""
        run, layout, clock = self.run, self.run.layout, self.clock
        ends = (stage == 0) + (stage == layout.pp - 1)
        if layout.pp == 1 and not run.model.untie_embeddings_and_output_weights:
            ends = 1
        kinds = [self._experts[layer] for chunk in self.stages[stage] for layer in chunk]
        dense, sparse = self.layers.parameters(kinds, ends)
        if run.model.family.encoder_decoder:  # two attentions in each layer of the decoder
            decoder = run.model.num_decoder_layers
            dense += (
                self.layers.parameters([0] * decoder, 0)[0] + 2 * decoder * attention_products(run.model, 0) / layout.tp
            )
        if run.model.lora_rank is not None:
            dense, sparse = len(kinds) * run.model.lora_rank * adapted_features(run.model) / layout.tp, 0.0
        itemsize = self.layers.itemsize
        gradient = 4 if run.precision.grads_in_fp32 else itemsize
        zero1, sharded = run.parallel.shards_optimizer_only, run.fully_sharded
        own = 0.0
        for axis, count in (("dp", dense), ("edp", sparse)):
            ranks = layout.cp * layout.dp
            if axis == "edp":
                ranks = layout.tp * ranks // (layout.expert_tp * layout.ep)
            own += count / (ranks if zero1 or sharded else 1)
            if ranks == 1 or not count:
                continue
            buckets = max(1, ceil(count / max(40_000_000, 1_000_000 * ranks)))
            if sharded:  # a layer is gathered and reduced at once, and the rest
                buckets = len(kinds) + 1
            parts_of = buckets if sharded else 1
            scatters = (zero1 or sharded) and clock.rates.asynchronous  # gloo sums all of it in place
            way = "reduce_scatter" if scatters else "all_reduce"
            reduced = parts_of * clock.collective(axis, way, count * gradient / parts_of)
            gathered = parts_of * clock.collective(axis, "all_gather", count * itemsize / parts_of)
            moves = [(run.num_micro_batches if sharded else 1, reduced, backward)]
            if sharded and run.parallel.reshard_after_forward:  # tables of the vocabulary stay to the end of both
                tables = ends * self.vocab_size * run.model.hidden_size / layout.tp / count * (axis == "dp")
                again = gathered * (1 - tables)
                moves += [(run.num_micro_batches, *one) for one in ((gathered, forward), (again, backward))]
            elif sharded or zero1:
                moves += [(1, gathered, forward)]
            for times, seconds, meanwhile in moves:
                hidden = meanwhile * (1 - 1 / buckets) if clock.rates.asynchronous else 0.0
                parts["dp"] += times * max(seconds / buckets, seconds - hidden)
        moved = self._offloaded * own
        parts["optimizer"] += moved * (4 + itemsize) / BUS + moved * (32 if itemsize == 2 else 28) / HOST_MEMORY
        if stage in self.seen:
            update = self.seen[stage]["step"]
            here = (1 - self._offloaded) * clock.ops(update.ops)
            parts["optimizer"] += here + sum(one.number * clock.exposed(one) for one in update.sent)
            return
        # the norm reads gradients; AdamW reads and writes master weights and two moments, and writes the weights
        moved = own * (2 * gradient + 24 + (itemsize if itemsize < 4 else 0))
        parts["optimizer"] += (1 - self._offloaded) * clock.ops([Op(0, moved / 16, 16)])


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: value + other[name] for name, value in one.items()}


class Layers:
    """What a rank computes and sends in a layer, in the embedding and in the loss, for a micro-batch."""

    def __init__(self, run: RunConfig, vocab_size: int) -> None:
        self.run, self.model, self.layout, self.vocab_size = run, run.model, run.layout, vocab_size
        self.dtype = dtype_of(run)
        self.itemsize = 4 if run.precision.params_dtype == "float32" else 2
        self.tokens = run.train.micro_batch_size * run.data.seq_length / self.layout.cp
        self.sequence = run.parallel.sequence_parallel_here
        shards = self.layout.tp if self.sequence else 1
        self.hidden_bytes = self.tokens * self.model.hidden_size * self.itemsize / shards

    def parameters(self, kinds: Iterable[int], ends: int) -> tuple[float, float]:
        """Return the parameters of a rank outside of experts, and in them.

        Args:
            kinds: number of experts of each of its layers.
            ends: tables of the vocabulary that it has.
        """
        model, tp = self.model, self.layout.tp
        dense = sparse = 0.0
        for experts, times in Counter(kinds).items():
            dense += times * (2 * attention_products(model, 0) / tp + 2 * model.hidden_size)
            if experts:
                one = 2 * (feed_forward_weights(model, 2) - feed_forward_weights(model, 1))
                sparse += times * experts * one / (self.layout.ep * self.layout.expert_tp)
                dense += times * ((2 * feed_forward_weights(model, 1) - one) / tp + experts * model.hidden_size)
            else:
                dense += times * 2 * feed_forward_weights(model, 0) / tp
        return dense + ends * self.vocab_size * model.hidden_size / tp, sparse

    def embedding(self) -> Work:
        moved = Op(0, 3 * self.hidden_bytes, 3)
        return Work((moved,), self._reduced("F", 1) if self.layout.tp > 1 else ())

    def loss(self) -> Work:
        """Return logits, loss and their gradients: all three products, in one pass."""
        logits = self.tokens * self.vocab_size / self.layout.tp
        product = self._product(self.tokens, self.model.hidden_size, self.vocab_size / self.layout.tp)
        chunks = max(1.0, logits / 2**24)  # rows are taken in chunks (nn/loss.py)
        heads = 1 + self.model.predictions
        return Work(
            (product._replace(number=3.0 * heads), Op(0, 18 * logits / (24 * chunks), 24 * chunks * heads)),
            self._reduced("F", 2) if self.layout.tp > 1 else (),
        )

    def _product(self, rows: float, inner: float, columns: float) -> Op:
        moved = (rows * (inner + columns) + inner * columns) * self.itemsize
        return Op(2 * rows * inner * columns, moved, kind=f"product {self.dtype}")

    def _pass(self, tensors: float, launches: float, size: float) -> Op:
        """Return launches that read and write `tensors` tensors of `size` bytes together."""
        return Op(0, tensors * size / launches, launches)

    def passes(self, experts: int, window: int | None) -> Mapping[str, Work]:
        """Return the forward (F) and the backward pass (B), of which weight gradients (W), and attention (core)."""
        model, layout, rows = self.model, self.layout, self.tokens
        tp, hidden, heads = layout.tp, model.hidden_size, model.num_attention_heads
        size = model.v_head_dim if model.multi_latent_attention else model.head_size
        context = heads * size / tp
        queries = (2 * attention_products(model, 0) / hidden - heads * size) / tp
        seen = self.run.data.seq_length / 2 if window is None else min(window, self.run.data.seq_length / 2)
        scores = 4 * rows * (attention_products(model, round(2 * seen)) - attention_products(model, 0)) / tp
        whole = rows * hidden * self.itemsize
        core = Op(scores, (2 * context + queries) * rows * self.itemsize, kind=f"attention {self.dtype}")
        if not model.fused_attention:  # scores, mask, softmax and dropout are passes of their own
            unfused = self._pass(8, 6, rows * 2 * seen * heads / tp * self.itemsize)
        else:
            unfused = Op(0, 0, 0)
        norm = self._pass(2, 1, self.hidden_bytes)
        dropout = model.hidden_dropout > 0
        add = self._pass(6 if dropout else 3, 3 if dropout else 1, self.hidden_bytes)
        heads_apart = self._pass(11, 4, rows * context * self.itemsize)
        rope = self._pass(6, 6, rows * queries * self.itemsize) if model.rotary_size else Op(0, 0, 0)
        products = [self._product(rows, hidden, queries), self._product(rows, context, hidden)]
        ops = [norm, core, unfused, add, norm, add, rope, heads_apart]
        if layout.cp > 1 and "a2a" not in self.run.parallel.cp_comm_type:  # contexts are merged in fp32
            ops += [self._pass(12 * layout.cp, 8 * layout.cp, rows * context * 4)]
        gates = 2 if model.gated else 1
        if experts:
            width, chosen = model.expert_size / layout.expert_tp, model.moe_router_topk
            local = experts / layout.ep  # of a balanced router each expert gets as many rows
            each = rows * chosen * (layout.tp / layout.expert_tp if layout.etp is not None else 1) / local
            ops += [self._pass(13 * chosen, 30, whole)]
            grouped = [self._product(each, hidden, gates * width), self._product(each, width, hidden)]
            products += [one._replace(flops=one.flops * local, bytes=one.bytes * local) for one in grouped]
            ops += [self._pass(1 + gates, gates, rows * chosen * width * self.itemsize)]
            if shared := model.moe_shared_expert_intermediate_size or 0:
                products += [self._product(rows, hidden, gates * shared / tp), self._product(rows, shared / tp, hidden)]
        else:
            width = model.ffn_size / tp
            products += [self._product(rows, hidden, gates * width), self._product(rows, width, hidden)]
            ops += [self._pass(1 + gates, gates, rows * width * self.itemsize)]
        if model.add_bias_linear:
            columns = sum(one.flops for one in products) / (2 * rows * hidden)  # of all products together
            ops += [self._pass(0.7, 4, rows * columns * self.itemsize)]
        weights = [one._replace(bytes=one.bytes + 8 * one.flops / (2 * rows)) for one in products]
        if model.lora_rank is not None:
            weights = []  # adapters' are small
        backward = [op._replace(number=2 * op.number) for op in ops if op.kind == "memory"]
        backward += [core._replace(flops=2.5 * scores, bytes=2 * core.bytes), *products, *weights]
        sent: dict[str, tuple[Sent, ...]] = {"F": (), "B": ()}
        if tp > 1:
            sent = {"F": self._reduced("F", 2), "B": self._reduced("B", 2, tuple(products[1:3]))}
        for way, factor in (("F", 1), ("B", 2)):
            sent[way] += self._context(factor, core) + self._experts(experts, whole)
        return {
            "F": Work((*products, *ops), sent["F"]),
            "B": Work(tuple(backward), sent["B"]),
            "W": Work(tuple(weights)),
            "core": Work((core, unfused)),
        }

    def _reduced(self, way: str, times: int, under: tuple[Op, ...] = ()) -> tuple[Sent, ...]:
        """Return the collectives of tensor parallelism around `times` pairs of column and row layers."""
        size = self.tokens * self.model.hidden_size * self.itemsize
        if not self.sequence:
            return (Sent("tp", "all_reduce", size, times, under[:1]),)
        around = Sent("tp", "all_gather", size, times), Sent("tp", "reduce_scatter", size, times, under[:1])
        again = Sent("tp", "all_gather", size, times, under[1:])
        return around if way == "F" else (*around, again)

    def _context(self, factor: int, core: Op) -> tuple[Sent, ...]:
        """Return what context parallelism sends: keys and values around the ring, or heads for sequence."""
        model, ranks = self.model, self.layout.cp
        if ranks == 1:
            return ()
        keys = 2 * self.tokens * model.query_groups * model.head_size * self.itemsize / self.layout.tp
        if "a2a" in self.run.parallel.cp_comm_type:
            queries = 2 * self.tokens * model.num_attention_heads * model.head_size * self.itemsize / self.layout.tp
            return (Sent("cp", "all_to_all", (keys + queries) / 2, 2),)
        step = core._replace(flops=factor * core.flops / ranks, bytes=core.bytes / ranks)
        return (Sent("cp", "ring_shift", factor * keys, ranks - 1, (step,)),)

    def _experts(self, experts: int, whole: float) -> tuple[Sent, ...]:
        """Return what expert parallelism sends: tokens to their experts, and sums back."""
        if not experts or self.layout.ep == 1:
            return ()
        ranks = self.layout.ep
        if self.run.model.moe_token_dispatcher_type == "allgather":
            return Sent("ep", "all_gather", ranks * whole), Sent("ep", "reduce_scatter", ranks * whole)
        return (Sent("ep", "all_to_all", whole * min(self.model.moe_router_topk, ranks - 1), 2),)
