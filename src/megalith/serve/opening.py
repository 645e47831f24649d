"""What stands before an answer where an encoder reads the prompt: the ids of the text, and the first token."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megalith.data.masked.t5 import decoder_start
from megalith.errors import DataError
from megalith.models.language_model import LanguageModel
from megalith.models.t5 import T5
from megalith.tokenizers import Tokenizer


@dataclass(frozen=True)
class Opening:
    """How a model answers that reads its prompts with an encoder.

    Attributes:
        start: the token that its decoder begins with.
        end: the one that ends an answer.
    """

    start: int
    end: int


def opening_of(model: LanguageModel, tokenizer: Tokenizer) -> Opening | None:
    """How a model answers; None where it continues its prompt.

    Raises:
        ConfigError: the tokenizer has no token that a decoder can begin with.
    """
    if not isinstance(model, T5):
        return None
    return Opening(decoder_start(tokenizer), tokenizer.special.get("eos", tokenizer.eod))


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text for an encoder, in which <extra_id_N> stands for itself whatever the tokenizer makes of it.

    Raises:
        DataError: the tokenizer has fewer of these tokens, or cannot encode the text.
    """
    sentinels = {f"<extra_id_{number}>": token for number, token in enumerate(tokenizer.extra_ids)}
    named = re.findall(r"<extra_id_\d+>", text)
    if unknown := [name for name in named if name not in sentinels]:
        shown = unknown[0] if len(unknown[0]) < 40 else f"{unknown[0][:30]}...>"
        raise DataError(f"has {shown}, and the tokenizer {len(sentinels)} tokens <extra_id_N>")
    if not named or sentinels[named[0]] in tokenizer.encode(named[0]):  # it knows them, and puts ends around the whole
        return tokenizer.encode(text)
    ids = list[int]()
    for part in re.split(r"(<extra_id_\d+>)", text):
        if part in sentinels:
            ids.append(sentinels[part])
        elif part.strip():
            ids += tokenizer.encode(part)
    return ids
