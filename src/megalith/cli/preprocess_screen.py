"""What `megalith preprocess` prints: Megatron's lines, and a few of its own."""

from __future__ import annotations

import sys

from megalith.data.preprocess import PreprocessReport
from megalith.data.progress import Standing

_MEGABYTE = 1024 * 1024
_SECONDS_BETWEEN_LINES = 1.0
_SHOWN_BAD_LINES = 10


class ConsoleProgress:
    """Opening and start-up on the standard output, progress on the standard error."""

    def __init__(self, log_interval: int) -> None:
        self._interval = log_interval
        self._next_line_at = _SECONDS_BETWEEN_LINES
        self._last_documents = 0

    def note(self, text: str) -> None:
        print(f"note: {text}", file=sys.stderr, flush=True)

    def opening(self, path: str, about: str) -> None:
        print(f"Opening {path}", flush=True)
        print(f"  {about}", flush=True)

    def started(self, seconds: float, workers: int) -> None:
        print(f"Time to startup: {seconds}", flush=True)

    def advanced(self, standing: Standing) -> None:
        if standing.documents - self._last_documents >= self._interval and standing.seconds >= self._next_line_at:
            self._next_line_at = standing.seconds + _SECONDS_BETWEEN_LINES
            self._last_documents = standing.documents
            _say(f"{_processed(standing)} {_left(standing)}")

    def skipped(self, place: str, reason: str, count: int) -> None:
        if count <= _SHOWN_BAD_LINES:
            _say(f"left out: {place}: {reason}")
        elif count == _SHOWN_BAD_LINES + 1:
            _say("left out: more, which are listed in the file named at the end")

    def finished(self, standing: Standing) -> None:
        _say(_processed(standing))


def summary(report: PreprocessReport) -> str:
    """The last lines of a run."""
    lines = [
        f"Wrote {prefix}.bin and .idx: {report.num_documents} documents, {report.num_tokens[key]} tokens"
        for key, prefix in report.prefixes.items()
    ]
    if report.num_skipped:
        lines.append(f"Left out {report.num_skipped} documents that cannot be read: {report.skipped_list}")
    speed = report.num_bytes / report.seconds / _MEGABYTE
    written = f"{speed:.1f} MB/s, {report.workers} processes"
    if report.num_new_tokens:
        written += f", {report.num_bytes / report.num_new_tokens:.2f} bytes of text a token"
    lines.append(f"{report.num_bytes} bytes in {report.seconds:.1f} s ({written})")
    return "\n".join(lines)


def _processed(standing: Standing) -> str:
    """Megatron's line; the speeds are those of this run."""
    documents = standing.documents - standing.documents_before
    speed = (standing.bytes - standing.bytes_before) / standing.seconds / _MEGABYTE
    return f"Processed {standing.documents} documents ({documents / standing.seconds} docs/s, {speed} MB/s)."


def _left(standing: Standing) -> str:
    done = standing.disk - standing.disk_before
    seconds = standing.seconds * (standing.disk_total - standing.disk) / max(1, done)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{standing.disk / max(1, standing.disk_total):.1%} done, {hours}:{minutes:02}:{rest:02} left"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
