"""Construction of the tokenizer that a configuration names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalith.config import TokenizerConfig
from megalith.errors import ConfigError
from megalith.registry import Registered
from megalith.tokenizers import character, sentence_piece, tik_token, word_piece
from megalith.tokenizers.character import CharacterTokenizer
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalith.tokenizers.huggingface import HuggingFaceTokenizer, holds_tokenizer
from megalith.tokenizers.null import NullTokenizer
from megalith.tokenizers.protocol import Tokenizer
from megalith.tokenizers.registered import RegisteredTokenizer
from megalith.tokenizers.sentence_piece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megalith.tokenizers.tik_token import TikTokenizer
from megalith.tokenizers.word_piece import WordPieceTokenizer

_SENTENCE_PIECE_FILES = {"tokenizer_model": sentence_piece.MODEL_FILE}
_WORD_PIECE_FILES = {"vocab_file": word_piece.VOCABULARY_FILE}
_FILES: dict[str, dict[str, str]] = {
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "Llama2Tokenizer": _SENTENCE_PIECE_FILES,
    "GPTSentencePieceTokenizer": _SENTENCE_PIECE_FILES,
    "SentencePieceTokenizer": _SENTENCE_PIECE_FILES,
    "TikTokenizer": {"tokenizer_model": tik_token.VOCABULARY_FILE},
    "BertWordPieceLowerCase": _WORD_PIECE_FILES,
    "BertWordPieceCase": _WORD_PIECE_FILES,
    "CharacterTokenizer": {"vocab_file": character.VOCABULARY_FILE},
}
"""Kind of tokenizer -> setting that names a file -> the name of that file beside a checkpoint."""


def tokenizer_violations(config: TokenizerConfig) -> list[str]:
    """Return why this configuration names no tokenizer, empty if it names one. Opens no file."""
    kind = config.tokenizer_type
    if isinstance(kind, Registered):
        return []
    if kind not in _BUILDERS:
        return [f"--tokenizer-type {kind} is not in this version, which has {', '.join(_BUILDERS)}"]
    violations = [f"{flag} is missing: {kind} needs it" for flag in config.missing_flags]
    return violations + config.contradictions


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that the configuration names.

    Raises:  ConfigError if the configuration is incomplete; DataError if its files are missing or damaged, or a library
        is not installed.
    """
    violations = tokenizer_violations(config)
    if violations:
        raise ConfigError(violations)
    kind = config.tokenizer_type
    return RegisteredTokenizer(str(kind), kind(config)) if isinstance(kind, Registered) else _BUILDERS[kind](config)


def with_files_in(folder: Path, config: TokenizerConfig) -> TokenizerConfig:
    """Use the tokenizer files of a folder if it has all of them, so that a checkpoint is self-contained."""
    if config.is_hugging_face:
        return dataclasses.replace(config, tokenizer_model=str(folder)) if holds_tokenizer(folder) else config
    there = {setting: folder / name for setting, name in _FILES.get(config.tokenizer_type, {}).items()}
    named = all(getattr(config, setting) for setting in there)
    if not (named and all(path.is_file() for path in there.values())):
        return config
    moved: dict[str, Any] = {setting: str(path) for setting, path in there.items()}
    return dataclasses.replace(config, **moved)


def _path(file: str | None) -> str:
    """Return the path of a setting whose presence `tokenizer_violations` has checked."""
    assert file is not None
    return file


def _hugging_face(config: TokenizerConfig) -> Tokenizer:
    return HuggingFaceTokenizer(
        _path(config.tokenizer_model),
        special_tokens=config.tokenizer_special_tokens,
        add_special_tokens=not config.tokenizer_hf_no_include_special_tokens,
    )


def _tik_token(config: TokenizerConfig) -> Tokenizer:
    return TikTokenizer(
        _path(config.tokenizer_model),
        pattern=config.tiktoken_pattern or tik_token.DEFAULT_PATTERN,
        vocab_size=config.vocab_size,
        num_special_tokens=config.tiktoken_num_special_tokens,
        special_tokens=config.tokenizer_special_tokens,
    )


def _word_piece(config: TokenizerConfig) -> Tokenizer:
    return WordPieceTokenizer(
        _path(config.vocab_file),
        lower_case=config.tokenizer_type == "BertWordPieceLowerCase",
        vocab_extra_ids=config.vocab_extra_ids,
    )


def _null(config: TokenizerConfig) -> Tokenizer:
    assert config.vocab_size is not None
    return NullTokenizer(
        config.vocab_size,
        later=config.has_separate_eod,
        eod_id=config.null_tokenizer_eod_id,
        pad_id=-1 if config.null_tokenizer_pad_id is None else config.null_tokenizer_pad_id,
    )


_BUILDERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "GPT2BPETokenizer": lambda config: GPT2BPETokenizer(_path(config.vocab_file), _path(config.merge_file)),
    "HuggingFaceTokenizer": _hugging_face,
    "SFTTokenizer": _hugging_face,
    "Llama2Tokenizer": lambda config: Llama2Tokenizer(_path(config.tokenizer_model)),
    "GPTSentencePieceTokenizer": lambda config: GPTSentencePieceTokenizer(_path(config.tokenizer_model)),
    "SentencePieceTokenizer": lambda config: SentencePieceTokenizer(
        _path(config.tokenizer_model), config.vocab_extra_ids
    ),
    "TikTokenizer": _tik_token,
    "BertWordPieceLowerCase": _word_piece,
    "BertWordPieceCase": _word_piece,
    "CharacterTokenizer": lambda config: CharacterTokenizer(_path(config.vocab_file)),
    "NullTokenizer": _null,
}
