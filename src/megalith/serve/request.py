"""What a user asks of a model and what comes back, checked without torch.

A request may have several samples; each is a stream of `Token` events that ends with one `Finished`. Asked for, the
`PromptLogprobs` of the prompt come first. The result of a beam search is one `Beams` in place of tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megalith.errors import MegalithError

_COLDEST = 1e-6  # colder ones are greedy: logits that are divided by them leave the range of fp32

Reason = Literal["stop", "length", "cancelled", "error"]


class RequestError(MegalithError):
    """A request that cannot be served, and the `field` of `Request` or `Sampling` that is wrong."""

    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        self.field, self.message = field, message
        super().__init__(f"{field}: {message}")


class QueueFullError(MegalithError):
    """The queue is full: the same request may be served later."""


@dataclass(frozen=True)
class Sampling:
    """A way to choose tokens."""

    temperature: float = 1.0  # the logits are divided by it; 0 (below 1e-6) takes the most likely token: greedy
    top_k: int = 0  # only the k most likely tokens are candidates; 0 for all
    top_p: float = 0.0  # nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751); 0 or 1 for all
    min_p: float = 0.0  # least share of the likeliest's probability (Nguyen et al. 2024, arXiv:2407.01082); 0 for all
    top_p_decay: float = 0.0  # factor on top_p after each token (Lee et al. 2022, arXiv:2206.04624); 0: none
    top_p_bound: float = 0.0  # the decayed top_p does not fall below it
    # divides positive, multiplies negative logits of tokens of prompt and output (Keskar et al. 2019, arXiv:1909.05858)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that the output has
    frequency_penalty: float = 0.0  # subtracted from the logit of a token once for each time that the output has it
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    banned: tuple[int, ...] = ()
    banned_after: tuple[tuple[int, int], ...] = ()  # (a, b): b is not chosen right after a

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature < _COLDEST or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """True if penalties, biases or bans change the logits."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.banned
            or self.banned_after
        )

    def top_p_at(self, number: int) -> float:
        """Return top_p for token `number` of the output, counted from 0."""
        if not (self.top_p_decay and self.top_p):
            return self.top_p
        least = sys.float_info.min  # 0 would allow every token
        return float(max(self.top_p * self.top_p_decay**number, self.top_p_bound, least))

    def violations(self) -> list[str]:
        """List the invalid values in the words of the flags."""
        return [f"--{name.replace('_', '-')} {message}" for name, message in self.problems()]

    def problems(self) -> list[tuple[str, str]]:
        """List the invalid values as (field, value and rule)."""
        heat, repetition = self.temperature, self.repetition_penalty
        checks = [
            ("temperature", "is not a number of 0 or more; 0 is greedy, 1 the model's own", 0.0 <= heat < math.inf),
            ("top_k", "is negative; 0 allows every token, 40 the 40 most likely", self.top_k >= 0),
            ("top_p", "is not between 0 and 1; 0 allows every token", 0.0 <= self.top_p <= 1.0),
            ("min_p", "is not between 0 and 1; 0 allows every token", 0.0 <= self.min_p <= 1.0),
            ("top_p_decay", "is not between 0 and 1; 0 keeps top-p as it is", 0.0 <= self.top_p_decay <= 1.0),
            ("top_p_bound", "is not between 0 and top-p", 0.0 <= self.top_p_bound <= max(self.top_p, 0.0)),
            ("repetition_penalty", "is not a number above 0; 1 changes nothing", 0.0 < repetition < math.inf),
            ("presence_penalty", "is not a number", math.isfinite(self.presence_penalty)),
            ("frequency_penalty", "is not a number", math.isfinite(self.frequency_penalty)),
        ]
        found = [(name, f"{getattr(self, name):g} {rule}") for name, rule, holds in checks if not holds]
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            found.append(("logit_bias", "has a value that is not a number"))
        return found


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    prompt: tuple[int, ...]  # its ids, at least one
    max_new_tokens: int  # maximum length of the output; 0 with `prompt_logprobs` scores the prompt only
    sampling: Sampling = Sampling()
    seed: int | None = None  # the same seed gives the same output, but for rounding; unpredictable if None
    n: int = 1
    stop_ids: tuple[int, ...] | None = None  # tokens that end the output; None: the end of a document
    extra_stop_ids: tuple[int, ...] = ()
    skip_token_ids: frozenset[int] = frozenset()  # tokens that are left out of the text of the output
    stop_texts: tuple[str, ...] = ()  # texts that end the output, which is cut before them
    logprobs: int | None = None  # how many of the likeliest tokens come with each token and its log-probability
    prompt_logprobs: bool = False  # whether the tokens of the prompt are scored too
    beam_width: int | None = None  # beam search instead of samples; of `sampling` only the bans hold
    length_penalty: float = 1.0  # the score of a beam is the sum of its log-probabilities / length ** length_penalty
    adapter: int = 0  # number of the LoRA adapters to use (`Engine.add_adapters`); 0 for the model alone


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens with their natural log-probabilities, most likely first."""


@dataclass(frozen=True, slots=True)
class Token:
    """One more token of a sample."""

    id: int  # A stop id comes too, as the last one
    text: str  # whole characters that cannot begin a stop text, nor come from a stop id; joined they are the output
    logprob: float | None = None  # natural, of the model before temperature, penalties and bans
    top: TopLogprobs = ()  # as many as asked for
    sample: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt, before any `Token`; once for all samples."""

    logprobs: tuple[float | None, ...]  # of each token of the prompt after those before it; None for the first
    top: tuple[TopLogprobs, ...]  # the most likely tokens in its place, at least one; () for the first


@dataclass(frozen=True, slots=True)
class Beams:
    """The result of a beam search, best first."""

    hypotheses: tuple[tuple[int, ...], ...]  # the ids after the prompt, without the stop token
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sample."""

    # "stop" by a stop id or text, "length" at max_new_tokens or the end of the context, "cancelled", "error"
    reason: Reason
    message: str = ""
    stop: int | str | None = None  # the id or the text that ended it
    sample: int = 0


Event = Token | PromptLogprobs | Beams | Finished


_CONTEXT = 6  # ids before the first, for tokenizers whose text depends on the preceding tokens
_UNFINISHED = "\ufffd"  # ends the text of ids that end within a character
_LONGEST_CHARACTER = 8  # maximum number of ids of one character
_PARTS = 3  # bytes, and so ids, of a character of UTF-8 that lacks its last one


class TextStream:
    """Text of a growing list of ids after those `before`, in pieces of whole characters; `hidden` ids have none.

    A character of several bytes may be spread over several ids; until it is whole, its text ends in U+FFFD. Only the
    last few ids are decoded, so that long texts take no longer.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = (), hidden: Collection[int] = ()
    ) -> None:
        self._decode, self._hidden = decode, hidden
        self._ids = list(before[-_CONTEXT:])
        self._shown_ids = len(self._ids)
        self._shown = len(decode(self._ids)) if self._ids else 0

    def push(self, token: int) -> str:
        """Append a token; return the new text of whole characters."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(_UNFINISHED):
            return self._take(text)
        if len(self._ids) - self._shown_ids < _LONGEST_CHARACTER:
            return ""
        # Broken bytes: only the last ids can still become a character.
        return self._take(text, next((n for n in range(_PARTS, 0, -1) if self._splits(text, n)), 0))

    def rest(self) -> str:
        """Return the text that is left at the end, whole characters or not."""
        return self._take(self._decode(self._ids)) if len(self._ids) > self._shown_ids else ""

    def _splits(self, text: str, last: int) -> bool:
        """Return whether the text is that of all ids but the last ones and then theirs."""
        return self._decode(self._ids[:-last]) + self._decode(self._ids[-last:]) == text

    def _take(self, text: str, held: int = 0) -> str:
        """Return what is new of the text of the ids, without the last `held` ones."""
        end = len(self._ids) - held
        piece = (self._decode(self._ids[:end]) if held else text)[self._shown :]
        before = self._ids[max(0, self._shown_ids - 1) : end][-_CONTEXT:]
        self._shown_ids, self._shown = len(before), len(self._decode(before))
        self._ids = before + self._ids[end:]
        return piece


class StopTexts:
    """Cuts a stream of text before the first of these texts; holds back what may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Append text; return the text that can be shown now, and the stop text that was found, or None."""
        if not self._texts:
            return piece, None
        self._held += piece
        found = [(place, text) for text in self._texts if (place := self._held.find(text)) >= 0]
        if found:
            place, text = min(found)
            shown, self._held = self._held[:place], ""
            return shown, text
        keep = max(self._overlap(text) for text in self._texts)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, None

    def rest(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Return how many of the last held characters may begin this stop text."""
        return next((n for n in range(min(len(text) - 1, len(self._held)), 0, -1) if self._held.endswith(text[:n])), 0)
