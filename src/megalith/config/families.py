"""The families of models: facts that are known without building one. Their classes: `models.families`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Objective = Literal["causal", "masked", "spans"]


@dataclass(frozen=True)
class Family:
    """A kind of model that `--model-family` names.

    Attributes:
        title: Its name on the console.
        objective: What it is trained to predict, which decides its samples, its evaluation and what it generates: each
            next token ("causal"), hidden words ("masked"), or hidden spans, by a decoder ("spans").
        stacks: Megatron's names of its stacks of layers.
        weights: Pattern of names of weights by which a checkpoint shows the family, unless it is a later one.
        defaults: Settings that Megatron's program of the family has by default.
    """

    title: str
    objective: Objective
    stacks: tuple[str, ...]
    weights: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def encoder_decoder(self) -> bool:
        """Return whether the model has a decoder that attends to an encoder's output."""
        return len(self.stacks) > 1

    @property
    def generates(self) -> bool:
        """Return whether the model generates text, as a continuation or as the decoder's answer."""
        return self.stacks[-1] == "decoder"


_WORD_PIECES = {"tokenizer_type": "BertWordPieceLowerCase"}

FAMILIES: Mapping[str, Family] = {
    "gpt": Family("GPT", "causal", ("decoder",)),
    "bert": Family(
        "BERT",
        "masked",
        ("encoder",),
        r"^(?:module\.|model\.)*(?:encoder\.|lm_head\.dense\.|binary_head\.|pooler\.|embedding\.tokentype_embeddings\.|"
        r"language_model\.(?:pooler\.|embedding\.tokentype_embeddings\.))",
        _WORD_PIECES,
    ),
    "t5": Family(
        "T5",
        "spans",
        ("encoder", "decoder"),
        r"^(?:module\.|model\.)*(?:language_model\.)?decoder\.layers\.(?:\d+\.)?(?:cross_attention|inter_attention)\.",
        _WORD_PIECES,
    ),
}
"""By the name that `--model-family` takes."""
