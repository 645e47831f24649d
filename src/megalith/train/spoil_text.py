"""Wrong numbers put in on purpose, for tests of what a run does about them: their text form.

`nan@step=7,point=activation,module=decoder.layers.1.mlp,rank=1,micro_batch=0` makes one element of the output of that
module a NaN on that rank, whenever that step is computed; with `times=1` the first time only. Points are weight,
activation, grad (of the output of the module) and loss; `inf` is the other value, and `spike` multiplies the loss by
ten thousand. `spoil` carries it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalith.errors import ConfigError

VALUES = {"nan": math.nan, "inf": math.inf}
SPIKE = 1.0e4
POINTS = ("weight", "activation", "grad", "loss")
_FIELDS = {"step", "point", "rank", "module", "micro_batch", "times"}


@dataclass(frozen=True)
class Spoil:
    """What is spoiled, and where.

    Attributes:
        action: "nan", "inf" or "spike".
        step: that makes this iteration.
        point: one of `POINTS`.
        module: a module, or a parameter for the point "weight"; not for the loss.
        rank: the only rank that it strikes; every rank that has the module if None.
        micro_batch: of the step.
        times: after which it is over; never if None.
    """

    action: str
    step: int
    point: str
    module: str = ""
    rank: int | None = None
    micro_batch: int = 0
    times: int | None = None


def is_spoil(text: str) -> bool:
    """Whether a MEGALITH_FAULT is one of these rather than a crash or a hang."""
    return text.partition("@")[0] in (*VALUES, "spike")


def parse_spoil(text: str) -> Spoil:
    """Read the text form.

    Raises:
        ConfigError: it is not understood.
    """
    action, _, rest = text.partition("@")
    fields = dict(part.partition("=")[::2] for part in rest.split(","))
    numbers = {name: fields[name] for name in ("step", "rank", "micro_batch", "times") if name in fields}
    point = fields.get("point", "")
    known = {"step", "point"} <= set(fields) <= _FIELDS and all(number.isdigit() for number in numbers.values())
    fits = (point == "loss") != ("module" in fields) and (point == "loss" or action != "spike")
    if not known or point not in POINTS or not fits:
        raise ConfigError(
            f"MEGALITH_FAULT={text} is not understood; write nan@step=7,point=activation,module=decoder.layers.0.mlp "
            f"with rank=N, micro_batch=N and times=N where wanted; points: {', '.join(POINTS)}; a loss has no module, "
            "and spike is for the loss alone"
        )
    places = {name: int(number) for name, number in numbers.items()}
    return Spoil(action, point=point, module=fields.get("module", ""), **places)
