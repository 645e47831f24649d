"""Which family of models a checkpoint of Megatron is of, and what its args do not say of it, by its weights' names.

Megatron's args are the same whatever its program trained. The tokenizer does not tell either: a GPT may have that of
BERT. Names are those of any generation, with or without the prefix of a wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_ACROSS = re.compile(r"(^|\.)(cross_attention|inter_attention)\.")
_OF_BERT = re.compile(
    r"^(?:module\.|model\.)*(?:encoder\.|lm_head\.dense\.|binary_head\.|pooler\.|embedding\.tokentype_embeddings\.|"
    r"language_model\.(?:pooler\.|embedding\.tokentype_embeddings\.))"
)
_FINAL_NORM = re.compile(r"\.final_(layernorm|norm)\.")


def with_family(args: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The args of a checkpoint with those that say the family; as they are where they say it.

    Args:
        args: of the run that wrote it.
        names: of its weights, those of its first and of its last stage at least.

    >>> with_family({}, ["decoder.layers.0.mlp.linear_fc1.weight"])["model_family"]
    'gpt'
    >>> with_family({}, ["embedding.tokentype_embeddings.weight", "encoder.final_layernorm.weight"])["model_family"]
    'bert'
    """
    if "model_family" in args:
        return dict(args)
    known = list(names)
    family = _family(known)
    if family == "gpt":
        return {**args, "model_family": family}
    # Without TransformerEngine the stacks of Megatron's BERT and T5 end without a norm.
    return {**args, "model_family": family, "final_layernorm": any(map(_FINAL_NORM.search, known))}


def _family(names: Collection[str]) -> str:
    if any(map(_ACROSS.search, names)):
        return "t5"
    return "bert" if any(map(_OF_BERT.search, names)) else "gpt"
