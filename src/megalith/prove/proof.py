"""The proof of a configuration: its miniatures in their layouts against one process, and what that shows."""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch

from megalith import __version__
from megalith.config import RunConfig, all_settings
from megalith.config.run import plain
from megalith.distributed.forked import run_forked
from megalith.errors import PeerError
from megalith.progress import task
from megalith.prove.cause import Cause, find_cause
from megalith.prove.compare import ROUNDED, TOLERANCE, Comparison, Difference, compare, unequal
from megalith.prove.miniature import FILES, SAVED, STEPS, Miniature, miniatures, write_data
from megalith.prove.outside import Outside, compare_export
from megalith.prove.record import Record, record
from megalith.prove.reference import compare_reference
from megalith.prove.rounding import compare_rounded

SECONDS = 60.0  # of a rank without an answer
REFERENCE_SECONDS = 180.0  # of another program, which takes long to import
ALWAYS_UNCOVERED = (
    "NCCL, and kernels and branches that only a GPU takes",
    "real sizes: what overflows, runs out of memory or depends on a large number",
    "your data and tokenizer: a miniature has documents of its own",
)
_UNCOVERED = {
    "bf16": "bf16 products as a GPU rounds them",
    "fp16": "fp16 products as a GPU rounds them; overflows, and what the loss scale does after them",
    "fp8": "fp8",
    "compile": "compiled blocks (--compile)",
    "hidden_dropout": "the random streams of dropout: its masks follow from the values",
    "attention_dropout": "dropout of attention, which is off",
    "lora_rank": "B of adapters at 0, as they start: it has small random weights",
    "lora_dropout": "dropout of adapters, which is off",
    "moe_input_jitter_eps": "jitter of router inputs, which is off",
    "moe_router_load_balancing_type": "sinkhorn and global_aux_loss, which depend on the layout, as in Megatron",
    "moe_expert_capacity_factor": "the capacity of experts, which is of one rank's tokens, as in Megatron",
    "moe_router_force_load_balancing": "random routing",
    "hooks": "your hooks",
    "no_load_optim": "restarts with --no-load-optim, which lose the moments: a miniature continues with them",
    "no_save_optim": "restarts from checkpoints without moments (--no-save-optim): those of a miniature have them",
    "step_batch_size_schedule": "--step-batch-size-schedule: the batch is constant",
    "use_cpu_initialization": "--use-cpu-initialization: weights are drawn by name",
    "use_precision_aware_optimizer": "dtypes of optimizer states",
    "optimizer_cpu_offload": "offloaded optimizer states",
    "lion": "the signs that Lion takes of small gradients: a smooth function is in their place",
    "soap": "eigenbases that rounding decides: the tie-breaker and the epsilon of SOAP are greater",
    "data_source": "registered datasets",
}


@dataclass
class Result:
    """A miniature and what comparing it has shown.

    Attributes:
        cause: Of its first difference; None if there is none.
        failure: Why its ranks ended, where one process did not; empty if they did not.
        overflow: Step of one process that overflowed in the run's own precision, which is then not compared; else "".
        resumed: Layouts in which its checkpoint was continued.
        outside: What that checkpoint was compared with besides.
    """

    miniature: Miniature
    comparison: Comparison
    cause: Cause | None = None
    failure: str = ""
    overflow: str = ""
    resumed: list[str] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if nothing differs."""
        return self.cause is None and not self.failure


@dataclass
class Proof:
    """Results for the miniatures of a run; `left` are those that were not asked for."""

    run: RunConfig
    command: Sequence[str]
    device: str = ""
    results: list[Result] = field(default_factory=list)
    left: list[Miniature] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True if all miniatures equal one process."""
        return all(result.holds for result in self.results)

    @property
    def compared(self) -> Comparison:
        """Return what was compared of all miniatures."""
        whole = Comparison()
        for result in self.results:
            whole.merge(result.comparison)
        return whole

    @property
    def uncovered(self) -> list[str]:
        """Return what this proof does not show."""
        changed = {name for result in self.results for name in result.miniature.changed}
        changed |= {"hidden_dropout"} if self.run.model.hidden_dropout > 0 else set()
        changed.add(str(self.run.optimizer.optimizer))
        left = [f"the miniature {one}, left out by --quick" for one in self.left]
        if not all(result.resumed for result in self.results):
            left.append("checkpoints, resumes and exports, left out by --quick or after a mismatch")
        dtype = self.run.precision.params_dtype
        left += [f"{dtype}: {one.overflow} of {one.miniature} overflows" for one in self.results if one.overflow]
        left += [line for result in self.results for one in result.outside for line in one.uncovered]
        texts = [text for name, text in _UNCOVERED.items() if name in changed]
        return [*ALWAYS_UNCOVERED, *dict.fromkeys([*texts, *left])]

    def certificate(self) -> dict[str, Any]:
        """Return the proof as plain values, with a SHA-256 of all else."""
        content: dict[str, Any] = {
            "megalith": __version__,
            "verdict": "proven" if self.holds else "mismatch",
            "command": list(self.command),
            "layout": str(self.run.layout),
            "device": self.device,
            "tolerance": TOLERANCE,
            "steps": STEPS,
            "miniatures": [_plain(result) for result in self.results],
            "not covered": self.uncovered,
        }
        text = json.dumps(content, sort_keys=True, default=str)
        return content | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _plain(result: Result) -> dict[str, Any]:
    comparison, cause = result.comparison, result.cause
    return {
        "axes": dict(result.miniature.axes),
        "ranks": result.miniature.world_size,
        "changed": {
            name: {"run": plain(old), "here": plain(new)} for name, (old, new) in result.miniature.changed.items()
        },
        "compared": _counted(comparison),
        "differences": [str(one) for one in comparison.differences],
        "failure": result.failure,
        "checkpoint continued in": result.resumed,
        "checkpoint compared with": {one.what: _counted(one.comparison) for one in result.outside if one.what},
        "cause": None
        if cause is None
        else {
            "first": str(cause.difference),
            "kind": cause.difference.kind,
            "name": cause.difference.name,
            "layer": cause.layer,
            "axes": list(cause.axes),
            "operation": cause.operation,
        },
    }


def _counted(comparison: Comparison) -> dict[str, Any]:
    return {
        kind: {"count": count, "worst": comparison.worst.get(kind, (0.0, ""))[0]}
        | {"where": comparison.worst.get(kind, (0.0, ""))[1]}
        for kind, count in comparison.counts.items()
    }


@task("proving")
def prove(
    run: RunConfig, command: Sequence[str], *, device: str = "", quick: bool = False, references: Sequence[str] = ()
) -> Proof:
    """Compare every miniature of a run with one process.

    Args:
        command: As typed, for the certificate.
        device: What the run is meant for, likewise.
        quick: Only the first miniature, without checkpoints unless there are references.
        references: "transformers", "megatron"; the first miniature is compared with each.

    Raises:
        ConfigError: The run has no miniature, or a reference cannot compute it.
        PeerError: A miniature does not run in one process.
    """
    saves = not quick or bool(references)
    warm(run, checkpoints=saves)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(run, folder)
        chosen = miniatures(run, folder)
        proof = Proof(run, command, device, left=chosen[1:] if quick else [])
        for miniature in chosen[:1] if quick else chosen:
            write_base(miniature)
            (alone,) = run_forked(1, record, miniature.alone(), seconds=SECONDS)
            checkpoints = folder / str(len(proof.results)) if saves else None
            result, ranks = _compared(miniature, alone)
            if result.holds and miniature.axes:
                _compare_rounded(result, alone, routed=run.model.mixture)
            if result.holds and checkpoints is not None:
                _resume(result, alone, ranks, checkpoints)
            if result.holds and checkpoints is not None:
                _compare_outside(result, checkpoints, () if proof.results else references, logits=not proof.results)
            proof.results.append(result)
        return proof


def write_base(miniature: Miniature) -> None:
    """Train the whole model whose checkpoint a miniature of adapters starts from, if it is one."""
    if (base := miniature.values.get("pretrained_checkpoint")) is not None:
        whole: dict[str, Any] = {"lora_rank": None, "pretrained_checkpoint": None, "save": base}
        run_forked(1, partial(record, save_interval=STEPS, **whole), miniature.alone(), seconds=SECONDS)


def warm(run: RunConfig, *, checkpoints: bool) -> None:
    """Import what ranks would import, each for itself."""
    names = ["megalith.checkpoint.store.saving", "megalith.checkpoint.sources"] if checkpoints else []
    names += ["megalith.parallel.fsdp"] if run.fully_sharded else []
    names += ["torch._dynamo"] if run.fully_sharded or run.train.recompute_granularity else []  # by decorators of torch
    for name in names:
        importlib.import_module(name)


def _compared(miniature: Miniature, alone: Record) -> tuple[Result, Sequence[Record]]:
    """Compare a miniature and find the cause of the first difference; also return what its ranks saw."""
    found, failure, ranks = _outcome(miniature, alone)
    result = Result(miniature, found, failure=failure)
    if failure or found.differences:
        first, axes = _fewest_axes(miniature, alone)
        if first is not None:
            result.cause = find_cause(first, axes)
        elif found.differences:
            result.cause = find_cause(found.differences[0], tuple(miniature.axes))
    return result, ranks


def _compare_rounded(result: Result, alone: Record, *, routed: bool) -> None:
    """Compare a miniature with one process in the run's own precision."""
    own, one = result.miniature, result.miniature.alone()
    if one.config().model.hidden_dropout > 0:  # whose masks would differ where values are rounded
        (alone,) = run_forked(1, partial(record, hidden_dropout=0.0), one, seconds=SECONDS)
    try:
        (rounded,) = run_forked(1, partial(record, exact=False), one, seconds=SECONDS)
        ranks = run_forked(own.world_size, partial(record, exact=False), own, seconds=SECONDS)
    except PeerError as error:
        result.failure = f"in {own.dtype}: {error}"
        return
    lacking = next((name for name in alone.numbers if name not in rounded.numbers), "")
    if lacking:  # a step is skipped without a norm
        result.overflow = lacking.partition(",")[0]
        return
    found = compare_rounded(alone, rounded, ranks, getattr(torch, own.dtype), routed=routed)
    result.comparison.merge(found)
    if found.differences:
        cause = find_cause(found.differences[0], tuple(own.axes))
        likely = f"in {own.dtype} alone: a sum in the wrong precision, or the loss scale"
        result.cause = replace(cause, operation=likely)


def _resume(result: Result, alone: Record, whole: Sequence[Record], checkpoints: Path) -> None:
    """Kill a miniature between two steps, and continue its checkpoint in its layout, in one process and in another one.

    Each continuation is compared with the process that was not interrupted, and that in the same layout with the ranks
    that were not, bit for bit.
    """
    own = result.miniature
    with suppress(PeerError):  # it is killed
        saves = partial(record, save=str(checkpoints), save_interval=SAVED, killed_after=SAVED)
        run_forked(own.world_size, saves, own, seconds=SECONDS)
    others = [own.without(axis) for axis in list(own.axes)[:1]]
    for layout in {str(one): one for one in (own, own.alone(), *others)}.values():
        found, failure, ranks = _outcome(layout, alone, resumed=True, load=str(checkpoints))
        result.resumed.append(str(layout))
        result.comparison.merge(found)
        first = next(iter(found.differences), None) or (unequal(whole, ranks) if ranks and layout is own else None)
        if failure or first:
            path = (
                f"{own}, killed after step {SAVED} and continued in {layout}: a state that is not saved or not restored"
            )
            result.failure = f"{path}: {failure}" if failure else ""
            result.cause = replace(find_cause(first, ()), operation=path) if first else None
            return


def _compare_outside(result: Result, checkpoints: Path, references: Sequence[str], *, logits: bool) -> None:
    """Compare the checkpoint of a miniature with what others make of it, until there is a difference."""
    folder = checkpoints.with_name(f"{checkpoints.name}-exported")
    steps = [partial(compare_export, checkpoints=checkpoints, folder=folder, logits=logits and not references)]
    steps += [partial(compare_reference, reference=one, checkpoints=checkpoints, folder=folder) for one in references]
    for step in steps:
        (one,) = run_forked(1, step, seconds=REFERENCE_SECONDS)
        result.outside.append(one)
        if one.comparison.differences:
            result.cause = find_cause(one.comparison.differences[0], ())
            if step is not steps[0]:
                result.cause = replace(result.cause, operation=f"what is computed otherwise than by {one.what}")
            return


def _outcome(
    miniature: Miniature, alone: Record, *, resumed: bool = False, **settings: Any
) -> tuple[Comparison, str, Sequence[Record]]:
    """Return how a miniature, with other settings, compares with one process, or why its ranks ended; and these."""
    try:
        ranks = run_forked(miniature.world_size, partial(record, **settings), miniature, seconds=SECONDS)
    except PeerError as error:
        return Comparison(), str(error), ()
    return compare(alone, ranks, resumed=resumed), "", ranks


def _fewest_axes(miniature: Miniature, alone: Record) -> tuple[Difference | None, tuple[str, ...]]:
    """Return the first difference with the fewest axes with which there is one, and these."""
    for axes in _fewer(miniature.axes):
        smaller = miniature.without(*(axis for axis in miniature.axes if axis not in axes))
        if set(smaller.axes) != set(axes):
            continue
        differences = _outcome(smaller, alone)[0].differences
        if differences:
            return differences[0], axes
    return None, tuple(miniature.axes)


def _fewer(axes: Iterable[str]) -> Iterable[tuple[str, ...]]:
    names = tuple(axes)
    return chain.from_iterable(combinations(names, count) for count in range(1, len(names)))


def text(proof: Proof) -> str:
    """Return the verdict for a screen."""
    run, lines = proof.run, list[str]()
    number = len(proof.results)
    equal = f"{number} miniature{'s' * (number > 1)} of {run.layout}, {STEPS} steps in fp64"
    lines.append(f"proven: {equal}, equal one process" if proof.holds else f"MISMATCH: {equal}")
    for result in proof.results:
        ranks = result.miniature.world_size
        lines.append(f"{result.miniature} ({ranks} rank{'s' * (ranks > 1)}):")
        lines += _lines(result.comparison)
        if result.resumed:
            lines.append(f"  killed after step {SAVED}, continued in: {', '.join(result.resumed)}")
        for one in result.outside:
            lines += [f"  {one.what}:", *_lines(one.comparison)] if one.what else []
        if result.failure:
            lines.append(f"  its ranks ended, one process did not: {result.failure.strip().splitlines()[-1]}")
        if result.cause:
            lines.append(f"  first: {result.cause}")
    lines.append("changed: " + ", ".join(_changes(proof.results)))
    lines.append("kept: " + ", ".join(_kept(run, proof.results)))
    lines += ["not covered:", *(f"  {one}" for one in proof.uncovered)]
    return "\n".join(lines)


def _lines(comparison: Comparison) -> list[str]:
    lines = []
    for kind, count in comparison.counts.items():
        error, where = comparison.worst.get(kind, (0.0, "none"))
        wrong = sum(one.kind == kind for one in comparison.differences)
        differs = f", {wrong} differ{'s' * (wrong == 1)}" if wrong else ""
        worst = f"{error:.2f} of its bound" if kind.startswith(ROUNDED) else f"{error:.1e}"
        lines.append(f"  {count:5} {kind}{'s' * (count != 1)}{differs}; worst within bounds: {worst} ({where})")
    return lines


def _changes(results: Sequence[Result]) -> list[str]:
    """Return the changed sizes, as the settings of the run's command line."""
    changed = {name: pair for result in results for name, pair in result.miniature.changed.items()}
    given = results[0].miniature.given if results else frozenset[str]()
    return [f"{name} {_short(old)} -> {_short(new)}" for name, (old, new) in changed.items() if name in given]


def _kept(run: RunConfig, results: Sequence[Result]) -> list[str]:
    changed = {name for result in results for name in result.miniature.changed} | {*FILES}
    settings = all_settings(run.registry)
    names = [name for name in settings if name in run.given and name not in changed and settings[name].group in _SHOWN]
    return [f"{name} {_short(getattr(getattr(run, settings[name].group), name))}" for name in names]


_SHOWN = ("model", "train", "schedule", "data", "precision", "optimizer", "parallel")


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
