"""BERT's WordPiece: text to words by Unicode's classes, words to the longest pieces that the vocabulary has.

Written here because the ids must be those of Google's reference on all text: the `tokenizers` library has the same
algorithm with another idea of control characters (it drops unassigned and private ones too), of lower case (a final
sigma) and of what is Chinese (it leaves out 256 characters), and gives up on words above another length.

Most words come again: a dictionary of words already taken apart makes this faster than that library.

transformers' `BertTokenizer` knows neither [BOS], [EOS] and <extra_id_N>, which Megatron puts behind the vocabulary,
nor texts without [CLS] and [SEP] around them; the tokenizer.json that `tokenizer_json` writes says both. Where the
library takes words apart otherwise than Megatron, so does that file.

Source:  Devlin et al. 2018, arXiv:1810.04805; google-research/bert tokenization.py as in Megatron-LM, which gives up on
words above 200 characters instead of 100. Classes of characters are those of this Python's Unicode version.
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

LONGEST_WORD = 200  # characters; above it a word is unknown
_REMEMBERED_WORDS = 1 << 17  # then all are forgotten, so that no text fills the memory
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
    """`BertWordPieceLowerCase` and `BertWordPieceCase` of Megatron.

    Special tokens written out in a text are plain text. Decoding joins the words with spaces, as Megatron does: what
    stood between them in the text is lost in the ids.

    Args:
        vocab_file: a token on each line; the number of the line is its id.
        lower_case: whether capitals and accents are taken off.
        vocab_extra_ids: how many `<extra_id_N>` it has, which stand for the spans that T5 leaves out.

    Raises:  DataError if the vocabulary is missing, damaged, or none of BERT.
    """

    def __init__(self, vocab_file: str | Path, *, lower_case: bool, vocab_extra_ids: int = 0) -> None:
        self._vocab_file, self._vocab_extra_ids = str(vocab_file), vocab_extra_ids
        self.lower_case = lower_case
        self._ids = _read_vocabulary(Path(vocab_file))
        extra = [f"<extra_id_{number}>" for number in range(vocab_extra_ids)]
        for token in (_BEGIN, _END, *extra):
            self._ids.setdefault(token, len(self._ids))
        self.tokens: tuple[str, ...] = tuple(self._ids)
        """The token of each id; a leading ## marks what goes on a word."""
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
            ids += self._take_apart(word) if pieces is None else pieces
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
    def _card_class(self) -> str:
        return f"BertWordPiece{'LowerCase' if self.lower_case else 'Case'}"

    def _settings(self) -> dict[str, Any]:
        return {"vocab_extra_ids": self._vocab_extra_ids} if self._vocab_extra_ids else {}

    def _tokens(self) -> Iterable[tuple[str, int]]:
        return ((token, number) for number, token in enumerate(self.tokens) if number not in self.extra_ids)

    def _take_apart(self, word: str) -> tuple[int, ...]:
        """Ids of what stands between two spaces, which are remembered."""
        if self.lower_case:
            plain = unicodedata.normalize("NFD", word.lower())
            parts = plain.translate(_WITHOUT_ACCENTS).split()
        else:
            parts = word.translate(_PUNCTUATION_APART).split()
        ids = tuple(number for part in parts for number in self._pieces(part))
        if len(word) <= LONGEST_WORD:
            if len(self._words) >= _REMEMBERED_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    def _pieces(self, word: str) -> list[int]:
        """The longest token that the word begins with, then the longest that goes on from there, and so on."""
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
    """A table for `str.translate` that works out each character when it first comes; None takes it out."""

    def __init__(self, rule: Callable[[str], str | None]) -> None:
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str | None:
        self[code] = translated = self._rule(chr(code))
        return translated


def _clean(character: str) -> str | None:
    """Control characters out, spaces of all kinds plain, and each Chinese character a word of its own."""
    if character in "\t\n\r ":
        return " "
    code, category = ord(character), unicodedata.category(character)
    if code in (0, 0xFFFD) or category in ("Cc", "Cf"):
        return None
    if category == "Zs":
        return " "
    return f" {character} " if any(code in block for block in _CHINESE) else character


def _punctuation_apart(character: str) -> str:
    """Each punctuation mark a word of its own."""
    is_mark = character in _ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")
    return f" {character} " if is_mark else character


def _without_accents(character: str) -> str | None:
    """The same, and combining marks out."""
    return None if unicodedata.category(character) == "Mn" else _punctuation_apart(character)


_CLEAN = _Translation(_clean)
_PUNCTUATION_APART, _WITHOUT_ACCENTS = _Translation(_punctuation_apart), _Translation(_without_accents)

# In this order.
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
        raise DataError(f"--vocab-file {path}: {twice!r} stands on two lines, so that an id has no token; {again}")
    missing = [token for token in (_UNKNOWN, *_ROLES.values()) if token not in ids]
    if missing:
        raise DataError(f"--vocab-file {path} is no vocabulary of BERT: it has no {', '.join(missing)}; {again}")
    return ids


def is_word_continuation(tokenizer: Tokenizer) -> tuple[bool, ...]:
    """Of each id, whether it goes on the word before it: marked with ##; never where pieces are not marked so."""
    if not isinstance(tokenizer, WordPieceTokenizer):
        return (False,) * tokenizer.vocab_size
    return tuple(token.startswith("##") for token in tokenizer.tokens)


def tokenizer_json(tokenizer: WordPieceTokenizer) -> str:
    """The content of tokenizer.json: the same ids, and nothing around a text."""
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
    """The content of tokenizer_config.json beside it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "do_lower_case": tokenizer.lower_case,
        EXTRA_IDS: len(tokenizer.extra_ids),
        **{f"{role}_token": tokenizer.tokens[tokenizer.special[role]] for role in _TOKENS_OF_ROLES},
    }
