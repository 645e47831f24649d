"""States, gradients and main parameters in half precision (`--use-precision-aware-optimizer`), arithmetic in fp32.

What is stored is rounded, what is computed is not: each piece of a parameter is widened, updated and rounded again, a
piece at a time, so that the fp32 copies stay in the cache and never exist for a whole model. The numbers are stored as
they are, without a scale per tensor: that is enough for bf16 moments and for fp16 main parameters, and not for moments
in fp16 or fp8, whose squares would vanish; a rule of the configuration refuses these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megalith.nn.precision import at_least_fp32
from megalith.optim.rules import UpdateRule, Work

PIECE_ON_CPU, PIECE_ELEMENTS = 1 << 18, 1 << 24
"""Of a piece: with its companions in fp32 4 MiB on a CPU, within the cache of a core, and 256 MiB elsewhere."""


@dataclass
class Widened:
    """An elementwise rule over tensors of several dtypes.

    Attributes:
        rule: what is done in fp32.
    """

    rule: UpdateRule
    _rooms: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.rule.kinds

    def settings(self) -> dict[str, Any]:
        return self.rule.settings()

    def update(self, work: Work) -> None:
        self.update_scaled(work, 1.0, None)

    def update_scaled(self, work: Work, scale: float, weights: Sequence[Tensor] | None) -> None:
        """Update with `scale` x the gradients, and round the new parameters to `weights` where there are such.

        Both are done while a piece is in the cache: in passes of their own they would take half as long again.
        """
        piece = PIECE_ON_CPU if work.params[0].device.type == "cpu" else PIECE_ELEMENTS
        for number, name in enumerate(work.names):
            held = [work.params[number], work.grads[number], *(work.states[kind][number] for kind in self.kinds)]
            flat = [tensor.view(-1) for tensor in held]
            weight = None if weights is None else weights[number].view(-1)
            for start in range(0, flat[0].numel(), piece):
                parts = [tensor[start : start + piece] for tensor in flat]
                wide = [self._wide(place, part) for place, part in enumerate(parts)]
                if scale != 1.0:
                    wide[1].mul_(scale)
                states = {kind: [wide[2 + place]] for place, kind in enumerate(self.kinds)}
                self.rule.update(replace(work, names=[name], params=wide[:1], grads=wide[1:2], states=states))
                for part, result in zip((parts[0], *parts[2:]), (wide[0], *wide[2:]), strict=True):
                    if part is not result:
                        part.copy_(result)
                if weight is not None:
                    weight[start : start + piece].copy_(parts[0])

    def _wide(self, place: int, part: Tensor) -> Tensor:
        """The part itself where it is wide enough, else a copy in a room that is used again."""
        dtype = at_least_fp32(part.dtype)
        if part.dtype == dtype:
            return part
        room = self._rooms.get((place, part.device))
        if room is None or room.numel() < part.numel():
            room = self._rooms[place, part.device] = torch.empty(part.numel(), dtype=dtype, device=part.device)
        return room[: part.numel()].copy_(part)


STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of the command line."""
