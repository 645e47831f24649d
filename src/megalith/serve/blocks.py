"""Which blocks of the cache hold whose keys and values: counting, sharing, reuse. No tensors.

A block is shared by all sequences that begin alike up to its end (`refs` counts them). One that nobody needs keeps
what it holds until it is given away, so that a later sequence with the same beginning finds it: full blocks are known
by a digest of all tokens up to their end. What holds nothing of use is found by a hand that goes round and round, and
passes over what was found useful since it last came by (the clock algorithm).

Blocks that follow one another in memory are read faster than scattered ones (serve.cache). So a new sequence is given a
place in front of free blocks, which are promised to it, and grows into them. A promise is only a wish: where there
is no other room, it is broken.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one sequence, in the order of its tokens, and the digests of the full ones.

    Attributes:
        root: what the digests begin with: sequences of different roots share no block, however alike they begin.
    """

    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    promised: range = range(0)
    root: bytes = b""


def filled_blocks(tokens: int, size: int) -> int:
    """The tokens of the blocks of `size` that so many tokens fill, the last one up to its end."""
    return -(-tokens // size) * size


def chained(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a block: of its tokens and all before them. No two beginnings are taken for one another."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Blocks:
    """All blocks of a cache.

    Attributes:
        size: tokens in a block.
        free: how many are not needed by any sequence.
        refs: for each block, how many sequences need it.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size, self.free = count, size, count
        self.refs = [0] * count
        self._promised = [0] * count
        self._digest: list[bytes | None] = [None] * count
        self._useful = bytearray(count)
        self._known: dict[bytes, int] = {}
        self._hand = 0

    @property
    def used(self) -> int:
        """How many are needed by a sequence."""
        return self.count - self.free

    def match(self, table: Table, tokens: Sequence[int], limit: int) -> int:
        """Give an empty table the blocks that hold the beginning of these tokens already.

        Returns:
            How many tokens that are: a multiple of the block size, at most `limit`.
        """
        assert not table.blocks, "only a new table can begin with what is there"
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
        """Give a table `count` more blocks, of which as many are free; `room` is how many it may need in the end."""
        assert count <= self.free, "the caller looks first"
        while count:
            follower = table.blocks[-1] + 1 if table.blocks else self.count
            if not (follower < self.count and self._fit(follower, table)):
                follower = self._place(table, max(room, count))
            self._give(table, follower)
            count, room = count - 1, room - 1

    def own(self, table: Table, index: int) -> tuple[int, int] | None:
        """See that a table alone has its block of this index, before it is written to.

        Returns:
            What must be copied for it, (from, to); None where it has it alone already. Takes one free block.
        """
        old = table.blocks[index]
        if self.refs[old] == 1:
            return None
        assert self.free, "the caller looks first"
        scratch = Table()
        self._give(scratch, self._place(scratch, 1))
        self._promise(scratch, range(0))
        table.blocks[index] = scratch.blocks[0]
        self._drop(old)
        return old, table.blocks[index]

    def publish(self, table: Table, tokens: Sequence[int], length: int) -> None:
        """Let others find the full blocks of the first `length` tokens, whose keys and values are there now."""
        for index in range(len(table.digests), length // self.size):
            before = table.digests[-1] if table.digests else table.root
            digest = chained(before, tokens[index * self.size : (index + 1) * self.size])
            table.digests.append(digest)
            block = table.blocks[index]
            if digest not in self._known and self._digest[block] is None:
                self._known[digest], self._digest[block] = block, digest

    def fork(self, table: Table) -> Table:
        """A second table over the same blocks."""
        for block in table.blocks:
            self._refer(block)
        return Table(list(table.blocks), list(table.digests), root=table.root)

    def release(self, table: Table) -> None:
        """Take a table's blocks back; what they hold can be found until they are given away."""
        for block in table.blocks:
            self._drop(block)
        self._promise(table, range(0))
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
        """Whether a block is free and promised to nobody else."""
        return self.refs[block] == 0 and self._promised[block] == (block in table.promised)

    def _promise(self, table: Table, blocks: range) -> None:
        for block in table.promised:
            self._promised[block] -= 1
        for block in blocks:
            self._promised[block] += 1
        table.promised = blocks

    def _place(self, table: Table, room: int) -> int:
        """A free block, with as much room behind it as there can be, which is promised to the table."""
        self._promise(table, range(0))
        for _ in range(2):  # the first round passes over what was useful, and forgets that it was
            start = self._run(room)
            if start is not None:
                self._hand = (start + room) % self.count
                self._promise(table, range(start, start + room))
                return start
        free = [block for block in self._round() if self.refs[block] == 0]
        block = next((block for block in free if not self._promised[block]), free[0])
        self._hand = (block + 1) % self.count
        return block

    def _run(self, length: int) -> int | None:
        """The start of so many blocks in a row that are free and promised to nobody."""
        found = 0
        for block in self._round():
            if block == 0:
                found = 0
            fits = self.refs[block] == 0 and not self._promised[block] and not self._useful[block]
            self._useful[block] = 0
            found = found + 1 if fits else 0
            if found == length:
                return block - length + 1
        return None

    def _round(self) -> Iterable[int]:
        return chain(range(self._hand, self.count), range(self._hand))
