"""Verification of a conversion: logits of our model and of transformers on a fixed prompt, in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.writers.huggingface import Weights
from megalith.config.families import Objective
from megalith.errors import CheckpointError, install_command
from megalith.models.families import model_class
from megalith.models.saved import saved_tensors

TOLERANCE = 1e-5
"""Maximum difference of logits due to rounding, relative to the largest logit."""

_PROMPT_LENGTH = 32
_STRIDE = 7919  # a prime, so that the prompt covers the whole vocabulary


@dataclass(frozen=True)
class Comparison:
    """Largest difference of logits, relative to the largest logit; None without transformers."""

    difference: float | None

    def __str__(self) -> str:
        if self.difference is None:
            return f"logits not compared: transformers is not installed ({install_command('hf')})"
        return f"logits equal those of transformers: largest difference {self.difference:.1e} of the largest logit"


def compare_logits(folder: Path, weights: Weights, params: GlobalParameters, rows: int) -> Comparison:
    """Compute the logits of a fixed prompt with both models, one after the other, and compare `rows` of the vocabulary.

    Raises:
        CheckpointError: they differ by more than `TOLERANCE`, or transformers cannot load the folder.
    """
    if find_spec("transformers") is None:
        return Comparison(None)
    tokens_BS = torch.tensor([fixed_prompt(rows, params.model.max_position_embeddings)])
    prompt = _prompts(tokens_BS)[params.model.family.objective]
    ours = our_logits(tokens_BS, prompt.ours, weights, params)[..., :rows]
    theirs = _their_logits(tokens_BS, prompt, folder)
    if theirs.shape != ours.shape:
        raise CheckpointError(
            f"{folder}: transformers gives logits {list(theirs.shape)}, this version {list(ours.shape)}"
        )
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    if not difference <= TOLERANCE:  # also True for NaN
        raise CheckpointError(
            f"the logits of {folder} and of the checkpoint differ by {difference:.1e} of the largest logit, more than "
            f"the rounding tolerance of {TOLERANCE:.0e}; nothing was written. Please report this with the config.json"
        )
    return Comparison(difference)


@dataclass(frozen=True)
class _Prompt:
    """transformers' class for a model, and the inputs of either model besides the tokens."""

    auto_class: str
    ours: Mapping[str, Tensor]
    theirs: Mapping[str, Any]


def _prompts(tokens_BS: Tensor) -> dict[Objective, _Prompt]:
    """Return the further inputs by objective: part of the tokens for a decoder, halves as token types for BERT."""
    length = tokens_BS.shape[1]
    types_BS = (torch.arange(length) * 2 // length).expand_as(tokens_BS)
    answer_BS = tokens_BS.flip(1)[:, : max(1, length // 2)]
    of_decoder = {"use_cache": False, "decoder_input_ids": answer_BS}
    return {
        "causal": _Prompt("AutoModelForCausalLM", {}, {"use_cache": False}),
        "masked": _Prompt("AutoModelForMaskedLM", {"types_BS": types_BS}, {"token_type_ids": types_BS}),
        "spans": _Prompt("AutoModelForSeq2SeqLM", {"decoder_tokens_BS": answer_BS}, of_decoder),
    }


def fixed_prompt(rows: int, longest: int) -> list[int]:
    """Return the ids of a prompt over a vocabulary of `rows`."""
    return [number * _STRIDE % rows for number in range(1, min(_PROMPT_LENGTH, longest) + 1)]


@torch.no_grad()
def our_logits(tokens_BS: Tensor, more: Mapping[str, Tensor], weights: Weights, params: GlobalParameters) -> Tensor:
    """Return the logits of our model in fp32, [B, S, V] with the padding of the vocabulary; `more` are other inputs."""
    model = model_class(params.model)(params.model, params.vocab_size)
    for name, tensor, _ in saved_tensors(model):
        tensor.copy_(weights.read(name, tensor.shape, params))
    logits: Tensor = model.eval()(tokens_BS, **more)
    return logits


@torch.no_grad()
def _their_logits(tokens_BS: Tensor, prompt: _Prompt, folder: Path) -> Tensor:
    import transformers

    major = int(transformers.__version__.partition(".")[0])
    options: dict[str, Any] = {"dtype" if major >= 5 else "torch_dtype": torch.float32}
    try:
        with quiet(transformers):
            loaded: Any = getattr(transformers, prompt.auto_class).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
            )
    except Exception as error:  # any error makes the folder unusable
        raise CheckpointError(f"transformers {transformers.__version__} cannot load {folder}: {error}") from error
    model, loading = loaded
    if lacking := sorted(loading["missing_keys"]):
        raise CheckpointError(f"transformers finds no {', '.join(lacking[:5])} in {folder}")
    logits: Tensor = model.eval()(tokens_BS, **prompt.theirs).logits
    return logits


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Disable transformers' warnings and progress bars within the block."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
