"""What the datasets of BERT and T5 share: the index of runs of sentences, its cache, and reading them.

A dataset is made by `preprocess --split-sentences`, so that a sequence is a sentence.
"""

from __future__ import annotations

import json
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from megalith.data.index_cache import Arrays, Recipe, load_or_build
from megalith.data.indexed import IndexedDataset
from megalith.data.masked.ngrams import Masking
from megalith.data.masked.sample_index import LONGEST_SENTENCE, build_sample_index
from megalith.data.samples import Portion
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_ARRAYS = ("sample_index",)


@dataclass(frozen=True)
class MaskedOptions:
    """How samples are made.

    Attributes:
        sequence_length: tokens of a sample, padding included.
        seed: of the order and of all draws; the same for every split.
        masking: how words to hide are chosen.
        short_probability: of a sample that is meant to be shorter.
    """

    sequence_length: int
    seed: int
    masking: Masking
    short_probability: float = 0.1

    def identity(self) -> dict[str, Any]:
        """Megatron's names of what the samples depend on, in the order in which it hashes them."""
        masking = self.masking
        return {
            "masking_probability": masking.probability,
            "short_sequence_probability": self.short_probability,
            "masking_max_ngram": masking.longest_ngram,
            "masking_do_full_word": masking.whole_words,
            "masking_do_permutation": masking.permutation,
            "masking_use_longer_ngrams": masking.longer_ngrams,
            "masking_use_geometric_distribution": masking.geometric,
        }


class MaskedDataset(ABC):
    """Samples of one split; a `samples.SplitDataset`. Item i is always the same, whenever it is read.

    Args:
        documents: the sentences, of every split.
        portion: the split.
        options: how samples are made.
        tokenizer: the one that made the data.
        class_name: Megatron's name of this kind of dataset.
        longest: tokens of a sample without its special ones.
        fewest_sentences: of a sample.
        further: what else the samples depend on, by Megatron's names.

    Attributes:
        name: train, valid or test.
        prefix: where the documents come from.
        requested: number of samples asked for, None for one epoch.
        sample_index: first sentence, the one behind the last, and target length of each sample; [samples, 3].

    Raises:
        DataError: no document of the split serves.
    """

    def __init__(
        self,
        documents: IndexedDataset,
        portion: Portion,
        *,
        options: MaskedOptions,
        tokenizer: Tokenizer,
        class_name: str,
        longest: int,
        fewest_sentences: int,
        further: Mapping[str, Any],
    ) -> None:
        self.name, self.prefix, self.requested = portion.name, portion.path, portion.requested
        self._documents, self._options, self._vocab_size = documents, options, tokenizer.vocab_size
        self._own = portion.documents(documents.num_documents)
        self._longest, self._fewest = longest, fewest_sentences
        self.identity: dict[str, Any] = {
            "class": class_name,
            "dataset_path": portion.path,
            "num_samples": portion.requested,
            "index_split": self.name,
            "random_seed": options.seed,
            "sequence_length": options.sequence_length,
            "split": portion.shares.text,
            "split_matrix": portion.shares.matrix,
            "tokenizer": tokenizer.identity(),
            **options.identity(),
            **further,
        }
        description = json.dumps(self.identity, indent=4)
        cached = load_or_build(
            portion.cache_folder,
            Recipe(class_name, description, _ARRAYS, self._build, self._source),
            portion.written_ns,
            is_checked=portion.cache_is_checked,
        )
        self.cache_problem = cached.problem
        self.sample_index: NDArray[Any] = cached.arrays["sample_index"]
        if portion.requested and not len(self.sample_index):
            raise DataError(self._nothing(portion.said(documents.num_documents)))
        logger.info("> total number of samples: %d", len(self))

    @abstractmethod
    def _sample(self, sentences: list[NDArray[Any]], target: int, random: RandomState) -> dict[str, NDArray[Any]]:
        """A sample of sentences; `target` tokens of them at most."""

    def __len__(self) -> int:
        """Number of samples: those of whole epochs, which may be more than were requested."""
        return len(self.sample_index)

    @property
    def built_for(self) -> str:
        """What was asked of it."""
        return f"{self.requested} samples"

    @property
    def summary(self) -> str:
        """How much of it there is, in one line."""
        return f"{len(self)} samples of {len(self._own)} documents"

    def __getitem__(self, item: int) -> dict[str, NDArray[Any]]:
        """Sample `item` in the order of training.

        Raises:  DataError if the files do not give it, or hold tokens outside the vocabulary.
        """
        if not 0 <= item < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        first, stop, target = self.sample_index[item].tolist()
        try:
            sentences = self._documents[first:stop]
        except (IndexError, ValueError) as error:
            raise DataError(
                f"sample {item} of the {self.name} split cannot be read from {self.prefix} ({error}): the files "
                f"changed under the run, or are damaged; start again, and if it stays so prepare them anew"
            ) from error
        assert isinstance(sentences, list)
        self._refuse_foreign(sentences)
        return self._sample(sentences, target, RandomState((self._options.seed + item) % 2**32))

    def _refuse_foreign(self, sentences: list[NDArray[Any]]) -> None:
        for sentence in sentences:
            if len(sentence) and (sentence.min() < 0 or sentence.max() >= self._vocab_size):
                outside = sentence.min() if sentence.min() < 0 else sentence.max()
                raise DataError(
                    f"{self.prefix} holds token {outside}, outside the vocabulary of {self._vocab_size}: it was made "
                    f"with another tokenizer"
                )

    def _build(self) -> Arrays:
        return {
            "sample_index": build_sample_index(
                self._documents.document_index[self._own.start : self._own.stop + 1],
                self._documents.lengths,
                requested=self.requested,
                longest=self._longest,
                short_probability=self._options.short_probability,
                seed=self._options.seed,
                fewest_sentences=self._fewest,
            )
        }

    def _source(self) -> str:
        """Digest of what the index depends on besides its description: the lengths and borders of the documents."""
        parts = (self._documents.lengths, self._documents.document_index)
        return ", ".join(f"{len(part)} entries {zlib.crc32(np.ascontiguousarray(part).data):08x}" for part in parts)

    def _nothing(self, where: str) -> str:
        asked = f"the {self.name} split of {self.prefix} has no sample, but {self.requested} are asked of it"
        share = "give the split a larger share, or ask for no samples (--eval-iters 0)"
        if not self._own:
            return f"{asked}: it has no document ({where}). G{share[1:]}"
        sentences = "a sentence" if self._fewest == 1 else f"{self._fewest} sentences"
        return (
            f"{asked}: no document of it has {sentences} without one longer than {LONGEST_SENTENCE} tokens ({where}). "
            f"Prepare the text with preprocess --split-sentences, {share}"
        )
