"""Verification of a GGUF file: greedy tokens of llama.cpp and of our model, and ids of a text by both tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.assemble.huggingface import fixed_prompt, our_logits
from megalith.checkpoint.writers.gguf import Description
from megalith.errors import CheckpointError
from megalith.tokenizers.gguf_vocabulary import GgufVocabulary

TOLERANCE = 1e-3
"""Difference of two logits, relative to the largest, below which either token may be the greedy one. llama.cpp rounds
the GELU of GPT-2 to fp16, and in other operations no more than we do."""

_NEW_TOKENS = 32
_TEXT = (
    "Hello, world! It's 2026: 12345.678 tokens, we'll see.\n\n\tdef f(x):\r\n    return x ** 2  # naïve café\n"
    " 漢字かな 한국어 Привет 🙂🙂   spaces   at the end  \n"
)


@dataclass(frozen=True)
class GgufComparison:
    """Greedy tokens that agree, of how many, and what the tokenizers make of a text; None without llama.cpp."""

    equal: int | None
    tokens: int = 0
    difference: float = 0.0
    same_ids: bool = True

    def __str__(self) -> str:
        if self.equal is None:
            return "greedy tokens not compared: llama.cpp is not installed (pip install llama-cpp-python)"
        return (
            f"greedy tokens: {self.equal} of {self.tokens} as here (llama.cpp; largest difference of logits "
            f"{self.difference:.1e} of the largest)"
        )


def compare_with_llama_cpp(file: Path, about: Description, vocabulary: GgufVocabulary, exact: bool) -> GgufComparison:
    """Continue a fixed prompt greedily with llama.cpp, and compare each token with that of our model in fp32.

    Ours computes the logits of llama.cpp's whole text at once: if each of its tokens is the greedy one after those
    before it, both continue the prompt alike.

    Args:
        exact: the file has the weights without rounding, so that other tokens are an error.

    Raises:
        CheckpointError: llama.cpp cannot load the file, or a token differs by more than `TOLERANCE` in its logit.
    """
    if find_spec("llama_cpp") is None:
        return GgufComparison(None)
    context = about.params.model.max_position_embeddings
    prompt = fixed_prompt(about.rows, max(1, context // 2))
    model = _load(file, context)
    same_ids = model.tokenize(_TEXT.encode(), add_bos=False, special=False) == vocabulary.encode(_TEXT)
    tokens, theirs = _greedy(model, prompt, min(_NEW_TOKENS, context - len(prompt)))
    del model  # one model in memory at a time
    ours = our_logits(torch.tensor(tokens[:-1])[None], {}, about.weights, about.params)[
        0, len(prompt) - 1 :, : about.rows
    ]
    largest = ours.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    chosen = torch.tensor(tokens[len(prompt) :])
    gaps = (ours.amax(-1) - ours.gather(-1, chosen[:, None])[:, 0]) / largest
    equal, difference = int((gaps <= TOLERANCE).sum()), float((ours - theirs).abs().max() / largest)
    if equal < len(chosen) and exact or not difference < float("inf"):
        raise CheckpointError(
            f"llama.cpp continues a prompt unlike the checkpoint: {len(chosen) - equal} of {len(chosen)} tokens differ "
            f"(largest difference of logits {difference:.1e} of the largest); nothing was written. Please report this "
            "with the architecture (megalith checkpoint inspect)"
        )
    return GgufComparison(equal, len(chosen), difference, same_ids)


def _load(file: Path, context: int) -> Any:
    llama_cpp: Any = import_module("llama_cpp")
    fp32 = llama_cpp.GGML_TYPE_F32
    try:
        return llama_cpp.Llama(str(file), n_ctx=context, logits_all=True, verbose=False, type_k=fp32, type_v=fp32)
    except ValueError as error:
        raise CheckpointError(f"llama.cpp {llama_cpp.__version__} cannot load {file.name}: {error}") from error


def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Return prompt and continuation, and the logits of each new token, [count, V]."""
    tokens, logits = list(prompt), []
    model.eval(prompt)
    for _ in range(count):
        logits.append(torch.from_numpy(model.scores[model.n_tokens - 1].copy()))
        tokens.append(int(logits[-1].argmax()))
        model.eval(tokens[-1:])
    return tokens, torch.stack(logits)
