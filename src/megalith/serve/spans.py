"""Answers of an encoder-decoder model: it reads a text once and writes another, token by token.

The keys and values of the text are computed once, those of the answer kept as it grows. One text at a time; the engine
for many (`serve.engine`) is for decoders alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megalith.errors import ConfigError, MegalithError
from megalith.models.t5 import T5
from megalith.nn.attend import AttentionRule, attend_fused
from megalith.serve.request import Sampling
from megalith.serve.sampler import Row, choose


@dataclass
class _Layer:
    """The keys and values of the answer so far in one layer: a `nn.cache.LayerCache`."""

    k_SBHK: Tensor | None = None
    v_SBHK: Tensor | None = None

    def attend(self, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, rule: AttentionRule) -> Tensor:
        self.k_SBHK = k_SBGK if self.k_SBHK is None else torch.cat((self.k_SBHK, k_SBGK))
        self.v_SBHK = v_SBGK if self.v_SBHK is None else torch.cat((self.v_SBHK, v_SBGK))
        return attend_fused(q_SBHK, self.k_SBHK, self.v_SBHK, 0.0, rule)


@dataclass
class _Cache:
    """A `nn.cache.KVCache` of one answer; `length` is set before each new token."""

    layers: list[_Layer]
    device: torch.device
    length: int = field(default=0)

    @property
    def positions_S(self) -> Tensor:
        return torch.tensor([self.length - 1], device=self.device)


@torch.no_grad()
def answer(
    model: T5,
    text: Sequence[int],
    *,
    start: int,
    end: int,
    most: int,
    sampling: Sampling,
    seed: int,
    tokens: int,
) -> Iterator[int]:
    """The tokens of an answer, one after the other, without the one that ends it.

    Args:
        model: whole, or of tensor-parallel ranks, which all ask for the same answer.
        text: what the encoder reads, at least one token.
        start: the token that the decoder begins with.
        end: the one that ends the answer.
        most: tokens of the answer.
        sampling: how to choose.
        seed: of the choices.
        tokens: ids that the tokenizer has; the padding of the vocabulary behind them is never chosen.

    Raises:
        ConfigError: the text is empty, or longer than the model's positions.
        MegalithError: the logits are not finite.
    """
    positions, table = model.config.max_position_embeddings, model.embedding.position_embeddings
    if not text:
        raise ConfigError("--prompt is empty; give a text that the encoder can read")
    if len(text) > positions and table is not None:
        raise ConfigError(
            f"--prompt has {len(text)} tokens, and the model has {positions} positions; give a shorter one"
        )
    encoded = replace(model.encode(torch.tensor([list(text)], device=model.device)), kept={})
    cache = _Cache([_Layer() for _ in model.decoder.layers], model.device)
    draws, said, last = torch.Generator().manual_seed(seed), list[int](), start
    room = most if table is None else min(most, positions)
    while len(said) < room:
        cache.length += 1
        hidden_SBD = model.decode(torch.tensor([[last]], device=model.device), encoded, cache=cache)
        logits_BV = model.logits(hidden_SBD)[0, :, :tokens].cpu()
        uniform = float(torch.rand((), generator=draws, dtype=torch.float64))
        (choice,) = choose(logits_BV, [Row(sampling, uniform, text, said)])
        if choice.problem:
            raise MegalithError(choice.problem)
        if choice.token == end:
            return
        last = choice.token
        said.append(last)
        yield last
