"""Base of the BERT and T5 datasets: runs of sentences, their cached index, and the choice of masked words.

The text is prepared with `preprocess --split-sentences`, so that a sequence is a sentence. N-grams of whole words are
masked until the requested share of the tokens is masked:

    tokens                    [CLS] un ##want ##ed gu ##est [SEP]
    candidates, whole words         (1 2 3)        (4 5)
    candidates, pieces              (1) (2) (3)    (4) (5)

Random numbers are drawn in Megatron's order, so that its samples are repeated exactly. One exception: under
`permutation` Megatron draws the moved tokens from an unseeded generator; here the sample's own generator
draws them, so that a sample is the same whenever it is read.

Source:  Megatron-LM `MaskedWordPieceDataset._create_masked_lm_predictions`; Devlin et al. 2018, arXiv:1810.04805;
spans of geometric lengths from Joshi et al. 2020, arXiv:1907.10529, section 3.1.
"""

from __future__ import annotations

import json
import logging
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from megalith.data.index_cache import Arrays, IndexSpec
from megalith.data.indexed import IndexedDataset
from megalith.data.masked.sample_index import LONGEST_SENTENCE, build_sample_index
from megalith.data.samples import SplitSpec
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.word_piece import is_word_continuation

_GEOMETRIC = 0.2  # success probability of SpanBERT's span lengths
logger = logging.getLogger(__name__)

_ARRAYS = ("sample_index",)


@dataclass(frozen=True)
class Masking:
    """Options of the choice of masked words.

    Attributes:
        probability: share of the tokens that is masked.
        longest_ngram: maximum number of words masked together; n words have a weight of 1 / n.
        whole_words: mask all pieces of a word together.
        permutation: also permute as many unmasked tokens, which are then predicted too.
        longer_ngrams: reverse the weights of the n-grams.
        geometric: draw lengths from a geometric distribution instead.
    """

    probability: float
    longest_ngram: int
    whole_words: bool = True
    permutation: bool = False
    longer_ngrams: bool = False
    geometric: bool = False

    @cached_property
    def cumulative_weights(self) -> list[float]:
        """Return the probability of n-grams of up to 1, 2, ... words."""
        weights = 1.0 / (np.arange(self.longest_ngram, dtype=np.int64) + 1)
        weights = weights / weights.sum(keepdims=True)
        if self.longer_ngrams:
            weights = weights[::-1]
        sums = (weights / weights.sum(keepdims=True)).cumsum()
        bounds: list[float] = (sums / sums[-1]).tolist()
        return bounds

    def draw_by_weight(self, random: RandomState) -> int:
        """Draw a number of words to mask together, by the weights."""
        return bisect_right(self.cumulative_weights, random.random_sample()) + 1

    def draw(self, random: RandomState) -> int:
        """Draw a number of words to mask together."""
        if self.geometric:
            return min(int(random.geometric(_GEOMETRIC)), self.longest_ngram)
        return self.draw_by_weight(random)


@dataclass(frozen=True)
class MaskedTokens:
    """Sequence with masked words.

    Attributes:
        labels: (position, original token) of each position to be predicted, by position.
        spans: positions that were masked together and their original tokens, by position.
    """

    tokens: list[int]
    labels: list[tuple[int, int]]
    spans: list[tuple[list[int], list[int]]]


def mask(
    tokens: Sequence[int],
    target: int,
    random: RandomState,
    masking: Masking,
    *,
    unmaskable: Collection[int],
    continues: Sequence[bool],
    replacement: Callable[[RandomState], int | None],
) -> MaskedTokens:
    """Choose and mask words.

    Args:
        target: intended length of the sample in tokens, which bounds how many are masked.
        unmaskable: ids that are never masked.
        continues: for each id, whether it continues the word before it.
        replacement: draws the id that replaces a token; None for the token itself.
    """
    candidates = _candidates(tokens, masking, unmaskable, continues)
    num_to_mask = min(masking.probability * target, max(1, round(len(tokens) * masking.probability)))
    order = list(range(len(candidates)))
    random.shuffle(order)
    masked_tokens, labels, masked = list(tokens), list[tuple[int, int]](), set[int]()
    spans: list[tuple[list[int], list[int]]] = []
    for candidate in order:
        if len(labels) >= num_to_mask:
            break
        ngram = _longest_fitting(candidates, candidate, masking.draw(random), num_to_mask - len(labels))
        if ngram is None or not masked.isdisjoint(ngram):
            continue
        for position in ngram:
            masked.add(position)
            new = replacement(random)
            masked_tokens[position] = tokens[position] if new is None else new
            labels.append((position, tokens[position]))
        spans.append((ngram, [tokens[position] for position in ngram]))
    random.shuffle(order)
    if masking.permutation:
        labels += _permute(masked_tokens, candidates, order, masked, num_to_mask, random, masking)
    return MaskedTokens(
        masked_tokens, sorted(labels, key=lambda label: label[0]), sorted(spans, key=lambda span: span[0][0])
    )


def _candidates(
    tokens: Sequence[int], masking: Masking, unmaskable: Collection[int], continues: Sequence[bool]
) -> list[list[int]]:
    """Return the positions of each word, or of each piece."""
    found: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in unmaskable:
            continue
        if continues[token] and masking.whole_words and found:
            found[-1].append(position)
        else:
            found.append([position])
    return found


def _longest_fitting(candidates: list[list[int]], first: int, words: int, room: float) -> list[int] | None:
    """Return the positions of the longest n-gram of at most `words` words from `first` on that fits into `room`."""
    for count in range(words, 0, -1):
        positions = [position for word in candidates[first : first + count] for position in word]
        if len(positions) <= room:
            return positions
    return None


def _permute(
    masked_tokens: list[int],
    candidates: list[list[int]],
    order: list[int],
    masked: set[int],
    num_to_move: float,
    random: RandomState,
    masking: Masking,
) -> Iterator[tuple[int, int]]:
    """Permute unmasked tokens of `masked_tokens` in place; yield (position, original token).

    The n-grams are drawn from a copy of `random`, whose next draws choose the new positions.
    """
    moved: set[int] = set()
    copy = RandomState()
    copy.set_state(random.get_state())
    for candidate in order:
        if len(moved) >= num_to_move:
            break
        ngram = _longest_fitting(candidates, candidate, masking.draw_by_weight(copy), num_to_move - len(moved))
        if ngram is not None and masked.isdisjoint(ngram) and moved.isdisjoint(ngram):
            moved.update(ngram)
    positions = sorted(moved)
    sources = list(positions)
    random.shuffle(sources)
    before = list(masked_tokens)
    for position, source in zip(positions, sources, strict=True):
        masked_tokens[position] = before[source]
        yield position, before[position]


@dataclass(frozen=True)
class MaskedOptions:
    """Options of masked datasets.

    Attributes:
        sequence_length: tokens of a sample, padding included.
        seed: seed of the order and of all draws; the same for every split.
        short_probability: probability of a sample with a shorter target length.
    """

    sequence_length: int
    seed: int
    masking: Masking
    short_probability: float = 0.1

    def identity(self) -> dict[str, Any]:
        """Return what the samples depend on, under Megatron's names and in the order in which it hashes them."""
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


def pad_to(values: list[int], length: int, padding: int) -> NDArray[np.int64]:
    """Pad values to a length. [length]."""
    array = np.full(length, padding, np.int64)
    array[: len(values)] = values
    return array


@dataclass(frozen=True)
class MaskedDatasetFactory:
    """Base of the factories of masked datasets (`samples.DatasetFactory`)."""

    options: MaskedOptions
    tokenizer: Tokenizer
    class_name: ClassVar[str]


class MaskedDataset(ABC):
    """Masked samples of one split (`samples.SplitDataset`). Item i is the same whenever it is read.

    Args:
        longest: maximum tokens of a sample, special ones excluded.
        min_sentences: minimum number of sentences of a sample.
        extra_identity: further values that the samples depend on, under Megatron's names.

    Raises:  DataError if no document of the split can be used.
    """

    def __init__(
        self,
        documents: IndexedDataset,
        spec: SplitSpec,
        factory: MaskedDatasetFactory,
        *,
        longest: int,
        min_sentences: int,
        extra_identity: Mapping[str, Any],
    ) -> None:
        self.name, self.prefix, self.requested = spec.name, spec.path, spec.requested
        options, tokenizer = factory.options, factory.tokenizer
        self._documents, self._options, self._vocab_size = documents, options, tokenizer.vocab_size
        self._split_documents = spec.documents(documents.num_documents)
        self._longest, self._min_sentences = longest, min_sentences
        self._spec, self._continues = spec, is_word_continuation(tokenizer)
        self.identity: dict[str, Any] = {
            **spec.identity(factory.class_name, options.seed, options.sequence_length, tokenizer),
            **options.identity(),
            **extra_identity,
        }
        description = json.dumps(self.identity, indent=4)
        index = IndexSpec(factory.class_name, description, _ARRAYS, self._build, self._source_digest)
        cached = spec.load_or_build(index)
        self.cache_problem = cached.problem
        self.sample_index: NDArray[Any] = cached.arrays["sample_index"]
        if spec.requested and not len(self.sample_index):
            raise DataError(self._no_sample_message(spec.describe_documents(documents.num_documents)))
        logger.info("> total number of samples: %d", len(self))

    @abstractmethod
    def _sample(self, sentences: list[NDArray[Any]], target: int, random: RandomState) -> dict[str, NDArray[Any]]:
        """Build a sample from sentences, of which at most `target` tokens are used."""

    def __len__(self) -> int:
        """Return the number of samples in whole epochs, which may exceed the requested number."""
        return len(self.sample_index)

    @property
    def request_text(self) -> str:
        """Describe the requested samples, for messages."""
        return f"{self.requested} samples"

    @property
    def summary(self) -> str:
        """Describe the size of the dataset in one line, and a text that was not split into sentences."""
        size, lengths = f"{len(self)} samples of {len(self._split_documents)} documents", self._documents.lengths
        if len(lengths) != self._documents.num_documents or not np.any(lengths > self._longest):
            return size
        return (
            f"{size}; each document is one sequence, of which only the first {self._longest} tokens are read: "
            "if it has several sentences, prepare the text with preprocess --split-sentences"
        )

    def __getitem__(self, item: int) -> dict[str, NDArray[Any]]:
        """Return sample `item`. Raises DataError if it cannot be read, or has tokens outside the vocabulary."""
        if not 0 <= item < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        first, stop, target = self.sample_index[item].tolist()
        try:
            sentences = self._documents[first:stop]
        except (IndexError, ValueError) as error:
            raise self._spec.unreadable(item, error) from error
        assert isinstance(sentences, list)
        for sentence in sentences:
            if len(sentence) and (sentence.min() < 0 or sentence.max() >= self._vocab_size):
                raise self._spec.outside_vocabulary(sentence, self._vocab_size)
        return self._sample(sentences, target, RandomState((self._options.seed + item) % 2**32))

    def _build(self) -> Arrays:
        return {
            "sample_index": build_sample_index(
                self._documents.document_index[self._split_documents.start : self._split_documents.stop + 1],
                self._documents.lengths,
                requested=self.requested,
                longest=self._longest,
                short_probability=self._options.short_probability,
                seed=self._options.seed,
                min_sentences=self._min_sentences,
            )
        }

    def _source_digest(self) -> str:
        """Digest the inputs of the index that are not in its description: lengths and bounds of the documents."""
        parts = (self._documents.lengths, self._documents.document_index)
        return ", ".join(f"{len(part)} entries {zlib.crc32(np.ascontiguousarray(part).data):08x}" for part in parts)

    def _no_sample_message(self, where: str) -> str:
        problem = f"the {self.name} split of {self.prefix} has no sample, but the run needs {self.requested}"
        remedy = f"ive the split a larger share{self._spec.or_none}"
        if not self._split_documents:
            return f"{problem}: it has no document ({where}). G{remedy}"
        sentences = "a sentence" if self._min_sentences == 1 else f"{self._min_sentences} sentences"
        return (
            f"{problem}: each of its documents has fewer than {sentences} or one longer than {LONGEST_SENTENCE} tokens "
            f"({where}). Prepare the text with preprocess --split-sentences, g{remedy}"
        )
