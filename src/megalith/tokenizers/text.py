"""What every tokenizer asks of a text and of ids before its library sees them."""

from __future__ import annotations

from collections.abc import Iterable

from megalith.errors import DataError


def require_text(text: str) -> str:
    """The text, if it is one. Libraries replace lone surrogates in silence, each in its own way.

    Raises:
        DataError: a character is a lone surrogate.
    """
    try:
        if not text.isascii():  # which a string knows without looking
            text.encode()
    except UnicodeEncodeError as error:
        raise surrogate_error(error) from error
    return text


def surrogate_error(error: UnicodeEncodeError) -> DataError:
    """What to say of a text that has no UTF-8."""
    character = ord(error.object[error.start])
    return DataError(f"character {error.start} is a lone surrogate (U+{character:04X}), which is no text")


def require_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Refuse to decode what is no id.

    Raises:
        DataError: naming the first id outside the vocabulary.
    """
    outside = next((number for number in ids if not 0 <= number < vocab_size), None)
    if outside is not None:
        raise DataError(f"id {outside} is outside the vocabulary of {vocab_size}")
