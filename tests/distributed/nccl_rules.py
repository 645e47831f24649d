"""NCCL's rules on CPUs: process groups over gloo that complete no more than NCCL would, and a proof for every timing.

gloo is forgiving. It matches messages by tag, adds tensors of unlike types, runs the collectives of a group side by
side, and mostly has a result in place before it is waited for. What passes there may wait for ever on GPUs, or read
memory that is still being written. Process groups that are made within `nccl_rules` obey these rules instead:

| rule                                                                       | where it is broken                 |
|----------------------------------------------------------------------------|------------------------------------|
| a communicator runs its operations one after the other, as they are issued | an earlier one waits for a later   |
| all its ranks issue the same: kind, shape, dtype, root, reduction, order   | `Violation` with the calls         |
| a send ends when its receive has begun (rendezvous, no buffer)             | two ranks that first send wait     |
| an operation runs at any time between its start and its `wait`             | results are NaN (-1) before `wait` |
| nobody writes to its memory meanwhile                                      | `Violation`                        |
| contiguous memory, dtypes of NCCL, one thread, none is never waited for    | `Violation`                        |

Operations run in a thread for each communicator, after random delays. Ranks that are stuck give up after some seconds.

Delays show some timings, `prove` shows all. Each rank's sequence of operations and waits is recorded. Matched as NCCL
matches them, these sequences have one outcome whatever the timing, so that playing them once is a proof:

- with operations of different communicators side by side, as on the streams of a GPU;
- with `one_queue`: an operation starts when all that were issued before it on its rank have started, and one behind
  another of its communicator holds up all that follow. So it is with CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron's
  scripts export; the usual eight queues, shared by more streams, are no worse.

A `wait` holds up all that its rank does next. On a GPU it holds up one stream, which is never more.
Not modelled: kernels that wait for room on the GPU, CPU tensors in a group of GPUs, and the time that anything takes.

Sources: NCCL's user guide, "Using multiple NCCL communicators concurrently" and "Group calls"; torch's
ProcessGroupNCCL, which with a bound device runs single messages in the order of all operations of their group.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.distributed import comm

BACKEND = "nccl_rules"
_RECORD_BYTES = 512
_DATA, _CALL, _ANSWER = 0, 1, 2  # tags of messages
_DELAY_SECONDS, _LONG_DELAY_SECONDS, _LONG_SHARE = 0.0003, 0.02, 0.01
_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
_DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Violation(Exception):
    """NCCL would not complete this, or not with these values."""


# --- what is recorded ----------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A collective, or a message of a group call."""

    peer: int | None  # global rank of the other end of a message; None for a collective
    sends: bool  # whether the message leaves
    call: str  # must be equal at all ends
    rows_sent: tuple[int, ...] = ()  # to each rank of the communicator, where these differ
    rows_received: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.peer is None:
            return self.call
        return f"{'send to' if self.sends else 'receive from'} rank {self.peer} of {self.call}"


class NewGroup(NamedTuple):
    """A communicator that all ranks of the world make together; they are numbered in this order."""

    ranks: tuple[int, ...]


class Issue(NamedTuple):
    """Start of an operation, the rank's `number`-th."""

    number: int
    communicator: int
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return " with ".join(map(str, self.parts))


class Wait(NamedTuple):
    """Wait for the end of an operation of this rank."""

    number: int


Program = list[NewGroup | Issue | Wait]
"""What one rank did, in order."""


def compare(parts: dict[int, Part]) -> None:
    """Raise Violation if the ranks, the keys, make different calls."""
    ranks = sorted(parts)
    same = len({parts[rank].call for rank in ranks}) == 1
    if same and parts[ranks[0]].peer is None:  # in the order of the ranks, which is that of the communicator
        sent = [parts[rank].rows_sent for rank in ranks]
        received = [parts[rank].rows_received for rank in ranks]
        same = not any(sent) or [*zip(*sent, strict=True)] == received
    if not same:
        calls = "\n".join(
            f"  rank {rank}: {part}{f', rows {part.rows_sent} -> {part.rows_received}' if part.rows_sent else ''}"
            for rank, part in sorted(parts.items())
        )
        raise Violation(f"the ranks make different calls in the same place of a communicator:\n{calls}")


# --- the proof -----------------------------------------------------------------------------------------------------


def prove(programs: Sequence[Program], *, one_queue: bool = False) -> None:
    """Raise Violation if NCCL would not complete these programs of all ranks, whatever the timing."""
    _Play(programs, one_queue=one_queue).run()


@dataclass
class _Started:
    """An operation in the queue of its communicator; `left` are the parts that have not found their other ends."""

    issue: Issue
    left: list[Part]


class _Play:
    def __init__(self, programs: Sequence[Program], *, one_queue: bool) -> None:
        self._programs, self._one_queue = programs, one_queue
        self._places = [0] * len(programs)
        self._members: list[tuple[int, ...]] = []
        self._queues: dict[tuple[int, int], deque[_Started]] = defaultdict(deque)  # (communicator, rank) -> in order
        self._issued: list[dict[int, Issue]] = [{} for _ in programs]
        self._complete: list[set[int]] = [set() for _ in programs]

    def run(self) -> None:
        ranks, moved = range(len(self._programs)), True
        while moved:
            moved = any([self._advance(rank) for rank in ranks])
            moved |= self._make_group()
            moved |= any([self._match(communicator) for communicator in range(len(self._members))])
        if any(self._queues.values()) or any(self._event(rank) is not None for rank in ranks):
            raise Violation("the ranks wait for each other for ever:\n" + "\n".join(map(self._describe, ranks)))

    def _event(self, rank: int) -> NewGroup | Issue | Wait | None:
        place = self._places[rank]
        return self._programs[rank][place] if place < len(self._programs[rank]) else None

    def _advance(self, rank: int) -> bool:
        """Let a rank go on until something holds it up; return whether it did anything."""
        before = self._places[rank]
        while self._takes(rank, self._event(rank)):
            self._places[rank] += 1
        return self._places[rank] > before

    def _takes(self, rank: int, event: NewGroup | Issue | Wait | None) -> bool:
        if isinstance(event, Wait):
            return event.number in self._complete[rank]
        if not isinstance(event, Issue):
            return False
        queue = self._queues[event.communicator, rank]
        if queue and self._one_queue:
            return False
        queue.append(_Started(event, list(event.parts)))
        self._issued[rank][event.number] = event
        return True

    def _make_group(self) -> bool:
        events = [self._event(rank) for rank in range(len(self._programs))]
        made = [event.ranks for event in events if isinstance(event, NewGroup)]
        if len(made) < len(events):
            return False
        if len(set(made)) > 1:
            raise Violation(f"the ranks make different communicators, number {len(self._members)} of each: {made}")
        self._members.append(made[0])
        self._places = [place + 1 for place in self._places]
        return True

    def _match(self, communicator: int) -> bool:
        """Complete what can be at the heads of a communicator's queues; return whether there was anything."""
        members = self._members[communicator]
        heads = {rank: queue[0] for rank in members if (queue := self._queues[communicator, rank])}
        collectives = {rank: head.left[0] for rank, head in heads.items() if head.left[0].peer is None}
        if len(collectives) == len(members):
            compare(collectives)
            for rank in members:
                self._end(communicator, rank)
            return True
        moved = False
        for rank, head in heads.items():
            for part in [part for part in head.left if part.sends]:
                moved |= self._deliver(rank, part, head, heads)
        for rank in [rank for rank, head in heads.items() if not head.left]:
            self._end(communicator, rank)
        return moved

    def _deliver(self, source: int, part: Part, sender: _Started, heads: Mapping[int, _Started]) -> bool:
        for rank, receiver in heads.items():
            waiting = [other for other in receiver.left if other.peer == source and not other.sends]
            if rank == part.peer and waiting:
                compare({source: part, rank: waiting[0]})
                sender.left.remove(part)
                receiver.left.remove(waiting[0])
                return True
        return False

    def _end(self, communicator: int, rank: int) -> None:
        self._complete[rank].add(self._queues[communicator, rank].popleft().issue.number)

    def _describe(self, rank: int) -> str:
        event = self._event(rank)
        if event is None:
            does = "has ended"
        elif isinstance(event, NewGroup):
            does = f"makes a communicator of the ranks {event.ranks}"
        elif isinstance(event, Wait):
            does = f"waits for its {self._named(self._issued[rank][event.number])}"
        else:
            does = f"cannot start its {self._named(event)}"
        begun = [self._named(queue[0].issue) for (_, of), queue in sorted(self._queues.items()) if of == rank and queue]
        return f"  rank {rank} {does}; begun: {', '.join(begun) or 'nothing'}"

    def _named(self, issue: Issue) -> str:
        return f"{issue} [{issue.number}] of the ranks {self._members[issue.communicator]} [{issue.communicator}]"


# --- the process groups --------------------------------------------------------------------------------------------


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, written to without a trace in its version counter."""
    return tensor.data.view(-1).view(torch.uint8)


def _name(operation: Any) -> str:
    return next((name for known, name in _NAMES.items() if operation == known), str(operation))


def _what(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


class _Operation:
    """An operation between its start and its `wait`, which is when its results appear; torch's `Work`.

    Args:
        inputs: tensors that are read.
        outputs: tensors that are written, of the same memory perhaps.
        run: computes copies of the outputs from copies of the inputs.
    """

    def __init__(
        self,
        rules: Rules,
        issue: Issue,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Callable[[list[Tensor], list[Tensor]], None],
    ) -> None:
        self._rules, self._issue, self._run = rules, issue, run
        self._inputs, self._outputs = list(inputs), list(outputs)
        for tensor in (*inputs, *outputs):
            if not tensor.is_contiguous() or tensor.dtype not in _DTYPES:
                raise Violation(f"NCCL has no {issue} (strides {tensor.stride()})")
        self._sent = [tensor.detach().clone() for tensor in inputs]
        for tensor in outputs:
            _bytes(tensor).fill_(0xFF)  # NaN, or -1
        self._received = [tensor.detach().clone() for tensor in outputs]
        for tensor, sent in zip(inputs, self._sent, strict=True):
            if any(output.numel() > tensor.numel() for output in outputs):
                tensor.data.copy_(sent)  # the own part in the output of a gather in place stays what it is
        self._memory = [_bytes(tensor).clone() for tensor in (*inputs, *outputs)]
        self._ended, self._error, self._waited = threading.Event(), "", False

    def execute(self) -> None:
        """Run in the thread of the communicator."""
        try:
            self._run(self._sent, self._received)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        self._ended.set()

    def wait(self, timeout: Any = None) -> bool:
        if self._waited:
            return True
        self._rules.program.append(Wait(self._issue.number))
        if not self._ended.wait(self._rules.seconds):
            raise Violation(f"waited {self._rules.seconds} s for {self._issue}")
        if self._error:
            raise Violation(f"{self._issue}: {self._error}")
        for tensor, before in zip((*self._inputs, *self._outputs), self._memory, strict=True):
            if not torch.equal(_bytes(tensor), before):
                raise Violation(f"{_what(tensor)} was written to between the start and the wait of {self._issue}")
        for tensor, received in zip(self._outputs, self._received, strict=True):
            _bytes(tensor).copy_(_bytes(received))
        self._waited = True
        self._rules.pending.discard(self._issue)
        return True


class _Communicator(dist.ProcessGroup):
    """A process group that issues operations to its thread; `gloo` is the group that moves the data."""

    def __init__(self, rank: int, size: int, rules: Rules, number: int, ranks: Sequence[int], gloo: Any) -> None:
        super().__init__(rank, size)
        self._rules, self._number, self._ranks, self._gloo = rules, number, tuple(ranks), gloo
        self._place, self._size = rank, size
        self._collectives, self._messages = 0, defaultdict[tuple[int, int], int](int)
        self._queue: SimpleQueue[_Operation | None] = SimpleQueue()
        self._random = random.Random(f"{rules.seed} {number} {rank}")
        self._batch: list[tuple[bool, Tensor, int]] | None = None
        self._thread = threading.Thread(target=self._work, name=f"communicator-{number}", daemon=True)
        self._thread.start()

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._get_process_group_name(self))

    def shutdown(self) -> None:
        """End the thread, unless it is stuck."""
        self._queue.put(None)
        self._thread.join(1.0)

    def _work(self) -> None:
        while (operation := self._queue.get()) is not None:
            share = self._random.random() < _LONG_SHARE
            time.sleep(self._random.expovariate(1 / (_LONG_DELAY_SECONDS if share else _DELAY_SECONDS)))
            operation.execute()

    def _issue(
        self,
        parts: Sequence[Part],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Callable[[list[Tensor], list[Tensor]], None],
    ) -> _Operation:
        issue = self._rules.issue(self._number, parts)
        operation = _Operation(self._rules, issue, inputs, outputs, run)
        self._queue.put(operation)
        return operation

    def _collective(
        self,
        call: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Callable[[list[Tensor], list[Tensor]], None],
        rows: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> _Operation:
        part = Part(None, False, f"{call} (number {self._collectives})", tuple(rows[0]), tuple(rows[1]))
        self._collectives += 1

        def compare_and_run(sent: list[Tensor], received: list[Tensor]) -> None:
            own = _record(part)
            records = torch.empty(self._size * len(own), dtype=torch.uint8)
            _all_gather(records, own, group=self._gloo)
            compare({rank: _part(one) for rank, one in zip(self._ranks, records.chunk(self._size), strict=True)})
            run(sent, received)

        return self._issue([part], inputs, outputs, compare_and_run)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Operation:
        (tensor,), operation = tensors, opts.reduceOp

        def run(sent: list[Tensor], received: list[Tensor]) -> None:
            dist.all_reduce(received[0].copy_(sent[0]), operation, group=self._gloo)

        return self._collective(f"all_reduce of {_what(tensor)} ({_name(operation)})", tensors, tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Operation:
        (tensor,), root = tensors, opts.rootRank
        sends = root == self._place

        def run(sent: list[Tensor], received: list[Tensor]) -> None:
            dist.broadcast((sent or received)[0], group_src=root, group=self._gloo)

        call = f"broadcast of {_what(tensor)} from rank {self._ranks[root]}"
        return self._collective(call, tensors if sends else [], [] if sends else tensors, run)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Operation:
        def run(sent: list[Tensor], received: list[Tensor]) -> None:
            dist.all_gather(received, sent[0], group=self._gloo)

        return self._collective(f"all_gather of {_what(inputs[0])}", inputs, outputs[0], run)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Operation:
        def run(sent: list[Tensor], received: list[Tensor]) -> None:
            _all_gather(received[0], sent[0], group=self._gloo)

        return self._collective(f"all_gather of {_what(input)}", [input], [output], run)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Operation:
        operation = opts.reduceOp

        def run(sent: list[Tensor], received: list[Tensor]) -> None:
            _reduce_scatter(received[0], sent[0], operation, group=self._gloo)

        return self._collective(f"reduce_scatter of {_what(input)} ({_name(operation)})", [input], [output], run)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received_rows: list[int], sent_rows: list[int], opts: Any = None
    ) -> _Operation:
        def run(sent: list[Tensor], received: list[Tensor]) -> None:
            dist.all_to_all_single(received[0], sent[0], received_rows, sent_rows, group=self._gloo)

        what = f"rows of {_what(input[:0])}" if sent_rows or received_rows else _what(input)
        return self._collective(f"all_to_all of {what}", [input], [output], run, (sent_rows, received_rows))

    _allgather_base = all_gather_single  # names before torch 2.13
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> _Operation:
        return self._collective("barrier", [], [], lambda sent, received: None)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Any:
        return self._message(True, tensors[0], target)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._message(False, tensors[0], source)

    def _message(self, sends: bool, tensor: Tensor, peer: int) -> Any:
        if self._batch is None:
            return self._group_call([(sends, tensor, peer)])
        self._batch.append((sends, tensor, peer))
        return None

    def batch(self, calls: Sequence[dist.P2POp]) -> list[_Operation]:
        """Issue messages as one operation, as NCCL's group calls do."""
        self._batch = []
        for call in calls:
            call.op(call.tensor, call.peer, group=self)
        batch, self._batch = self._batch, None
        return [self._group_call(batch)]

    def _group_call(self, messages: Sequence[tuple[bool, Tensor, int]]) -> _Operation:
        parts = []
        for sends, tensor, peer in messages:
            edge = (self._place, peer) if sends else (peer, self._place)
            parts.append(Part(self._ranks[peer], sends, f"{_what(tensor)} (number {self._messages[edge]})"))
            self._messages[edge] += 1

        def run(sent: list[Tensor], received: list[Tensor]) -> None:
            self._rendezvous(parts, [peer for _, _, peer in messages])
            leaving, arriving = iter(sent), iter(received)
            for work in [
                dist.isend(next(leaving), group_dst=peer, group=self._gloo, tag=_DATA)
                if sends
                else dist.irecv(next(arriving), group_src=peer, group=self._gloo, tag=_DATA)
                for sends, _, peer in messages
            ]:
                work.wait()  # type: ignore[union-attr]

        return self._issue(
            parts,
            [tensor for sends, tensor, _ in messages if sends],
            [tensor for sends, tensor, _ in messages if not sends],
            run,
        )

    def _rendezvous(self, parts: Sequence[Part], peers: Sequence[int]) -> None:
        """Wait until the other ends of all messages have begun too, and compare the calls."""
        works, answers = [], []
        for part, peer in zip(parts, peers, strict=True):
            own, answer = _record(part), torch.empty(_RECORD_BYTES, dtype=torch.uint8)
            there, back = (_CALL, _ANSWER) if part.sends else (_ANSWER, _CALL)
            works.append((dist.isend(own, group_dst=peer, group=self._gloo, tag=there), own))
            works.append((dist.irecv(answer, group_src=peer, group=self._gloo, tag=back), answer))
            answers.append(answer)
        for work, _ in works:
            work.wait()  # type: ignore[union-attr]
        for part, peer, answer in zip(parts, peers, answers, strict=True):
            compare({self._ranks[self._place]: part, self._ranks[peer]: _part(answer)})


def _record(part: Part) -> Tensor:
    text = json.dumps(part).encode()
    assert len(text) <= _RECORD_BYTES, text
    return torch.frombuffer(bytearray(text.ljust(_RECORD_BYTES)), dtype=torch.uint8)


def _part(record: Tensor) -> Part:
    peer, sends, call, sent, received = json.loads(record.numpy().tobytes())
    return Part(peer, sends, call, tuple(sent), tuple(received))


@dataclass
class Rules:
    """What this rank did within `nccl_rules`."""

    seed: int
    seconds: float
    program: Program = field(default_factory=list)
    pending: set[Issue] = field(default_factory=set)  # not waited for yet
    _number: int = 0
    _thread: threading.Thread = field(default_factory=threading.current_thread)

    def issue(self, communicator: int, parts: Sequence[Part]) -> Issue:
        """Record the start of an operation."""
        issue = Issue(self._number, communicator, tuple(parts))
        if threading.current_thread() is not self._thread:
            raise Violation(
                f"{issue} in {threading.current_thread().name}: its place among the others is left to chance"
            )
        self._number += 1
        self.program.append(issue)
        self.pending.add(issue)
        return issue


@contextmanager
def nccl_rules(*, seed: int = 0, seconds: float = 60.0) -> Iterator[Rules]:
    """Let process groups that are made in the block, in a world of gloo, obey NCCL's rules.

    Args:
        seed: of the delays.
        seconds: after which a wait is given up.
    """
    rules, made, next_group = Rules(seed, seconds), 0, dict[str, Any]()
    new_group, batch_isend_irecv = dist.new_group, dist.batch_isend_irecv

    def create(store: Any, rank: int, size: int, timeout: Any) -> _Communicator:
        return _Communicator(rank, size, rules, **next_group)

    def new_group_by_the_rules(ranks: Sequence[int], timeout: Any = None) -> Any:
        nonlocal made
        rules.program.append(NewGroup(tuple(ranks)))
        next_group.update(number=made, ranks=ranks, gloo=new_group(ranks, timeout=timeout))
        made += 1
        group = new_group(ranks, timeout=timeout, backend=BACKEND)
        next_group.clear()  # the threads of a group of gloo end with its last reference
        return group

    def batch(calls: list[dist.P2POp]) -> Any:
        group = calls[0].group
        return group.batch(calls) if isinstance(group, _Communicator) else batch_isend_irecv(calls)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    with (
        patch.object(dist, "new_group", new_group_by_the_rules),
        patch.object(dist, "batch_isend_irecv", batch),
        patch.object(comm, "is_host", lambda device: False),  # else gloo's ways are taken
    ):
        yield rules
    if rules.pending:
        raise Violation(f"never waited for: {', '.join(map(str, rules.pending))}")
