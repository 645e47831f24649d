"""Picture of a ladder: the losses and the law over the number of parameters, one line for each ratio of tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from megalith.report.ladder import Ladder, amount
from megalith.report.scaling_law import Fit


def draw(ladder: Ladder, law: Fit, file: Path) -> None:
    """Write the picture, in the format that the name of the file says; ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="parameters without embeddings", ylabel="validation loss")
    runs, predictions = ladder.of("fit"), ladder.predictions(law)
    sizes = [run.parameters for run in runs]
    x = np.geomspace(min(sizes), max(found.parameters for found in predictions), 60)
    for number, ratio in enumerate(ladder.ratios):
        near = [run for run in runs if round(run.tokens / run.parameters / ratio, 1) == 1]
        colour = f"C{number}"
        axes.plot(x, law.law.loss(x, ratio * x), color=colour, linewidth=1, label=f"{ratio:g} tokens per parameter")
        axes.plot([run.parameters for run in near], [run.loss for run in near], "o", color=colour)
    for place, found in enumerate(predictions):
        low, high = found.loss.value - found.loss.low, found.loss.high - found.loss.value
        reach = [[max(0.0, low)], [max(0.0, high)]]  # the law may lie outside of its own interval
        label = "predicted" if place == 0 else None
        axes.errorbar(found.parameters, found.loss.value, reach, fmt="s", color="0.5", capsize=3, label=label)
        if math.isfinite(found.measured):
            label = f"measured, not fitted ({amount(found.parameters)}, {found.relative_error:+.2%})"
            axes.plot(found.parameters, found.measured, "k*", markersize=11, label=label)
    axes.legend()
    figure.savefig(file)
