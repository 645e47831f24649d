"""Tokenizers: text to token ids and back, behind one base class. Never touches the network; imports no torch."""

from megalith.tokenizers.build import build_tokenizer
from megalith.tokenizers.byte_level import train_byte_level_bpe
from megalith.tokenizers.protocol import Tokenizer, padded_vocab_size, padding_message

__all__ = ["Tokenizer", "build_tokenizer", "padded_vocab_size", "padding_message", "train_byte_level_bpe"]
