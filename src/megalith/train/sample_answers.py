"""Answers to prompts at each evaluation (`--sample-prompts`, and `--sft-sample-prompts` of held-out conversations).

All ranks compute them alike, without a KV cache: a tensor-parallel model takes the same tokens on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megalith.data.sft_dataset import Prompt
from megalith.errors import ConfigError, DataError
from megalith.models.language_model import GenerativeModel
from megalith.models.layer_options import for_any_batch, mixture
from megalith.nn.loss import whole_logits
from megalith.nn.moe.layer import MoE, MoESettings
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import end_ids, require_ids
from megalith.train.results import Evaluation, Hook, Samples

MOST_TOKENS = 64  # of an answer
_STEP = 64  # rows are that many tokens per tensor-parallel rank, or a multiple


class SampleAnswers(Hook):
    """Computes the most likely answers once at each iteration that is evaluated, for `receive`."""

    def __init__(
        self,
        model: GenerativeModel,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        length: int,
        receive: Callable[[Samples], None],
    ) -> None:
        self._model, self._prompts, self._tokenizer, self._length = model, prompts, tokenizer, length
        self._receive, self._answered = receive, -1

    def after_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.iteration == self._answered:
            return
        self._answered, samples = evaluation.iteration, list[dict[str, str]]()
        for prompt in self._prompts:
            stops = {*end_ids(self._tokenizer), *prompt.answer[-1:]}
            ids = greedy_answer(self._model, prompt.tokens, stops, self._length, self._tokenizer.vocab_size)
            parts = {"prompt": prompt.tokens, "answer": ids, **({"held_out": prompt.answer} if prompt.answer else {})}
            samples.append({name: self._tokenizer.decode(part) for name, part in parts.items()})
        self._receive(Samples(evaluation.iteration, samples))


def prompt_of(text: str, tokenizer: Tokenizer, length: int) -> Prompt:
    """Return a prompt of `--sample-prompts`; ConfigError if it cannot be encoded, or leaves none of `length` tokens."""
    try:
        tokens = tuple(tokenizer.encode(text))
        require_ids(tokens, tokenizer.vocab_size)
    except DataError as error:
        raise ConfigError(f"--sample-prompts {text!r}: {error}") from error
    if not 0 < len(tokens) < length:
        raise ConfigError(
            f"--sample-prompts {text!r}: {len(tokens)} tokens; with --seq-length {length} 1 to {length - 1}"
        )
    return Prompt(tokens, ())


@torch.no_grad()  # in inference mode cached tables of positions would be of no use in training
def greedy_answer(
    model: GenerativeModel, prompt: Sequence[int], stops: set[int], length: int, vocab_size: int
) -> list[int]:
    """Return the most likely next tokens up to a stop, `MOST_TOKENS` or `length` tokens with the prompt."""
    step = _STEP * model.region.size
    width = min(length, -(-(len(prompt) + MOST_TOKENS) // step) * step)
    tokens_1S = torch.zeros(1, width, dtype=torch.int64, device=model.device)
    tokens_1S[0, : len(prompt)] = torch.tensor(prompt)
    answer: list[int] = []
    with _as_in_inference(model):
        for place in range(len(prompt), min(width, len(prompt) + MOST_TOKENS)):
            states_SBD = model.hidden_states(tokens_1S)
            logits = whole_logits(states_SBD, model.output_weight, model.region, model.vocab_size, row=place - 1)
            answer.append(int(logits[0, :vocab_size].argmax()))
            if answer[-1] in stops:
                break
            tokens_1S[0, place] = answer[-1]
    return answer


@contextmanager
def _as_in_inference(model: GenerativeModel) -> Iterator[None]:
    """Evaluate without the training-only routing, by which padding and later tokens would displace earlier ones."""
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    held, settings = [layer.settings for layer in layers], [mixture(for_any_batch(model.config)[0]) for _ in layers]
    model.eval()
    try:
        _set_routing(layers, settings)
        yield
    finally:
        _set_routing(layers, held)
        model.train()


def _set_routing(layers: Sequence[MoE], settings: Sequence[MoESettings]) -> None:
    for layer, each in zip(layers, settings, strict=True):
        layer.settings, layer.router.settings = each, each.router
