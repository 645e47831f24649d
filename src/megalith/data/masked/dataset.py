"""What the datasets of BERT and T5 share: runs of sentences, their cached index, and choosing the words to hide.

A dataset is made by `preprocess --split-sentences`, so that a sequence is a sentence. N-grams of whole words are hidden
until the wanted share of the tokens is:

    tokens                    [CLS] un ##want ##ed gu ##est [SEP]
    candidates, whole words         (1 2 3)        (4 5)
    candidates, pieces              (1) (2) (3)    (4) (5)

The draws come in Megatron's order, so that its samples are repeated number by number. Under `permutation` Megatron
draws which tokens move from a generator that nobody has seeded; here these draws are the sample's own too, so that a
sample is the same whenever it is read. What then moves where is as Megatron has it.

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

from megalith.data.index_cache import Arrays, Recipe
from megalith.data.indexed import IndexedDataset
from megalith.data.masked.sample_index import LONGEST_SENTENCE, build_sample_index
from megalith.data.samples import Portion
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.word_piece import continues_a_word

_GEOMETRIC = 0.2  # SpanBERT's
logger = logging.getLogger(__name__)

_ARRAYS = ("sample_index",)


@dataclass(frozen=True)
class Masking:
    """How words are chosen.

    Attributes:
        probability: share of the tokens that is hidden.
        longest_ngram: words that are hidden together at most; n of them with a weight of 1 / n.
        whole_words: pieces of a word are hidden together.
        permutation: as many tokens again change places, and are to be found too.
        longer_ngrams: the weights the other way round.
        geometric: lengths from a geometric distribution instead.
    """

    probability: float
    longest_ngram: int
    whole_words: bool = True
    permutation: bool = False
    longer_ngrams: bool = False
    geometric: bool = False

    @cached_property
    def cumulated(self) -> list[float]:
        """Probability of n-grams of up to 1, 2, ... words."""
        weights = 1.0 / (np.arange(self.longest_ngram, dtype=np.int64) + 1)
        weights = weights / weights.sum(keepdims=True)
        if self.longer_ngrams:
            weights = weights[::-1]
        sums = (weights / weights.sum(keepdims=True)).cumsum()
        bounds: list[float] = (sums / sums[-1]).tolist()
        return bounds

    def draw_by_weight(self, random: RandomState) -> int:
        """How many words to take together, by the weights."""
        return bisect_right(self.cumulated, random.random_sample()) + 1

    def draw(self, random: RandomState) -> int:
        """How many words to take together."""
        if self.geometric:
            return min(int(random.geometric(_GEOMETRIC)), self.longest_ngram)
        return self.draw_by_weight(random)


@dataclass(frozen=True)
class Masked:
    """A sequence with words hidden.

    Attributes:
        labels: position -> what stood there, of the positions to be told; in the order of positions.
        spans: the positions that were hidden together and the tokens that stood there, in the order of positions.
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
    borders: Collection[int],
    continues: Sequence[bool],
    replacement: Callable[[RandomState], int | None],
) -> Masked:
    """Hide words.

    Args:
        target: tokens that the sample was meant to have, which bounds how many are hidden.
        borders: ids that are never hidden.
        continues: of each id, whether it goes on the word before it.
        replacement: draws what stands in the place of a token; None for the token itself.
    """
    candidates = _candidates(tokens, masking, borders, continues)
    wanted = min(masking.probability * target, max(1, round(len(tokens) * masking.probability)))
    order = list(range(len(candidates)))
    random.shuffle(order)
    left, labels, hidden = list(tokens), list[tuple[int, int]](), set[int]()
    spans: list[tuple[list[int], list[int]]] = []
    for candidate in order:
        if len(labels) >= wanted:
            break
        ngram = _fitting(candidates, candidate, masking.draw(random), wanted - len(labels))
        if ngram is None or not hidden.isdisjoint(ngram):
            continue
        for position in ngram:
            hidden.add(position)
            new = replacement(random)
            left[position] = tokens[position] if new is None else new
            labels.append((position, tokens[position]))
        spans.append((ngram, [tokens[position] for position in ngram]))
    random.shuffle(order)
    if masking.permutation:
        labels += _permute(left, candidates, order, hidden, wanted, random, masking)
    return Masked(left, sorted(labels, key=lambda label: label[0]), sorted(spans, key=lambda span: span[0][0]))


def _candidates(
    tokens: Sequence[int], masking: Masking, borders: Collection[int], continues: Sequence[bool]
) -> list[list[int]]:
    """The positions of each word, or of each piece."""
    found: list[list[int]] = []
    for position, token in enumerate(tokens):
        if token in borders:
            continue
        if continues[token] and masking.whole_words and found:
            found[-1].append(position)
        else:
            found.append([position])
    return found


def _fitting(candidates: list[list[int]], first: int, words: int, room: float) -> list[int] | None:
    """The positions of the longest n-gram of up to `words` words from `first` on with at most `room` of them."""
    for count in range(words, 0, -1):
        positions = [position for word in candidates[first : first + count] for position in word]
        if len(positions) <= room:
            return positions
    return None


def _permute(
    left: list[int],
    candidates: list[list[int]],
    order: list[int],
    hidden: set[int],
    wanted: float,
    random: RandomState,
    masking: Masking,
) -> Iterator[tuple[int, int]]:
    """Let tokens that are not hidden change places in `left`; yields what stood where.

    The n-grams are drawn from a copy of `random`, whose next draws are those of the new places.
    """
    moved: set[int] = set()
    copy = RandomState()
    copy.set_state(random.get_state())
    for candidate in order:
        if len(moved) >= wanted:
            break
        ngram = _fitting(candidates, candidate, masking.draw_by_weight(copy), wanted - len(moved))
        if ngram is not None and hidden.isdisjoint(ngram) and moved.isdisjoint(ngram):
            moved.update(ngram)
    places = sorted(moved)
    sources = list(places)
    random.shuffle(sources)
    before = list(left)
    for place, source in zip(places, sources, strict=True):
        left[place] = before[source]
        yield place, before[place]


@dataclass(frozen=True)
class MaskedOptions:
    """How samples are made.

    Attributes:
        sequence_length: tokens of a sample, padding included.
        seed: of the order and of all draws; the same for every split.
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


def filled(values: list[int], length: int, padding: int) -> NDArray[np.int64]:
    """Fill values up to a length. [length]."""
    array = np.full(length, padding, np.int64)
    array[: len(values)] = values
    return array


@dataclass(frozen=True)
class MaskedSamples:
    """How the samples of a family are made: the base of `samples.SampleRule`s."""

    options: MaskedOptions
    tokenizer: Tokenizer
    class_name: ClassVar[str]


class MaskedDataset(ABC):
    """Samples of one split; a `samples.SplitDataset`. Item i is always the same, whenever it is read.

    Args:
        longest: tokens of a sample without its special ones.
        fewest_sentences: of a sample.
        further: what else the samples depend on, by Megatron's names.

    Raises:  DataError if no document of the split serves.
    """

    def __init__(
        self,
        documents: IndexedDataset,
        portion: Portion,
        rule: MaskedSamples,
        *,
        longest: int,
        fewest_sentences: int,
        further: Mapping[str, Any],
    ) -> None:
        self.name, self.prefix, self.requested = portion.name, portion.path, portion.requested
        options, tokenizer = rule.options, rule.tokenizer
        self._documents, self._options, self._vocab_size = documents, options, tokenizer.vocab_size
        self._own = portion.documents(documents.num_documents)
        self._longest, self._fewest = longest, fewest_sentences
        self._portion, self._continues = portion, continues_a_word(tokenizer)
        self.identity: dict[str, Any] = {
            **portion.identity(rule.class_name, options.seed, options.sequence_length, tokenizer),
            **options.identity(),
            **further,
        }
        description = json.dumps(self.identity, indent=4)
        cached = portion.load_or_build(Recipe(rule.class_name, description, _ARRAYS, self._build, self._source))
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
        """Sample `item`. Raises DataError if the files do not give it, or hold tokens outside the vocabulary."""
        if not 0 <= item < len(self):
            raise IndexError(f"sample {item} of {len(self)}")
        first, stop, target = self.sample_index[item].tolist()
        try:
            sentences = self._documents[first:stop]
        except (IndexError, ValueError) as error:
            raise self._portion.unreadable(item, error) from error
        assert isinstance(sentences, list)
        for sentence in sentences:
            if len(sentence) and (sentence.min() < 0 or sentence.max() >= self._vocab_size):
                raise self._portion.outside_vocabulary(sentence, self._vocab_size)
        return self._sample(sentences, target, RandomState((self._options.seed + item) % 2**32))

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
