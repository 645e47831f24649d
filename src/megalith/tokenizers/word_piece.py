"""BERT's WordPiece: text to words by Unicode classes, words to the longest pieces in the vocabulary.

Implemented here because the ids must equal those of Google's reference on all text. The `tokenizers` library differs in
control characters (it drops unassigned and private ones too), in lower case (a final sigma), in Chinese characters (it
misses 256) and in the longest word.

Most words repeat: a dictionary of words already split makes this faster than that library.

transformers' `BertTokenizer` knows neither [BOS], [EOS] and <extra_id_N>, which Megatron appends to the vocabulary, nor
texts without [CLS] and [SEP] around them; the tokenizer.json that `tokenizer_json` writes supports both. Where
the library splits words differently from Megatron, so does that file.

Source:  Devlin et al. 2018, arXiv:1810.04805; google-research/bert tokenization.py as in Megatron-LM, whose longest
word has 200 characters instead of 100. Character classes are those of this Python's Unicode version.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.tokenizers.protocol import Tokenizer, read_text_file, require_ids, require_text

VOCABULARY_FILE = "vocab.txt"
"""The name of the vocabulary beside a checkpoint."""

LONGEST_WORD = 200  # characters; a longer word becomes [UNK]
_REMEMBERED_WORDS = 1 << 17  # then the cache is cleared, which bounds its memory
_UNKNOWN = "[UNK]"
_ROLES = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
_BEGIN, _END = "[BOS]", "[EOS]"
_CHINESE = (
    *(range(0x4E00, 0xA000), range(0x3400, 0x4DC0), range(0x20000, 0x2A6E0), range(0x2A700, 0x2B740)),
    *(range(0x2B740, 0x2B820), range(0x2B820, 0x2CEB0), range(0xF900, 0xFB00), range(0x2F800, 0x2FA20)),
)
_ASCII_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
EXTRA_IDS = "extra_ids"
"""In tokenizer_config.json: how many tokens <extra_id_N> there are."""
_TOKENS_OF_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class WordPieceTokenizer(Tokenizer):
    """Megatron's `BertWordPieceLowerCase` and `BertWordPieceCase`.

    Special tokens in a text are plain text. Decoding joins the words with spaces, as Megatron does: the original white
    space is lost in the ids.

    Args:
        vocab_file: one token per line; the line number, from 0, is its id.
        lower_case: whether to lower capitals and strip accents.
        vocab_extra_ids: number of `<extra_id_N>` tokens, T5's sentinels.

    Raises:  DataError if the vocabulary is missing, damaged, or not of BERT.
    """

    def __init__(self, vocab_file: str | Path, *, lower_case: bool, vocab_extra_ids: int = 0) -> None:
        self._vocab_file, self._vocab_extra_ids = str(vocab_file), vocab_extra_ids
        self.lower_case = lower_case
        self._ids = _read_vocabulary(Path(vocab_file))
        extra = [f"<extra_id_{number}>" for number in range(vocab_extra_ids)]
        for token in (_BEGIN, _END, *extra):
            self._ids.setdefault(token, len(self._ids))
        self.tokens: tuple[str, ...] = tuple(self._ids)
        """The token of each id; a leading ## marks the continuation of a word."""
        roles = {**_ROLES, "unk": _UNKNOWN, "bos": _BEGIN, "eos": _END}
        self.special = {role: self._ids[token] for role, token in roles.items()}
        self.vocab_size, self.eod, self.pad = len(self.tokens), self.special["eos"], self.special["pad"]
        self.extra_ids = tuple(self._ids[token] for token in extra)
        self._longest_token = max(map(len, self.tokens))
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        remembered, ids = self._words, list[int]()
        for word in require_text(text).translate(_CLEAN).split():
            pieces = remembered.get(word)
            ids += self._split_word(word) if pieces is None else pieces
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        require_ids(ids, self.vocab_size)
        text = " ".join([self.tokens[number] for number in ids]).replace(" ##", "").strip()
        for apart, joined in _JOINED_IN_ENGLISH:
            text = text.replace(apart, joined)
        return text

    def identity(self) -> dict[str, Any]:
        return {
            "class": "_BertWordPieceTokenizer",
            "tokenizer_path": [self._vocab_file],
            "lower_case": str(self.lower_case),
            "vocab_extra_ids": str(self._vocab_extra_ids),
        }

    def files(self) -> dict[str, Path]:
        return {VOCABULARY_FILE: Path(self._vocab_file)}

    @property
    def _megatron_class(self) -> str:
        return f"BertWordPiece{'LowerCase' if self.lower_case else 'Case'}"

    def _settings(self) -> dict[str, Any]:
        return {"vocab_extra_ids": self._vocab_extra_ids} if self._vocab_extra_ids else {}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return ((token, number) for number, token in enumerate(self.tokens) if number not in self.extra_ids)

    def _split_word(self, word: str) -> tuple[int, ...]:
        """Return the ids of a text between two spaces, and cache them."""
        if self.lower_case:
            plain = unicodedata.normalize("NFD", word.lower())
            parts = plain.translate(_STRIP_ACCENTS).split()
        else:
            parts = word.translate(_SPACE_PUNCTUATION).split()
        ids = tuple(number for part in parts for number in self._pieces(part))
        if len(word) <= LONGEST_WORD:
            if len(self._words) >= _REMEMBERED_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    def _pieces(self, word: str) -> list[int]:
        """Return the ids of a word by greedy longest match from its beginning."""
        if len(word) > LONGEST_WORD:
            return [self.special["unk"]]
        ids, begin, mark = list[int](), 0, ""
        while begin < len(word):
            for end in range(min(len(word), begin + self._longest_token), begin, -1):
                number = self._ids.get(mark + word[begin:end])
                if number is not None:
                    break
            else:
                return [self.special["unk"]]
            ids.append(number)
            begin, mark = end, "##"
        return ids


class _Translation(dict[int, str | None]):
    """Table for `str.translate` that computes each character on first use; None deletes it."""

    def __init__(self, rule: Callable[[str], str | None]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str | None:
        self[code] = translated = self._rule(chr(code))
        return translated


def _clean(character: str) -> str | None:
    """Delete control characters, make all kinds of spaces plain, and put spaces around each Chinese character."""
    if character in "\t\n\r ":
        return " "
    code, category = ord(character), unicodedata.category(character)
    if code in (0, 0xFFFD) or category in ("Cc", "Cf"):
        return None
    if category == "Zs":
        return " "
    return f" {character} " if any(code in block for block in _CHINESE) else character


def _space_punctuation(character: str) -> str:
    """Put spaces around punctuation."""
    is_mark = character in _ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")
    return f" {character} " if is_mark else character


def _strip_accents(character: str) -> str | None:
    """Delete combining marks and put spaces around punctuation."""
    return None if unicodedata.category(character) == "Mn" else _space_punctuation(character)


_CLEAN = _Translation(_clean)
_SPACE_PUNCTUATION, _STRIP_ACCENTS = _Translation(_space_punctuation), _Translation(_strip_accents)

# Applied in this order.
_JOINED_IN_ENGLISH = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s")),
    *((" 've", "'ve"), (" 're", "'re")),
)


def _read_vocabulary(path: Path) -> dict[str, int]:
    again = "download it again, or take the vocab.txt of the model"
    text = read_text_file(path, "vocab.txt of BERT", again, flag="--vocab-file")
    # Lines as Python reads them from a text file: \n, \r\n and \r end one, other separators of Unicode do not.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    tokens = [line.strip() for line in (lines[:-1] if not lines[-1] else lines)]
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise DataError(f"--vocab-file {path}: {twice!r} is on two lines, so that an id has no token; {again}")
    missing = [token for token in (_UNKNOWN, *_ROLES.values()) if token not in ids]
    if missing:
        raise DataError(f"--vocab-file {path} is not a BERT vocabulary: it has no {', '.join(missing)}; {again}")
    return ids


def is_word_continuation(tokenizer: Tokenizer) -> tuple[bool, ...]:
    """Return, for each id, whether it continues a word (marked with ##); all False for other tokenizers."""
    if not isinstance(tokenizer, WordPieceTokenizer):
        return (False,) * tokenizer.vocab_size
    return tuple(token.startswith("##") for token in tokenizer.tokens)


def tokenizer_json(tokenizer: WordPieceTokenizer) -> str:
    """Return the content of a tokenizer.json with the same ids, which adds no special tokens around a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    ids = {token: number for number, token in enumerate(tokenizer.tokens)}
    engine = Tokenizer(WordPiece(ids, unk_token=_UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    engine.normalizer = normalizers.BertNormalizer(lowercase=tokenizer.lower_case)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    special = [*map(tokenizer.special.__getitem__, _TOKENS_OF_ROLES), *tokenizer.extra_ids]
    added = [AddedToken(tokenizer.tokens[number], special=True, normalized=False) for number in special]
    engine.add_special_tokens(added)
    text: str = engine.to_str(pretty=True)
    return text + "\n"


def tokenizer_config(tokenizer: WordPieceTokenizer) -> Mapping[str, Any]:
    """Return the content of tokenizer_config.json beside it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "do_lower_case": tokenizer.lower_case,
        EXTRA_IDS: len(tokenizer.extra_ids),
        **{f"{role}_token": tokenizer.tokens[tokenizer.special[role]] for role in _TOKENS_OF_ROLES},
    }
