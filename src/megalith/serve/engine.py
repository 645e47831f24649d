"""The engine: requests in, events out, one step at a time, in one thread."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.serve.request import Event, Request
from megalith.serve.runner import Runner
from megalith.tokenizers import Tokenizer


@dataclass(frozen=True)
class Limits:
    """What bounds the work of an engine.

    Attributes:
        step_tokens: How many tokens are read in one step at most: prompts are read in chunks, so that those who
            already have their answer under way wait no longer than this takes.
        running: How many sequences (samples, beams) are worked on at once.
        waiting: How many more may wait; a request beyond them is refused with `Busy`.
        samples: The largest `n` and `beam_width`.
        logprobs: The largest `logprobs`.
        stop_texts: How many there may be.
    """

    step_tokens: int = 512
    running: int = 64
    waiting: int = 256
    samples: int = 128
    logprobs: int = 20
    stop_texts: int = 16


@dataclass(frozen=True, eq=False)
class Ticket:
    """A request that was taken."""

    number: int
    request: Request


@dataclass(frozen=True)
class Stats:
    """What an engine has done and has to do.

    Attributes:
        waiting, running: sequences, now.
        blocks_used, blocks: of the cache, now; used ones are those that a sequence needs.
        prompt_tokens, generated_tokens: since the start.
        reused_tokens: of prompts, whose keys and values were there already.
        preemptions: sequences that had to give their blocks to others and were read again.
    """

    waiting: int = 0
    running: int = 0
    blocks_used: int = 0
    blocks: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0


class Engine:
    """Serves requests with a runner. Not thread-safe: one thread calls all methods (see `serve.worker`)."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, limits: Limits | None = None) -> None:
        self.runner, self.tokenizer, self.limits = runner, tokenizer, limits or Limits()

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together; the cache may hold less than the model reads."""
        return min(self.runner.context_length, self.runner.block_size * self.runner.num_blocks)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        raise NotImplementedError

    def submit(self, request: Request) -> Ticket:
        """Take a request.

        Raises:
            RequestError: it can never be served; names the field.
            Busy: too many wait.
        """
        raise NotImplementedError

    def cancel(self, ticket: Ticket) -> None:
        """Stop working on it; its open samples finish with "cancelled" at the next step. Finished ones stay so."""
        raise NotImplementedError

    def step(self) -> list[tuple[Ticket, Event]]:
        """Compute one batch; what came of it, in order for each sample.

        Without work it tells the other ranks that this one lives: call it at least once a second.

        Raises:
            PeerError: a rank that shares the model is gone, and nothing can be served any more.
        """
        raise NotImplementedError

    def stats(self) -> Stats:
        """Counters for monitoring."""
        raise NotImplementedError

    def close(self) -> None:
        """Let the other ranks go; afterwards there are no more steps."""
        self.runner.close()
