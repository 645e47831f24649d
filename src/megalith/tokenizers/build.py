"""From the configuration to a tokenizer."""

from __future__ import annotations

from megalith.config import TokenizerConfig
from megalith.errors import ConfigError
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalith.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.tokenizers.null import NullTokenizer
from megalith.tokenizers.protocol import Tokenizer

TOKENIZER_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")


def tokenizer_violations(config: TokenizerConfig) -> list[str]:
    """What keeps this configuration from naming a tokenizer, empty if nothing does. Opens no file."""
    if config.tokenizer_type in TOKENIZER_TYPES:
        return [f"{flag} is missing: {config.tokenizer_type} needs it" for flag in config.lacking]
    known = ", ".join(TOKENIZER_TYPES)
    return [f"--tokenizer-type {config.tokenizer_type} is not in this version, which has {known}"]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Make the tokenizer that the configuration names.

    Raises:  ConfigError if the configuration is incomplete; DataError if its files are missing or damaged.
    """
    violations = tokenizer_violations(config)
    if violations:
        raise ConfigError(violations)
    if config.tokenizer_type == "NullTokenizer":
        assert config.vocab_size is not None
        return NullTokenizer(config.vocab_size)
    if config.tokenizer_type == "HuggingFaceTokenizer":
        assert config.tokenizer_model is not None
        return HuggingFaceTokenizer(config.tokenizer_model)
    assert config.vocab_file is not None and config.merge_file is not None
    return GPT2BPETokenizer(config.vocab_file, config.merge_file)
