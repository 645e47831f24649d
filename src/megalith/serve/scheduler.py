"""Continuous batching: choose the tokens of the next step and their KV cache blocks. No tensors are touched here.

Sequences are scheduled in order of arrival, at most `max_num_batched_tokens` tokens per step, with two exceptions:
every decoding sequence gets its one token, and an encoder input is computed in one step. Prompts take the rest in
chunks (chunked prefill). When blocks run out, the youngest sequence is preempted and recomputed later, so that the
oldest always progresses and no sequence starves.

Prefix caching: sequences with a common prefix share its blocks (`ref_counts` counts the sequences of each block), and a
full block is looked up by a hash of all tokens up to its end. A free block keeps its content until it is reused, so
that a later sequence with the same prefix finds it. Blocks are evicted by the clock algorithm (second chance).

Consecutive blocks are read faster than scattered ones (serve.cache). So a new sequence starts in front of free blocks,
which are reserved for it, and grows into them. Other sequences take reserved blocks when no others are free.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any


@dataclass(eq=False, slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens, and the hashes of the full ones."""

    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    reserved: range = range(0)
    cache_salt: bytes = b""  # hashed before the first block: only sequences with the same salt share blocks


def padded_to_blocks(tokens: int, size: int) -> int:
    """Return `tokens` rounded up to whole blocks of `size` tokens."""
    return -(-tokens // size) * size


def block_hash(parent: bytes, tokens: Iterable[int]) -> bytes:
    """Return the 128-bit hash of a block's tokens and of all tokens before them, whose hash is `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Block allocator of a paged KV cache; `num_free` blocks are used by no sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size, self.num_free = num_blocks, block_size, num_blocks
        self.ref_counts = [0] * num_blocks  # for each block, the number of sequences that use it
        self._reserved = [0] * num_blocks
        self._block_hashes: list[bytes | None] = [None] * num_blocks
        self._recently_used = bytearray(num_blocks)
        self._cached: dict[bytes, int] = {}
        self._hand = 0

    @property
    def num_used(self) -> int:
        """Return the number of blocks in use."""
        return self.num_blocks - self.num_free

    def match_prefix(self, table: BlockTable, tokens: list[int], limit: int) -> int:
        """Fill an empty table with cached blocks of the longest prefix; return its tokens, at most `limit`."""
        assert not table.blocks, "only a new table can take cached blocks"
        digest = table.cache_salt
        for start in range(0, limit - self.block_size + 1, self.block_size):
            digest = block_hash(digest, tokens[start : start + self.block_size])
            block = self._cached.get(digest)
            if block is None:
                break
            self._add_ref(block)
            self._recently_used[block] = 1
            table.blocks.append(block)
            table.block_hashes.append(digest)
        return len(table.blocks) * self.block_size

    def extend(self, table: BlockTable, count: int, run_length: int) -> None:
        """Append `count` free blocks to a table that will need up to `run_length` more blocks in all."""
        assert count <= self.num_free, "caller must check num_free"
        while count:
            next_block = table.blocks[-1] + 1 if table.blocks else self.num_blocks
            if not (next_block < self.num_blocks and self._is_available(next_block, table)):
                next_block = self._allocate(table, max(run_length, count))
            self._append(table, next_block)
            count, run_length = count - 1, run_length - 1

    def copy_on_write(self, table: BlockTable, index: int) -> tuple[int, int] | None:
        """Replace block `index` of a table by a copy if it is shared (copy on write); return (from, to), or None."""
        old = table.blocks[index]
        if self.ref_counts[old] == 1:
            return None
        assert self.num_free, "caller must check num_free"
        scratch = BlockTable()
        self._append(scratch, self._allocate(scratch, 1))
        self._reserve(scratch, range(0))
        table.blocks[index] = scratch.blocks[0]
        self._drop_ref(old)
        return old, table.blocks[index]

    def cache_full_blocks(self, table: BlockTable, tokens: list[int], length: int) -> None:
        """Add the full blocks of the first `length` tokens, whose keys and values are computed, to the prefix cache."""
        for index in range(len(table.block_hashes), length // self.block_size):
            parent = table.block_hashes[-1] if table.block_hashes else table.cache_salt
            digest = block_hash(parent, tokens[index * self.block_size : (index + 1) * self.block_size])
            table.block_hashes.append(digest)
            block = table.blocks[index]
            if digest not in self._cached and self._block_hashes[block] is None:
                self._cached[digest], self._block_hashes[block] = block, digest

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table that shares all blocks of a table."""
        for block in table.blocks:
            self._add_ref(block)
        return BlockTable(list(table.blocks), list(table.block_hashes), cache_salt=table.cache_salt)

    def release(self, table: BlockTable) -> None:
        """Free a table's blocks; their content stays in the prefix cache until they are reused."""
        for block in table.blocks:
            self._drop_ref(block)
        self._reserve(table, range(0))
        table.blocks.clear()
        table.block_hashes.clear()

    def _add_ref(self, block: int) -> None:
        self.num_free -= self.ref_counts[block] == 0
        self.ref_counts[block] += 1

    def _drop_ref(self, block: int) -> None:
        self.ref_counts[block] -= 1
        assert self.ref_counts[block] >= 0
        self.num_free += self.ref_counts[block] == 0

    def _append(self, table: BlockTable, block: int) -> None:
        digest = self._block_hashes[block]
        if digest is not None:
            del self._cached[digest]
            self._block_hashes[block] = None
        self._recently_used[block] = 0
        self._add_ref(block)
        table.blocks.append(block)

    def _is_available(self, block: int, table: BlockTable) -> bool:
        """Return whether a block is free and reserved for no other sequence."""
        return self.ref_counts[block] == 0 and self._reserved[block] == (block in table.reserved)

    def _reserve(self, table: BlockTable, blocks: range) -> None:
        for block in table.reserved:
            self._reserved[block] -= 1
        for block in blocks:
            self._reserved[block] += 1
        table.reserved = blocks

    def _allocate(self, table: BlockTable, run_length: int) -> int:
        """Return the first block of a run of `run_length` free blocks and reserve the run; else any free block."""
        self._reserve(table, range(0))
        for _ in range(2):  # the first round passes over recently used blocks and clears their mark
            start = self._find_run(run_length)
            if start is not None:
                self._hand = (start + run_length) % self.num_blocks
                self._reserve(table, range(start, start + run_length))
                return start
        free = [block for block in self._clock_order() if self.ref_counts[block] == 0]
        block = next((block for block in free if not self._reserved[block]), free[0])
        self._hand = (block + 1) % self.num_blocks
        return block

    def _find_run(self, length: int) -> int | None:
        """Return the start of `length` consecutive blocks that are free and not reserved, or None."""
        found = 0
        for block in self._clock_order():
            if block == 0:
                found = 0
            fits = self.ref_counts[block] == 0 and not self._reserved[block] and not self._recently_used[block]
            self._recently_used[block] = 0
            found = found + 1 if fits else 0
            if found == length:
                return block - length + 1
        return None

    def _clock_order(self) -> Iterable[int]:
        return chain(range(self._hand, self.num_blocks), range(self._hand))


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of a sample or beam, and how far they are computed."""

    tokens: list[int]  # of prompt and output; the owner appends
    limit: int  # maximum number of tokens
    logits_start: int  # logits are needed from this position on; less than the number of tokens
    num_branches: int = 1  # number of sequences that this may become by `fork`
    owner: Any = None  # opaque to the scheduler; the engine's request
    encoder_length: int = 0  # first tokens that an encoder reads at once, padded to whole blocks; 0 without an encoder
    priority: tuple[int, ...] = ()  # order of arrival; lower ones are scheduled first
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
class SchedulerOutput:
    """The chunks of one step, and the block copies (from, to) that come before them, in order."""

    chunks: list[ScheduledChunk]
    copies: list[tuple[int, int]]


class Scheduler:
    """Chooses the chunks of each step, and admits and preempts sequences."""

    def __init__(self, blocks: BlockPool, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.blocks, self.max_num_batched_tokens, self.max_num_seqs = blocks, max_num_batched_tokens, max_num_seqs
        self.running: list[Sequence] = []  # admitted and not preempted, in order
        self.waiting: list[Sequence] = []  # the others, in order
        self.preemptions = 0
        self.num_cached_tokens = 0  # tokens found in the prefix cache
        self._num_added = 0

    def add(self, sequence: Sequence) -> None:
        """Append a sequence, which alone must fit into the pool."""
        assert sequence.limit <= self.blocks.num_blocks * self.blocks.block_size and sequence.logits_start < len(
            sequence.tokens
        )
        sequence.priority = (self._num_added,)
        self._num_added += 1
        self.waiting.append(sequence)

    def fork(self, sequence: Sequence, owner: Any) -> Sequence:
        """Return a second sequence with the same tokens and shared blocks, scheduled right after the first."""
        self._num_added += 1
        sequence.num_branches = max(1, sequence.num_branches - 1)
        child = Sequence(
            list(sequence.tokens),
            sequence.limit,
            sequence.logits_start,
            1,
            owner,
            sequence.encoder_length,
            (sequence.priority[0], self._num_added),
            block_table=BlockTable(cache_salt=sequence.block_table.cache_salt),
        )
        if sequence in self.waiting:
            insort(self.waiting, child, key=_priority)
            return child
        child.block_table, child.num_computed = self.blocks.fork(sequence.block_table), sequence.num_computed
        insort(self.running, child, key=_priority)
        return child

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence and free its blocks."""
        self.blocks.release(sequence.block_table)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step; empty if there is nothing to compute. Call `complete_step` before any other method."""
        while True:
            chunks: list[ScheduledChunk] = []
            copies: list[tuple[int, int]] = []
            budget = self._schedule_running(chunks, copies)
            if budget is not None:
                self._schedule_waiting(budget, chunks, copies)
            # Beams that wait for one another may hold the blocks that the last of them needs.
            idle = [] if chunks else [sequence for sequence in self.running if not sequence.num_uncomputed]
            if not idle or (budget is not None and not any(map(_needs_logits, self.waiting))):
                return SchedulerOutput(chunks, copies)
            self._preempt(idle[-1])

    def _schedule_running(self, chunks: list[ScheduledChunk], copies: list[tuple[int, int]]) -> int | None:
        """Schedule the running sequences; return the tokens left for others, None if blocks have run out."""
        ready = [sequence for sequence in self.running if sequence.num_uncomputed]
        budget = self.max_num_batched_tokens - sum(sequence.num_uncomputed == 1 for sequence in ready)
        for sequence in ready:
            if not sequence.block_table.blocks:
                break  # an older one has just preempted it and all after it
            decodes = sequence.num_uncomputed == 1
            count = 1 if decodes else min(sequence.num_uncomputed, budget)
            if count <= 0:
                continue
            if not self._allocate_blocks(sequence, sequence.num_computed + count, copies):
                return None  # it is the youngest: it keeps its blocks and waits
            budget -= 0 if decodes else count
            chunks.append(self._chunk(sequence, count))
        return budget

    def complete_step(self, output: SchedulerOutput) -> None:
        """Record that a step was computed, and add its full blocks to the prefix cache."""
        for chunk in output.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            sequence.logits_start = max(sequence.logits_start, chunk.stop)
            if chunk.stop // self.blocks.block_size > len(sequence.block_table.block_hashes):
                self.blocks.cache_full_blocks(sequence.block_table, sequence.tokens, chunk.stop)

    def _chunk(self, sequence: Sequence, count: int) -> ScheduledChunk:
        start, stop = sequence.num_computed, sequence.num_computed + count
        return ScheduledChunk(sequence, start, stop, max(0, stop - max(start, sequence.logits_start)))

    def _num_missing_blocks(self, sequence: Sequence, stop: int) -> int:
        return -(-stop // self.blocks.block_size) - len(sequence.block_table.blocks)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Return whether the next token goes into a block that other sequences share."""
        index, blocks = sequence.num_computed // self.blocks.block_size, sequence.block_table.blocks
        return index < len(blocks) and self.blocks.ref_counts[blocks[index]] > 1

    def _allocate_blocks(self, sequence: Sequence, stop: int, copies: list[tuple[int, int]]) -> bool:
        """Allocate blocks for the tokens up to `stop`, preempting younger sequences; False if that is not enough."""
        table = sequence.block_table
        while True:
            missing, shared = self._num_missing_blocks(sequence, stop), self._writes_shared(sequence)
            if missing + shared <= self.blocks.num_free:
                break
            if self.running[-1] is sequence:
                return False
            self._preempt(self.running[-1])
        if shared and (copy := self.blocks.copy_on_write(table, sequence.num_computed // self.blocks.block_size)):
            copies.append(copy)
        if missing > 0:
            self.blocks.extend(table, missing, self._num_missing_blocks(sequence, sequence.limit))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.block_table)
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=_priority)
        self.preemptions += 1

    def _schedule_waiting(self, budget: int, chunks: list[ScheduledChunk], copies: list[tuple[int, int]]) -> None:
        """Admit waiting sequences in order while there are blocks for all their present tokens."""
        num_seqs = sum(sequence.num_branches for sequence in self.running)
        while budget > 0:
            sequence = next(filter(_needs_logits, self.waiting), None)
            if sequence is None or self.running and num_seqs + sequence.num_branches > self.max_num_seqs:
                return
            num_cached = self._match_prefix(sequence)
            padded = padded_to_blocks(sequence.encoder_length, self.blocks.block_size)
            if self._num_missing_blocks(sequence, len(sequence.tokens)) > self.blocks.num_free:
                self.blocks.release(sequence.block_table)
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_priority)
            sequence.num_computed = num_cached
            self.num_cached_tokens += num_cached - (padded - sequence.encoder_length if num_cached else 0)
            num_seqs += sequence.num_branches
            count = min(budget, len(sequence.tokens) - num_cached)
            if num_cached < padded:  # the encoder input at once, and the decoder's first token for its logits
                count = max(count, padded + 1)
            ok = self._allocate_blocks(sequence, num_cached + count, copies)
            assert ok, "checked above"
            budget -= count
            chunks.append(self._chunk(sequence, count))

    def _match_prefix(self, sequence: Sequence) -> int:
        """Fill the table with cached blocks; return their tokens. An encoder input is reused entirely or not at all."""
        limit = min(sequence.logits_start, len(sequence.tokens) - 1)
        num_cached = self.blocks.match_prefix(sequence.block_table, sequence.tokens, limit)
        if num_cached < sequence.encoder_length:
            self.blocks.release(sequence.block_table)
            return 0
        return num_cached


def _needs_logits(sequence: Sequence) -> bool:
    """Return whether logits are needed: a preempted beam is recomputed only once its next logits are needed."""
    return sequence.logits_start < len(sequence.tokens)


def _priority(sequence: Sequence) -> tuple[int, ...]:
    return sequence.priority
