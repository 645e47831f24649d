"""Stands for `megalith train` in tests of `megalith ladder`: writes the end of a run whose loss follows a planted law.

The best learning rate is 0.01. The file `stop` in the folder of the ladder makes it wait for a signal once and end as a
run that has saved; at the rate 1 it ends as a run that has diverged, at 2 to 5 as one that fails with the same code, at
6 as one whose last records are lost, and at 7 as one whose time is over.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.config import RunConfig, load
from megalith.report.scaling_law import Law

LAW = Law(E=1.0, A=20.0, alpha=0.3, B=60.0, beta=0.35)
START = {"event": "start", "iteration": 0}
BAD = {"event": "bad step", "iteration": 1, "loss": None, "action": "stop", "again": "anomalous"}
FAILURES: Mapping[float, Sequence[Mapping[str, Any]]] = {  # by rate
    1.0: [START, BAD, {"event": "save", "iteration": 0}],
    2.0: [START],
    3.0: [START, {**BAD, "action": "skip"}],
    4.0: [START, {**BAD, "again": "finite"}],
    5.0: [START, BAD, {"event": "resume", "iteration": 0}],
}


def main() -> int:
    config = load(sys.argv[1:], files=False)
    save, iterations = Path(str(config.checkpoint.save)), config.train_iters
    with (save.parent / "started").open("a") as started:
        started.write(f"{save.name}\n")
    if config.schedule.lr in FAILURES:
        write(save, config, FAILURES[config.schedule.lr])
        return 1
    stop = save.parent / "stop"
    if stop.exists():
        stop.unlink()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        (save.parent / "waits").write_text(str(os.getpid()))
        time.sleep(60)
    tokens = config.global_batch_size * config.data.seq_length
    layers, width = config.model.num_layers, config.model.hidden_size
    parameters = 12 * layers * width**2 + (4 * layers + 2) * width  # without importing torch
    loss = float(LAW.loss(parameters, iterations * tokens))
    loss += 0.1 * math.log10(config.schedule.lr / 0.01) ** 2
    records = [
        START,
        {"event": "step", "iteration": iterations, "loss": loss, "num_tokens": tokens, "seconds": 0.5},
        {"event": "evaluation", "iteration": iterations, "split": "validation", "loss": loss},
    ]
    if config.schedule.lr in (6.0, 7.0):
        over = {"event": "exit", "iteration": 1, "kind": "duration"}
        records = [START, {**records[1], "iteration": 1}, *([over] if config.schedule.lr == 7.0 else [])]
    write(save, config, records)
    return 0


def write(save: Path, config: RunConfig, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the run folder."""
    (save / "run").mkdir(parents=True, exist_ok=True)
    (save / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (save / "run" / "config.json").write_text(json.dumps(config.to_dict()))


if __name__ == "__main__":
    sys.exit(main())
