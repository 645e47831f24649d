"""Who is read in the next step, and into which blocks: continuous batching as a policy of integers, without tensors.

Each step reads at most `step_tokens` tokens. Those who arrived first come first; every sequence that lacks one token
only (an answer under way) is sure of it, and prompts are read in chunks of what is left. When blocks run out, the
youngest gives its up and is read again later: so the oldest always gets on, and nobody waits for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from megalith.serve.blocks import Blocks, Table, filled_blocks


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens that are to be read.

    Attributes:
        tokens: All that are known; the owner appends.
        limit: Their number in the end, at most.
        scored: Of how many positions no logits are wanted, or have been given; below the number of tokens.
        width: How many sequences this may become by `fork`.
        owner: Whoever gets the logits.
        source: How many of the first tokens are a text that an encoder reads, at once; its last block is filled up
            with tokens that mean nothing. 0 where there is no encoder.
        order: Those of lower order go first.
        read: How many tokens have their keys and values in the blocks.
    """

    tokens: list[int]
    limit: int
    scored: int
    width: int = 1
    owner: Any = None
    source: int = 0
    order: tuple[int, ...] = ()
    read: int = 0
    table: Table = field(default_factory=Table)


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens from `start` to `stop` of a sequence are read; logits are wanted of the last `wanted` ones."""

    sequence: Sequence
    start: int
    stop: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read in one step, after these blocks were copied (from, to), in this order."""

    parts: Seq[Part]
    copies: Seq[tuple[int, int]] = ()


class Scheduler:
    """The sequences of an engine.

    Attributes:
        running: those with blocks, or with nothing to be read at the moment; in order.
        waiting: the others, in order.
        preemptions: how often a sequence had to give its blocks up.
        reused: how many tokens had their keys and values there already.
    """

    def __init__(self, blocks: Blocks, *, step_tokens: int, max_running: int) -> None:
        self.blocks, self.step_tokens, self.max_running = blocks, step_tokens, max_running
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = self.reused = 0
        self._numbers = 0

    def add(self, sequence: Sequence) -> None:
        """Take a sequence behind all others. It fits into the blocks alone."""
        assert sequence.limit <= self.blocks.count * self.blocks.size and sequence.scored < len(sequence.tokens)
        sequence.order = (self._numbers,)
        self._numbers += 1
        self.waiting.append(sequence)

    def fork(self, sequence: Sequence, owner: Any) -> Sequence:
        """A second sequence with the same tokens, and the same blocks where there are any; it goes right behind."""
        self._numbers += 1
        sequence.width = max(1, sequence.width - 1)
        twin = Sequence(
            list(sequence.tokens),
            sequence.limit,
            sequence.scored,
            1,
            owner,
            sequence.source,
            (sequence.order[0], self._numbers),
            table=Table(root=sequence.table.root),
        )
        if sequence in self.waiting:
            insort(self.waiting, twin, key=_order)
            return twin
        twin.table, twin.read = self.blocks.fork(sequence.table), sequence.read
        insort(self.running, twin, key=_order)
        return twin

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self.blocks.release(sequence.table)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def plan(self) -> Plan:
        """Choose what is read next; empty if there is nothing. `done` follows before anything else happens."""
        while True:
            parts: list[Part] = []
            copies: list[tuple[int, int]] = []
            budget = self._go_on(parts, copies)
            if budget is not None:
                self._admit(budget, parts, copies)
            # Beams that wait for one another may hold the blocks that the last of them needs.
            idle = [] if parts else [sequence for sequence in self.running if sequence.read == len(sequence.tokens)]
            if not idle or (budget is not None and not any(map(_has_something_to_read, self.waiting))):
                return Plan(parts, copies)
            self._preempt(idle[-1])

    def _go_on(self, parts: list[Part], copies: list[tuple[int, int]]) -> int | None:
        """Plan for those who run; how many tokens are left for others, None where blocks have run out."""
        ready = [sequence for sequence in self.running if sequence.read < len(sequence.tokens)]
        budget = self.step_tokens - sum(1 for sequence in ready if sequence.read == len(sequence.tokens) - 1)
        for sequence in ready:
            if not sequence.table.blocks:
                break  # it was preempted by an older one just now, and so were all behind it
            lacking = len(sequence.tokens) - sequence.read
            count = 1 if lacking == 1 else min(lacking, budget)
            if count <= 0:
                continue
            if not self._make_room(sequence, sequence.read + count, copies):
                return None  # it is the youngest, and waits with what it has
            budget -= 0 if lacking == 1 else count
            parts.append(self._part(sequence, count))
        return budget

    def done(self, plan: Plan) -> None:
        """The plan has been carried out."""
        for part in plan.parts:
            sequence = part.sequence
            sequence.read = part.stop
            sequence.scored = max(sequence.scored, part.stop)
            if part.stop // self.blocks.size > len(sequence.table.digests):
                self.blocks.publish(sequence.table, sequence.tokens, part.stop)

    def _part(self, sequence: Sequence, count: int) -> Part:
        stop = sequence.read + count
        return Part(sequence, sequence.read, stop, max(0, stop - max(sequence.read, sequence.scored)))

    def _lacking_blocks(self, sequence: Sequence, stop: int) -> int:
        return -(-stop // self.blocks.size) - len(sequence.table.blocks)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that others need too."""
        index = sequence.read // self.blocks.size
        return index < len(sequence.table.blocks) and self.blocks.refs[sequence.table.blocks[index]] > 1

    def _make_room(self, sequence: Sequence, stop: int, copies: list[tuple[int, int]]) -> bool:
        """Give a sequence blocks of its own for the tokens up to `stop`; younger ones may lose theirs."""
        while True:
            lacking, shared = self._lacking_blocks(sequence, stop), self._writes_shared(sequence)
            if lacking + shared <= self.blocks.free:
                break
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        if shared and (copy := self.blocks.own(sequence.table, sequence.read // self.blocks.size)):
            copies.append(copy)
        if lacking > 0:
            self.blocks.extend(sequence.table, lacking, self._lacking_blocks(sequence, sequence.limit))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.table)
        sequence.read = 0
        insort(self.waiting, sequence, key=_order)
        self.preemptions += 1

    def _admit(self, budget: int, parts: list[Part], copies: list[tuple[int, int]]) -> None:
        """Let those who wait in, in order, as long as there is room for all that they have now."""
        width = sum(sequence.width for sequence in self.running)
        while budget > 0:
            sequence = next(filter(_has_something_to_read, self.waiting), None)
            if sequence is None or self.running and width + sequence.width > self.max_running:
                return
            reused, source = self._reuse(sequence), filled_blocks(sequence.source, self.blocks.size)
            if self._lacking_blocks(sequence, len(sequence.tokens)) > self.blocks.free:
                self.blocks.release(sequence.table)
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)
            sequence.read = reused
            self.reused += reused - (source - sequence.source if reused else 0)
            width += sequence.width
            count = min(budget, len(sequence.tokens) - reused)
            if reused < source:  # and the first token of the answer, of which alone there are logits
                count = max(count, source + 1)
            room = self._make_room(sequence, reused + count, copies)
            assert room, "it was looked for"
            budget -= count
            parts.append(self._part(sequence, count))

    def _reuse(self, sequence: Sequence) -> int:
        """Begin with the blocks that are there already; how many tokens they hold. Of a text all, or none."""
        reused = self.blocks.match(sequence.table, sequence.tokens, min(sequence.scored, len(sequence.tokens) - 1))
        if reused < sequence.source:
            self.blocks.release(sequence.table)
            return 0
        return reused


def _has_something_to_read(sequence: Sequence) -> bool:
    """Whether logits are wanted of it; a beam that waits for others and has lost its blocks is not read for nothing."""
    return sequence.scored < len(sequence.tokens)


def _order(sequence: Sequence) -> tuple[int, ...]:
    return sequence.order
