"""Dialogues to tokens and a loss mask: which tokens a fine-tuning run learns to predict.

What an assistant says is found by the tag `{% generation %}` of the template, else by rendering the messages before
each answer and up to its end. The second way needs a template that writes a message alike whatever follows: one that
does not, such as Qwen3's, which removes earlier thoughts, is refused for the dialogues where it matters.

The mask ends with the token that ends the turn, so that the model learns to stop. White space that a template writes
behind that token is not learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from unicodedata import is_normalized

import numpy as np
from numpy.typing import NDArray

from megalith.data.sources.documents import BadDocument, Dialogue, Document
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.chat_template import BUILT_IN, BadDialogue, ChatTemplate
from megalith.tokenizers.fast_bpe import plain_array_encoder

_ASKING = ("system", "developer", "user")
_ROLES = (*_ASKING, "assistant", "tool", "function")

Span = tuple[int, int]
Rendered = tuple[str, list[Span]]
"""A text, and the ranges of its characters that are learnt."""
Learnt = tuple[NDArray[Any], NDArray[np.uint8]]
"""Ids and loss mask of a dialogue, [tokens] each."""


class DialogueEncoder:
    """Encoder of dialogues with their loss masks.

    Args:
        loss_mask: one of `encoding.LOSS_MASKS`.
        seq_length: tokens of the longest dialogue, without the last, which is only predicted; None for any number.
        expected_bytes: of text; decides what is worth being loaded at once.
        eod: id behind each dialogue that does not end with it, None for none. It is learnt where an answer ends the
            dialogue.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        loss_mask: str,
        seq_length: int | None,
        eod: int | None,
        expected_bytes: int = 0,
    ) -> None:
        self._template, self._tokenizer, self._loss_mask = template, tokenizer, loss_mask
        self._seq_length, self._eod = seq_length, eod
        self._arrays = plain_array_encoder(tokenizer, expected_bytes)

    def encode(self, documents: Sequence[Document | BadDocument]) -> list[Learnt | BadDocument]:
        """Return ids and mask of each dialogue, or why it cannot be learnt from."""
        rendered = [self._try_to_render(document) for document in documents]
        together = iter(self._encode_together([one for one in rendered if not isinstance(one, BadDocument)]))
        return [one if isinstance(one, BadDocument) else self._complete(*one, next(together)) for one in rendered]

    def _encode_together(self, rendered: Sequence[Rendered]) -> Sequence[Learnt | None]:
        """Return ids and masks by the bytes of the tokens; None for a text that those do not make up."""
        texts, sizes = [text for text, _ in rendered], self._tokenizer.token_sizes
        try:
            arrays = self._arrays(texts) if self._arrays is not None and texts else []
        except DataError:  # one of the texts is at fault
            arrays = []
        if not arrays or sizes is None:
            return [None] * len(texts)
        bounds = [0, *accumulate(map(len, arrays))]
        ends = sizes[np.concatenate(arrays)].cumsum()  # in bytes of all texts
        starts = np.concatenate([[0], ends])[bounds].tolist()
        begins, finishes, fits = list[int](), list[int](), list[bool]()
        for (text, spans), start, end in zip(rendered, starts, starts[1:], strict=False):
            plain = text.isascii()
            fits.append(end - start == (len(text) if plain else len(text.encode())) and is_normalized("NFC", text))
            if fits[-1]:
                edges = spans if plain else [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]
                begins += [start + begin for begin, _ in edges]
                finishes += [start + finish for _, finish in edges]
        changes = np.zeros(len(ends) + 1, np.int32)
        np.add.at(changes, ends.searchsorted(begins, "right"), 1)
        np.add.at(changes, ends.searchsorted(finishes, "left") + 1, -1)
        mask = (changes.cumsum() > 0).astype(np.uint8)
        learnt = (mask[start:end] for start, end in zip(bounds, bounds[1:], strict=False))
        return [(ids, part) if fit else None for ids, part, fit in zip(arrays, learnt, fits, strict=True)]

    def _complete(self, text: str, spans: list[Span], encoded: Learnt | None) -> Learnt | BadDocument:
        """Return ids and mask with the end of document; by the offsets of the tokenizer where they are not known."""
        try:
            ids, mask = encoded or self._encode_by_offsets(text, spans)
        except DataError as error:
            return BadDocument(str(error))
        if self._eod is not None and (not len(ids) or ids[-1] != self._eod):
            ids = np.append(ids, self._eod)
            mask = np.append(mask, np.uint8(bool(spans) and not text[spans[-1][1] :].strip()))
        if self._seq_length is not None and len(ids) > self._seq_length + 1:
            most = f"{self._seq_length + 1}, the last of which is only predicted"
            return BadDocument(f"the dialogue has {len(ids)} tokens; --seq-length {self._seq_length} takes {most}")
        return (ids, mask) if mask.any() else BadDocument("no token of the dialogue is to be predicted")

    def _encode_by_offsets(self, text: str, spans: Sequence[Span]) -> Learnt:
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        mask = np.zeros(len(ids), np.uint8)
        for begin, end in spans:
            mask[offsets[:, 1].searchsorted(begin, "right") : offsets[:, 0].searchsorted(end)] = 1
        return ids, mask

    def _try_to_render(self, document: Document | BadDocument) -> Rendered | BadDocument:
        if not isinstance(document, Dialogue):
            plain = BadDocument("it is a text and no dialogue, in which --loss-mask finds the tokens to learn")
            return document if isinstance(document, BadDocument) else plain
        try:
            return self._render(document)
        except BadDialogue as error:
            return BadDocument(str(error))

    def _render(self, dialogue: Dialogue) -> Rendered:
        """Return the text and the ranges of characters to learn. Raises BadDialogue."""
        turns = self._turns(dialogue)
        if dialogue.tools and not self._template.takes_tools:
            raise BadDialogue("the dialogue has tools, and the template of --chat-template takes none")
        text, marked = self._template.render_marked(
            dialogue.messages, tools=dialogue.tools, add_generation_prompt=False
        )
        if self._loss_mask == "all":
            return text, [(0, len(text))]
        answers = [at for at, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
        if len(marked) == len(answers):
            return text, [span for at, span in zip(answers, marked, strict=True) if at in turns]
        if marked and turns == answers:
            return text, marked
        return text, [self._span(dialogue, at, text) for at in turns]

    def _turns(self, dialogue: Dialogue) -> list[int]:
        """Return the numbers of the messages to learn. Raises BadDialogue for a sample that is of no use."""
        turns = []
        for at, message in enumerate(dialogue.messages):
            role, weight = message["role"], message.get("weight", 1)
            if role not in _ROLES:
                raise BadDialogue(f"message {at + 1} has the role {role!r}; known are {', '.join(_ROLES)}")
            if role in _ASKING and not isinstance(message.get("content"), str):  # which templates write as nothing
                raise BadDialogue(f"message {at + 1}, of the role {role}, has no text as its content")
            if role != "assistant":
                continue
            if _is_empty(message):
                raise BadDialogue(f"message {at + 1}, an assistant's, is empty")
            if weight not in (0, 1):
                raise BadDialogue(f"message {at + 1} has the weight {weight!r}; it is 0 or 1")
            if weight and at >= dialogue.prompt:
                turns.append(at)
        if not turns:
            raise BadDialogue("the dialogue has no message of an assistant to learn from")
        return turns[-1:] if self._loss_mask == "last" else turns

    def _span(self, dialogue: Dialogue, turn: int, text: str) -> Span:
        """Return the range of one message in the text. Raises BadDialogue if the template writes it differently alone.

        The text up to the message ends with what prompts an answer; the text with it, with what ends the turn.
        """
        render, messages = self._template.render, dialogue.messages
        before = render(messages[:turn], tools=dialogue.tools, add_generation_prompt=True)
        whole = text
        if turn < len(messages) - 1:
            whole = render(messages[: turn + 1], tools=dialogue.tools, add_generation_prompt=False)
        if len(before) >= len(whole) or not (text.startswith(before) and text.startswith(whole)):
            raise BadDialogue(
                f"the template writes message {turn + 1} differently when others follow, so that the tokens to learn "
                "are not certain; give --loss-mask last, or as --chat-template one that marks answers "
                f"({', '.join(BUILT_IN)})"
            )
        trimmed, stop = whole.rstrip(), self._template.after_answer.rstrip()
        return len(before), len(trimmed if stop and trimmed.endswith(stop) else whole)


def _is_empty(message: dict[str, Any]) -> bool:
    content: str | Sequence[Any] | None = message.get("content")
    blank = not content.strip() if isinstance(content, str) else not content
    return blank and not message.get("tool_calls")
