"""progress.txt in the folder of the checkpoints: one line a start and a checkpoint, as Megatron's --log-progress."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from megalith.train.hooks import Hook
from megalith.train.results import SavedCheckpoint, StepResult, WindowReport
from megalith.train.streams import warn


class ProgressLog(Hook):
    """Appends to `path`; a disk that fails costs the lines, with a warning, not the training.

    Args:
        path: progress.txt.
        world_size: processes of the run.
        flops: model FLOPs spent before this start.
        flops_per_step: of all processes together.
        job: what the cluster calls this run.
    """

    def __init__(self, path: Path, world_size: int, flops: float, flops_per_step: float, job: str = "") -> None:
        self._path, self._world_size, self._job = path, world_size, job
        self._flops, self._flops_per_step = flops, flops_per_step
        self._spent, self._seconds, self._tokens, self._pace = 0.0, 0.0, 0, 0.0
        self._line("Starting job")

    def after_step(self, result: StepResult) -> None:
        self._spent += self._flops_per_step
        self._seconds += result.seconds
        self._tokens = result.consumed_samples * (result.num_tokens // result.num_samples)

    def after_window(self, report: WindowReport) -> None:
        self._pace = report.teraflops

    def after_save(self, saved: SavedCheckpoint) -> None:
        job = self._spent / self._seconds / 1e12 / self._world_size if self._seconds else 0.0
        self._line(
            f"Saved checkpoint\tIteration: {saved.iteration}\tJob throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Last throughput: {self._pace:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {self._flops + self._spent:.2e}\t"
            f"Tokens (in billions): {self._tokens / 1e9:.2f}"
        )

    def _line(self, text: str) -> None:
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{now}\tJob ID: {self._job}\t# GPUs: {self._world_size}\t{text}\n")
        except OSError as error:
            warn(f"WARNING: {self._path} is not written: {error}")
