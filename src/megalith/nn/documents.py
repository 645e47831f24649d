"""Where the documents of a micro-batch lie, for attention that stays inside each of them.

    sequence 0    | a a a a | b b |        . seen        a | .
    sequence 1    | c | d d d d d |        # hidden      a | . .
                                                         b | # # .
    lengths       4 2 1 5                                b | # # . .

A mask of S x S is never made of whole sequences: kernels work document by document, or take the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalith.kernels.transfer import to_device


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of whole sequences.

    Attributes:
        ids_BS: number of the document of each token, different in neighbours that are not of the same document.
        lengths: tokens of each document, known to the host; sequence after sequence, B * S together.
    """

    ids_BS: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, ids_BS: Tensor, device: torch.device | None = None) -> Documents | None:
        """Build from document ids [B, S] on the host; None if each sequence is one document."""
        begins = torch.ones_like(ids_BS, dtype=torch.bool)
        begins[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
        starts = begins.flatten().nonzero().flatten().tolist()
        if len(starts) == ids_BS.shape[0]:
            return None
        ends = [*starts[1:], ids_BS.numel()]
        lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return cls(ids_BS if device is None else to_device(ids_BS, device), lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest one."""
        return max(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """Start of each document in the sequences laid end to end, and the end of the last; int32 on the device."""
        ends = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return to_device(ends, self.ids_BS.device)

    def laid_out(self, x_SBHK: Tensor) -> Tensor:
        """Concatenate the sequences. [S, B, H, K] -> [B * S, H, K]."""
        return x_SBHK.transpose(0, 1).flatten(0, 1)

    def in_sequences(self, x_THK: Tensor) -> Tensor:
        """Invert `laid_out`."""
        return x_THK.unflatten(0, self.ids_BS.shape).transpose(0, 1)

    def separated(self, x_SBHK: Tensor) -> Sequence[Tensor]:
        """Split into documents. [S, B, H, K] -> [L, 1, H, K] for each length L."""
        return self.laid_out(x_SBHK)[:, None].split(self.lengths)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Invert `separated`."""
        return self.in_sequences(torch.cat(list(parts)).squeeze(1))
