"""A dataset of BERT or T5 whose text was not split into sentences says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.masked.dataset import MaskedDataset, MaskedOptions, Masking
from megalith.data.masked.t5 import T5DatasetFactory
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.tokenizers.null import NullTokenizer


class Sentences(MaskedDataset):
    def _sample(self, sentences: list[Any], target: int, random: Any) -> dict[str, Any]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([[30], [9]], True),
        ([[30], [9, 5]], False),
        ([[14], [9]], False),  # titles: nothing is cut
    ],
)
def test_unsplit_documents_are_noticed(tmp_path: Path, documents: list[list[int]], said: bool) -> None:
    prefix = str(tmp_path / "text_document")
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for lengths in documents:
            writer.add_document(np.arange(sum(lengths), dtype=np.uint16), lengths)
        writer.finalize()
    dataset = Sentences(
        IndexedDataset(prefix),
        SplitSpec(0, 4, SplitRatios.parse("1"), prefix, tmp_path),
        T5DatasetFactory(MaskedOptions(16, 7, Masking(0.15, 3)), NullTokenizer(99), decoder_length=8),
        longest=14,
        min_sentences=1,
        extra_identity={},
    )
    assert ("--split-sentences" in dataset.summary) is said
    assert ("14" in dataset.summary) is said
