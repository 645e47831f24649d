"""Mock documents of Megatron's `--mock-data`, to try a configuration without data.

Source:  Megatron-LM `MockGPTLowLevelDataset`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.tokenizers import Tokenizer

MOCK_SPLIT = "1,1,1"
NUM_DOCUMENTS = 100_000
_LONGEST = 4096


class MockDocuments:
    """100,000 documents of 1 to 4095 tokens: 1, 2, 3 and so on, then the end-of-document id if there is one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.lengths: NDArray[np.int32] = np.random.default_rng(0).integers(1, _LONGEST, NUM_DOCUMENTS, np.int32)
        self._vocab_size, self._eod = tokenizer.vocab_size, tokenizer.eod

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return `length` tokens of a document from `offset` on; up to its end by default."""
        total = int(self.lengths[sequence])
        stop = total if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1) % self._vocab_size
        if stop == total and len(tokens) and self._eod is not None:
            tokens[-1] = self._eod
        return tokens
