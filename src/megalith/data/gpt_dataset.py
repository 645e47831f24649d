"""GPT datasets: samples of fixed length cut from a stream of shuffled documents, as Megatron's GPTDataset does.

A dataset is a pure function of its documents, its options and the number of requested samples. Its index arrays are
kept in an `IndexCache`. Samples never modify a shared mask. (Megatron does: padding in the first item read masks the
same positions in all others; that bug is not repeated.)
"""

from __future__ import annotations

import json
import logging
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalith.data import gpt_index
from megalith.data.gpt_index import EpochPlan, document_ids, part_ids, reset_positions
from megalith.data.index_cache import Arrays, CachedIndex, IndexSpec
from megalith.data.samples import SplitSpec
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import require_eod

logger = logging.getLogger(__name__)

_ARRAYS = ("document_index", "sample_index", "shuffle_index")


class Documents(Protocol):
    """Token sequences by number: an `IndexedDataset` or mock documents."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Return the tokens of each sequence; [sequences]."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return `length` tokens of a sequence from `offset` on; up to its end by default."""


@dataclass(frozen=True)
class GPTDatasetOptions:
    """Options of cutting samples. All but the masks are part of the names of the cache files.

    Attributes:
        sequence_length: tokens of a sample.
        seed: seed of the order of documents and samples; the same for every split.
        eod_mask_loss: no loss where the input token ends a document.
        reset_position_ids: positions start at 0 with each document.
        reset_attention_mask: attention stays inside a document: samples carry `document_ids`.
        mask_between_documents: both of these, with the borders of the documents of the dataset instead of the
            end-of-document tokens.
        add_extra_token: read one token more than `sequence_length`, which is the last label. Without it the last
            label is padding.
        drop_last_partial_validation: leave out the tokens at the end of the validation split that fill no sample,
            instead of padding them.
    """

    sequence_length: int
    seed: int
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    mask_between_documents: bool = False
    add_extra_token: bool = True
    drop_last_partial_validation: bool = True

    @property
    def needs_document_ids(self) -> bool:
        """Return whether positions or masks depend on where the documents of a sample begin."""
        return self.reset_position_ids or self.reset_attention_mask or self.mask_between_documents

    @property
    def needs_eod(self) -> bool:
        """Return whether end-of-document tokens decide positions or masks."""
        return self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask


class GPTDataset:
    """Samples of one split; item i is a dict of arrays of `sequence_length` entries.

    Arrays may be shared between samples and are then read-only; a batch is made of copies.

    tokens (i64), labels (i64, the tokens one later), loss_mask (f32, 0 where the label is padding), position_ids (i64)
    and, if attention stays inside a document, document_ids (i32).
    """

    def __init__(
        self,
        documents: Documents,
        spec: SplitSpec,
        *,
        options: GPTDatasetOptions,
        tokenizer: Tokenizer,
        class_name: str = "GPTDataset",
    ) -> None:
        """Load the index arrays or build and save them; without a cache a split of which the run draws no sample
        builds them at its first use. Raises DataError if the split has too few tokens."""
        self.name, self.prefix, self.requested = spec.name, spec.path, spec.requested
        self.documents_of_split = spec.documents(len(documents.lengths))
        self._documents, self._options, self._spec = documents, options, spec
        by_eod = "--eod-mask-loss, --reset-position-ids or --reset-attention-mask"
        self._eod = require_eod(tokenizer, by_eod) if options.needs_eod else -1
        self._vocab_size = tokenizer.vocab_size
        # Padding with the end-of-document id would mask the loss of every document end, as Megatron before 2026 did.
        self._pad = -1 if tokenizer.pad is None or tokenizer.pad == tokenizer.eod else tokenizer.pad
        self._extra = 1 if options.add_extra_token else 0
        self._needed = options.sequence_length + self._extra
        self._is_plain = (
            self._pad < 0 and options.add_extra_token and not options.eod_mask_loss and not options.needs_document_ids
        )
        self._ones = _read_only(np.ones(options.sequence_length, np.float32))
        self._positions = _read_only(np.arange(options.sequence_length, dtype=np.int64))
        self.plan = self._plan()
        self.identity = spec.identity(class_name, options.seed, options.sequence_length, tokenizer)
        self._index_spec = IndexSpec(
            f"{class_name}-{self.name}", self.description, _ARRAYS, self._build, self._source_digest, self._is_valid
        )
        is_drawn_from = spec.requested is None or spec.requested > 0
        self.cache_problem = self._index.problem if is_drawn_from or spec.cache_folder is not None else None
        logger.info("> total number of samples: %d", len(self))
        logger.info("> total number of epochs: %d", self.num_epochs)

    @cached_property
    def _index(self) -> CachedIndex:
        return self._spec.load_or_build(self._index_spec)

    @cached_property
    def document_index(self) -> NDArray[np.int32]:
        """Documents in stream order, [documents of all epochs]."""
        return self._index.arrays["document_index"]

    @cached_property
    def sample_index(self) -> NDArray[Any]:
        """Start of each sample in the stream, and the end of the last, [samples + 1, 2]."""
        return self._index.arrays["sample_index"]

    @cached_property
    def shuffle_index(self) -> NDArray[Any]:
        """Samples in training order, [samples]."""
        return self._index.arrays["shuffle_index"]

    def __len__(self) -> int:
        """Return the number of samples in whole epochs, which may exceed the requested number."""
        return self.plan.num_samples

    @property
    def description(self) -> str:
        """Return the JSON text whose md5 names the cache files."""
        return json.dumps(self.identity, indent=4)

    @property
    def request_text(self) -> str:
        """Describe the requested samples and the epochs they need, for messages."""
        return f"{self.requested} samples ({self.num_epochs} epochs)"

    @property
    def summary(self) -> str:
        """Describe the size of the dataset in one line."""
        return f"{len(self)} samples in {self.num_epochs} epochs of its text"

    @property
    def num_epochs(self) -> int:
        return self.plan.num_epochs

    def __getitem__(self, item: int) -> dict[str, NDArray[Any]]:
        """Return sample `item` in training order."""
        if not 0 <= item < self.plan.num_samples:
            raise IndexError(f"sample {item} of {len(self)}")
        text, parts, num_missing = self._read_tokens(int(self.shuffle_index[item]))
        options, length = self._options, self._options.sequence_length
        # Most samples are read-only views of the tokens read and of arrays that all samples share.
        tokens = text[:length]
        labels = text[1:] if self._extra else np.append(text[1:], self._pad)
        sample = {"tokens": tokens, "labels": labels, "loss_mask": self._ones, "position_ids": self._positions}
        if self._is_plain and not num_missing:
            return sample
        loss_mask = self._ones.copy()
        if options.eod_mask_loss:
            loss_mask[tokens == self._eod] = 0.0
        if options.needs_document_ids:
            between = options.mask_between_documents
            lengths = [len(part) for part in parts]
            documents = part_ids(lengths, length) if between else document_ids(tokens, self._eod)
            if options.reset_position_ids or between:
                sample["position_ids"] = reset_positions(documents)
            if options.reset_attention_mask or between:
                sample["document_ids"] = documents
        if self._pad >= 0 or not self._extra or num_missing:  # else the sample has no padding
            tokens, labels = tokens.copy(), labels.copy()
            loss_mask[labels == self._pad] = 0.0
            tokens[tokens == self._pad] = 0
            labels[labels == self._pad] = 0
        return {**sample, "tokens": tokens, "labels": labels, "loss_mask": loss_mask}

    def _read_tokens(self, sample: int) -> tuple[NDArray[np.int64], list[NDArray[Any]], int]:
        """Return the padded tokens of a sample before shuffling, [sequence_length + extra] i64, read-only.

        The second value holds the parts of documents that they come from, the third the number of padding tokens.

        Raises:  DataError if the documents cannot be read, or hold tokens outside the vocabulary.
        """
        try:
            parts = self._read_parts(sample)
            if len(parts) == 1:
                text = parts[0].astype(np.int64)
            else:
                text = np.concatenate(parts, dtype=np.int64, casting="unsafe")
            num_missing = self._needed - len(text)
            if num_missing < 0:
                raise ValueError(f"its documents give {len(text)} tokens instead of {self._needed}")
        except (IndexError, ValueError) as error:
            raise self._spec.unreadable(sample, error) from error
        if (
            len(text) and np.maximum.reduce(text.view(np.uint64)) >= self._vocab_size
        ):  # negative ids are huge as unsigned
            raise self._spec.outside_vocabulary(text, self._vocab_size)
        if num_missing:
            text = np.concatenate([text, np.full(num_missing, self._pad)])
        text.setflags(write=False)
        return text, parts, num_missing

    def _read_parts(self, sample: int) -> list[NDArray[Any]]:
        """Read the parts of documents that make up a sample."""
        (first, begin), (last, end) = self.sample_index[sample : sample + 2].tolist()
        get, end = self._documents.get, end + self._extra
        if first == last:
            return [get(int(self.document_index[first]), begin, end - begin)]
        documents = self.document_index[first : last + 1].tolist()
        return [
            get(documents[0], begin),
            *(get(document) for document in documents[1:-1]),
            get(documents[-1], 0, end),
        ]

    def _plan(self) -> EpochPlan:
        split = self.documents_of_split
        tokens = int(self._documents.lengths[split.start : split.stop].sum(dtype=np.int64))
        needed = self._needed
        if self.requested and not tokens:
            raise DataError(self._too_small(tokens))
        if 0 < tokens < needed:
            logger.warning(
                "the %s split of %s has %d tokens, a sample needs %d: %s",
                self.name,
                self.prefix,
                tokens,
                needed,
                "each sample repeats the text" if self.requested else "it has no sample",
            )
        plan = gpt_index.plan_epochs(
            tokens,
            self._options.sequence_length,
            self.requested,
            extra=self._extra,
            drop_last=self.name != "valid" or self._options.drop_last_partial_validation,
        )
        if plan.num_epochs * len(split) >= 2**31:
            raise DataError(
                f"{self._describe_request()} of the {self.name} split of {self.prefix} would repeat its {tokens} "
                f"tokens {plan.num_epochs} times; give it more text"
            )
        return plan

    def _describe_request(self) -> str:
        length = self._options.sequence_length
        return f"{self.requested} samples of {length} + {self._extra} tokens"

    def _too_small(self, tokens: int) -> str:
        """Explain why a split without tokens cannot serve samples."""
        where = self._spec.describe_documents(len(self._documents.lengths))
        remedy = "Add documents" if self._spec.ratios.matrix is None else "Give it a larger share or add documents"
        return (
            f"the {self.name} split of {self.prefix} has {tokens} tokens, but the run needs "
            f"{self._describe_request()}: {where}. {remedy}{self._spec.or_none}"
        )

    def _build(self) -> Arrays:
        # One generator shuffles the documents, then the samples.
        rng = np.random.RandomState(self._options.seed)
        document_index = gpt_index.build_document_index(self.documents_of_split, self.plan, rng)
        sample_index = gpt_index.build_sample_index(
            self._documents.lengths,
            document_index,
            self.plan.num_samples,
            self._options.sequence_length,
            extra=self._extra,
        )
        shuffle_index = gpt_index.build_shuffle_index(self.plan, rng)
        return dict(zip(_ARRAYS, (document_index, sample_index, shuffle_index), strict=True))

    def _source_digest(self) -> str:
        """Digest the inputs of the indices that are not in their description."""
        lengths, options = np.ascontiguousarray(self._documents.lengths), self._options
        partial = self.name == "valid" and not options.drop_last_partial_validation
        return f"{len(lengths)} lengths {zlib.crc32(lengths.data):08x}, extra {self._extra}, partial {int(partial)}"

    def _is_valid(self, arrays: Arrays) -> bool:
        """Check every entry of arrays of unknown origin: only the order of documents and samples is free."""
        document_index, sample_index, shuffle_index = (arrays[name] for name in _ARRAYS)
        return (
            gpt_index.document_index_fits(document_index, self.documents_of_split, self.plan)
            and gpt_index.shuffle_index_fits(shuffle_index, self.plan)
            and gpt_index.sample_index_fits(
                sample_index,
                self._documents.lengths,
                document_index,
                self.plan.num_samples,
                self._options.sequence_length,
                extra=self._extra,
            )
        )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array
