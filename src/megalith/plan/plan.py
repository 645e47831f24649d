"""The plan of a run: whether it fits, with the memory of its ranks, as an object, as JSON and as text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megalith.config import RunConfig, all_settings, load
from megalith.config.command_line import RECIPE_FLAG, read_command_line, without_settings, words_of
from megalith.config.reading import read_recipe
from megalith.config.tokenizer import TIKTOKEN_SIZE
from megalith.errors import ConfigError, MegalithError
from megalith.plan.bound import checkpoint_bytes, least_bytes
from megalith.plan.chinese import Words, left, right
from megalith.plan.devices import DEVICES, GIB, Device, find_device, read_devices
from megalith.plan.memory import CATEGORIES, Part, RankMemory, plan_memory
from megalith.plan.presets import half
from megalith.plan.rates import with_measured
from megalith.plan.record import Record
from megalith.plan.remember import remembering
from megalith.plan.search import ALONE, SEARCHED, Choice, Found, Search
from megalith.plan.time import Course, StepTime, course, step_time
from megalith.progress import Task
from megalith.registry import IMPORT_FLAG
from megalith.tokenizers.protocol import padded_vocab_size

_NOT_SEARCHED = "--search, --preset or flags without --micro-batch-size let a plan choose the layout"


class NothingFitsError(ConfigError):
    """No layout of a run fits its devices."""


@dataclass(frozen=True)
class Plan:
    """What a run needs.

    Attributes:
        ranks: kinds of ranks, in the order of the pipeline.
        time: of a step, predicted.
        nodes: machines.
        notes: what was assumed, one line each.
        checkpoint: bytes of one; None where they are not known.
        found: the layouts of a search, of which this is the fastest; `words` are the flags of all of them.
    """

    run: RunConfig
    device: Device
    ranks: Sequence[RankMemory]
    time: StepTime
    nodes: int = 1
    notes: Sequence[str] = ()
    checkpoint: int | None = None
    found: Found | None = None
    words: Sequence[str] = ()

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Return whether the fullest rank fits its device; None if the memory of the device is not known."""
        return self.fullest.peak_bytes <= self.device.room if self.device.gib else None

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        ranks = [
            {
                "stages": [rank.stages[0], rank.stages[-1]],
                "layers": rank.layers,
                "allocated_bytes": rank.allocated_bytes,
                "peak_bytes": rank.peak_bytes,
                "allocated": dict(rank.allocated),
                "peak": dict(rank.peak),
                "moment": rank.moment,
                "tensors": [one._asdict() for one in rank.tensors],
            }
            for rank in self.ranks
        ]
        memory = {
            "allocated_bytes": max(rank.allocated_bytes for rank in self.ranks),
            "peak_bytes": self.fullest.peak_bytes,
            "room_bytes": self.device.room,
            "context_bytes": self.device.context,
            "ranks": ranks,
        }
        whole = {"fits": self.fits, "device": self.device.name, "memory": memory, **asdict(self.time)}
        whole |= asdict(self._course())
        if self.found is None:
            return json.dumps(
                {**whole, "layouts": None, "reasons": {"layouts": _NOT_SEARCHED}, "notes": list(self.notes)}
            )
        layouts = [
            {
                "command": self.command(one),
                "flags": one.flags(),
                "layout": str(one.run.layout),
                "step_seconds": one.time.step_seconds,
                "mfu": one.time.mfu,
                "tokens_per_second": one.time.tokens_per_second,
                "peak_bytes": one.peak_bytes,
            }
            for one in self.found.best
        ]
        reasons = {"layouts": [{"change": change, "verdict": why} for change, why in self.found.reasons]}
        return json.dumps({**whole, "layouts": layouts, "reasons": reasons, "notes": list(self.notes)})

    def command(self, choice: Choice) -> str:
        """Return the command that trains with a layout, on each machine where there are several."""
        number, each = self.run.launch.world_size, self.run.launch.world_size // self.nodes
        words = [*self.words, *choice.flags()]
        if self.nodes == 1:
            return shlex.join(["megalith", "train", *(["--nproc", str(number)] if number > 1 else []), *words])
        start = ["torchrun", "--nnodes", str(self.nodes), "--nproc-per-node", str(each)]
        start += ["--node-rank", "N", "--master-addr", "HOST"]  # without them torchrun waits for 15 minutes
        return shlex.join([*start, "-m", "megalith", "train", *words])

    def layouts_text(self, say: Words) -> list[str]:
        """Return lines about the layouts of a search: the fastest, their commands, and why others are not."""
        if self.found is None:
            return []
        head = left(say("layout"), 22), right(say("s a step"), 9), "MFU".rjust(6), "tokens/s".rjust(10), "GiB".rjust(6)
        lines = [say("The fastest of {number} layouts that fit:", number=self.found.layouts)]
        lines += ["  ".join(["  ", *head, say("flags")])]
        for place, one in enumerate(self.found.best, 1):
            speed = f"{one.time.step_seconds:9.3f}  {one.time.mfu:6.1%}  {one.time.tokens_per_second:10,.0f}"
            figures = f"{one.run.layout!s:22}  {speed}  {one.peak_bytes / GIB:6.1f}"
            lines.append(f"{place:2}  {figures}  {shlex.join(one.flags())}")
        lines += ["", say("Beside the first:"), *(f"  {change}: {why}" for change, why in self.found.reasons)]
        start = "Start the first with:" if self.nodes == 1 else "Start it on each host, with its own --node-rank:"
        return [*lines, "", say(start), f"  {self.command(self.found.best[0])}", ""]

    def text(self, savings: Sequence[str] = (), language: str = "en") -> str:
        """Return one screen of text; `savings` are lines about what would need less."""
        full, device, say = self.fullest, self.device, Words(language)
        verdict = say({True: "fits", False: "does not fit", None: "needs"}[self.fits])
        own = {"room": device.room / GIB, "device": device.name}
        room = say(" of {room:.1f} GiB that tensors may take on {device}", **own) if device.gib else ""
        peak = {"verdict": verdict, "peak": full.peak_bytes / GIB, "room": room, "layout": say(str(self.run.layout))}
        lines = self.layouts_text(say)
        lines += [say("{verdict}: {peak:.2f} GiB{room}, {layout}", **peak), *self._speed(say), ""]
        used = [name for name in CATEGORIES if any(rank.peak.get(name) for rank in self.ranks)]
        names = (right(say(name), 13) for name in (*used, "peak", "between"))
        lines.append("  ".join([left(say("GiB at the peak"), 18), *names]))
        for rank in self.ranks:
            first, last = rank.stages[0], rank.stages[-1]
            name = say("stage {first}" if first == last else "stages {first} to {last}", first=first, last=last)
            values = [*(rank.peak.get(name, 0) for name in used), rank.peak_bytes, rank.allocated_bytes]
            lines.append("  ".join([left(name, 18), *(f"{value / GIB:13.2f}" for value in values)]))
        lines += ["", say("The peak is in the {moment}. The largest tensors then:", moment=say.moment(full.moment))]
        for one in full.tensors:
            category = left(say(one.category), 13)
            lines.append(f"{one.number:5} x {one.size / 2**20:10.1f} MiB  {category}  {one.what}")
        lines += ["", *savings, *(say("note: {note}", note=note) for note in self.notes)]
        return "\n".join(lines).rstrip()

    def _course(self) -> Course:
        return course(self.run, self.time, self.device, nodes=self.nodes, checkpoint=self.checkpoint)

    def _speed(self, say: Words) -> list[str]:
        time, whole = self.time, self._course()
        parts = sorted(time.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{say(name)} {value / time.step_seconds:.0%}" for name, value in parts if value)
        return [
            say(
                "predicted: {step:.3g} s a step, {speed:,.0f} tokens/s, MFU {mfu:.1%}; {tokens:,} tokens in {days:.3g} "
                "days with {kwh:,.3g} kWh (goodput {goodput:.1%})",
                **asdict(whole),
                step=time.step_seconds,
                speed=time.tokens_per_second,
                mfu=time.mfu,
            ),
            say("of a step: {shares}", shares=shares),
        ]


def machines(gpus: str, nodes: int | None = None) -> tuple[int, Device, int]:
    """Return the number of devices in a text such as "8xH100", the device, and how many machines they are in.

    Args:
        nodes: machines; by default as few as hold the devices, each as many.

    Raises:
        ConfigError: there is no such device, or the machines do not divide the devices.
    """
    number, device = read_devices(gpus)
    each = next(size for size in range(min(number, device.rates.node), 0, -1) if number % size == 0)
    found = number // each if nodes is None else nodes
    if found < 1 or number % found:
        raise ConfigError(f"--nodes {found} does not divide the {number} devices of --gpus")
    return number, device, found


def plan_for(
    argv: Sequence[str], gpus: str, *, nodes: int | None = None, search: bool = False, task: Task | None = None
) -> Plan:
    """Plan the run of a command line of `megalith train`: its memory and time, without its files and devices.

    Args:
        argv: flags.
        gpus: devices of all machines together, such as "8xH100" (`megalith plan --help` lists them).
        nodes: machines; by default as few as hold the devices.
        search: find the fastest layouts that fit, instead of the one of the flags (`Plan.found`).
        task: receives the progress of a search.

    Raises:
        ConfigError: the violations that `megalith train` would list, what cannot be planned, or no layout fits.
    """
    number, device, found = machines(gpus, nodes)
    if search:
        return search_run(argv, device, world_size=number, nodes=found, task=task)[0]
    return plan_run(argv, device, world_size=number, nodes=found)


def plan_run(words: Sequence[str], device: Device, *, world_size: int, nodes: int = 1) -> Plan:
    """Plan the run of a command line of `megalith train`, without its files.

    Raises:
        ConfigError: the violations that `megalith train` would list, or what cannot be planned.
    """
    local = world_size // nodes
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local)}
    run, device = load(list(words), environ, files=False), with_measured(device, local)
    tokens, notes = _vocabulary(run)
    return _plan_of(run, _padded(run, tokens), device, nodes, notes)


def _plan_of(run: RunConfig, vocab_size: int, device: Device, nodes: int, notes: list[str]) -> Plan:
    if run.train.compile:
        run = replace(run, train=replace(run.train, compile=False))
        notes.append("--compile: planned as without it, which needs more")
    if run.precision.bf16 and "--fp16" in half(device):
        notes.append(f"--bf16: {device.name} emulates it, which is slow; --fp16 is fast there")
    if run.train.device == "cpu" and device.compute:
        notes.append(f"--device cpu: planned for {device.name} of --gpus nevertheless; the run would be on the CPU")
    if run.data.masks_documents:
        notes.append("each sequence is planned as one document")
    if nodes > 1 and (each := run.launch.world_size // nodes) < device.rates.node:
        notes.append(f"the devices are in {nodes} machines of {each}; --nodes N sets another number")
    ranks = _memory(device, run, vocab_size)
    runs = f"; {device.runs} runs corrected them by {device.rates.efficiency:.3g}" if device.runs else ""
    notes.append(f"rates: {device.rates.source}{runs}")
    time = time_of(run, vocab_size, device, ranks, nodes)
    return Plan(run, device, ranks, time, nodes, notes, checkpoint_bytes(run, vocab_size))


def _memory(device: Device, run: RunConfig, vocab_size: int) -> list[RankMemory]:
    def measure(part: Part) -> Record:
        from megalith.plan import measure as measuring  # imports torch

        return measuring.measure(run, part, vocab_size, device)

    if (least := least_bytes(run, vocab_size)) >= 2**63:  # torch has no shapes of so many bytes
        model = run.model
        raise ConfigError(
            f"--hidden-size {model.hidden_size}, --ffn-hidden-size {model.ffn_size}: a device would hold "
            f"{least / GIB:.3g} GiB, which no plan counts; give smaller sizes"
        )
    return plan_memory(run, device, remembering(run, vocab_size, device, measure))


def without_layout(words: Sequence[str]) -> tuple[list[str], RunConfig]:
    """Return flags without those of layout and micro-batch, and their run on one device; ConfigError if it is wrong."""
    own = without_settings(_without_recipe(words), SEARCHED)
    alone = [word for name in ALONE for word in (all_settings()[name].flag, "1")]
    return own, load([*own, *alone], {}, files=False)


def _without_recipe(words: Sequence[str]) -> list[str]:
    """Return flags in place of a recipe that sets a layout: no flag undoes some of these settings."""
    flags = read_command_line(words)
    recipe = read_recipe(Path(flags.recipe)) if flags.recipe else flags
    sets_layout = any(name in SEARCHED and name != "micro_batch_size" for name in recipe.values)
    if not flags.recipe or recipe.problems or not sets_layout:
        return list(words)
    kept = {name: value for name, value in recipe.values.items() if name not in flags.values}
    imports = [word for name in recipe.imports for word in (IMPORT_FLAG, name)]
    return [*imports, *words_of(kept), *without_settings(words, [RECIPE_FLAG])]


def left_out(words: Sequence[str]) -> list[str]:
    """Return a note about settings of flags and their recipe in whose place a search chooses others, if any are."""
    reading = read_command_line(words)
    recipe = read_recipe(Path(reading.recipe)).values if reading.recipe else {}
    given = {name: value for name, value in {**recipe, **reading.values}.items() if name in SEARCHED}
    flags = (all_settings()[name].flag + ("" if value is True else f" {value}") for name, value in given.items())
    return [f"left out, as the search chooses the layout: {', '.join(flags)}"] if given else []


def search_run(
    words: Sequence[str], device: Device, *, world_size: int, nodes: int = 1, number: int = 5, task: Task | None = None
) -> tuple[Plan, Found]:
    """Return the plan of the fastest layout of a run that fits, and the fastest `number` of them.

    Layout and micro-batch size of `words` are left out, which the notes of the plan say; its global batch size is kept.

    Raises:
        ConfigError: a setting other than of layout is wrong; NothingFitsError, which is one: no layout fits.
    """
    device, (own, base) = with_measured(device, world_size // nodes), without_layout(words)
    if base.model.family.objective != "causal":
        raise ConfigError(f"--search: the times of layouts are of gpt, not of {base.model.model_family}; give a layout")
    if base.train.compile:
        base = replace(base, train=replace(base.train, compile=False))
    tokens, notes = _vocabulary(base)
    notes += left_out(words)
    search = Search(base, device, world_size=world_size, nodes=nodes, tokens=tokens, memory=partial(_memory, device))
    found = search.best(number, task)
    if not found.best:
        short, remedy = "", "plan for more or larger devices, or a smaller model"
        if found.fewest is None:
            short = f": none divides its {base.model.num_layers} layers and its batch of {base.global_batch_size}"
            remedy = f"give --global-batch-size N, a multiple of {world_size}"
        elif found.least is not None:
            short = f": the closest needs {found.least / GIB:.1f} GiB more"
        elif found.fewest > device.room:
            short = (
                f": in no layout do weights, gradients and optimizer states take less than {found.fewest / GIB:.1f} "
                f"GiB of each, and tensors may take {device.room / GIB:.1f} GiB"
            )
        raise NothingFitsError(f"no layout of this model fits {world_size} x {device.name}{short}; {remedy}")
    plans = [_plan_of(one.run, one.vocab_size, device, nodes, list(notes)) for one in found.best]
    pairs = sorted(zip(plans, found.best, strict=True), key=lambda pair: pair[0].time.step_seconds)
    plan, first = pairs[0]
    found.reasons = list(search.losers(first))
    found.best = [replace(one, time=known.time) for known, one in pairs]
    command = [*own, *first.flags()]
    local = str(world_size // nodes)
    load(
        command, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": local}, files=False
    )
    return replace(plan, found=found, words=own), found


def remembered(run: RunConfig, vocab_size: int, device: Device) -> list[RankMemory]:
    """Return the memory of ranks by what earlier plans have seen of their parts; none if they have not seen all."""

    def unseen(part: Part) -> Record:
        raise LookupError

    try:
        return plan_memory(run, device, remembering(run, vocab_size, device, unseen))
    except (LookupError, ConfigError):
        return []


def device_here(name: str, compute: tuple[int, int] | None, memory: int) -> Device:
    """Return the device of a running training, with the rates of the known one of its name; CPU rates for others.

    Args:
        name, compute, memory: of the device; 0 bytes if that is not known.
    """
    return replace(find_device(name) or DEVICES["CPU"], name=name, compute=compute, gib=round(memory / GIB))


def time_of(run: RunConfig, vocab_size: int, device: Device, ranks: Sequence[RankMemory], nodes: int) -> StepTime:
    """Return the time of a step by what was seen of its parts."""
    seen = {stage: rank.work for rank in ranks for stage in rank.stages if rank.work}
    return step_time(run, vocab_size, device, nodes=nodes, seen=seen)


def warning_of(run: RunConfig, vocab_size: int, device: Device) -> str:
    """Return a line if a run will not fit its devices by what earlier plans have seen of its parts; else ""."""
    ranks = remembered(run, vocab_size, device)
    full = max(ranks, key=lambda rank: rank.peak_bytes, default=None)
    if full is None or not device.gib or full.peak_bytes <= device.room:
        return ""
    return (
        f"this run may run out of memory: by its plan it needs {full.peak_bytes / GIB:.1f} GiB in the {full.moment}, "
        f"and tensors may take {device.room / GIB:.1f} GiB on {device.name}; `megalith plan` "
        "with these flags names others that need less (--plan off: no warning)"
    )


def _padded(run: RunConfig, tokens: int | None) -> int:
    """Return the padded size of the vocabulary."""
    if tokens is None:
        return run.data.padded_vocab_size or 0
    return padded_vocab_size(tokens, run.model.make_vocab_size_divisible_by, run.parallel.tensor_model_parallel_size)


_PUBLISHED_SIZES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30524,  # BERT's 30,522 of uncased text, and [BOS] and [EOS]
    "BertWordPieceCase": 28998,  # its 28,996 of cased text, and the two
    "TikTokenizer": TIKTOKEN_SIZE,
}
"""Kind of tokenizer -> the number of tokens in the files that are published with it."""


def _vocabulary(run: RunConfig) -> tuple[int | None, list[str]]:
    """Return the size of the vocabulary before padding, None if the padded one is given, and notes about it."""
    from megalith.tokenizers import build_tokenizer

    if run.data.padded_vocab_size is not None:
        return None, []
    notes, size = list[str](), run.tokenizer.vocab_size
    try:
        size = build_tokenizer(run.tokenizer).vocab_size
    except (MegalithError, OSError) as error:
        published = _PUBLISHED_SIZES.get(run.tokenizer.tokenizer_type)
        if size is None and published is None:
            raise ConfigError(
                f"the size of the vocabulary is not known without the tokenizer's files ({error}); "
                "give --padded-vocab-size"
            ) from error
        extra = run.tokenizer.vocab_extra_ids if "vocab_extra_ids" in run.tokenizer.taken else 0
        size = size or (published or 0) + extra
        notes.append(f"the tokenizer's files are not here: {size} tokens are assumed; --padded-vocab-size sets them")
    return size, notes


def savings(plan: Plan, words: Sequence[str], *, world_size: int, nodes: int = 1, language: str = "en") -> list[str]:
    """Return lines about flags with which the fullest rank would need less, for those that the rules allow."""
    run, found, say = plan.run, [], Words(language)
    for name, flags in _alternatives(run).items():
        try:
            other = plan_run([*words, *flags], plan.device, world_size=world_size, nodes=nodes)
        except ConfigError:
            continue
        saved = plan.fullest.peak_bytes - other.fullest.peak_bytes
        if saved > 0:
            enough = "" if plan.fits is not False else ", and would fit" if other.fits else ", and would not fit"
            own = {"flags": " ".join(flags), "name": say(name), "saved": saved / GIB, "enough": say(enough)}
            found.append(say("{flags} ({name}) would need {saved:.2f} GiB less{enough}", **own))
    return found


def _alternatives(run: RunConfig) -> Mapping[str, list[str]]:
    size, found = run.train.micro_batch_size, dict[str, list[str]]()
    if not run.parallel.shards_optimizer_only and run.layout.dp * run.layout.cp > 1:
        found["ZeRO-1"] = ["--use-distributed-optimizer"]
    if run.layout.tp > 1 and not run.parallel.sequence_parallel_here:
        found["sequence parallelism"] = ["--sequence-parallel"]
    if size > 1:
        smaller = max(other for other in range(1, size) if size % other == 0)
        found["a smaller micro-batch"] = ["--micro-batch-size", str(smaller)]
    if run.train.recompute_granularity != "full":
        words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        found["recomputation of activations"] = words.split()
    return found
