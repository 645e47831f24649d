"""Continuous batching: the tokens of the next step and their blocks of the KV cache. Integers only.

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
class BlockTable:
    """The blocks of one sequence, in the order of its tokens, and the digests of the full ones."""

    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    reserved: range = range(0)
    root: bytes = b""  # begins the digests: sequences of different roots share no block, however alike


def padded_to_blocks(tokens: int, size: int) -> int:
    """Return `tokens` rounded up to whole blocks of `size` tokens."""
    return -(-tokens // size) * size


def chain_digest(before: bytes, tokens: Seq[int]) -> bytes:
    """Return the digest of a block: a 128-bit hash of its tokens and of all tokens before them."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Block allocator of a paged KV cache: `count` blocks of `size` tokens, `free` of them used by no sequence."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.free = count, size, count
        self.refs = [0] * count  # for each block, how many sequences need it
        self._reserved = [0] * count
        self._digest: list[bytes | None] = [None] * count
        self._recently_used = bytearray(count)
        self._cached: dict[bytes, int] = {}
        self._hand = 0

    @property
    def used(self) -> int:
        """Return the number of blocks in use."""
        return self.count - self.free

    def match(self, table: BlockTable, tokens: Seq[int], limit: int) -> int:
        """Fill an empty table with cached blocks of the longest prefix; return its tokens, at most `limit`."""
        assert not table.blocks, "only a new table can take cached blocks"
        digest = table.root
        for start in range(0, limit - self.size + 1, self.size):
            digest = chain_digest(digest, tokens[start : start + self.size])
            block = self._cached.get(digest)
            if block is None:
                break
            self._add_ref(block)
            self._recently_used[block] = 1
            table.blocks.append(block)
            table.digests.append(digest)
        return len(table.blocks) * self.size

    def extend(self, table: BlockTable, count: int, room: int) -> None:
        """Append `count` free blocks to a table that may need `room` blocks in the end."""
        assert count <= self.free, "the caller looks first"
        while count:
            follower = table.blocks[-1] + 1 if table.blocks else self.count
            if not (follower < self.count and self._is_available(follower, table)):
                follower = self._allocate(table, max(room, count))
            self._append(table, follower)
            count, room = count - 1, room - 1

    def make_writable(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Replace block `index` of a table by a copy if it is shared (copy on write); return (from, to), or None."""
        old = table.blocks[index]
        if self.refs[old] == 1:
            return None
        assert self.free, "the caller looks first"
        scratch = BlockTable()
        self._append(scratch, self._allocate(scratch, 1))
        self._reserve(scratch, range(0))
        table.blocks[index] = scratch.blocks[0]
        self._drop_ref(old)
        return old, table.blocks[index]

    def publish(self, table: BlockTable, tokens: Seq[int], length: int) -> None:
        """Add the full blocks of the first `length` tokens, whose keys and values are computed, to the prefix cache."""
        for index in range(len(table.digests), length // self.size):
            before = table.digests[-1] if table.digests else table.root
            digest = chain_digest(before, tokens[index * self.size : (index + 1) * self.size])
            table.digests.append(digest)
            block = table.blocks[index]
            if digest not in self._cached and self._digest[block] is None:
                self._cached[digest], self._digest[block] = block, digest

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table that shares all blocks of a table."""
        for block in table.blocks:
            self._add_ref(block)
        return BlockTable(list(table.blocks), list(table.digests), root=table.root)

    def release(self, table: BlockTable) -> None:
        """Free a table's blocks; their content stays in the prefix cache until they are reused."""
        for block in table.blocks:
            self._drop_ref(block)
        self._reserve(table, range(0))
        table.blocks.clear()
        table.digests.clear()

    def _add_ref(self, block: int) -> None:
        self.free -= self.refs[block] == 0
        self.refs[block] += 1

    def _drop_ref(self, block: int) -> None:
        self.refs[block] -= 1
        assert self.refs[block] >= 0
        self.free += self.refs[block] == 0

    def _append(self, table: BlockTable, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._cached[digest]
            self._digest[block] = None
        self._recently_used[block] = 0
        self._add_ref(block)
        table.blocks.append(block)

    def _is_available(self, block: int, table: BlockTable) -> bool:
        """Return whether a block is free and reserved for no other sequence."""
        return self.refs[block] == 0 and self._reserved[block] == (block in table.reserved)

    def _reserve(self, table: BlockTable, blocks: range) -> None:
        for block in table.reserved:
            self._reserved[block] -= 1
        for block in blocks:
            self._reserved[block] += 1
        table.reserved = blocks

    def _allocate(self, table: BlockTable, room: int) -> int:
        """Return a free block with `room` free blocks behind it if there are any, and reserve them for the table."""
        self._reserve(table, range(0))
        for _ in range(2):  # the first round passes over recently used blocks and clears their mark
            start = self._find_run(room)
            if start is not None:
                self._hand = (start + room) % self.count
                self._reserve(table, range(start, start + room))
                return start
        free = [block for block in self._clock_order() if self.refs[block] == 0]
        block = next((block for block in free if not self._reserved[block]), free[0])
        self._hand = (block + 1) % self.count
        return block

    def _find_run(self, length: int) -> int | None:
        """Return the start of `length` consecutive blocks that are free and not reserved, or None."""
        found = 0
        for block in self._clock_order():
            if block == 0:
                found = 0
            fits = self.refs[block] == 0 and not self._reserved[block] and not self._recently_used[block]
            self._recently_used[block] = 0
            found = found + 1 if fits else 0
            if found == length:
                return block - length + 1
        return None

    def _clock_order(self) -> Iterable[int]:
        return chain(range(self._hand, self.count), range(self._hand))


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of a sample or beam, and how far they are computed."""

    tokens: list[int]  # of prompt and answer; the owner appends
    limit: int  # most tokens that it may have
    num_scored: int  # first positions whose logits are not needed, or were returned; below the number of tokens
    width: int = 1  # number of sequences that this may become by `fork`
    owner: Any = None  # opaque to the scheduler; the engine's request
    encoder_length: int = 0  # first tokens that an encoder reads at once, padded to whole blocks; 0 without an encoder
    order: tuple[int, ...] = ()  # of arrival; lower ones are scheduled first
    num_computed: int = 0  # first tokens whose keys and values are in the blocks
    block_table: BlockTable = field(default_factory=BlockTable)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens without keys and values in the blocks."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, stop) of a sequence to compute, with logits of the last `num_logits`."""

    sequence: Sequence
    start: int
    stop: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The chunks of one step, and the block copies (from, to) that come before them, in order."""

    chunks: Seq[ScheduledChunk]
    copies: Seq[tuple[int, int]] = ()


class Scheduler:
    """Chooses the chunks of each step, and admits and preempts sequences."""

    def __init__(self, blocks: BlockPool, *, step_tokens: int, max_running: int) -> None:
        self.blocks, self.step_tokens, self.max_running = blocks, step_tokens, max_running
        self.running: list[Sequence] = []  # admitted and not preempted, in order
        self.waiting: list[Sequence] = []  # the others, in order
        self.preemptions = 0
        self.reused = 0  # tokens found in the prefix cache
        self._num_added = 0

    def add(self, sequence: Sequence) -> None:
        """Append a sequence, which must fit into the pool by itself."""
        assert sequence.limit <= self.blocks.count * self.blocks.size and sequence.num_scored < len(sequence.tokens)
        sequence.order = (self._num_added,)
        self._num_added += 1
        self.waiting.append(sequence)

    def fork(self, sequence: Sequence, owner: Any) -> Sequence:
        """Return a second sequence with the same tokens and shared blocks, scheduled right after the first."""
        self._num_added += 1
        sequence.width = max(1, sequence.width - 1)
        twin = Sequence(
            list(sequence.tokens),
            sequence.limit,
            sequence.num_scored,
            1,
            owner,
            sequence.encoder_length,
            (sequence.order[0], self._num_added),
            block_table=BlockTable(root=sequence.block_table.root),
        )
        if sequence in self.waiting:
            insort(self.waiting, twin, key=_order)
            return twin
        twin.block_table, twin.num_computed = self.blocks.fork(sequence.block_table), sequence.num_computed
        insort(self.running, twin, key=_order)
        return twin

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence and free its blocks."""
        self.blocks.release(sequence.block_table)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def plan(self) -> Plan:
        """Choose the next step; empty if there is nothing to compute. Call `done` before any other method."""
        while True:
            chunks: list[ScheduledChunk] = []
            copies: list[tuple[int, int]] = []
            budget = self._continue_running(chunks, copies)
            if budget is not None:
                self._admit(budget, chunks, copies)
            # Beams that wait for one another may hold the blocks that the last of them needs.
            idle = [] if chunks else [sequence for sequence in self.running if not sequence.num_uncomputed]
            if not idle or (budget is not None and not any(map(_needs_logits, self.waiting))):
                return Plan(chunks, copies)
            self._preempt(idle[-1])

    def _continue_running(self, chunks: list[ScheduledChunk], copies: list[tuple[int, int]]) -> int | None:
        """Plan the running sequences; return the tokens left for others, None if blocks have run out."""
        ready = [sequence for sequence in self.running if sequence.num_uncomputed]
        budget = self.step_tokens - sum(sequence.num_uncomputed == 1 for sequence in ready)
        for sequence in ready:
            if not sequence.block_table.blocks:
                break  # an older one has just preempted it and all after it
            decodes = sequence.num_uncomputed == 1
            count = 1 if decodes else min(sequence.num_uncomputed, budget)
            if count <= 0:
                continue
            if not self._make_room(sequence, sequence.num_computed + count, copies):
                return None  # it is the youngest: it keeps its blocks and waits
            budget -= 0 if decodes else count
            chunks.append(self._chunk(sequence, count))
        return budget

    def done(self, plan: Plan) -> None:
        """Record that the plan was computed, and publish its full blocks."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            sequence.num_scored = max(sequence.num_scored, chunk.stop)
            if chunk.stop // self.blocks.size > len(sequence.block_table.digests):
                self.blocks.publish(sequence.block_table, sequence.tokens, chunk.stop)

    def _chunk(self, sequence: Sequence, count: int) -> ScheduledChunk:
        start, stop = sequence.num_computed, sequence.num_computed + count
        return ScheduledChunk(sequence, start, stop, max(0, stop - max(start, sequence.num_scored)))

    def _lacking_blocks(self, sequence: Sequence, stop: int) -> int:
        return -(-stop // self.blocks.size) - len(sequence.block_table.blocks)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Return whether the next token goes into a block that other sequences share."""
        index, blocks = sequence.num_computed // self.blocks.size, sequence.block_table.blocks
        return index < len(blocks) and self.blocks.refs[blocks[index]] > 1

    def _make_room(self, sequence: Sequence, stop: int, copies: list[tuple[int, int]]) -> bool:
        """Allocate blocks for the tokens up to `stop`, preempting younger sequences; False if that is not enough."""
        table = sequence.block_table
        while True:
            lacking, shared = self._lacking_blocks(sequence, stop), self._writes_shared(sequence)
            if lacking + shared <= self.blocks.free:
                break
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        if shared and (copy := self.blocks.make_writable(table, sequence.num_computed // self.blocks.size)):
            copies.append(copy)
        if lacking > 0:
            self.blocks.extend(table, lacking, self._lacking_blocks(sequence, sequence.limit))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.block_table)
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=_order)
        self.preemptions += 1

    def _admit(self, budget: int, chunks: list[ScheduledChunk], copies: list[tuple[int, int]]) -> None:
        """Admit waiting sequences in order while there are blocks for all their present tokens."""
        width = sum(sequence.width for sequence in self.running)
        while budget > 0:
            sequence = next(filter(_needs_logits, self.waiting), None)
            if sequence is None or self.running and width + sequence.width > self.max_running:
                return
            reused, padded = self._match_prefix(sequence), padded_to_blocks(sequence.encoder_length, self.blocks.size)
            if self._lacking_blocks(sequence, len(sequence.tokens)) > self.blocks.free:
                self.blocks.release(sequence.block_table)
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_order)
            sequence.num_computed = reused
            self.reused += reused - (padded - sequence.encoder_length if reused else 0)
            width += sequence.width
            count = min(budget, len(sequence.tokens) - reused)
            if reused < padded:  # the encoder input at once, and the decoder's first token for its logits
                count = max(count, padded + 1)
            room = self._make_room(sequence, reused + count, copies)
            assert room, "checked above"
            budget -= count
            chunks.append(self._chunk(sequence, count))

    def _match_prefix(self, sequence: Sequence) -> int:
        """Fill the table from the prefix cache; return the tokens found, of an encoder input all or none."""
        limit = min(sequence.num_scored, len(sequence.tokens) - 1)
        reused = self.blocks.match(sequence.block_table, sequence.tokens, limit)
        if reused < sequence.encoder_length:
            self.blocks.release(sequence.block_table)
            return 0
        return reused


def _needs_logits(sequence: Sequence) -> bool:
    """Return whether its logits are needed: a preempted beam that waits for others is not recomputed before."""
    return sequence.num_scored < len(sequence.tokens)


def _order(sequence: Sequence) -> tuple[int, ...]:
    return sequence.order
