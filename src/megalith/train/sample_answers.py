"""Answers to held-out prompts at each evaluation of a fine-tuning run (`--sft-sample-prompts`).

All ranks compute them alike, without a KV cache: a tensor-parallel model takes the same tokens on each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megalith.data.sft_dataset import Prompt
from megalith.models.language_model import GenerativeModel
from megalith.nn.loss import whole_logits
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import end_ids
from megalith.train.results import Evaluation, Hook

MOST_TOKENS = 64  # of an answer
_STEP = 64  # rows are that many tokens per tensor-parallel rank, or a multiple


class SampleAnswers(Hook):
    """Writes the most likely answers once at each iteration that is evaluated.

    Args:
        say: Prints a line.
        record: Writes an event to metrics.jsonl.
    """

    def __init__(
        self,
        model: GenerativeModel,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        length: int,
        say: Callable[[str], None],
        record: Callable[..., None],
    ) -> None:
        self._model, self._prompts, self._tokenizer, self._length = model, prompts, tokenizer, length
        self._say, self._record, self._answered = say, record, -1

    def after_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.iteration == self._answered:
            return
        self._answered, samples = evaluation.iteration, list[dict[str, Any]]()
        for prompt in self._prompts:
            stops = {*end_ids(self._tokenizer), prompt.answer[-1]}
            ids = greedy_answer(self._model, prompt.tokens, stops, self._length, self._tokenizer.vocab_size)
            texts = (self._tokenizer.decode(part) for part in (prompt.tokens, ids, prompt.answer))
            samples.append(dict(zip(("prompt", "answer", "held_out"), texts, strict=True)))
        self._record("samples", iteration=evaluation.iteration, samples=samples)
        for number, sample in enumerate(samples, start=1):
            shown = (
                f"{name.replace('_', ' ')}: {json.dumps(text, ensure_ascii=False)}" for name, text in sample.items()
            )
            self._say(f" sample {number} at iteration {evaluation.iteration} | {' | '.join(shown)}")


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
    model.eval()
    try:
        for place in range(len(prompt), min(width, len(prompt) + MOST_TOKENS)):
            states_SBD = model.hidden_states(tokens_1S)
            logits = whole_logits(states_SBD, model.output_weight, model.region, model.vocab_size, row=place - 1)
            answer.append(int(logits[0, :vocab_size].argmax()))
            if answer[-1] in stops:
                break
            tokens_1S[0, place] = answer[-1]
    finally:
        model.train()
    return answer
