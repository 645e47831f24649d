"""Where the documents inside a sample begin, and what follows from it for positions.

A document ends with its end-of-document token, which still belongs to it:

    tokens         5 7 eod 3 eod 2 2
    document_ids   0 0 0   1 1   2 2       attention looks only at tokens of the same number
    positions      0 1 2   0 1   0 1

Source:  Megatron-LM `_get_ltor_masks_and_position_ids`, without its dense mask of S x S.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def document_ids(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int32]:
    """The number of the document, counted from 0 within the sample, that each token belongs to. [S] -> [S]."""
    ends = tokens == eod
    return np.asarray(np.cumsum(ends) - ends, np.int32)


def numbers_of_parts(lengths: Sequence[int], size: int) -> NDArray[np.int32]:
    """The number of the part, of parts of these lengths, that each of the first `size` tokens belongs to.

    Padding behind the last part counts to it, parts without tokens do not count.
    """
    there = [length for length in lengths if length]
    numbers = np.repeat(np.arange(len(there), dtype=np.int32), there)[:size]
    return np.pad(numbers, (0, size - len(numbers)), mode="edge")


def restarted_positions(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """Positions that start at 0 with each document. [S] -> [S]."""
    places = np.arange(len(documents), dtype=np.int64)
    starts = np.flatnonzero(np.diff(documents, prepend=-1))
    return places - starts[documents]
