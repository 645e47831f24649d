"""Blocks and scheduling, without torch: what is read is what was written, nothing leaks, everybody gets on."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.serve.scheduler import BlockPool, BlockTable, Scheduler, SchedulerOutput, Sequence

MANY = settings(max_examples=300, deadline=None)


@dataclass
class World:
    """A scheduler with a memory of tokens in place of keys and values."""

    scheduler: Scheduler
    chance: Random
    memory: list[list[int]] = field(default_factory=list)
    open: list[Sequence] = field(default_factory=list)
    finished: int = 0

    def __post_init__(self) -> None:
        blocks = self.scheduler.blocks
        self.memory = [[-1] * blocks.block_size for _ in range(blocks.num_blocks)]

    def add(self, prompt: list[int], new: int, num_branches: int, logits_start: int | None = None) -> Sequence:
        blocks = self.scheduler.blocks
        limit = min(len(prompt) + new, blocks.num_blocks * blocks.block_size)
        sequence = Sequence(
            list(prompt), limit, len(prompt) - 1 if logits_start is None else logits_start, num_branches
        )
        self.scheduler.add(sequence)
        self.open.append(sequence)
        return sequence

    def step(self) -> SchedulerOutput:
        first = min(self.open, key=lambda sequence: sequence.priority) if self.open else None
        output = self.scheduler.schedule()
        self._obey(output)
        self.check()
        if first is not None:
            # The oldest gets on, unless sure single tokens of others leave no room for its prompt.
            reads = any(chunk.sequence is first for chunk in output.chunks)
            assert reads or len(output.chunks) >= self.scheduler.max_num_batched_tokens, "the oldest waits"
        self.scheduler.complete_step(output)
        for chunk in output.chunks:
            if chunk.sequence.num_computed == len(chunk.sequence.tokens):
                assert chunk.num_logits, "logits of the last token"
                self._answer(chunk.sequence)
        return output

    def _obey(self, output: SchedulerOutput) -> None:
        size = self.scheduler.blocks.block_size
        lengths = [chunk.stop - chunk.start for chunk in output.chunks]
        assert sum(count for count in lengths if count > 1) <= self.scheduler.max_num_batched_tokens
        assert len({id(chunk.sequence) for chunk in output.chunks}) == len(output.chunks)
        for source, target in output.copies:
            self.memory[target] = list(self.memory[source])
        for chunk in output.chunks:
            table = chunk.sequence.block_table.blocks
            for position in range(chunk.start, chunk.stop):
                block = table[position // size]
                assert self.scheduler.blocks.ref_counts[block] == 1, "written to by one only"
                self.memory[block][position % size] = chunk.sequence.tokens[position]
        for chunk in output.chunks:
            table = chunk.sequence.block_table.blocks
            seen = [self.memory[table[p // size]][p % size] for p in range(chunk.stop)]
            assert seen == chunk.sequence.tokens[: chunk.stop]

    def _answer(self, sequence: Sequence) -> None:
        children = [self.scheduler.fork(sequence, None) for _ in range(sequence.num_branches - 1)]
        self.open += children
        for child in [sequence, *children]:
            child.tokens.append(self.chance.randrange(3))
            if len(child.tokens) >= child.limit:
                self.end(child)

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.open.remove(sequence)
        self.finished += 1

    def check(self) -> None:
        blocks = self.scheduler.blocks
        needed = [0] * blocks.num_blocks
        for sequence in self.open:
            for block in sequence.block_table.blocks:
                needed[block] += 1
        assert blocks.ref_counts == needed
        assert blocks.num_free == needed.count(0)
        assert {id(s) for s in self.open} == {id(s) for s in [*self.scheduler.running, *self.scheduler.waiting]}

    def finish(self) -> int:
        """Go on until all have ended; the number of steps."""
        steps = 0
        while self.open:
            self.step()
            steps += 1
            assert steps < 5000, "it does not end"
        return steps


def _world(count: int = 8, size: int = 4, max_num_batched_tokens: int = 16, running: int = 8, seed: int = 0) -> World:
    return World(
        Scheduler(BlockPool(count, size), max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=running),
        Random(seed),
    )


@MANY
@given(
    count=st.integers(1, 12),
    size=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    running=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    arrivals=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)), max_size=10),
)
def test_everyone_ends_and_nothing_leaks(
    count: int, size: int, max_num_batched_tokens: int, running: int, seed: int, arrivals: list[tuple[int, int, int]]
) -> None:
    world = _world(count, size, max_num_batched_tokens, running, seed)
    alphabet = 2  # so that beginnings coincide
    for length, new, num_branches in arrivals:
        prompt = [world.chance.randrange(alphabet) for _ in range(min(length, count * size - 1) or 1)]
        if len(prompt) >= count * size:
            continue
        whole = world.chance.random() < 0.2
        world.add(prompt, new, num_branches, logits_start=0 if whole else None)
        for _ in range(world.chance.randrange(4)):
            world.step()
        if world.open and world.chance.random() < 0.1:
            world.end(world.chance.choice(world.open))
    world.finish()
    blocks = world.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks and not any(blocks.ref_counts) and not any(blocks._reserved)
    assert not world.scheduler.running and not world.scheduler.waiting


def test_a_prompt_that_was_read_is_not_read_again() -> None:
    world = _world()
    world.add([0, 1] * 5, 1, 1)
    world.finish()
    world.add([0, 1] * 5 + [1], 1, 1)
    (chunk,) = world.step().chunks
    assert (chunk.start, chunk.stop, chunk.num_logits) == (8, 11, 1)
    assert world.scheduler.num_cached_tokens == 8


def test_the_last_token_is_always_read() -> None:
    world = _world()
    for _ in range(2):
        world.add([0, 1] * 4, 1, 1)
        chunks = world.step().chunks
    assert (chunks[0].start, chunks[0].stop) == (4, 8)


def test_scored_prompts_are_read_whole() -> None:
    world = _world()
    for _ in range(2):
        world.add([0, 1] * 4, 1, 1, logits_start=0)
        (chunk,) = world.step().chunks
        assert (chunk.start, chunk.stop, chunk.num_logits) == (0, 8, 8)


def test_answers_go_on_while_a_long_prompt_is_read_in_chunks() -> None:
    world = _world(count=64, max_num_batched_tokens=8)
    short = world.add([1, 2, 3], 20, 1)
    world.step()
    world.add([5] * 40, 1, 1)
    counts = []
    while world.open:
        counts.append([chunk.stop - chunk.start for chunk in world.step().chunks])
    assert counts[:7] == [[1, 7], [1, 7], [1, 7], [1, 7], [1, 7], [1, 5], [1]]
    assert len(short.tokens) == 23


def test_the_youngest_gives_way_and_comes_back() -> None:
    world = _world(count=4, size=4)
    old, young = world.add([1] * 6, 8, 1), world.add([2] * 6, 8, 1)
    world.finish()
    assert world.scheduler.preemptions >= 1
    assert len(old.tokens) == len(young.tokens) == 14


def test_first_come_first_served() -> None:
    world = _world(running=2)
    sequences = [world.add([index] * 4, 1, 1) for index in range(5)]
    order = [[sequences.index(chunk.sequence) for chunk in world.step().chunks] for _ in range(3)]
    assert order == [[0, 1], [2, 3], [4]]


def test_twins_share_what_they_have_read_and_part_where_they_write() -> None:
    world = _world(count=16)
    first = world.add([1] * 6, 4, 3)
    world.step()
    one, two, three = world.open
    assert one is first and one.block_table.blocks == two.block_table.blocks == three.block_table.blocks
    output = world.step()
    assert len(output.copies) == 2, "the last one keeps the block"
    assert len({one.block_table.blocks[1], two.block_table.blocks[1], three.block_table.blocks[1]}) == 3
    assert one.block_table.blocks[0] == two.block_table.blocks[0] == three.block_table.blocks[0]


def test_a_sequence_grows_in_one_stretch_while_there_is_room() -> None:
    blocks = BlockPool(32, 4)
    tables = [BlockTable() for _ in range(3)]
    for _ in range(8):
        for table in tables:
            blocks.extend(table, 1, 8 - len(table.blocks))
    for table in tables:
        assert table.blocks == list(range(table.blocks[0], table.blocks[0] + 8))


def test_what_is_useful_outlives_what_is_not() -> None:
    blocks = BlockPool(8, 1)
    shared = BlockTable()
    blocks.extend(shared, 2, 2)
    blocks.cache_full_blocks(shared, [7, 8], 2)
    blocks.release(shared)
    for number in range(20):
        again, other = BlockTable(), BlockTable()
        assert blocks.match_prefix(again, [7, 8, 9], 2) == 2, f"lost in round {number}"
        blocks.release(again)
        blocks.extend(other, 3, 3)
        blocks.cache_full_blocks(other, [100 + number, 1, 2], 3)
        blocks.release(other)


def test_those_who_wait_for_one_another_do_not_keep_the_blocks_that_the_last_one_needs() -> None:
    world = _world(count=5, size=4)
    beams = [world.add([number] * 7, 8, 1) for number in range(4)]
    for _ in range(8):
        told: list[Sequence] = []
        while len(told) < len(beams):
            output = world.scheduler.schedule()
            assert output.chunks, "all wait"
            world._obey(output)
            world.check()
            world.scheduler.complete_step(output)
            told += [
                chunk.sequence
                for chunk in output.chunks
                if chunk.num_logits and chunk.stop == len(chunk.sequence.tokens)
            ]
        assert len({id(beam) for beam in told}) == len(told)
        for beam in beams:
            beam.tokens.append(5)
