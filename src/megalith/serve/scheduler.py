"""Continuous batching: which tokens run in the next step, and in which blocks of the KV cache. Integers only.

Each step computes at most `step_tokens` tokens, in order of arrival. Every decoding sequence gets its one token, and
prompts take the rest in chunks (chunked prefill). When blocks run out, the youngest sequence is preempted and
recomputed later, so that the oldest always progresses and no sequence starves.

Prefix caching: a block is shared by all sequences that are equal up to its end (`refs` counts them), and a full block
is looked up by a digest of all tokens up to its end. A free block keeps its content until it is reused, so that a later
sequence with the same prefix finds it. Blocks are evicted by the clock algorithm (second chance).

Consecutive blocks are read faster than scattered ones (serve.cache). So a new sequence starts in front of free blocks,
which are reserved for it, and grows into them. Other sequences take reserved blocks when no others are free.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one sequence, in the order of its tokens, and the digests of the full ones."""

    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    reserved: range = range(0)
    root: bytes = b""  # begins the digests: sequences of different roots share no block, however alike


def filled_blocks(tokens: int, size: int) -> int:
    """Return `tokens` rounded up to whole blocks of `size` tokens."""
    return -(-tokens // size) * size


def chained(before: bytes, tokens: Seq[int]) -> bytes:
    """Return the digest of a block: a 128-bit hash of its tokens and of all tokens before them."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Blocks:
    """Block allocator of a paged KV cache: `count` blocks of `size` tokens, `free` of them used by no sequence."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.free = count, size, count
        self.refs = [0] * count  # for each block, how many sequences need it
        self._reserved = [0] * count
        self._digest: list[bytes | None] = [None] * count
        self._useful = bytearray(count)
        self._known: dict[bytes, int] = {}
        self._hand = 0

    @property
    def used(self) -> int:
        """Return the number of blocks in use."""
        return self.count - self.free

    def match(self, table: Table, tokens: Seq[int], limit: int) -> int:
        """Fill an empty table with cached blocks of the longest prefix; return its tokens, at most `limit`."""
        assert not table.blocks, "only a new table can take cached blocks"
        digest = table.root
        for start in range(0, limit - self.size + 1, self.size):
            digest = chained(digest, tokens[start : start + self.size])
            block = self._known.get(digest)
            if block is None:
                break
            self._refer(block)
            self._useful[block] = 1
            table.blocks.append(block)
            table.digests.append(digest)
        return len(table.blocks) * self.size

    def extend(self, table: Table, count: int, room: int) -> None:
        """Append `count` free blocks to a table; `room` is how many it may need in the end."""
        assert count <= self.free, "the caller looks first"
        while count:
            follower = table.blocks[-1] + 1 if table.blocks else self.count
            if not (follower < self.count and self._fit(follower, table)):
                follower = self._place(table, max(room, count))
            self._give(table, follower)
            count, room = count - 1, room - 1

    def own(self, table: Table, index: int) -> tuple[int, int] | None:
        """Make a table the only owner of its block `index` (copy on write); return the copy (from, to), or None."""
        old = table.blocks[index]
        if self.refs[old] == 1:
            return None
        assert self.free, "the caller looks first"
        scratch = Table()
        self._give(scratch, self._place(scratch, 1))
        self._reserve(scratch, range(0))
        table.blocks[index] = scratch.blocks[0]
        self._drop(old)
        return old, table.blocks[index]

    def publish(self, table: Table, tokens: Seq[int], length: int) -> None:
        """Add the full blocks of the first `length` tokens, whose keys and values are computed, to the prefix cache."""
        for index in range(len(table.digests), length // self.size):
            before = table.digests[-1] if table.digests else table.root
            digest = chained(before, tokens[index * self.size : (index + 1) * self.size])
            table.digests.append(digest)
            block = table.blocks[index]
            if digest not in self._known and self._digest[block] is None:
                self._known[digest], self._digest[block] = block, digest

    def fork(self, table: Table) -> Table:
        for block in table.blocks:
            self._refer(block)
        return Table(list(table.blocks), list(table.digests), root=table.root)

    def release(self, table: Table) -> None:
        """Free a table's blocks; their content stays in the prefix cache until they are reused."""
        for block in table.blocks:
            self._drop(block)
        self._reserve(table, range(0))
        table.blocks.clear()
        table.digests.clear()

    def _refer(self, block: int) -> None:
        self.free -= self.refs[block] == 0
        self.refs[block] += 1

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        assert self.refs[block] >= 0
        self.free += self.refs[block] == 0

    def _give(self, table: Table, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._known[digest]
            self._digest[block] = None
        self._useful[block] = 0
        self._refer(block)
        table.blocks.append(block)

    def _fit(self, block: int, table: Table) -> bool:
        """Whether a block is free and reserved for no other sequence."""
        return self.refs[block] == 0 and self._reserved[block] == (block in table.reserved)

    def _reserve(self, table: Table, blocks: range) -> None:
        for block in table.reserved:
            self._reserved[block] -= 1
        for block in blocks:
            self._reserved[block] += 1
        table.reserved = blocks

    def _place(self, table: Table, room: int) -> int:
        """Return a free block with `room` free blocks behind it if there are any, and reserve them for the table."""
        self._reserve(table, range(0))
        for _ in range(2):  # the first round passes over what was useful, and forgets that it was
            start = self._run(room)
            if start is not None:
                self._hand = (start + room) % self.count
                self._reserve(table, range(start, start + room))
                return start
        free = [block for block in self._round() if self.refs[block] == 0]
        block = next((block for block in free if not self._reserved[block]), free[0])
        self._hand = (block + 1) % self.count
        return block

    def _run(self, length: int) -> int | None:
        """Return the start of `length` consecutive blocks that are free and not reserved, or None."""
        found = 0
        for block in self._round():
            if block == 0:
                found = 0
            fits = self.refs[block] == 0 and not self._reserved[block] and not self._useful[block]
            self._useful[block] = 0
            found = found + 1 if fits else 0
            if found == length:
                return block - length + 1
        return None

    def _round(self) -> Iterable[int]:
        return chain(range(self._hand, self.count), range(self._hand))


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens that are to be read."""

    tokens: list[int]  # all that are known; the owner appends
    limit: int  # their number in the end, at most
    scored: int  # of how many positions no logits are wanted, or have been given; below the number of tokens
    width: int = 1  # how many sequences this may become by `fork`
    owner: Any = None  # whoever gets the logits
    source: int = 0  # first tokens that an encoder reads at once, padded to whole blocks; 0 without an encoder
    order: tuple[int, ...] = ()  # those of lower order go first
    read: int = 0  # how many tokens have their keys and values in the blocks
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
    """The sequences of an engine."""

    def __init__(self, blocks: Blocks, *, step_tokens: int, max_running: int) -> None:
        self.blocks, self.step_tokens, self.max_running = blocks, step_tokens, max_running
        self.running: list[Sequence] = []  # those with blocks, or with nothing to be read at the moment; in order
        self.waiting: list[Sequence] = []  # the others, in order
        self.preemptions = 0  # how often a sequence had to give its blocks up
        self.reused = 0  # tokens whose keys and values were there already
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
