"""Mask filling: the likeliest tokens for the [MASK]s of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megalith.errors import DataError
from megalith.models.language_model import LanguageModel
from megalith.nn.precision import at_least_fp32
from megalith.tokenizers import Tokenizer

_CONTINUES = "##"  # of WordPiece: goes on the word before it


@dataclass(frozen=True)
class Candidate:
    """Token for a mask, with its probability."""

    token: int
    text: str
    probability: float


@dataclass(frozen=True)
class FilledText:
    """Text with its masks filled."""

    text: str  # with the likeliest token in place of each mask
    masks: tuple[tuple[Candidate, ...], ...]  # of each mask in order the likeliest tokens, likeliest first


def fill_masks(model: LanguageModel, tokenizer: Tokenizer, text: str, count: int = 1) -> FilledText:
    """Predict the likeliest tokens for each [MASK] of a text, all masked at once.

    Args:
        model: A masked language model, whole on this rank.
        text: With at least one [MASK].
        count: Candidates for each mask.

    Raises:
        DataError: The text has no mask or too many tokens, or the tokenizer lacks a special token.
    """
    special, positions = tokenizer.special, model.config.max_position_embeddings
    if missing := [role for role in ("cls", "sep", "mask") if role not in special]:
        raise DataError(f"cannot be filled: the tokenizer has no token for {', '.join(missing)}")
    mask = tokenizer.decode([special["mask"]]).strip()
    parts = text.split(mask)
    if len(parts) < 2:
        raise DataError(f"has no {mask}: put one in place of each token to predict")
    ids = [special["cls"]]
    for number, part in enumerate(parts):
        ids += [special["mask"]] * (number > 0) + _encode_part(tokenizer, part)
    ids.append(special["sep"])
    if len(ids) > positions and model.config.position_embedding_type == "learned_absolute":
        raise DataError(f"has {len(ids)} tokens, but the model has {positions} positions; give a shorter text")
    tokens_1S = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        logits_SV = model(tokens_1S, types_BS=torch.zeros_like(tokens_1S))[0, :, : tokenizer.vocab_size]
    hidden = (tokens_1S[0] == special["mask"]).nonzero().squeeze(1)
    probabilities = logits_SV[hidden].to(at_least_fp32(logits_SV.dtype)).softmax(-1)
    best = probabilities.topk(min(count, probabilities.shape[1]))
    masks = tuple(
        tuple(
            Candidate(token, tokenizer.decode([token]).strip(), value)
            for token, value in zip(tokens, values, strict=True)
        )
        for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    filled = parts[0]
    for candidates, part in zip(masks, parts[1:], strict=True):
        likeliest = candidates[0].text
        filled = (
            filled.rstrip() + likeliest.removeprefix(_CONTINUES)
            if likeliest.startswith(_CONTINUES)
            else (filled + likeliest)
        )
        filled += part
    return FilledText(filled, masks)


def _encode_part(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a part of a text, without the tokens that some tokenizers put around every text."""
    around = {tokenizer.special[role] for role in ("cls", "sep")}
    return [number for number in tokenizer.encode(text) if number not in around]
