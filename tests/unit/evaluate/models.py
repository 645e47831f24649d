"""Small models and a tokenizer without files, for tests of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise

CONTEXT, VOCABULARY = 16, 64


class Letters:
    """A tokenizer of single bytes below 63; a token is a character, 63 ends a document."""

    vocab_size, eod, pad = VOCABULARY, VOCABULARY - 1, None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 63 for letter in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(number) for number in ids)

    def fingerprint(self) -> dict[str, Any]:
        return {"class": "Letters", "vocab_size": self.vocab_size, "special": {"eod": self.eod}, "files": {}}

    def identity(self) -> dict[str, Any]:
        return {}

    def files(self) -> dict[str, Path]:
        return {}


def small_model(seed: int = 0, **changes: Any) -> GPT:
    """A random model in fp64 whose predictions are far from uniform."""
    values = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    config = ModelConfig(**{**values, "hidden_dropout": 0.0, "attention_dropout": 0.0, **changes})
    model = GPT(config, VOCABULARY, dtype=torch.float64)
    initialise(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return model.requires_grad_(False).eval()
