"""Text to token ids and back, behind one protocol. Never touches the network; imports no torch."""

from megalith.tokenizers.build import build_tokenizer
from megalith.tokenizers.padding import padded_vocab_size, padding_message
from megalith.tokenizers.protocol import Tokenizer
from megalith.tokenizers.training import train_byte_level_bpe

__all__ = ["Tokenizer", "build_tokenizer", "padded_vocab_size", "padding_message", "train_byte_level_bpe"]
