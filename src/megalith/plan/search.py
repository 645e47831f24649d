"""The fastest layouts of a model that fit its devices, by predicted time and planned memory.

A layout says how many ranks tensor, context, pipeline and expert parallelism have, and the schedule; its variants are
micro-batch size, sequence parallelism, ZeRO-1 and recomputation. Layouts are visited in the order of a time below that
of all their variants, variants in the order of their own. The first that the rules of a configuration and the memory
allow are the fastest: nothing that is skipped could be among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, product
from typing import Any

from megalith.config import RunConfig
from megalith.config.command_line import words_of
from megalith.config.flops import step_flops
from megalith.config.rules import RULES
from megalith.config.rules.rule import Draft
from megalith.config.run import all_settings
from megalith.plan.bound import least_bytes
from megalith.plan.devices import GIB, Device
from megalith.plan.memory import RankMemory
from megalith.plan.time import StepTime, step_time
from megalith.progress import Task
from megalith.tokenizers.protocol import padded_vocab_size

MOST = 32  # samples of a micro-batch that are tried
_FEWEST_TOKENS = 256  # of a sequence on a context-parallel rank
_NAMES = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_schedule": "auto",
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "micro_batch_size": 1,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
}
"""What a search chooses, with the value of a run on one device."""
SEARCHED = (
    *_NAMES,
    *("num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage"),
    *("use_torch_fsdp2", "use_megatron_fsdp", "data_parallel_sharding_strategy", "torch_fsdp2_reshard_after_forward"),
    *("recompute_modules", "moe_layer_recompute"),
)
"""Settings that a search sets or leaves out."""
ALONE = tuple(name for name, value in _NAMES.items() if value == 1 and value is not False)
"""Sizes of a run on one device."""
_OF_LAYOUT = tuple(_NAMES)[:9]
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_CORE = {"recompute_granularity": "selective"}

Values = Mapping[str, Any]
Memory = Callable[[RunConfig, int], Sequence[RankMemory]]
"""Plans the memory of a run with a padded vocabulary."""


@dataclass(frozen=True)
class Choice:
    """A run with a layout, its padded vocabulary, the time of its steps, and what the fullest rank needs."""

    run: RunConfig
    vocab_size: int
    time: StepTime
    peak_bytes: int
    values: Values

    def flags(self) -> list[str]:
        """Return the flags of what differs from one device, and of the micro-batch."""
        differs = {name: value != _NAMES[name] or name == "micro_batch_size" for name, value in self.values.items()}
        return words_of({name: value for name, value in self.values.items() if differs[name]})


@dataclass
class Found:
    """What a search has found.

    Attributes:
        best: layouts, the fastest first.
        reasons: why neighbours of the first are not: a change of flags, and what is wrong with it.
        layouts, tried: number of layouts, and of variants whose time was computed.
        planned: number of variants whose memory was planned.
        least: bytes by which the closest layout that was planned is short; None if none was.
        fewest: bytes of weights, gradients and optimizer states in the layout that needs the fewest; None without any.
    """

    best: list[Choice] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)
    layouts: int = 0
    tried: int = 0
    planned: int = 0
    least: int | None = None
    fewest: int | None = None


class Search:
    """A search over the layouts of a run.

    Args:
        base: the run on one device, whose global batch size is kept.
        tokens: size of the vocabulary before padding; None if the run sets the padded one.
        memory: plans the memory of a run.
    """

    def __init__(
        self, base: RunConfig, device: Device, *, world_size: int, nodes: int, tokens: int | None, memory: Memory
    ) -> None:
        launch = replace(base.launch, world_size=world_size, local_world_size=world_size // nodes)
        batch = base.train.global_batch_size or base.train.micro_batch_size * world_size
        plain = {name: all_settings()[name] for name in SEARCHED}
        parallel, train = (
            {name: one.default for name, one in plain.items() if one.group == group and not one.required}
            for group in ("parallel", "train")
        )
        self.base = replace(
            base,
            launch=launch,
            parallel=replace(base.parallel, **parallel),
            train=replace(base.train, **train, global_batch_size=batch),
        )
        self.device, self.world_size, self.nodes, self.tokens, self.memory = device, world_size, nodes, tokens, memory
        self.found = Found()
        self._full: dict[Any, int] = {}  # variant without its micro-batch -> the smallest that does not fit
        self._peaks: dict[Any, int] = {}
        self._states: dict[Any, int] = {}

    def best(self, number: int, task: Task | None = None) -> Found:
        """Return the `number` fastest layouts that fit."""
        order, heap = count(), list[tuple[float, int, Values, bool]]()
        for layout in self.layouts():
            self.found.layouts += 1
            heappush(heap, (self.least_seconds(layout), next(order), layout, False))
        chosen: set[tuple[Any, ...]] = set()
        while heap and len(self.found.best) < number:
            seconds, _, values, is_variant = heappop(heap)
            key = tuple(values[name] for name in _OF_LAYOUT)
            if key in chosen:
                continue
            if task is not None:
                task.advance(1, f"{self.found.planned} planned, {len(self.found.best)} found")
            if not is_variant:
                for variant in self.variants(values):
                    short = self.least(variant) > self.room
                    for one in self._recomputing(variant) if short else (variant,):
                        if not short or self.least(one) <= self.room:
                            heappush(heap, (self.time_of(one).step_seconds, next(order), one, True))
                continue
            if self.allowed(values) and self.fits(values):
                chosen.add(key)
                run, vocab_size = self.run_of(values)
                peak = self._peaks[tuple(values.items())]
                self.found.best.append(Choice(run, vocab_size, self.time_of(values), peak, values))
            elif values["recompute_granularity"] is None:
                for again in self._recomputing(values):
                    heappush(heap, (max(seconds, self.time_of(again).step_seconds), next(order), again, True))
        return self.found

    def layouts(self) -> Iterator[Values]:
        """Yield all layouts whose sizes divide what they are to divide; the rules may refuse more."""
        model, world, batch = self.base.model, self.world_size, self.base.global_batch_size
        length, local = self.base.data.seq_length, min(self.world_size // self.nodes, self.device.rates.node)
        for tp, cp, (pp, embedding, loss) in product(_divisors(local), _divisors(world), _stages(model.num_layers)):
            rest, left = divmod(world, tp * cp * pp)
            uneven = left or rest == 0 or batch % max(1, rest) or model.num_attention_heads % tp or model.ffn_size % tp
            short = cp > 1 and (length % (2 * cp) or length // cp < _FEWEST_TOKENS)
            if uneven or short or (model.query_groups % tp and tp % model.query_groups):
                continue
            layout = {**_NAMES, **dict(zip(_OF_LAYOUT, (tp, cp, pp), strict=False))}
            layout["account_for_embedding_in_pipeline_split"] = embedding
            layout["account_for_loss_in_pipeline_split"] = loss
            units = (model.num_layers + embedding + loss) // pp
            for chunks, schedule in self._schedules(pp, units, batch // rest):
                own = {**layout, "num_virtual_stages_per_pipeline_rank": chunks, "pipeline_schedule": schedule}
                for ep, etp in self._experts(tp, cp * rest):
                    whole = {**own, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
                    held = self._held({**whole, "use_distributed_optimizer": True})
                    self.found.fewest = min(held, self.found.fewest or held)
                    if held <= self.room:
                        yield whole

    def _schedules(self, pp: int, units: int, samples: int) -> Iterator[tuple[int | None, str]]:
        yield None, "auto"
        if pp > 1:
            yield None, "zb-h1"
            yield from ((chunks, "auto") for chunks in _divisors(units)[1:] if samples % pp == 0)

    def _experts(self, tp: int, replicas: int) -> Iterator[tuple[int, int | None]]:
        number = self.base.model.num_experts or 1
        for ep in _divisors(number):
            if replicas % ep == 0:
                yield ep, None
            if number > 1 and tp > 1 and tp * replicas % ep == 0:
                yield ep, 1

    def variants(self, layout: Values) -> Iterator[Values]:
        """Yield the variants of a layout without recomputation."""
        tp, pp = layout["tensor_model_parallel_size"], layout["pipeline_model_parallel_size"]
        replicas = self.world_size // (tp * pp * layout["context_parallel_size"])
        samples = self.base.global_batch_size // replicas
        sizes = [2**n for n in range(MOST.bit_length()) if samples % 2**n == 0]
        divided = (False, True) if replicas * layout["context_parallel_size"] > 1 else (False,)
        for size, sequence, zero1 in product(sizes, (False, True) if tp > 1 else (False,), divided):
            yield {
                **layout,
                "micro_batch_size": size,
                "sequence_parallel": sequence,
                "use_distributed_optimizer": zero1,
            }

    def _recomputing(self, values: Values) -> Iterator[Values]:
        if self.base.model.saves_attention_probabilities:
            yield {**values, **_CORE}
        yield {**values, **_FULL}

    def run_of(self, values: Values) -> tuple[RunConfig, int]:
        """Return the run of a layout, and its padded vocabulary."""
        parallel = {name: value for name, value in values.items() if hasattr(self.base.parallel, name)}
        train = {name: value for name, value in values.items() if name not in parallel}
        base = self.base
        run = replace(base, parallel=replace(base.parallel, **parallel), train=replace(base.train, **train))
        if self.tokens is None:
            return run, base.data.padded_vocab_size or 0
        divisor = base.model.make_vocab_size_divisible_by
        return run, padded_vocab_size(self.tokens, divisor, run.parallel.tensor_model_parallel_size)

    def time_of(self, values: Values) -> StepTime:
        self.found.tried += 1
        return step_time(*self.run_of(values), self.device, nodes=self.nodes)

    def least_seconds(self, layout: Values) -> float:
        """Return a time below that of all variants: all products at the best rate, with the pipeline's bubble."""
        run, vocab_size = self.run_of(layout)
        model, length, batch = run.model, run.data.seq_length, run.global_batch_size
        best = self.device.rates.best * self.world_size
        pp, chunks = run.layout.pp, run.parallel.num_virtual_stages_per_pipeline_rank or 1
        if run.pipeline_schedule == "zb-h1" or pp == 1:
            return step_flops(model, vocab_size, length, batch) / best
        fewest = 1 - (pp if run.stages[0] != run.stages[-1] else 0) / model.num_layers  # of layers, on stages at an end
        layers = max(0.0, fewest) * step_flops(model, 0, length, batch)
        bubble = layers * (pp - 1) / (chunks * (batch // run.layout.dp))
        return (step_flops(model, vocab_size, length, batch) + bubble) / best

    def allowed(self, values: Values) -> bool:
        """Return whether a training would start."""
        draft = Draft(self.run_of(values)[0], self.base.given | set(values))
        return not any(rule.broken(draft) for rule in RULES)

    @property
    def room(self) -> float:
        """Return the bytes that tensors may take; all where the memory of the device is not known."""
        return self.device.room if self.device.gib else float("inf")

    def fits(self, values: Values) -> bool:
        """Return whether the fullest rank fits."""
        run, vocab_size = self.run_of(values)
        size = values["micro_batch_size"]
        key = tuple(values[name] for name in values if name != "micro_batch_size")
        if size >= self._full.get(key, size + 1):  # more samples need no less
            return False
        if self.least(values) > self.room:
            return False
        self.found.planned += 1
        peak = max(rank.peak_bytes for rank in self.memory(run, vocab_size))
        self._peaks[tuple(values.items())] = peak
        if peak > self.room:
            self._short(key, size, peak)
        return peak <= self.room

    def _short(self, key: Any, size: int, needed: int) -> None:
        self._full[key] = min(size, self._full.get(key, size))
        lacking = needed - self.device.room
        self.found.least = lacking if self.found.least is None else min(lacking, self.found.least)

    def least(self, values: Values) -> int:
        """Return bytes below what a variant needs: its states, and what linear layers keep of the first stage."""
        base, model, width = self.base, self.base.model, self.base.precision.params_dtype
        tp, cp, pp = (values[name] for name in tuple(_NAMES)[:3])
        shards = cp * (tp if values["sequence_parallel"] else 1)
        kept = model.hidden_size / shards  # the input of a layer
        if (
            values["recompute_granularity"] != "full"
            and not model.registered_layers
            and not model.multi_latent_attention
        ):
            mixed = model.mixture and (0 in model.experts or model.moe_expert_capacity_factor is not None)
            wide = 0 if mixed else model.moe_router_topk * model.expert_size if model.mixture else model.ffn_size
            heads = 2 * model.num_attention_heads + 2 * max(model.query_groups, tp)
            inside = heads * model.head_size + wide * (3 if model.gated else 2)
            kept += model.hidden_size / shards + inside / (cp * tp)
        samples, size = base.global_batch_size * tp * cp * pp // self.world_size, values["micro_batch_size"]
        tokens = size * min(pp, samples // size) * base.data.seq_length
        layers = (model.num_layers + self._extra(values)) // pp - values["account_for_embedding_in_pipeline_split"]
        return self._held(values) + int(tokens * kept * layers * (4 if width == "float32" else 2))

    @staticmethod
    def _extra(values: Values) -> int:
        return int(values["account_for_embedding_in_pipeline_split"] + values["account_for_loss_in_pipeline_split"])

    def _held(self, values: Values) -> int:
        """Return bytes below those of weights, gradients and optimizer states."""
        values = {**values, "micro_batch_size": 1, **dict.fromkeys(_FULL)}
        key = tuple(values[name] for name in (*_OF_LAYOUT, "use_distributed_optimizer"))
        if key not in self._states:
            self._states[key] = least_bytes(*self.run_of(values))
        return self._states[key]

    def losers(self, winner: Choice) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with layouts that differ from the fastest in one place."""
        values, sizes = winner.values, []
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            sizes += [{name: values[name] * 2}, {name: values[name] // 2}]
        if self.base.model.mixture:
            ep = values["expert_model_parallel_size"]
            sizes += [{"expert_model_parallel_size": ep * 2}, {"expert_model_parallel_size": ep // 2}]
        sizes += [
            {"micro_batch_size": values["micro_batch_size"] * 2},
            {"micro_batch_size": values["micro_batch_size"] // 2},
        ]
        sizes += [{name: not values[name]} for name in ("sequence_parallel", "use_distributed_optimizer")]
        sizes += [dict.fromkeys(_FULL) if values["recompute_granularity"] else _FULL]
        for change in sizes:
            if 0 in change.values():
                continue
            other = {**values, **change}
            if other["pipeline_model_parallel_size"] == 1:
                other |= {name: _NAMES[name] for name in _OF_LAYOUT[3:7]}
            if other["tensor_model_parallel_size"] == 1:
                other |= {"sequence_parallel": False, "expert_tensor_parallel_size": None}
            run, _ = self.run_of(other)
            if other == values or run.layout.world_size != self.world_size or not self.allowed(other):
                continue
            what = " ".join(_shown(name, value) for name, value in change.items() if name not in tuple(_FULL)[1:])
            yield what, self._verdict(winner, other)

    def _verdict(self, winner: Choice, other: Values) -> str:
        time, seconds = self.time_of(other), winner.time.step_seconds
        if not self.fits(other):
            needed = self._peaks.get(tuple(other.items())) or self.least(other)
            return f"does not fit: {needed / GIB:.1f} GiB"
        parts = {name: time.parts[name] - winner.time.parts[name] for name in time.parts}
        worst = max(parts, key=lambda name: parts[name])
        if time.step_seconds <= seconds * 1.001:
            return "as fast"
        return f"{time.step_seconds / seconds - 1:.1%} slower: {worst} {parts[worst]:+.3g} s"


def _shown(name: str, value: Any) -> str:
    setting = all_settings()[name]
    if value is None or value is False:
        return f"without {setting.positive_flag}"
    return setting.positive_flag if value is True else f"{setting.flag} {value}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _stages(layers: int) -> list[tuple[int, bool, bool]]:
    """Return numbers of pipeline stages, and whether embedding and loss count as layers so that all have as many."""
    found = [(size, False, False) for size in _divisors(layers)]
    known = {size for size, _, _ in found}
    for embedding, loss in ((False, True), (True, True)):
        found += [(size, embedding, loss) for size in _divisors(layers + embedding + loss) if size not in known]
        known |= {size for size, _, _ in found}
    return [one for one in found if one[0] <= layers]
