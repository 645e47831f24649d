"""From what a launcher says to processes that can talk: the meeting of all ranks, the process group, and its end.

All ranks meet at a store before anything else, so that a rank that never comes, comes twice or counts another number of
ranks is named instead of waited for. Where a launcher says that all ranks are on one host, nothing listens on an
interface that others can reach; else the store and gloo trust their network, as all of torch.distributed does.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, takewhile
from typing import NoReturn

import torch
import torch.distributed as dist

from megalith.config.environment import listen, loopback
from megalith.config.groups import LaunchConfig
from megalith.distributed.agreement import Facts, difference
from megalith.distributed.board import BoardGone, StoreBoard, in_thread, to_stderr
from megalith.distributed.machine import (
    AwakeClock,
    interface_towards,
    interface_variable,
    interfaces,
    is_own_address,
    own_address,
    place,
    refusal,
    unusable_interfaces,
)
from megalith.errors import ConfigError, MegalithError, PeerError

PATIENCE_SECONDS = 20.0
"""After this time whoever waits says for whom."""

_NAMED_RANKS = 16  # a message stays readable in a run of thousands
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_HEAR = 3.0
_SECONDS_BETWEEN_LOOKS = 0.5
_UNCONNECTED = "unconnected"
_STACK = ("Exception raised from ", "frame #", "C++ CapturedTraceback")  # begins what torch puts behind a message
_ROUNDS, _ROUND = "megalith/rounds", "megalith/round"  # in a store that outlives the ranks: how many, and which one


@dataclass
class _Held:
    """The store of ranks that this process has joined before. Rank 0 keeps it open: it cannot listen there twice."""

    store: dist.Store  # that is open
    address: tuple[str, int]  # host and port of it
    times: int = 0  # how often this process has joined


_HELD: dict[tuple[int, str, int], _Held] = {}
"""Rank, host and port -> store; of the process, as `torch.distributed`'s own default group is."""


@dataclass(frozen=True)
class Meeting:
    """The ranks of a run that have met."""

    # of this process, and of all
    rank: int = 0
    size: int = 1
    one_host: bool = True  # whether all of them are on this machine
    # small values by name, for all ranks, over a connection of its own; None for a process alone
    store: dist.Store | None = None


def available_backends() -> dict[str, str]:
    """The collective libraries of this torch -> their versions, as far as they say one."""
    found = {"gloo": "", "mpi": ""} if dist.is_mpi_available() else {"gloo": ""}
    if not dist.is_gloo_available():
        del found["gloo"]
    if dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@contextmanager
def connect(
    launch: LaunchConfig,
    device: torch.device,
    backend: str,
    timeout: timedelta,
    *,
    join: timedelta | None = None,
    facts: Facts | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Meeting]:
    """Initialise torch.distributed for this process, and take it down behind the block. One process needs neither.

    An exception that leaves the block ends the process for good: Python prints it, and nothing more is waited for.
    Blocks may follow one another, and all ranks then join as often.

    Args:
        backend: "gloo" or "nccl"; the latter is gloo on a CPU.
        timeout: longest wait of a collective.
        join: longest wait for all ranks to come, `timeout` if None; who is missing is said after `PATIENCE_SECONDS`.
        facts: must be equal on all ranks.
        asked_to_stop: ends the wait for the others.

    Raises:
        ConfigError: two processes have the same rank, ranks disagree on their number or facts, the port is taken, or
            this process is within such a block, or has called `init_process_group` itself.
        PeerError: not all ranks came, or the wait was ended.
    """
    if launch.world_size == 1:
        yield Meeting()
        return
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised in this process already, and ranks join it once at a time: leave "
            "init_process_group to join_ranks, and inside its block make groups of another layout of the same ranks by "
            "ParallelContext.create(run.layout, context.device)"
        )
    backend = backend if device.type == "cuda" else "gloo"
    join_seconds = (join or timeout).total_seconds()
    meeting = _Meeting(launch, join_seconds, facts or {}, asked_to_stop, backend)
    store = meeting.hold()
    connection = meeting.second_connection()
    if backend == "gloo":
        meeting.choose_interface(store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        with meeting.connecting(connection):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,  # NCCL alone uses it
            )
        yield Meeting(launch.rank, launch.world_size, meeting.one_host, connection)
    except BaseException as error:
        _break_off(backend, error)
        raise
    dist.destroy_process_group()
    _leave_together(store, launch)


def _break_off(backend: str, error: BaseException) -> None:
    """See that this process ends soon though collectives are under way, which others may never answer.

    Its connections then close, by which the others hear of it. At a usual end the interpreter would wait for gloo,
    which waits for its timeout, or abort where a thread comes back from native code meanwhile.
    """
    group = dist.group.WORLD
    if backend == "nccl" and group is not None and hasattr(group, "abort"):
        aborting = threading.Thread(target=group.abort, name="abort-collectives", daemon=True)
        aborting.start()
        aborting.join(2.0)
    atexit.register(_end_now, _exit_code(error))  # after the traceback has been printed


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130  # 128 + SIGINT, as a shell reports it
    return error.exit_code if isinstance(error, MegalithError) else 1


def _end_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _leave_together(store: dist.Store, launch: LaunchConfig) -> None:
    """Rank 0 may hold the store that the others still speak to while they close: it leaves last."""
    with suppress(RuntimeError):  # rank 0 did not wait that long
        store.add("left", 1)
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        while launch.rank == 0 and store.add("left", 0) < launch.world_size and time.monotonic() < deadline:
            time.sleep(0.005)


class _Meeting:
    """The wait for all ranks at the store, and for their connections to each other.

    `one_host`: whether all ranks are on this machine, and each of them knows that; set by `hold`.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        join_seconds: float,
        facts: Facts,
        asked_to_stop: Callable[[], bool],
        backend: str,
    ) -> None:
        self._launch, self._facts = launch, facts
        self._backend, self.one_host = backend, launch.one_host
        self._interfaces: dict[int, str] = {}
        self._asked_to_stop = asked_to_stop
        # torchrun sets it where its agent, not rank 0, listens at MASTER_PORT.
        self._agent_holds_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._address, self._prefix, self._times = (launch.master_addr, launch.master_port), "", 0
        self._clock = AwakeClock()
        self._join_seconds = join_seconds
        self._next_word = min(PATIENCE_SECONDS, 0.5 * join_seconds)  # before a short wait ends, too

    def hold(self) -> dist.Store:
        """Return the store once all ranks have signed in."""
        try:
            opened = self._hold_open()
            store = self._round(opened)
            while not self._sign_in(store, opened):
                store = self._round(opened)
        except dist.DistError as error:
            host, port = self._address
            raise PeerError(
                f"{self._me()}: the store of the run at {host}:{port} stopped answering while the ranks met "
                f"({_first_line(error)})"
            ) from error
        return store

    def _sign_in(self, store: dist.Store, opened: dist.Store) -> bool:
        """Wait until all ranks have signed in; False if this round was given up for a newer one."""
        self._announce(store)
        for pause in _pauses():
            if store.add("here", 0) >= self._launch.world_size:
                self.one_host = store.add("several hosts", 0) == 0
                return True
            if store.check(["refused"]):
                self._leave_refused(store, store.get("refused").decode())
            if self._given_up(store, opened):
                return False
            self._late(lambda: self._missing(store, "who"))
            time.sleep(pause)
        raise AssertionError

    def _round(self, opened: dist.Store) -> dist.Store:
        """Return the part of the store that belongs to this start of the ranks.

        torchrun's agents keep one store over all restarts, and each agent counts only its own (a change of membership
        is none), so that TORCHELASTIC_RESTART_COUNT differs between nodes. The store itself counts: rank 0 opens the
        next round, and admits the process of each rank that asked last.
        """
        if not self._agent_holds_it:
            self._prefix = f"megalith/{self._times}"
            return dist.PrefixStore(self._prefix, opened)
        token = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
        number = self._open_round(opened, token) if self._launch.rank == 0 else self._join_round(opened, token)
        self._prefix = _round_prefix(number)
        return dist.PrefixStore(self._prefix, opened)

    def _open_round(self, opened: dist.Store, token: str) -> str:
        number = str(opened.add(_ROUNDS, 1))
        store, ranks = dist.PrefixStore(_round_prefix(number), opened), range(self._launch.world_size)
        store.set("asks/0", token)
        opened.set(_ROUND, number)
        for pause in _pauses():
            if store.check([f"asks/{rank}" for rank in ranks]):
                break
            self._late(lambda: self._missing(store, "asks"))
            time.sleep(pause)
        for rank in ranks:
            store.set(f"admitted/{rank}", store.get(f"asks/{rank}").decode())
        store.set("closed", "1")
        return number

    def _join_round(self, opened: dist.Store, token: str) -> str:
        rank, asked = self._launch.rank, ""
        for pause in _pauses():
            number = opened.get(_ROUND).decode() if opened.check([_ROUND]) else ""
            store = dist.PrefixStore(_round_prefix(number), opened)
            if number and number != asked:
                store.set(f"asks/{rank}", token)
                asked = number
            if number and store.check(["closed"]):
                if store.get(f"admitted/{rank}").decode() == token:
                    return number
                store.set("given up", "1")  # an earlier process of this rank was admitted, and is dead
            self._late(partial(self._who_keeps_a_round_open, store if number else None))
            time.sleep(pause)
        raise AssertionError

    def _who_keeps_a_round_open(self, store: dist.Store | None) -> str:
        """Say for whom this rank waits in a round, or where there is none that it could join."""
        if store is None or store.check(["closed"]):
            return "rank 0, which has not opened a new round since this process was started"
        if store.check([f"asks/{rank}" for rank in range(self._launch.world_size)]):
            return "rank 0, which does not admit the ranks that came"
        return self._missing(store, "asks")

    def _given_up(self, store: dist.Store, opened: dist.Store) -> bool:
        """Whether a process of this round was started again before all had signed in."""
        if not self._agent_holds_it:
            return False
        if self._launch.rank == 0:
            return store.check(["given up"])
        return _round_prefix(opened.get(_ROUND).decode()) != self._prefix

    def choose_interface(self, store: dist.Store) -> None:
        """Let gloo listen on the loopback interface, or on the one that leads to the other hosts, unless the user has
        named one."""
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return
        if self.one_host:
            here = {name for _, name in socket.if_nameindex()}
            # Linux calls the loopback interface lo, macOS lo0.
            name = next((name for name in ("lo", "lo0") if name in here), "")
        else:
            # As seen from rank 0; its own host may know itself by a loopback address.
            seen = (json.loads(store.get(f"who/{rank}"))["address"] for rank in range(self._launch.world_size))
            name = interface_towards(chain([self._launch.master_addr], filter(None, seen)))
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name

    def second_connection(self) -> dist.Store:
        """The store once more: a thread that uses it need not wait for what the first connection is asked."""
        return dist.PrefixStore("run", dist.PrefixStore(self._prefix, self._store(*self._address, None)))

    def _hold_open(self) -> dist.Store:
        """Return the store that this process has joined before, or open it."""
        if self._agent_holds_it:
            return self._open()
        key = (self._launch.rank, self._launch.master_addr, self._launch.master_port)
        if key not in _HELD:
            opened = self._open()
            _HELD[key] = _Held(opened, self._address)
        held = _HELD[key]
        held.times += 1
        self._address, self._times = held.address, held.times
        return held.store

    def _open(self) -> dist.Store:
        host = loopback() if self._launch.one_host and not self._agent_holds_it else self._launch.master_addr
        self._address = (host, self._launch.master_port)
        if self._launch.rank == 0 and not self._agent_holds_it:
            listener = self._listen(loopback() if self._stays_on_loopback() else "")
            self._address = (
                loopback(),
                listener.getsockname()[1],
            )  # MASTER_ADDR may be a service that leads here later
            return self._store(*self._address, listener.detach())
        self._reach(*self._address)
        return self._store(*self._address, None)

    def _stays_on_loopback(self) -> bool:
        """Whether no other host can have ranks. MASTER_ADDR=localhost does not say so: some operators give it to rank 0
        alone, and the name of a service to the others."""
        launch = self._launch
        if launch.local_world_size is not None:
            return launch.local_world_size == launch.world_size
        return launch.one_host and "MASTER_ADDR" not in os.environ

    def _store(self, host: str, port: int, listener: int | None) -> dist.Store:
        """Open the store, or connect to it.

        In a thread: torch waits in native code for the answer of whoever listens there, longer than it is told.
        """
        opened = in_thread(
            lambda: dist.TCPStore(
                host,
                port,
                self._launch.world_size,
                listener is not None,
                timedelta(seconds=self._join_seconds),
                wait_for_workers=False,  # `_sign_in` waits, and names who is missing
                master_listen_fd=listener,
            ),
            "open-store",
        )
        remedy = "give every run its own MASTER_PORT (torchrun --master_port, or --standalone)"
        try:
            for pause in _pauses():
                if wait([opened], pause).done:
                    return opened.result()
                self._late(f"the store of the run: what listens at {host}:{port} says nothing; {remedy}")
        except dist.DistError as error:
            raise PeerError(
                f"{self._me()}: what answers at {host}:{port} is not rank 0 of a run ({_first_line(error)}); {remedy}"
            ) from error
        except PeerError as error:
            atexit.register(_end_now, error.exit_code)  # the thread is still in native code
            raise
        raise AssertionError

    def _listen(self, host: str) -> socket.socket:
        if "MEGALITH_STORE_FD" in os.environ:  # the supervisor has opened it, so that no one could take its port
            return socket.socket(fileno=int(os.environ["MEGALITH_STORE_FD"]))
        port = self._launch.master_port
        try:
            return listen(host, port, 4096)  # backlog: the ranks of a large run connect at about the same time
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen on port {port} of {socket.gethostname()}: {os.strerror(error.errno or 0)}; is "
                "another run there? Give every run its own MASTER_PORT (torchrun --master_port, or --standalone)"
            ) from error

    def _reach(self, host: str, port: int) -> None:
        """Wait until someone listens at the address of rank 0."""
        hint = "is that the host of rank 0 (MASTER_ADDR, MASTER_PORT), was it started, does a firewall stand between?"
        if self._launch.one_host:
            hint = "ranks on other hosts need MASTER_ADDR, the host of rank 0"
        while error := refusal(host, port):
            why = error.strerror or str(error)
            # Not at once: the name of a service may resolve only when the host of rank 0 is up.
            if isinstance(error, socket.gaierror) and self._clock.elapsed() > self._next_word:
                raise PeerError(
                    f"{self._me()}: MASTER_ADDR={host} is not the name of a host that is known here ({why}); give the "
                    "name or the address of the host of rank 0"
                )
            self._late(f"rank 0, which does not answer at {host}:{port} ({why}); {hint}")
            time.sleep(0.1)

    def _late(self, whom: str | Callable[[], str]) -> None:
        """Say who is waited for, after 20 s and then every minute; give up at the end."""
        waited = self._clock.elapsed()
        if self._asked_to_stop():
            raise PeerError(f"{self._me()} was asked to stop while it waited for {_text(whom)}")
        if waited > self._join_seconds:
            raise PeerError(f"{self._me()} waited {waited:.0f} s (--distributed-timeout-minutes) for {_text(whom)}")
        if waited > self._next_word:
            self._next_word = waited + 60.0
            to_stderr(f"{self._me()} has waited {waited:.0f} s for {_text(whom)}")

    def _me(self) -> str:
        return f"rank {self._launch.rank} on {socket.gethostname()}"

    def _announce(self, store: dist.Store) -> None:
        """Sign in."""
        launch = self._launch
        store.add("came", 1)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "address": own_address(launch.master_addr)}
        size = store.compare_set("size", "", str(launch.world_size)).decode()
        if size != str(launch.world_size):
            self._refuse(
                store,
                f"{self._me()} was told of {launch.world_size} ranks, and others of {size}: --nproc_per_node and "
                "--nnodes must be the same on all hosts",
            )
        if store.add(f"rank/{launch.rank}", 1) > 1:
            first = json.loads(store.get(f"who/{launch.rank}"))
            where = "twice there" if first["host"] == me["host"] else f"and on {me['host']}"
            self._refuse(
                store,
                f"two processes say that they are rank {launch.rank}: on {first['host']} (process {first['pid']}) "
                f"{where} (process {me['pid']}). On several hosts each needs its own number: --node_rank 0 on the "
                "first, 1 on the second and so on (without the flag it is 0 everywhere)",
            )
        store.set(f"who/{launch.rank}", json.dumps(me))
        if problem := unusable_interfaces(self._backend, os.environ):
            self._refuse(store, f"{self._me()}: {problem}")
        where = place()
        if not launch.one_host or store.compare_set("place", "", where).decode() != where:
            store.add("several hosts", 1)
        own = json.dumps({"name": f"rank {launch.rank} ({me['host']})", "facts": dict(self._facts)})
        first, mine = json.loads(store.compare_set("facts", "", own)), json.loads(own)
        if text := difference(mine["facts"], first["facts"], mine["name"], first["name"]):
            self._refuse(store, text)
        store.add("here", 1)

    def _refuse(self, store: dist.Store, message: str) -> NoReturn:
        store.set("refused", message)
        self._leave_refused(store, message)

    def _leave_refused(self, store: dist.Store, message: str) -> NoReturn:
        """Rank 0 may hold the store in which the others read why: it leaves last."""
        heard, deadline = store.add("heard", 1), time.monotonic() + _SECONDS_TO_HEAR
        while self._launch.rank == 0 and heard < store.add("came", 0) and time.monotonic() < deadline:
            time.sleep(0.01)
            heard = store.add("heard", 0)
        raise ConfigError(message)

    def _missing(self, store: dist.Store, key: str) -> str:
        size = self._launch.world_size
        missing = [rank for rank in range(size) if not store.check([f"{key}/{rank}"])]
        return f"{_ranks(missing)} of {size}, which did not come{self._where_they_look()}"

    def _where_they_look(self) -> str:
        """A doubt about MASTER_ADDR, for rank 0 to say: it listens on its own host whatever the others were told."""
        host = self._launch.master_addr
        if self._launch.rank != 0 or self.one_host or self._agent_holds_it or is_own_address(host):
            return ""
        return f"; MASTER_ADDR={host} is not an address of {socket.gethostname()}: do they find rank 0 there?"

    # The connections of the ranks to each other.

    @contextmanager
    def connecting(self, connection: dist.Store) -> Iterator[None]:
        """See that the block, in which the ranks connect to each other, ends on all of them within the timeout.

        Where the interface is a wrong one, some ranks get an exception of the backend and others wait in native code. A
        thread with a connection of its own looks after the block.
        """
        board, done = StoreBoard(connection, self._launch.rank), threading.Event()
        with suppress(BoardGone):
            board.write(f"interface-{self._launch.rank}", self._interface())
        looking = threading.Thread(target=self._limit, args=(board, done), name="connecting", daemon=True)
        looking.start()
        try:
            yield
        except RuntimeError as error:
            clock, shown = AwakeClock(), min(self._launch.world_size, _NAMED_RANKS)
            while len(self._interfaces) < shown and clock.elapsed() < _SECONDS_TO_HEAR:  # others may come later
                self._read_interfaces(board)
                time.sleep(0.1)
            text = self._not_connected(_without_stack(error))
            with suppress(BoardGone):
                board.write(_UNCONNECTED, text)
                time.sleep(_SECONDS_TO_HEAR)  # the store may end with this process
            raise PeerError(f"{self._me()}: {text}") from error
        finally:
            done.set()
            looking.join(2.0 * _SECONDS_BETWEEN_LOOKS)

    def _limit(self, board: StoreBoard, done: threading.Event) -> None:
        """End this process when the time is over, or another rank has failed to connect."""
        clock = AwakeClock()
        while not done.wait(_SECONDS_BETWEEN_LOOKS):
            text, waited = "", clock.elapsed()
            self._read_interfaces(board)
            with suppress(BoardGone):
                text = board.read(_UNCONNECTED) or ""
            if waited > self._join_seconds:
                text = text or self._not_connected(f"after {waited:.0f} s (--distributed-timeout-minutes)")
            if self._asked_to_stop():
                text = "asked to stop while the ranks connected to each other"
            if text and not done.is_set():
                with suppress(BoardGone):
                    board.write(_UNCONNECTED, text)
                to_stderr(f"{self._me()}: {text}")
                _end_now(PeerError.exit_code)

    def _interface(self) -> str:
        """The interfaces of this rank that the backend uses, with their addresses, as far as that is known."""
        named, found = os.environ.get(interface_variable(self._backend), ""), interfaces()
        addresses = [f"{name} {' '.join(found[name])}".strip() for name in named.split(",") if name in found]
        return f"{socket.gethostname()}: {', '.join(addresses) or named or 'chosen by ' + self._backend}"

    def _read_interfaces(self, board: StoreBoard) -> None:
        """Note what the first ranks say of their interfaces, while the store still answers."""
        with suppress(BoardGone):
            for rank in range(min(self._launch.world_size, _NAMED_RANKS)):
                if rank not in self._interfaces and (text := board.read(f"interface-{rank}")):
                    self._interfaces[rank] = text

    def _not_connected(self, why: str) -> str:
        lines = [f"  rank {rank} on {text}" for rank, text in sorted(self._interfaces.items())]
        variable = interface_variable(self._backend)
        return "\n".join(
            [
                f"all ranks met at {self._launch.master_addr}:{self._address[1]}, but could not connect to each other "
                f"over {self._backend} ({why}); {variable} names the interface that leads to the other hosts, and a "
                "firewall must let them through. Interfaces and addresses tried:",
                *lines,
            ]
        )


def _pauses() -> Iterator[float]:
    """Seconds between two looks at the store: short at first, as most ranks come together."""
    pause = 0.002
    while True:
        pause = min(2 * pause, 0.5)
        yield pause


def _first_line(error: BaseException) -> str:
    """What went wrong, without the native stack that torch puts behind it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _without_stack(error: BaseException) -> str:
    """All that the backend says: NCCL names the cause, such as two ranks on one GPU, in its last lines."""
    lines = takewhile(lambda line: not line.startswith(_STACK), str(error).splitlines())
    return " ".join(filter(None, map(str.strip, lines))) or type(error).__name__


def _round_prefix(number: str) -> str:
    return f"megalith/round-{number}"


def _text(text: str | Callable[[], str]) -> str:
    return text if isinstance(text, str) else text()


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_NAMED_RANKS])
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
