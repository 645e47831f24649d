"""A trained model that writes and scores text, for `megalith generate`, programs and notebooks.

The engine of `megalith serve` writes the text, and the scorer of `megalith evaluate` scores it. Each call builds an
engine of its own with a KV cache as large as the call needs: calls in several threads share the weights only. No signal
handler is installed, and no event loop is needed or disturbed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from megalith.assemble.trained import Trained
from megalith.distributed.context import ParallelContext
from megalith.errors import DataError, MegalithError
from megalith.evaluate.request import DEFAULT_OVERLAP
from megalith.evaluate.score import Scorer
from megalith.evaluate.text import Windows, score_texts
from megalith.serve.engine import Engine, Limits
from megalith.serve.model_runner import RankRunner, blocks_for, decoder_prompt_of, runner_of, text_ids
from megalith.serve.request import Event, Finished, Request, RequestError, Sampling, Token
from megalith.serve.runner import Runner
from megalith.tokenizers.protocol import end_ids

if TYPE_CHECKING:
    from megalith.tokenizers.chat_template import ChatTemplate

Messages = Sequence[Mapping[str, Any]]
"""A dialogue in OpenAI's form: `role` and `content` of each message."""


@dataclass(frozen=True)
class Completion:
    """Text that a model wrote for a prompt.

    Attributes:
        text: What follows the prompt, or the answer of a T5; it ends before a stop text.
        token_ids: Its tokens; the last may be the one that ended it, which has no text.
        logprobs: Natural logarithms of their probabilities, by the model before temperature and penalties.
        finish_reason: "stop" at the end of a document or a stop text, "length" after `max_new_tokens` tokens or at the
            end of the context.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class TextModel:
    """Trained model that writes text: a decoder such as GPT, or a T5.

    Args:
        trained: A model with its tokenizer, as of `load_trained`.
        context: Tensor-parallel ranks that share a T5; all of them call `events` alike, and the first receives them.
        chat_template: Template of dialogues; by default the tokenizer's, if it has one.

    Raises:
        ConfigError: The model writes no text.
    """

    def __init__(
        self, trained: Trained, context: ParallelContext | None = None, *, chat_template: ChatTemplate | None = None
    ) -> None:
        self.trained, self.tokenizer, self._context = trained, trained.tokenizer, context
        self._given_template = chat_template
        self._model = trained.writer
        self._decoder_prompt = decoder_prompt_of(self._model, self.tokenizer)

    @property
    def answers(self) -> bool:
        """True if the model answers a text, as a T5 does; False if it continues it."""
        return self._decoder_prompt is not None

    @overload
    def generate(self, prompt: str, **options: Any) -> Completion: ...

    @overload
    def generate(self, prompt: list[str], **options: Any) -> list[Completion]: ...

    def generate(self, prompt: str | list[str], **options: Any) -> Completion | list[Completion]:
        """Continue a text, or the texts of a list together; a T5 answers them. Equal texts get different samples.

        Args:
            options: `max_new_tokens` (100), `stop` (a text or texts before which the output is cut), `seed`
                (unpredictable by default), and the fields of `megalith.serve.request.Sampling`: `temperature` (0.8; 0
                takes the most likely token), `top_p` (0.95), `top_k`, `min_p`, `repetition_penalty` and others. With
                `chat=True` the texts are of `render`, and what ends an answer by the template ends the output.

        Raises:
            RequestError: An option is out of its range, or a prompt is empty or too long.
            DataError: The tokenizer cannot encode a prompt.
        """
        if isinstance(prompt, str):
            return self.generate([prompt], **options)[0]
        counts = Counter(prompt)
        requests = [self.request(text, n=n, logprobs=0, **options) for text, n in counts.items()]
        tokens, reasons = defaultdict[tuple[str, int], list[Token]](list), dict[tuple[str, int], str]()
        texts = list(counts)
        for number, event in self.events(requests):
            if isinstance(event, Token):
                tokens[texts[number], event.sample].append(event)
            elif isinstance(event, Finished):
                reasons[texts[number], event.sample] = event.reason
        samples, found = Counter[str](), list[Completion]()
        for text in prompt:
            place = text, samples[text]
            samples[text] += 1
            pieces, ids, logprobs = zip(*((one.text, one.id, one.logprob) for one in tokens[place]), strict=True)
            found.append(Completion(text, "".join(pieces), ids, logprobs, reasons[place]))
        return found

    def chat(self, messages: Messages, **options: Any) -> Completion:
        """Answer the last message of a dialogue; `options` and errors as of `generate`, and those of `render`."""
        return self.generate(self.render(messages), chat=True, **options)

    def render(self, messages: Messages) -> str:
        """Return the text of a dialogue up to where its answer begins.

        Raises:
            RequestError: As of `require_template`, or the template does not take the messages.
        """
        from megalith.tokenizers.chat_template import BadDialogue

        template = self.require_template()
        try:
            return template.render(messages)
        except BadDialogue as error:
            raise RequestError("prompt", f"is refused by the chat template: {error}") from error

    def require_template(self) -> ChatTemplate:
        """Return the template of dialogues. Raises RequestError for a T5, or if the tokenizer has none."""
        if self.answers:
            raise RequestError("chat", "needs a decoder such as GPT, and this is a T5; leave it out")
        if self.chat_template is None:
            raise RequestError(
                "chat",
                "needs a chat template, and the tokenizer has none; give a Jinja file or a name by --chat-template",
            )
        return self.chat_template

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """Return the template of dialogues, or None."""
        from megalith.tokenizers.chat_template import template_beside  # which imports jinja2

        return self._given_template or template_beside(self.tokenizer)

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yield the text of `generate` as it is written, in pieces of whole characters; arguments as of `generate`."""
        for _, event in self.events([self.request(prompt, **options)]):
            if isinstance(event, Token) and event.text:
                yield event.text

    @overload
    def score(self, text: str, context: str = "") -> NDArray[np.float64]: ...

    @overload
    def score(self, text: list[str], context: str = "") -> list[NDArray[np.float64]]: ...

    def score(self, text: str | list[str], context: str = "") -> NDArray[np.float64] | list[NDArray[np.float64]]:
        """Return the natural log-probability of each token of a text, or of each text of a list, after the context.

        Text and context are encoded together, and blanks at the end of the context count to the text, as in lm-eval.
        Without a context a text follows an end of document; where the tokenizer has none, its first token has no score.
        Beyond the model's context length windows overlap as in `megalith evaluate --task text`. Rows of the vocabulary
        table without a token have no probability, as in `generate`.

        Raises:
            ConfigError: The model answers texts (T5) and does not continue them.
            DataError: A text cannot be encoded, or the tokenizer joins all of it with the context.
        """
        if isinstance(text, str):
            return self.score([text], context)[0]
        head, encode = context.rstrip(), self.tokenizer.encode
        before = encode(head) if head else list(end_ids(self.tokenizer))
        blanks = context[len(head) :]
        encoded = [encode(head + blanks + one) if head else before + encode(blanks + one) for one in text]
        counts = [len(ids) - len(before) for ids in encoded]
        for one, count in zip(text, counts, strict=True):
            if one and count < 1:
                raise DataError(f"the tokenizer joins {one!r} with the end of the context; begin the text with a word")
        # A Hugging Face folder has no padded rows.
        num_tokens = None if self.trained.from_huggingface else self.tokenizer.vocab_size
        scorer = Scorer(self.trained.gpt, num_tokens=num_tokens)
        length = scorer.context_length
        cut = [ids[-(length + count) :] for ids, count in zip(encoded, counts, strict=True)]
        found = score_texts(scorer, cut, Windows(length, min(DEFAULT_OVERLAP, length)))
        return [logprobs[max(0, len(logprobs) - count) :] for logprobs, count in zip(found, counts, strict=True)]

    def request(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 100,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        n: int = 1,
        logprobs: int | None = None,
        chat: bool = False,
        **sampling: Any,
    ) -> Request:
        """Return the request for `n` samples; other options as of `generate`, which names the errors."""
        ids, stop_ids = self._encoder_ids(prompt) if self.answers else self.tokenizer.encode(prompt), None
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if chat:
            from megalith.tokenizers.chat_template import ChatFormat, added_around

            before, behind = added_around(self.tokenizer)  # the template writes its own
            form = ChatFormat.of(self.tokenizer, self.chat_template)
            ids, stop_ids = ids[before : len(ids) - behind], form.stop_ids
            stops += form.stop_texts
        chosen = Sampling(**{"temperature": 0.8, "top_p": 0.95, **sampling})
        return Request(tuple(ids), max_new_tokens, chosen, seed, n, stop_ids, stop_texts=stops, logprobs=logprobs)

    def _encoder_ids(self, prompt: str) -> list[int]:
        try:
            return text_ids(self.tokenizer, prompt)
        except DataError as error:
            raise RequestError("prompt", str(error)) from error

    def max_output_tokens(self, request: Request) -> int:
        """Return how many tokens the model can write for a request; negative if its prompt is too long."""
        length = self._context_length(request)
        return length if self.answers else length - len(request.prompt)

    def _context_length(self, request: Request) -> int:
        config = self._model.config
        if not self.answers or config.position_embedding_type == "learned_absolute":
            return config.max_position_embeddings
        return max(len(request.prompt), request.max_new_tokens)

    def events(self, requests: Sequence[Request]) -> Iterator[tuple[int, Event]]:
        """Serve requests together; yield their events as they come, each with the index of its request.

        Raises:
            RequestError: A request cannot be served.
            MegalithError: A token has no finite logits.
        """
        most = max((request.n for request in requests), default=1)
        limits = Limits(max_num_seqs=max(64, most), samples=max(128, most), max_waiting=sum(one.n for one in requests))
        blocks = self._num_blocks(requests, limits.max_num_seqs)
        length = max(map(self._context_length, requests), default=1)
        if self._context is None:
            runner: Runner = runner_of(self._model, blocks, context_length=length)
        else:
            runner = shared = RankRunner(self._model, self._context, blocks, context_length=length)
            if self._context.rank > 0:
                shared.follow()
                return
        engine = Engine(runner, self.tokenizer, limits, decoder_prompt=self._decoder_prompt)
        try:
            numbers = {engine.submit(request): number for number, request in enumerate(requests)}
            while engine.has_work:
                for handle, event in engine.step():
                    if isinstance(event, Finished) and event.reason == "error":
                        raise MegalithError(event.message)
                    yield numbers[handle], event
        finally:
            engine.close()

    def _num_blocks(self, requests: Sequence[Request], at_once: int) -> int:
        """Return the number of KV-cache blocks that the longest `at_once` samples of the requests fill."""
        sizes = list[int]()
        for request in requests:
            new, length = min(request.max_new_tokens, self.max_output_tokens(request)), len(request.prompt)
            encoder, own = (blocks_for(length), 1 + new) if self.answers else (0, length + new)
            sizes += [encoder + blocks_for(own), *[blocks_for(own)] * (request.n - 1)]
        return max(1, sum(sorted(sizes)[-at_once:]))
