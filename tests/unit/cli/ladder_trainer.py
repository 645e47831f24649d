"""Stands for `megalith train` in tests of `megalith ladder`: writes the end of a run whose loss follows a planted law.

The best learning rate is 0.01. The file `stop` in the folder of the ladder makes it wait for a signal once and end as a
run that has saved; at the rate 1 it ends as a run that has diverged.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from pathlib import Path

from megalith.config import load
from megalith.report.scaling_law import Law

LAW = Law(E=1.0, A=20.0, alpha=0.3, B=60.0, beta=0.35)


def main() -> int:
    config = load(sys.argv[1:], files=False)
    save, iterations = Path(str(config.checkpoint.save)), config.train_iters
    with (save.parent / "started").open("a") as started:
        started.write(f"{save.name}\n")
    if config.schedule.lr == 1.0:
        return 1
    stop = save.parent / "stop"
    if stop.exists():
        stop.unlink()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        (save.parent / "waits").touch()
        time.sleep(60)
    tokens = config.global_batch_size * config.data.seq_length
    layers, width = config.model.num_layers, config.model.hidden_size
    parameters = 12 * layers * width**2 + (4 * layers + 2) * width  # without importing torch
    loss = float(LAW.loss(parameters, iterations * tokens))
    loss += 0.1 * math.log10(config.schedule.lr / 0.01) ** 2
    records = [
        {"event": "start", "iteration": 0},
        {"event": "step", "iteration": iterations, "loss": loss, "num_tokens": tokens, "seconds": 0.5},
        {"event": "evaluation", "iteration": iterations, "split": "validation", "loss": loss},
    ]
    (save / "run").mkdir(parents=True)
    (save / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (save / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
