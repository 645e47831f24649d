"""Benchmarks with known answers, asked by lm-evaluation-harness from files on this machine (extra `eval`).

Prompts, few-shot examples, metrics and groups are lm-eval's own. Only `datasets.load_dataset` is replaced while it
runs, by the files of `LocalDataset`: no task reaches the network, and what has no file is an error at once.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.errors import ConfigError, install_command
from megalith.evaluate.local_data import BENCHMARKS, Benchmark, LocalDataset


@dataclass(frozen=True)
class Asking:
    """How a benchmark is asked.

    Attributes:
        task: a key of `BENCHMARKS`.
        shots: examples with their answers before each question; None: as lm-eval's task says.
        chat: whether questions are messages of a dialogue, by the chat template.
        subjects: parts that are asked; all if empty.
        limit: most questions of each part.
    """

    task: str
    data: Path
    shots: int | None = None
    chat: bool = False
    subjects: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class BenchmarkResult:
    """Scores of a benchmark, and what tells whether they can be right.

    Attributes:
        scores: name of the benchmark (first) or a part -> metric -> value and standard error (None: lm-eval has none).
        by_chance: expected number of right answers of a guess.
        answers: number of times that each answer was given: of choices their index, otherwise the text.
        right_answers: number of different right answers.
        shortened: prompts that lost their beginning, as the context is shorter.
    """

    scores: Mapping[str, Mapping[str, tuple[float, float | None]]]
    total: int
    correct: int
    by_chance: float
    answers: Mapping[int | str, int] = field(repr=False)
    right_answers: int
    finite: bool = True
    asked: int = 0
    shortened: int = 0
    context_length: int = 0

    def numbers(self) -> dict[str, Any]:
        """Return what --json has."""
        scores = {
            part: {metric: {"value": value, "stderr": error} for metric, (value, error) in metrics.items()}
            for part, metrics in self.scores.items()
        }
        facts = ("total", "correct", "by_chance", "asked", "shortened")
        return {"scores": scores, **{name: getattr(self, name) for name in facts}}


def require_harness() -> None:
    """Raise ConfigError if lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"lm-eval, which asks these tasks, is not installed ({error}): {install_command('eval')}"
        ) from error


@contextmanager
def local_datasets(dataset: LocalDataset) -> Iterator[None]:
    """Let lm-eval's tasks read a local dataset in place of any that they name."""
    datasets: Any = importlib.import_module("datasets")

    class Splits(dict[str, Any]):
        """The splits of one part, each read when it is asked for."""

        def __init__(self, part: str | None) -> None:
            self._part = part

        def __missing__(self, split: str) -> Any:
            self[split] = found = datasets.Dataset.from_list(dataset.rows(self._part, split))
            return found

    before = datasets.load_dataset
    datasets.load_dataset = lambda path=None, name=None, **_: Splits(name)
    try:
        yield
    finally:
        datasets.load_dataset = before


def task_manager_of(benchmark: Benchmark) -> Any:
    """Return lm-eval's manager of the tasks of a benchmark."""
    from lm_eval import tasks

    folder = Path(tasks.__file__).parent / benchmark.tasks
    return tasks.TaskManager(include_path=str(folder), include_defaults=False)


def names_of(asking: Asking, known: Collection[str]) -> list[str]:
    """Return lm-eval's names of what is asked; ConfigError for subjects of a benchmark without, or unknown ones."""
    benchmark = BENCHMARKS[asking.task]
    if not asking.subjects:
        return [benchmark.task]
    if benchmark.of_subject is None:
        raise ConfigError(f"--subjects {','.join(asking.subjects)}: {asking.task} has none; leave it out")
    names = [benchmark.of_subject + subject for subject in asking.subjects]
    if unknown := [name for name in names if name not in known]:
        having = sorted(
            name.removeprefix(benchmark.of_subject) for name in known if name.startswith(benchmark.of_subject)
        )
        first = unknown[0].removeprefix(benchmark.of_subject)
        raise ConfigError(f"--subjects: {first} is none of {asking.task}'s: {', '.join(having)}")
    return names


def ask(model: Any, asking: Asking, **options: Any) -> BenchmarkResult:
    """Ask a benchmark of a model of lm-eval; all ranks call it alike.

    Args:
        model: `MegalithLM`, or lm-eval's name of one of its own with `model_args` in `options`.
    """
    from lm_eval import simple_evaluate

    benchmark = BENCHMARKS[asking.task]
    manager = task_manager_of(benchmark)
    with local_datasets(LocalDataset(asking.data, benchmark)):
        found = simple_evaluate(
            model=model,
            tasks=names_of(asking, set(manager.all_tasks)),
            task_manager=manager,
            num_fewshot=asking.shots,
            apply_chat_template=asking.chat,
            fewshot_as_multiturn=asking.chat,
            limit=asking.limit,
            bootstrap_iters=0,
            verbosity="ERROR",
            **options,
        )
    samples = [sample for each in found["samples"].values() for sample in each]
    return _result(asking, found, samples, model)


def _result(
    asking: Asking, found: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], model: Any
) -> BenchmarkResult:
    every = {**(found.get("groups") or {}), **found["results"]}
    scores = {name: _metrics(values) for name, values in every.items()}
    main = BENCHMARKS[asking.task].task
    ordered = {name: scores[name] for name in sorted(scores, key=lambda name: (name != main, name)) if scores[name]}
    by_filter = Counter[str]()
    for sample in samples:
        by_filter[sample["filter"]] += bool(_is_right(sample))
    chosen = [sample for sample in samples if sample["filter"] == by_filter.most_common(1)[0][0]] if samples else []
    chooses = bool(chosen) and "acc" in chosen[0]
    answers = [_chosen(sample) if chooses else str(sample["resps"][0][0]).strip() for sample in chosen]
    return BenchmarkResult(
        scores=ordered,
        total=len(chosen),
        correct=sum(_is_right(sample) for sample in chosen),
        by_chance=sum(1 / len(sample["resps"]) for sample in chosen) if chooses else 0.0,
        answers=Counter(answers),
        right_answers=len({str(sample["target"]) for sample in chosen}),
        finite=not chooses or all(math.isfinite(score) for sample in chosen for score in _scores(sample)),
        **{name: getattr(model, name, 0) for name in ("asked", "shortened")},
        context_length=getattr(model, "max_length", 0),
    )


def _metrics(values: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return the metrics of lm-eval's `name,filter` and `name_stderr,filter`."""
    metrics = {}
    for key, value in values.items():
        name, comma, rule = key.partition(",")
        if comma and not name.endswith("_stderr"):
            error = values.get(f"{name}_stderr,{rule}")
            shown = name if rule == "none" else f"{name} ({rule})"
            metrics[shown] = (float(value), float(error) if isinstance(error, int | float) else None)
    return metrics


def _is_right(sample: Mapping[str, Any]) -> bool:
    return max(float(sample.get(name, 0.0)) for name in ("acc", "acc_norm", "exact_match")) > 0


def _scores(sample: Mapping[str, Any]) -> list[float]:
    """Return the log-likelihood of each choice."""
    return [float(answer[0][0]) for answer in sample["resps"]]


def _chosen(sample: Mapping[str, Any]) -> int:
    scores = _scores(sample)
    return scores.index(max(scores))
