"""GPT-2's byte-level BPE from vocab.json and merges.txt, encoded by tiktoken.

tiktoken merges two neighbours whenever their bytes together are a token; a merges file merges exactly the listed pairs.
The two agree on every text if each merge is what tiktoken itself would do last to build that token. `ranks_decide`
proves this for the given files; it holds for what BPE training produces. Files for which the proof fails (hand-edited
merges) are encoded by the `tokenizers` library instead, with the same result as Megatron. Batches of texts are encoded
faster still (`fast_bpe`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megalith.tokenizers.byte_level import (
    END_OF_TEXT,
    BytePairVocabulary,
    byte_level_tokenizer,
    bytes_of,
    read_byte_pair_vocabulary,
)
from megalith.tokenizers.fast_bpe import ArrayEncoder, BytePairArrays, GigatokenModel, as_tokenizer_json
from megalith.tokenizers.protocol import Tokenizer, require_ids, surrogate_error

# GPT-2's pattern with possessive quantifiers, which cannot blow up; the same splits (tiktoken_ext/openai_public.py).
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

_HASH_BASE = 0x9E3779B97F4A7C15  # odd, so that no byte is lost from a hash of 64 bits

Encoder = Callable[[str], list[int]]


class GPT2BPETokenizer(Tokenizer):
    """Megatron's `GPT2BPETokenizer`: the same ids; `<|endoftext|>` inside a text is plain text."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        """Read both files. Raises DataError if a file is missing, damaged, or does not belong to the other."""
        self._vocab_file, self._merge_file = str(vocab_file), str(merge_file)
        self._vocabulary = vocabulary = read_byte_pair_vocabulary(self._vocab_file, self._merge_file)
        self.vocab_size, self.eod = len(vocabulary.ids), vocabulary.ids[END_OF_TEXT]
        self.special = {"eod": self.eod}

    # Built on first use: training and the parent process of preprocessing need neither.
    @cached_property
    def _ranked(self) -> Encoder | None:
        return _ranked_encoder(self._vocabulary)

    @cached_property
    def _encode(self) -> Encoder:
        return self._ranked or _reference_encoder(self._vocabulary)

    @cached_property
    def _bytes(self) -> list[bytes]:
        ids = self._vocabulary.ids
        return list(map(bytes_of, sorted(ids, key=ids.__getitem__)))

    @cached_property
    def token_sizes(self) -> NDArray[np.int64]:
        return np.array(list(map(len, self._bytes)))

    def encode(self, text: str) -> list[int]:
        try:
            return self._encode(text)
        except UnicodeEncodeError as error:
            raise surrogate_error(error) from error

    def array_encoder(self, expected_bytes: int = 0, *, plain: bool = False) -> ArrayEncoder:
        """Return the batch encoder for so much text; `fast_bpe.array_encoder` calls this. Every encoding is `plain`."""
        return BytePairArrays(
            lambda: GigatokenModel(as_tokenizer_json(self._vocabulary)),
            self.encode,
            lambda: self._ranked is not None,
            expected_bytes=expected_bytes,
        )

    def decode(self, ids: Sequence[int]) -> str:
        require_ids(ids, self.vocab_size)
        return b"".join([self._bytes[number] for number in ids]).decode(errors="replace")

    def identity(self) -> dict[str, Any]:
        return {"class": "_GPT2BPETokenizer", "tokenizer_path": [self._vocab_file, self._merge_file]}

    def files(self) -> dict[str, Path]:
        return {"vocab.json": Path(self._vocab_file), "merges.txt": Path(self._merge_file)}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return self._vocabulary.ids.items()


def _ranked_encoder(vocabulary: BytePairVocabulary) -> Encoder | None:
    """Return an encoder that merges by rank; None if that is not proved exact for this vocabulary."""
    ids = vocabulary.ids_by_rank
    rank_of = np.full(len(vocabulary.ids), len(ids))  # of a token that no merge makes, which `ranks_decide` rejects
    rank_of[ids] = np.arange(len(ids))
    # bincount, because unique imports numpy.ma
    if np.bincount(ids).max() > 1 or not ranks_decide(vocabulary.tokens_by_rank, rank_of[vocabulary.merge_ids[:, :2]]):
        return None
    return _tiktoken_encoder(vocabulary.tokens_by_rank, ids.tolist())


def ranks_decide(tokens: Sequence[bytes], splits: ArrayLike) -> bool:
    """Return whether merging by rank, as tiktoken does, is proved equal to merging by the list of pairs.

    The proof walks back in time from each merge, all merges at once: of the two neighbours at its border the one with
    the higher rank was made last. Taken apart, it shows an earlier pair at the border, which must not have been
    joinable before that moment. Of two equal neighbours the left one is made first. Tokens are compared by a hash of
    their bytes, so that an accident of the hash can only fail a proof.

    Args:
        tokens: bytes of each rank, all different; the single bytes come first.
        splits: the two ranks that each rank after the single bytes is made from, [ranks - single bytes, 2].
    Source:  the validity test of token pairs in github/rust-gems, crates/bpe.
    """
    pairs = np.asarray(splits, np.int64).reshape(-1, 2)
    num_bytes = len(tokens) - len(pairs)
    first, second = np.concatenate([np.arange(num_bytes)[:, None].repeat(2, axis=1), pairs]).T
    left, right = first[num_bytes:], second[num_bytes:]
    if (np.maximum(left, right) >= np.arange(num_bytes, len(tokens))).any():
        return False
    joined_rank = _rank_of_pairs(tokens)
    while len(left):
        undecided = np.maximum(left, right) >= num_bytes
        left, right = left[undecided], right[undecided]
        is_left_later = left > right
        limit = np.where(is_left_later, left, right + 1)
        left, right = np.where(is_left_later, second[left], left), np.where(is_left_later, right, first[right])
        if (joined_rank(left, right) < limit).any():
            return False
    return True


def _rank_of_pairs(tokens: Sequence[bytes]) -> Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]:
    """Return the function from two ranks, [N] each, to the rank of their tokens joined, `len(tokens)` if there is none.

    It may return a rank that is too low where two different byte strings have the same hash.
    """
    sizes = np.array(list(map(len, tokens)))
    ends = np.cumsum(sizes)
    powers = np.full(int(sizes.max()) + 1, _HASH_BASE, np.uint64)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    content = np.frombuffer(b"".join(tokens), np.uint8).astype(np.uint64) + np.uint64(1)
    hashes = np.add.reduceat(content * powers[np.repeat(ends, sizes) - 1 - np.arange(len(content))], ends - sizes)
    order = np.argsort(hashes, kind="stable")  # the lowest rank first among equal hashes
    in_order = hashes[order]

    def joined_rank(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
        joined = hashes[left] * powers[sizes[right]] + hashes[right]
        at = np.minimum(np.searchsorted(in_order, joined), len(tokens) - 1)
        return np.where(in_order[at] == joined, order[at], len(tokens))

    return joined_rank


def _tiktoken_encoder(tokens: Sequence[bytes], ids: list[int]) -> Encoder:
    import tiktoken

    rank_of = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("megalith", pat_str=_PATTERN, mergeable_ranks=rank_of, special_tokens={})

    def by_rank(text: str) -> list[int]:
        text.encode()  # tiktoken replaces lone surrogates in silence; this raises UnicodeEncodeError instead
        return encoding.encode_ordinary(text)

    if ids == list(range(len(ids))):
        return by_rank
    return lambda text: [ids[rank] for rank in by_rank(text)]


def _reference_encoder(vocabulary: BytePairVocabulary) -> Encoder:
    model = byte_level_tokenizer(vocabulary, ())

    def encode(text: str) -> list[int]:
        text.encode()
        ids: list[int] = model.encode(text, add_special_tokens=False).ids
        return ids

    return encode
