"""A vocabulary of which a part of the rows is here: which rows token ids are."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.nn.placement import Shard


def local_rows(ids: Tensor, part: Shard, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Where token ids stand in the rows that are here.

    Shapes: [...] -> 2 x [...].

    Returns:
        The row of each id, and a mask that is True where it is not here. There the row is any that is here: what is
        read from it is masked, and what is added to it is zero. They are spread over all rows, since GPUs add many
        gradients to one row slowly.

    An id outside the vocabulary stays outside the rows on every rank, so that looking it up fails there as it does on
    one device.
    """
    elsewhere = ((ids >= 0) & (ids < part.start)) | ((ids >= part.stop) & (ids < vocab_size))
    return torch.where(elsewhere, ids % part.size, ids - part.start), elsewhere
