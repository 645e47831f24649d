"""Vocabulary of a GGUF file, from the tokenizer files of a Hugging Face folder.

llama.cpp has the tokenizers of three kinds of files that this version writes:

    tokenizer.json, byte-level BPE               "gpt2", with the name of the expression that splits texts (`pre`)
    tokenizer.json, BPE with bytes as fallback   "llama", the merges in order of the ids
    tokenizer.model, BPE of SentencePiece        "llama", the merges in order of the scores

Sources:  llama.cpp convert_hf_to_gguf.py (names of the expressions), src/llama-vocab.cpp (the expressions).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.errors import DataError
from megalith.tokenizers.huggingface import TOKENIZER_FILE, read_tokenizer_json
from megalith.tokenizers.protocol import json_object
from megalith.tokenizers.sentence_piece import MODEL_FILE, load_model
from megalith.tokenizers.tik_token import PATTERNS

_DIGITS, _GPT2 = "each digit", "GPT-2's expression"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    (_DIGITS, _GPT2): "smollm",
    (_LLAMA3,): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}",): "qwen2",
    (PATTERNS["v2"],): "tekken",
}
"""What splits a text, in order -> llama.cpp's name of it."""
_WITH_MERGES = {"llama-bpe": "dbrx"}
"""The same expression for tokenizers that merge words even if they are tokens (no `ignore_merges`)."""

_INSTEAD = (
    "write the model with --to hf, and convert that with llama.cpp's convert_hf_to_gguf.py where it has the tokenizer"
)


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokens in order of their ids, as llama.cpp reads them.

    Attributes:
        model: llama.cpp's name of the algorithm.
        pre: its name of what splits a text before the merges.
        types: of each token a number of `gguf.TokenType`.
        space_prefix: whether a space is put ahead of a text.
        encode: return the ids of a text, without those around it.
    """

    model: str
    pre: str
    tokens: list[str]
    scores: list[float]
    types: list[int]
    space_prefix: bool
    encode: Callable[[str], list[int]]


def read_gguf_vocabulary(folder: Path, rows: int, library: Any) -> GgufVocabulary:
    """Read the tokenizer of a folder; `rows` are those of the embedding, `library` the module gguf.

    Raises:  DataError if there is none that llama.cpp has too, or it has more tokens than `rows`.
    """
    if (folder / MODEL_FILE).is_file():
        made = _of_sentence_piece(folder, library)
    elif (folder / TOKENIZER_FILE).is_file():
        made = _of_tokenizer_json(folder / TOKENIZER_FILE, library.TokenType)
    else:
        raise DataError(
            f"the checkpoint has no {TOKENIZER_FILE} and no {MODEL_FILE}, of which the vocabulary of a GGUF file is "
            "made; write the model with --to hf, put its tokenizer into that folder, and export the folder"
        )
    if len(made.tokens) > rows:
        raise DataError(f"the tokenizer has {len(made.tokens)} tokens and the embedding {rows} rows; give both alike")
    for number in range(len(made.tokens), rows):
        made.tokens.append(f"[PAD{number}]")
        made.scores.append(-1000.0)
        made.types.append(int(library.TokenType.UNUSED))
    return made


def _of_sentence_piece(folder: Path, library: Any) -> GgufVocabulary:
    kinds = library.TokenType
    entries = [
        (text.decode(), score, kind) for text, score, kind in library.vocab.SentencePieceVocab(folder).all_tokens()
    ]
    if any(score != int(score) for _, score, kind in entries if kind == kinds.NORMAL):
        raise DataError(
            f"{MODEL_FILE} is a unigram model, and llama.cpp merges by scores, as in models of type bpe; {_INSTEAD}"
        )
    for number, content, special in _added(folder):
        kind = kinds.CONTROL if special else kinds.USER_DEFINED
        if number < len(entries) and entries[number][2] in (kinds.NORMAL, kinds.USER_DEFINED):
            entries[number] = (content, -1000.0, kind)
        elif number == len(entries):
            entries.append((content, -1000.0, kind))
    tokens, scores, types = (list(column) for column in zip(*entries, strict=True))
    model = load_model("--to gguf", folder / MODEL_FILE)
    prefix = model.id_to_piece(model.encode("a")[0]).startswith("\u2581")
    return GgufVocabulary("llama", "default", tokens, scores, list(map(int, types)), prefix, model.encode)


def _added(folder: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield id, text and whether it is special of the tokens that a tokenizer_config.json adds, by id."""
    path = folder / "tokenizer_config.json"
    found = json_object(path).get("added_tokens_decoder") or {} if path.is_file() else {}
    for number, token in sorted(found.items(), key=lambda item: int(item[0])):
        yield int(number), token["content"], bool(token.get("special"))


def _of_tokenizer_json(path: Path, kinds: Any) -> GgufVocabulary:
    engine, content = read_tokenizer_json(path), json.loads(path.read_bytes())
    model = content["model"]
    fallback = bool(model.get("byte_fallback"))
    pre = "default" if fallback else _pre_tokenizer(content)
    if model.get("type") != "BPE" or pre is None:
        raise DataError(
            f"llama.cpp has no tokenizer like this {TOKENIZER_FILE}: its model is {model.get('type')}, its normalizer "
            f"{json.dumps(content.get('normalizer'))[:80]}, its pre-tokenizer "
            f"{json.dumps(content.get('pre_tokenizer'))[:200]}; {_INSTEAD}"
        )
    ids, added = engine.get_vocab(with_added_tokens=True), engine.get_added_tokens_decoder()
    texts = {number: text for text, number in ids.items()}
    tokens, types = list[str](), list[int]()
    for number in range(max(texts) + 1):
        kind = kinds.NORMAL if number in texts else kinds.UNUSED
        text = texts.get(number, f"[PAD{number}]")
        if number in added:
            kind = kinds.CONTROL if added[number].special else kinds.USER_DEFINED
        if fallback and text == model.get("unk_token"):
            kind = kinds.UNKNOWN
        elif fallback and len(text) == 6 and text.startswith("<0x"):
            kind = kinds.BYTE
        tokens.append(text)
        types.append(int(kind))
    scores = [-float(number) for number in range(len(tokens))]

    def encode(text: str) -> list[int]:
        found: list[int] = engine.encode(text, add_special_tokens=False).ids
        return found

    prefix = fallback and engine.encode("a", add_special_tokens=False).tokens[0].startswith("\u2581")
    return GgufVocabulary("llama" if fallback else "gpt2", pre, tokens, scores, types, prefix, encode)


def _pre_tokenizer(content: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of what splits texts in a byte-level BPE; None if it has nothing like it."""
    if (content.get("normalizer") or {"type": "NFC"})["type"] != "NFC":  # llama.cpp leaves texts as they are
        return None
    found = content.get("pre_tokenizer") or {}
    splits, ends_in_bytes = list[str](), False
    for step in found.get("pretokenizers", [found]):
        kind = step.get("type")
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            splits.append(step["pattern"]["Regex"])
        elif kind == "Digits" and step["individual_digits"]:
            splits.append(_DIGITS)
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            splits += [_GPT2] if step.get("use_regex", True) else []
            ends_in_bytes = True
        else:
            return None
    name = _PRE_TOKENIZERS.get(tuple(splits)) if ends_in_bytes else None
    return name if content["model"].get("ignore_merges") else _WITH_MERGES.get(name or "", name)
