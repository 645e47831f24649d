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

from megalith.tokenizers.byte_level import (
    BYTE_OF_CHARACTER,
    END_OF_TEXT,
    BytePairVocabulary,
    byte_level_tokenizer,
    bytes_of,
    read_byte_pair_vocabulary,
)
from megalith.tokenizers.fast_bpe import ArrayEncoder, BytePairArrays
from megalith.tokenizers.protocol import Tokenizer, require_ids, surrogate_error

# GPT-2's pattern with possessive quantifiers, which cannot blow up; the same splits (tiktoken_ext/openai_public.py).
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

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

    def encode(self, text: str) -> list[int]:
        try:
            return self._encode(text)
        except UnicodeEncodeError as error:
            raise surrogate_error(error) from error

    def array_encoder(self, expected_bytes: int = 0) -> ArrayEncoder:
        """Return the batch encoder for so much text; `fast_bpe.array_encoder` calls this."""
        if self._ranked is None:
            return lambda texts: [np.array(self.encode(text), np.uint32) for text in texts]
        return BytePairArrays(self._vocabulary, self.encode, expected_bytes=expected_bytes)

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
    tokens = rank_order(vocabulary)
    rank_of_token = {token: rank for rank, token in enumerate(tokens)}
    if len(rank_of_token) == len(tokens):
        unmade = len(tokens)  # rank of a token that no merge makes; `ranks_decide` rejects it
        splits = [(rank_of_token.get(a, unmade), rank_of_token.get(b, unmade)) for a, b in vocabulary.merges]
        as_bytes = [bytes_of(token) for token in tokens]
        rank_of = {token: rank for rank, token in enumerate(as_bytes)}
        if ranks_decide(as_bytes, rank_of, splits):
            return _tiktoken_encoder(rank_of, [vocabulary.ids[token] for token in tokens])
    return None


def rank_order(vocabulary: BytePairVocabulary) -> list[str]:
    """Return the tokens in order of creation: the 256 bytes by id, then the result of each merge."""
    characters = sorted(BYTE_OF_CHARACTER, key=vocabulary.ids.__getitem__)
    return characters + [left + right for left, right in vocabulary.merges]


def ranks_decide(tokens: Sequence[bytes], rank_of: dict[bytes, int], splits: Sequence[tuple[int, int]]) -> bool:
    """Return whether merging by rank, as tiktoken does, is proved equal to merging by the list of pairs.

    Args:
        tokens: bytes of each rank; the single bytes come first.
        rank_of: the inverse of `tokens`.
        splits: the two ranks that each rank after the single bytes is made from.
    """
    num_bytes = len(tokens) - len(splits)
    return all(
        _is_last_join(left, right, rank, tokens, rank_of, splits, num_bytes)
        for rank, (left, right) in enumerate(splits, start=num_bytes)
    )


def _is_last_join(
    left: int,
    right: int,
    limit: int,
    tokens: Sequence[bytes],
    rank_of: dict[bytes, int],
    splits: Sequence[tuple[int, int]],
    num_bytes: int,
) -> bool:
    """Return whether ranks below `limit` build `left` and `right` side by side without merging across their border.

    Walks back in time: of the two neighbours at the border the one with the higher rank was made last. Taken apart,
    it shows an earlier pair at the border, which must not have been joinable before that moment. Of two equal
    neighbours the left one is made first.
    Source:  the validity test of token pairs in github/rust-gems, crates/bpe.
    """
    if max(left, right) >= limit:
        return False
    while True:
        if rank_of.get(tokens[left] + tokens[right], limit) < limit:
            return False
        if max(left, right) < num_bytes:
            return True
        if left > right:
            limit, left = left, splits[left - num_bytes][1]
        else:
            limit, right = right + 1, splits[right - num_bytes][0]


def _tiktoken_encoder(rank_of: dict[bytes, int], ids: list[int]) -> Encoder:
    import tiktoken

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
