"""SFT datasets: rows of whole conversations, in which some tokens alone are to be predicted.

Beside the dataset PREFIX of conversations, one per document, lies PREFIX_loss_mask: uint8, of the same lengths, 1 where
a token is to be predicted. A conversation of L tokens takes L - 1 places of a row, for nothing follows its last token:

    conversations  a b c d e    f g h         tokens        a b c d   f g   0 0
    loss mask      0 0 0 1 1    0 1 1         labels        b c d e   g h   0 0
                                              loss_mask     0 0 1 1   1 1   0 0
                                              document_ids  0 0 0 0   1 1   2 2
                                              position_ids  0 1 2 3   0 1   0 1

Conversations are packed by best-fit decreasing: the longest first, each into the row with the least room that takes
it. How many rows that makes, and how long the conversations in each are, depends on the lengths alone. An epoch
shuffles the conversations of equal length and the rows; its order depends on the seed and its number, not on the length
of the run.

Source:  Ding et al. 2024, arXiv:2404.10830 (best-fit packing, here without cutting).
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.gpt_index import part_ids, reset_positions
from megalith.data.index_cache import Arrays, CachedIndex, IndexSpec
from megalith.data.indexed import LOSS_MASK, IndexedDataset, idx_path
from megalith.data.samples import SplitSpec
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

CLASS_NAME = "SFTDataset"
_ARRAYS = ("document_index", "row_index")


def has_mask(prefix: str) -> bool:
    """Return whether a loss mask lies beside a dataset."""
    return idx_path(prefix + LOSS_MASK).is_file()


def open_mask(documents: IndexedDataset, *, mmap_bin: bool = True) -> IndexedDataset:
    """Open the loss mask of a dataset. Raises DataError if there is none, or it is of another dataset."""
    prefix = documents.prefix
    if not has_mask(prefix):
        raise DataError(
            f"--sft: {prefix} has no loss mask ({idx_path(prefix + LOSS_MASK)}), which says what is to be predicted: "
            "make both from conversations with `megalith preprocess --loss-mask` (docs/fine-tuning.md), or leave out "
            "--sft to train on every token"
        )
    mask = IndexedDataset(prefix + LOSS_MASK, mmap_bin=mmap_bin)
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, documents.lengths):
        raise DataError(
            f"{mask.prefix} is not the loss mask of {prefix}: it has {len(mask)} sequences of {mask.num_tokens} "
            f"{mask.dtype} in place of {len(documents)} of {documents.num_tokens} uint8; preprocess the conversations "
            "again"
        )
    return mask


@dataclass(frozen=True)
class SFTDatasetOptions:
    """Options of the rows; all are part of the names of the cache files.

    Attributes:
        sequence_length: places of a row.
        packs: whether a row takes as many conversations as fit, else one.
        overlong: what happens to conversations that no row takes: "refuse" them, "truncate" or "drop" them.
    """

    sequence_length: int
    seed: int
    packs: bool = True
    overlong: str = "refuse"


@dataclass(frozen=True)
class Prompt:
    """Tokens of a conversation up to the first that is to be predicted, and those that are, without a gap."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]


class SFTDataset:
    """Rows of one split; item i is a dict of arrays of `sequence_length` entries (see the head of this file).

    tokens, labels, position_ids (i64), loss_mask (f32), document_ids (i32).
    """

    def __init__(
        self,
        documents: IndexedDataset,
        mask: IndexedDataset,
        spec: SplitSpec,
        *,
        options: SFTDatasetOptions,
        tokenizer: Tokenizer,
        mask_digest: Callable[[], str],
    ) -> None:
        """Load the index arrays, or build and save them. Raises DataError if the split has nothing to learn from."""
        self.name, self.prefix, self.requested = spec.name, spec.path, spec.requested
        self._documents, self._mask, self._spec, self._options = documents, mask, spec, options
        self._vocab_size, self._mask_digest = tokenizer.vocab_size, mask_digest
        own = {"packing": options.packs, "overlong": options.overlong}
        self.identity = spec.identity(CLASS_NAME, options.seed, options.sequence_length, tokenizer) | own
        self._refuse_overlong()
        description = json.dumps(self.identity, indent=4)
        self._index_spec = IndexSpec(
            f"{CLASS_NAME}-{self.name}", description, _ARRAYS, self._build, self._source_digest
        )
        is_drawn_from = spec.requested is None or spec.requested > 0
        self.cache_problem = self._index.problem if is_drawn_from or spec.cache_folder is not None else None
        if is_drawn_from and not len(self):
            raise DataError(
                f"the {self.name} split of {self.prefix} has no conversation with a token to predict: "
                f"{spec.describe_documents(len(documents.lengths))}; add conversations"
                + ("" if spec.ratios.matrix is None else ", give it another share by --split (0 for none)")
                + spec.or_none
            )

    @cached_property
    def _index(self) -> CachedIndex:
        return self._spec.load_or_build(self._index_spec)

    @property
    def document_index(self) -> NDArray[np.int32]:
        """Conversations of all rows, in training order; [conversations of all epochs]."""
        return self._index.arrays["document_index"]

    @property
    def row_index(self) -> NDArray[np.int64]:
        """Start of each row in `document_index`, and the end of the last; [rows + 1]."""
        return self._index.arrays["row_index"]

    def __len__(self) -> int:
        """Return the number of rows in whole epochs, which may exceed the requested number."""
        return len(self.row_index) - 1

    @property
    def num_epochs(self) -> int:
        """Return how often each conversation is there."""
        documents = self.document_index
        return int(np.count_nonzero(documents == documents[0])) if len(documents) else 0

    @property
    def request_text(self) -> str:
        """Describe the requested samples and the epochs they need, for messages."""
        return f"{self.requested} rows ({self.num_epochs} epochs)"

    @property
    def summary(self) -> str:
        """Describe rows and conversations in one line."""
        epochs, length = self.num_epochs, self._options.sequence_length
        if not epochs:
            return "no conversations"
        rows, conversations = len(self) // epochs, len(self.document_index) // epochs
        once = self._sizes[np.unique(self.document_index) - self._split.start]
        left_out = len(self._split) - conversations
        parts = [
            f"{conversations} conversations in {rows} rows of {length} tokens ({once.sum() / rows / length:.1%} full) "
            f"in each of {epochs} epochs"
        ]
        parts += [f"{left_out} conversations left out: too long, or without a token to predict"] * bool(left_out)
        if self._options.overlong == "truncate" and (cut := int((self._lengths - 1 > length).sum())):
            parts.append(f"{cut} conversations cut at {length + 1} tokens")
        return "; ".join(parts)

    def __getitem__(self, item: int) -> dict[str, NDArray[Any]]:
        """Return row `item` in training order."""
        if not 0 <= item < len(self):
            raise IndexError(f"row {item} of {len(self)}")
        length, first = self._options.sequence_length, self._split.start
        begin, end = self.row_index[item : item + 2].tolist()
        chosen = self.document_index[begin:end].tolist()
        sizes = [int(self._sizes[number - first]) for number in chosen]
        tokens, labels = np.zeros((2, length), np.int64)
        loss_mask, at = np.zeros(length, np.float32), 0
        try:
            for number, size in zip(chosen, sizes, strict=True):
                text, place = self._documents.get(number, 0, size + 1), slice(at, at + size)
                tokens[place], labels[place] = text[:-1], text[1:]
                loss_mask[place] = self._mask.get(number, 1, size)
                at += size
        except (IndexError, ValueError) as error:
            raise self._spec.unreadable(item, error) from error
        for ids in (tokens, labels):
            if ids.view(np.uint64).max() >= self._vocab_size:  # negative ids are huge as unsigned
                raise self._spec.outside_vocabulary(ids, self._vocab_size)
        numbers = part_ids([*sizes, length - at], length)
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": reset_positions(numbers),
            "document_ids": numbers,
        }

    def prompts(self, count: int) -> list[Prompt]:
        """Return the first prompts of the split, in the order of the files, that leave room for an answer."""
        found: list[Prompt] = []
        for number in map(int, np.unique(self.document_index)):
            mask = self._mask.get(number)
            begin = 1 + int(mask[1:].argmax())
            answer = mask[begin:].astype(bool).cumprod().sum()
            text = tuple(self._documents.get(number, 0, begin + int(answer)).tolist())
            if begin < self._options.sequence_length:
                found.append(Prompt(text[:begin], text[begin:]))
            if len(found) == count:
                break
        return found

    @cached_property
    def _split(self) -> range:
        return self._spec.documents(len(self._documents.lengths))

    @property
    def _lengths(self) -> NDArray[np.int32]:
        return self._documents.lengths[self._split.start : self._split.stop]

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """Places that each conversation of the split takes; 0 for those that are left out for their length."""
        sizes, length = self._lengths.astype(np.int64) - 1, self._options.sequence_length
        if self._options.overlong == "drop":
            sizes[sizes > length] = 0
        return sizes.clip(0, length)

    def _refuse_overlong(self) -> None:
        lengths, most = self._lengths, self._options.sequence_length + 1
        if self._options.overlong == "refuse" and (count := int((lengths > most).sum())):
            raise DataError(
                f"{count} of {len(lengths)} conversations of the {self.name} split of {self.prefix} have more than "
                f"--seq-length + 1 = {most} tokens, the longest {lengths.max()}: raise --seq-length, or cut off their "
                "ends (--sft-overlong truncate) or leave them out (--sft-overlong drop)"
            )

    def _build(self) -> Arrays:
        first, sizes = self._split.start, self._sizes
        learns = (bool(size and self._mask.get(first + i, 1, int(size)).any()) for i, size in enumerate(sizes))
        kept = np.flatnonzero(np.fromiter(learns, bool, len(sizes)))
        rows = pack(sizes[kept], self._options.sequence_length if self._options.packs else 0)
        num_epochs = max(1, -(-(self.requested or 0) // max(1, rows.num_rows)))
        if num_epochs * len(kept) >= 2**31:
            raise DataError(
                f"{self.requested} rows of the {self.name} split of {self.prefix} would repeat its {len(kept)} "
                f"conversations {num_epochs} times; give it more"
            )
        epochs = [rows.shuffled(np.random.RandomState([self._options.seed, epoch])) for epoch in range(num_epochs)]
        counts = np.concatenate([[0], *(count for _, count in epochs)])
        conversations = np.concatenate([conversations for conversations, _ in epochs])
        return {"document_index": (first + kept[conversations]).astype(np.int32), "row_index": counts.cumsum()}

    def _source_digest(self) -> str:
        """Digest the inputs of the indices that are not in their description."""
        lengths = np.ascontiguousarray(self._documents.lengths)
        return f"{len(lengths)} lengths {zlib.crc32(lengths.data):08x}, mask {self._mask_digest()}"


@dataclass(frozen=True)
class Packing:
    """Rows of conversations, known by their place among all in the order of descending size.

    Attributes:
        sizes: places of each conversation, in its own order; [n].
        places: place in that order of the conversations of row 0, of row 1, ...; [n].
        counts: conversations of each row; [rows].
    """

    sizes: NDArray[np.int64]
    places: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.counts)

    def shuffled(self, rng: np.random.RandomState) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shuffle the rows, and the conversations of equal size; return conversations [n] and their counts [rows]."""
        order = rng.permutation(len(self.sizes))
        by_size = order[np.argsort(-self.sizes[order], kind="stable")]
        rows = rng.permutation(self.num_rows)
        counts, starts = self.counts[rows], (self.counts.cumsum() - self.counts)[rows]
        places = np.arange(counts.sum()) + np.repeat(starts - (counts.cumsum() - counts), counts)
        return by_size[self.places[places]], counts


def pack(sizes: NDArray[np.int64], capacity: int) -> Packing:
    """Pack conversations into rows of `capacity` places by best-fit decreasing; 0 makes a row of each.

    Bit s of `rooms` tells whether a row has s free places, so that the next larger room is found without a search.
    """
    chosen = np.arange(len(sizes))
    if capacity:
        rooms, num_rows, rows_with = 0, 0, [list[int]() for _ in range(capacity + 1)]
        for place, size in enumerate(np.sort(sizes)[::-1].tolist()):
            room, row = capacity, num_rows
            if fitting := rooms >> size:
                room = size + (fitting & -fitting).bit_length() - 1
                row = rows_with[room].pop()
                rooms ^= (not rows_with[room]) << room
            num_rows += row == num_rows
            chosen[place] = row
            rows_with[room - size].append(row)
            rooms |= 1 << (room - size)
    return Packing(sizes, np.argsort(chosen, kind="stable"), np.bincount(chosen))
