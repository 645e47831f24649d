"""Console lines of an evaluation: those of Megatron's tasks/main.py, and further ones.

Source: docs/reference/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megalith.evaluate.alarms import Alarm
from megalith.evaluate.benchmark import BenchmarkResult
from megalith.evaluate.masked import MaskedResult
from megalith.evaluate.text import Accuracy, TextLoss

DONE = "done :-)"
_RULE = "!" * 80


class EvaluationConsole:
    """Listener that prints Megatron's lines, one of progress every `log_interval` batches."""

    def __init__(self, say: Callable[[str], None], log_interval: int) -> None:
        self._say, self._log_interval = say, log_interval

    def building(self, path: Path) -> None:
        self._say(f"> building lambada dataset from {path} ...")

    def found(self, samples: int) -> None:
        self._say(f" > found {samples} samples.")

    def counted(self, original: int, tokens: int) -> None:
        self._say(f" > number of original tokens: {original}, number of detokenized tokens: {tokens}")

    def batch(self, number: int) -> None:
        if number % self._log_interval == 0:
            self._say(f"> working on iteration: {number}")

    def note(self, text: str) -> None:
        self._say(f"note: {text}")


def result_line(task: str, result: Accuracy | TextLoss | MaskedResult) -> str:
    """Return the line of a result; `task` is in capitals."""
    start = f" validation results on {task} | "
    if isinstance(result, MaskedResult):  # a task of our own
        return start + _masked_numbers(result)
    if isinstance(result, Accuracy):
        return start + (
            f"number correct: {result.correct:.4E} | total examples: {result.total:.4E} | "
            f"avg accuracy: {result.share:.4E}"
        )
    loss = f"avg loss: {result.mean:.4E} | ppl: {result.perplexity:.4E} | "
    if result.num_bytes is not None:  # a task of our own
        return start + (
            f"{loss}bits per byte: {result.bits_per_byte:.4E} | documents: {result.num_documents} | "
            f"tokens: {result.num_tokens} |"
        )
    return start + f"{loss}adjusted ppl: {result.adjusted_perplexity:.4E} | token ratio: {result.token_ratio} |"


def _masked_numbers(result: MaskedResult) -> str:
    tokens, orders = result.tokens, result.orders
    text = (
        f"number correct: {tokens.correct:.4E} | hidden tokens: {tokens.total:.4E} | avg accuracy: {tokens.share:.4E} "
        f"| avg loss: {tokens.mean:.4E} | ppl: {tokens.perplexity:.4E} | samples: {result.samples} |"
    )
    if orders is None:
        return text
    return f"{text} order accuracy: {orders.share:.4E} | order loss: {orders.mean:.4E} |"


def score_lines(task: str, results: Mapping[str, BenchmarkResult]) -> list[str]:
    """Return a table of the scores of a benchmark: a line for each part and metric, a column for each checkpoint."""
    first = next(iter(results.values()))
    rows = [("", "", *results)]
    for part, metrics in first.scores.items():
        for metric in metrics:
            found = [result.scores[part][metric] for result in results.values()]
            shown = [f"{value:.4f}" + (f" +- {error:.4f}" if error is not None else "") for value, error in found]
            rows.append((part, metric, *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    counts = ", ".join(str(result.total) for result in results.values())
    return [f" results on {task.upper()} | questions: {counts} |", *(f" {line}".rstrip() for line in table)]


def between_dashes(*lines: str) -> list[str]:
    """Return lines between two of dashes that are one longer than the longest."""
    dashes = "-" * (max(map(len, lines)) + 1)
    return [dashes, *lines, dashes]


def alarm_lines(alarms: Sequence[Alarm]) -> list[str]:
    """Return the last lines of an evaluation with alarms, empty without alarms."""
    return [_RULE, *(line for alarm in alarms for line in alarm.lines()), _RULE] if alarms else []
