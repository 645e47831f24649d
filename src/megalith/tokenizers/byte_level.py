"""Files of a byte-level BPE: reading, checking against each other, conversion to bytes, and training on a corpus.

vocab.json maps each token to its id; merges.txt lists the merges in order of priority. Both write a byte as one
printable character (`BYTE_OF_CHARACTER`). Broken downloads (a web page, half a file, files of two tokenizers) are
detected here and reported plainly, because a tokenizer that is silently wrong costs a whole training run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress, pairwise
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.tokenizers.protocol import read_text_file

END_OF_TEXT = "<|endoftext|>"
_NUM_BYTES = 256
_AGAIN = "download both files again (GPT-2's are vocab.json with 50257 entries and merges.txt with 50000 merges)"


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character: printable Latin-1 is itself, others start at U+0100 (OpenAI's encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return table


BYTE_OF_CHARACTER: dict[str, int] = _byte_characters()


# For str.translate: maps the byte alphabet to Latin-1, and other Latin-1 characters out of it.
_LATIN_1 = dict.fromkeys(range(_NUM_BYTES), 0xFFFF) | {ord(letter): byte for letter, byte in BYTE_OF_CHARACTER.items()}
_BYTE_OF_CODE = np.zeros(max(map(ord, BYTE_OF_CHARACTER)) + 2, np.uint8)  # by code point; 0 for any other character
_BYTE_OF_CODE[list(map(ord, BYTE_OF_CHARACTER))] = list(BYTE_OF_CHARACTER.values())


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token. A special token with characters outside the byte alphabet is its own UTF-8."""
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


@dataclass(frozen=True)
class BytePairVocabulary:
    """Vocabulary and merges that are known to fit each other.

    Attributes:
        ids: token, in the byte alphabet, to id; the ids are 0 to len(ids) - 1.
        merges: pairs of tokens in order of priority; both tokens and what they join to are in `ids`.
        merge_ids: ids of both tokens of each merge and of what they join to, [merges, 3].
    """

    ids: dict[str, int]
    merges: list[tuple[str, str]]
    merge_ids: NDArray[np.int64]

    @cached_property
    def ids_by_rank(self) -> NDArray[np.int64]:
        """Ids in order of creation: the 256 bytes by id, then the result of each merge."""
        return np.concatenate([sorted(map(self.ids.__getitem__, BYTE_OF_CHARACTER)), self.merge_ids[:, 2]])

    @cached_property
    def tokens_by_rank(self) -> list[bytes]:
        """Bytes of the tokens in order of creation; of no use if a merge has a character that is no byte's."""
        tokens = sorted(BYTE_OF_CHARACTER, key=self.ids.__getitem__)
        tokens += [left + right for left, right in self.merges]
        codes = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), "<u4")
        content = _BYTE_OF_CODE[np.minimum(codes, len(_BYTE_OF_CODE) - 1)].tobytes()
        return [content[begin:end] for begin, end in pairwise(accumulate(map(len, tokens), initial=0))]


def read_byte_pair_vocabulary(vocab_file: str, merge_file: str) -> BytePairVocabulary:
    """Read and check vocab.json and merges.txt. Raises DataError naming the file, the fault and the remedy."""
    ids = _parse_vocab(vocab_file, _read_text(vocab_file, "vocab.json"))
    merges = _parse_merges(merge_file, _read_text(merge_file, "merges.txt"))
    _check_vocab(vocab_file, ids)
    return BytePairVocabulary(ids, merges, _merge_ids(vocab_file, merge_file, ids, merges))


def _read_text(file: str, role: str) -> str:
    text = read_text_file(file, f"{role} of the tokenizer", _AGAIN, encoding="utf-8-sig")
    if not text.strip():
        raise DataError(f"{file} is empty; {_AGAIN}")
    return text


def _parse_vocab(file: str, text: str) -> dict[str, int]:
    if text.startswith("#version"):
        raise DataError(
            f"{file} is a merges.txt, not a vocab.json: --vocab-file takes vocab.json and --merge-file takes "
            "merges.txt; swap them, or download the missing one"
        )
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is cut short or damaged: {error}; {_AGAIN}") from error
    if not isinstance(ids, dict) or not {int}.issuperset(map(type, ids.values())):
        raise DataError(f"{file} is not a vocab.json: expected one JSON object of token: id; {_AGAIN}")
    return ids


def _parse_merges(file: str, text: str) -> list[tuple[str, str]]:
    lines = text.rstrip().split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    pairs: list[Any] = list(map(tuple, map(str.split, lines[first:])))
    if not {2}.issuperset(map(len, pairs)):
        number = next(number for number, pair in enumerate(pairs, start=first) if len(pair) != 2)
        raise DataError(f"{file}, line {number + 1}: expected two tokens, found {lines[number][:60]!r}; {_AGAIN}")
    return pairs


def _check_vocab(file: str, ids: dict[str, int]) -> None:
    if sorted(ids.values()) != list(range(len(ids))):
        raise DataError(f"{file}: its {len(ids)} tokens do not have the ids 0 to {len(ids) - 1}, each once; {_AGAIN}")
    missing = [character for character in BYTE_OF_CHARACTER if character not in ids]
    if missing:
        raise DataError(f"{file}: {len(missing)} of the 256 bytes have no token, such as {missing[0]!r}; {_AGAIN}")
    if END_OF_TEXT not in ids:
        raise DataError(f"{file} has no {END_OF_TEXT} token, which ends a document; {_AGAIN}")


def _merge_ids(
    vocab_file: str, merge_file: str, ids: dict[str, int], merges: list[tuple[str, str]]
) -> NDArray[np.int64]:
    """Return `BytePairVocabulary.merge_ids`. Raises DataError if the files do not belong together."""
    lefts, rights = zip(*merges, strict=True) if merges else ((), ())
    columns = lefts, rights, tuple(map(add, lefts, rights))
    try:
        found = np.stack([np.fromiter(map(ids.__getitem__, tokens), np.int64) for tokens in columns], axis=1)
    except KeyError as error:
        absent = error.args[0]
        number = next(number for number, row in enumerate(zip(*columns, strict=True), start=1) if absent in row)
        left, right = merges[number - 1]
        raise DataError(
            f"{merge_file} and {vocab_file} do not belong together: merge {number} ({left} {right}) needs "
            f"the token {absent!r}, which is not among the {len(ids)} of the vocabulary; {_AGAIN}"
        ) from error
    is_unmade = np.ones(len(ids), np.bool_)
    is_unmade[found[:, 2]] = False
    is_unmade[list(map(ids.__getitem__, BYTE_OF_CHARACTER))] = False
    unmade = _plain_tokens(compress(ids, is_unmade[np.fromiter(ids.values(), np.int64)].tolist()))
    if unmade:
        raise DataError(
            f"{merge_file} is cut short or does not belong to {vocab_file}: none of its {len(merges)} merges makes "
            f"{len(unmade)} of the {len(ids)} tokens, such as {min(unmade, key=ids.__getitem__)!r}; {_AGAIN}"
        )
    return found


def _plain_tokens(tokens: Iterable[str]) -> list[str]:
    """Return the tokens without brackets; those in <...> or [...] are special tokens, which need no merge."""
    brackets = (("<", ">"), ("[", "]"))
    return [token for token in tokens if not any(token.startswith(a) and token.endswith(b) for a, b in brackets)]


def tokenizer_json(vocabulary: BytePairVocabulary) -> str:
    """Return the content of tokenizer.json: the same ids, with `<|endoftext|>` as a special token as in GPT-2's own."""
    engine = byte_level_tokenizer(vocabulary, (END_OF_TEXT,))
    text: str = engine.to_str(pretty=True)
    return text + "\n"


def byte_level_tokenizer(vocabulary: BytePairVocabulary, special: Iterable[str]) -> Any:
    """Build the `tokenizers.Tokenizer` that transformers makes of GPT-2's two files.

    The `special` tokens become their ids where a text spells them out.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE

    engine = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.post_processor = processors.ByteLevel(trim_offsets=False)
    engine.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return engine


def train_byte_level_bpe(documents: Iterable[str], vocab_size: int, out_dir: str | Path) -> tuple[Path, Path]:
    """Learn a GPT-2 style tokenizer (256 bytes, merges by frequency, `<|endoftext|>` last) and return both paths.

    The same documents give the same files. A small corpus may have fewer repeated pairs than asked for; the
    vocabulary is then smaller than `vocab_size`.

    Args:
        documents: texts; `<|endoftext|>` inside them is plain text.
        vocab_size: number of ids including `<|endoftext|>`, at least 257.
        out_dir: folder that receives vocab.json and merges.txt; made if absent.

    Raises:  DataError if `vocab_size` cannot hold the bytes, or there is no text.
    """
    smallest = len(BYTE_OF_CHARACTER) + 1
    if vocab_size < smallest:
        raise DataError(
            f"a byte-level vocabulary of {vocab_size} is too small: the bytes and {END_OF_TEXT} need {smallest} ids"
        )
    ids, merges = _learn(documents, vocab_size - 1)
    if not merges:
        raise DataError("the documents hold no pair of characters that occurs twice: too little text for a tokenizer")
    ids[END_OF_TEXT] = len(ids)
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    vocab_file, merge_file = folder / "vocab.json", folder / "merges.txt"
    vocab_file.write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    merge_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return vocab_file, merge_file


def _learn(documents: Iterable[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train a BPE; return the tokens with their ids, sorted by id, and the merges in order."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    learner = Tokenizer(BPE())
    learner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=sorted(BYTE_OF_CHARACTER), show_progress=False
    )
    learner.train_from_iterator(documents, trainer)
    model = json.loads(learner.to_str())["model"]
    ids = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    # tokenizers before 0.20 writes a merge as one string, later ones as a pair.
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return ids, [(left, right) for left, right in merges]
