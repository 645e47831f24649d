"""Generation, token by token, with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megalith.errors import ConfigError
from megalith.models.gpt import GPT
from megalith.serve.request import Sampling
from megalith.serve.sampler import choose


def generate(
    model: GPT,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    *,
    vocab_size: int,
    eod: int | None = None,
) -> Iterator[int]:
    """Yield the ids that continue the prompt.

    Ends after `max_new_tokens`, when `eod` was chosen (which is not yielded), or when the context is full.

    Args:
        prompt: At least one id.
        vocab_size: Of the tokenizer; the padding of the embedding table above it is never chosen.

    Raises:
        ConfigError: The prompt is empty or does not fit the context.
    """
    context = model.config.max_position_embeddings
    if not prompt:
        raise ConfigError("--prompt is empty: generation continues a text of at least one token")
    if len(prompt) >= context:
        raise ConfigError(
            f"--prompt has {len(prompt)} tokens, and the model reads {context} with the answer: shorten it by "
            f"{len(prompt) - context + 1} or more"
        )
    return _generate(model, prompt, min(max_new_tokens, context - len(prompt)), sampling, generator, vocab_size, eod)


def _generate(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    generator: torch.Generator,
    vocab_size: int,
    eod: int | None,
) -> Iterator[int]:
    device = model.output_weight.device
    model.eval()
    cache = model.new_cache(batch=1, max_length=len(prompt) + count)
    unread = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([unread], device=device), cache=cache)[0, -1, :vocab_size].cpu()
        token = choose(logits, sampling, generator)
        if token == eod:
            return
        yield token
        unread = [token]


def printable_pieces(ids: Iterator[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Text of a stream of ids in pieces that end at whole characters.

    A character of several bytes may be spread over several tokens; until it is whole, its text ends in U+FFFD.
    """
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = decode(seen)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    rest = decode(seen)[len(shown) :] if seen else ""
    if rest:
        yield rest
