"""Rendezvous of the ranks that a launcher started, and the life of the default process group.

All ranks first register in a store, so that a rank that is missing, exists twice or has another world size is named
instead of waited for. If the launcher places all ranks on one host, they listen on the loopback interface only; else
the store and gloo trust their network, as all of torch.distributed does.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import NoReturn

import torch
import torch.distributed as dist

from megalith.config.environment import listen, loopback
from megalith.config.groups import LaunchConfig
from megalith.device import is_host, nccl_version
from megalith.distributed.board import BoardUnavailable, StoreBoard, run_in_thread, to_stderr
from megalith.distributed.consistency import Facts, difference
from megalith.distributed.device_errors import without_stack
from megalith.distributed.machine import (
    AwakeClock,
    connection_error,
    host_identity,
    interface_towards,
    interface_variable,
    interfaces,
    is_own_address,
    own_address,
    unusable_interfaces,
)
from megalith.errors import ConfigError, MegalithError, PeerError

WARN_AFTER_SECONDS = 20.0
"""Waiting time after which a rank prints for whom it waits."""

_NAMED_RANKS = 16  # keeps messages of large runs readable
_SECONDS_TO_LEAVE = 10.0
_SECONDS_FOR_OTHERS_TO_READ = 3.0
_POLL_SECONDS = 0.5
_UNCONNECTED = "unconnected"
_ROUNDS_KEY, _ROUND_KEY = (
    "megalith/rounds",
    "megalith/round",
)  # keys in a store that outlives the ranks


@dataclass
class _JoinedStore:
    """Store of a run that this process has joined before; rank 0 keeps it open, as it cannot listen twice."""

    store: dist.Store
    address: tuple[str, int]  # host and port of the store
    times: int = 0  # number of joins by this process


_JOINED_STORES: dict[tuple[int, str, int], _JoinedStore] = {}
"""(rank, host, port) -> store; global, as is the default group of torch.distributed."""


@dataclass(frozen=True)
class RendezvousInfo:
    """Result of the rendezvous."""

    rank: int = 0
    size: int = 1  # number of ranks
    one_host: bool = True  # whether all ranks are on this machine
    # a separate connection to the store of the run; None for a single process
    store: dist.Store | None = None


def available_backends() -> dict[str, str]:
    """Return the collective backends of this torch, name -> version ("" if unknown)."""
    found = {"gloo": "", "mpi": ""} if dist.is_mpi_available() else {"gloo": ""}
    if not dist.is_gloo_available():
        del found["gloo"]
    if dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, nccl_version()))
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
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[RendezvousInfo]:
    """Initialize torch.distributed within the block and destroy it afterwards; a single process needs neither.

    After an exception that leaves the block the process exits without waiting for pending collectives. Blocks may
    follow one another; all ranks must enter equally many.

    Args:
        backend: "gloo" or "nccl"; on a CPU always gloo, and for nccl the counterpart of another accelerator.
        timeout: of collectives.
        join: timeout of the rendezvous, `timeout` if None; missing ranks are printed after `WARN_AFTER_SECONDS`.
        facts: must be equal on all ranks.
        stop_requested: polled while waiting; PeerError if it returns True.

    Raises:
        ConfigError: two processes have the same rank, ranks differ in world size or facts, the port is in use, or this
            process is already within such a block or has called `init_process_group`.
        PeerError: ranks are missing or unreachable, or a stop was requested.
    """
    if launch.world_size == 1:
        yield RendezvousInfo()
        return
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is already initialized in this process: do not call init_process_group before "
            "join_ranks; within its block, create the groups of another layout with "
            "ParallelContext.create(run.layout, context.device)"
        )
    gloo = backend == "gloo" or is_host(device)
    backend = "gloo" if gloo else dist.get_default_backend_for_device(device)
    join_seconds = (join or timeout).total_seconds()
    rendezvous = _Rendezvous(launch, join_seconds, facts or {}, stop_requested, backend)
    store = rendezvous.join_store()
    connection = rendezvous.open_second_connection()
    if backend == "gloo":
        rendezvous.choose_interface(store)
    if not is_host(device):
        torch.accelerator.set_device_index(device)
    try:
        with rendezvous.limit_connecting(connection):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=timeout,
                device_id=None if gloo else device,
            )
        yield RendezvousInfo(launch.rank, launch.world_size, rendezvous.one_host, connection)
    except BaseException as error:
        _force_exit(backend, error)
        raise
    dist.destroy_process_group()
    _exit_together(store, launch)


def named_gpu(launch: LaunchConfig, environ: Mapping[str, str]) -> str:
    """Return the only GPU that CUDA_VISIBLE_DEVICES names to one of several processes of a machine, else "".

    srun and mpirun number the GPUs anew for each process, `megalith train --nproc` shows all to all: not for these.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    several = launch.local_rank > 0 or (launch.local_world_size or 1) > 1
    return visible if several and visible and "," not in visible and launch.launcher in ("torchrun", "hand") else ""


def _force_exit(backend: str, error: BaseException) -> None:
    """Make this process exit soon although collectives are pending, which peers may never complete.

    Its connections then close, which the others notice. A normal exit would wait for gloo until its timeout, or abort
    if a thread returned from native code meanwhile.
    """
    group = dist.group.WORLD
    if backend != "gloo" and group is not None and hasattr(group, "abort"):
        aborting = threading.Thread(target=group.abort, name="abort-collectives", daemon=True)
        aborting.start()
        aborting.join(2.0)
    atexit.register(_exit_now, _exit_code(error))  # after the traceback has been printed


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130  # 128 + SIGINT, as a shell reports it
    return error.exit_code if isinstance(error, MegalithError) else 1


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _exit_together(store: dist.Store, launch: LaunchConfig) -> None:
    """Make the ranks exit when all are ready, rank 0 last: it may own the store that the others use while they close.

    A launcher may end the others as soon as one exits with 75: rank 0 while a tracker still uploads.
    """
    with suppress(RuntimeError):  # rank 0 has stopped waiting
        if store.add("left", 1) == launch.world_size:
            store.set("all left", "1")
        with suppress(RuntimeError):
            store.wait(["all left"], timedelta(seconds=_SECONDS_TO_LEAVE))
        store.add("gone", 1)
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        while launch.rank == 0 and store.add("gone", 0) < launch.world_size and time.monotonic() < deadline:
            time.sleep(0.005)


class _Rendezvous:
    """Rendezvous of all ranks at the store, and their connections to each other.

    `one_host`: whether all ranks are on this machine, and each of them knows that; set by `join_store`.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        join_seconds: float,
        facts: Facts,
        stop_requested: Callable[[], bool],
        backend: str,
    ) -> None:
        self._launch, self._facts = launch, facts
        self._backend, self.one_host = backend, launch.one_host
        self._interfaces: dict[int, str] = {}
        self._stop_requested = stop_requested
        # torchrun sets it if its agent, not rank 0, listens at MASTER_PORT.
        self._agent_owns_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._address, self._prefix, self._times = (launch.master_addr, launch.master_port), "", 0
        self._clock = AwakeClock()
        self._join_seconds = join_seconds
        self._next_warning = min(WARN_AFTER_SECONDS, 0.5 * join_seconds)  # also within short timeouts

    def join_store(self) -> dist.Store:
        """Return the store after all ranks have registered."""
        try:
            opened = self._get_store()
            store = self._round(opened)
            while not self._wait_for_ranks(store, opened):
                store = self._round(opened)
        except dist.DistError as error:
            host, port = self._address
            raise PeerError(
                f"{self._name()}: the store of the run at {host}:{port} stopped answering during the rendezvous "
                f"({_first_line(error)})"
            ) from error
        return store

    def _wait_for_ranks(self, store: dist.Store, opened: dist.Store) -> bool:
        """Wait until all ranks have registered; return False if this round was abandoned for a newer one."""
        self._register(store)
        for pause in _poll_intervals():
            if store.add("here", 0) >= self._launch.world_size:
                self.one_host = store.add("several hosts", 0) == 0
                return True
            if store.check(["refused"]):
                self._raise_rejection(store, store.get("refused").decode())
            if self._is_abandoned(store, opened):
                return False
            self._check_deadline(lambda: self._missing(store, "who"))
            time.sleep(pause)
        raise AssertionError

    def _round(self, opened: dist.Store) -> dist.Store:
        """Return the prefix of the store that belongs to this start of the ranks.

        torchrun's agents keep one store over all restarts, and each counts only its own (changes of membership do not
        count), so that TORCHELASTIC_RESTART_COUNT differs between nodes. Rounds are therefore counted in the store:
        rank 0 opens the next one, and admits the latest process of each rank.
        """
        if not self._agent_owns_store:
            self._prefix = f"megalith/{self._times}"
            return dist.PrefixStore(self._prefix, opened)
        token = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
        number = self._open_round(opened, token) if self._launch.rank == 0 else self._join_round(opened, token)
        self._prefix = _round_prefix(number)
        return dist.PrefixStore(self._prefix, opened)

    def _open_round(self, opened: dist.Store, token: str) -> str:
        number = str(opened.add(_ROUNDS_KEY, 1))
        store, ranks = dist.PrefixStore(_round_prefix(number), opened), range(self._launch.world_size)
        store.set("asks/0", token)
        opened.set(_ROUND_KEY, number)
        for pause in _poll_intervals():
            if store.check([f"asks/{rank}" for rank in ranks]):
                break
            self._check_deadline(lambda: self._missing(store, "asks"))
            time.sleep(pause)
        for rank in ranks:
            store.set(f"admitted/{rank}", store.get(f"asks/{rank}").decode())
        store.set("closed", "1")
        return number

    def _join_round(self, opened: dist.Store, token: str) -> str:
        rank, joined_round = self._launch.rank, ""
        for pause in _poll_intervals():
            number = opened.get(_ROUND_KEY).decode() if opened.check([_ROUND_KEY]) else ""
            store = dist.PrefixStore(_round_prefix(number), opened)
            if number and number != joined_round:
                store.set(f"asks/{rank}", token)
                joined_round = number
            if number and store.check(["closed"]):
                if store.get(f"admitted/{rank}").decode() == token:
                    return number
                store.set("given up", "1")  # an earlier process of this rank was admitted and has died
            self._check_deadline(partial(self._round_blocker, store if number else None))
            time.sleep(pause)
        raise AssertionError

    def _round_blocker(self, store: dist.Store | None) -> str:
        """Return which rank blocks the current round, or why there is no round to join."""
        if store is None or store.check(["closed"]):
            return "rank 0, which has not opened a new round since this process was started"
        if store.check([f"asks/{rank}" for rank in range(self._launch.world_size)]):
            return "rank 0, which does not admit the ranks that came"
        return self._missing(store, "asks")

    def _is_abandoned(self, store: dist.Store, opened: dist.Store) -> bool:
        """Return whether a process of this round was restarted before all ranks had registered."""
        if not self._agent_owns_store:
            return False
        if self._launch.rank == 0:
            return store.check(["given up"])
        return _round_prefix(opened.get(_ROUND_KEY).decode()) != self._prefix

    def choose_interface(self, store: dist.Store) -> None:
        """Set GLOO_SOCKET_IFNAME, unless set by the user, to the loopback interface or one that reaches the other
        hosts."""
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return
        if self.one_host:
            here = {name for _, name in socket.if_nameindex()}
            # Linux calls the loopback interface lo, macOS lo0.
            name = next((name for name in ("lo", "lo0") if name in here), "")
        else:
            # Addresses as seen from rank 0, whose own host may resolve to a loopback address.
            seen = (json.loads(store.get(f"who/{rank}"))["address"] for rank in range(self._launch.world_size))
            name = interface_towards(chain([self._launch.master_addr], filter(None, seen)))
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name

    def open_second_connection(self) -> dist.Store:
        """Open another connection to the store, so that a thread is not blocked by requests on the first one."""
        return dist.PrefixStore("run", dist.PrefixStore(self._prefix, self._store(*self._address, None)))

    def _get_store(self) -> dist.Store:
        """Return the store that this process has joined before, or open it."""
        if self._agent_owns_store:
            return self._open()
        key = (self._launch.rank, self._launch.master_addr, self._launch.master_port)
        if key not in _JOINED_STORES:
            opened = self._open()
            _JOINED_STORES[key] = _JoinedStore(opened, self._address)
        held = _JOINED_STORES[key]
        held.times += 1
        self._address, self._times = held.address, held.times
        return held.store

    def _open(self) -> dist.Store:
        host = loopback() if self._launch.one_host and not self._agent_owns_store else self._launch.master_addr
        self._address = (host, self._launch.master_port)
        if self._launch.rank == 0 and not self._agent_owns_store:
            listener = self._listen(loopback() if self._is_local() else "")
            self._address = (
                loopback(),
                listener.getsockname()[1],
            )  # MASTER_ADDR may be a service that is not up yet
            return self._store(*self._address, listener.detach())
        self._wait_for_listener(*self._address)
        return self._store(*self._address, None)

    def _is_local(self) -> bool:
        """Return whether no other host can have ranks. MASTER_ADDR=localhost does not prove it: some operators set it
        on rank 0 only, and a service name elsewhere."""
        launch = self._launch
        if launch.local_world_size is not None:
            return launch.local_world_size == launch.world_size
        return launch.one_host and "MASTER_ADDR" not in os.environ

    def _store(self, host: str, port: int, listener: int | None) -> dist.Store:
        """Create the store, or connect to it.

        Runs in a thread: torch waits in native code for the listener's answer, longer than its timeout.
        """
        opened = run_in_thread(
            lambda: dist.TCPStore(
                host,
                port,
                self._launch.world_size,
                listener is not None,
                timedelta(seconds=self._join_seconds),
                wait_for_workers=False,  # `_wait_for_ranks` waits and names missing ranks
                master_listen_fd=listener,
            ),
            "open-store",
        )
        remedy = "give every run its own MASTER_PORT (torchrun --master_port, or --standalone)"
        try:
            for pause in _poll_intervals():
                if wait([opened], pause).done:
                    return opened.result()
                self._check_deadline(f"the store of the run: the listener at {host}:{port} does not answer; {remedy}")
        except dist.DistError as error:
            raise PeerError(
                f"{self._name()}: what answers at {host}:{port} is not rank 0 of a run ({_first_line(error)}); {remedy}"
            ) from error
        except PeerError as error:
            atexit.register(_exit_now, error.exit_code)  # the thread is still in native code
            raise
        raise AssertionError

    def _listen(self, host: str) -> socket.socket:
        if "MEGALITH_STORE_FD" in os.environ:  # opened by the supervisor, to reserve the port
            return socket.socket(fileno=int(os.environ["MEGALITH_STORE_FD"]))
        port = self._launch.master_port
        try:
            return listen(host, port, 4096)  # backlog: all ranks connect at about the same time
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen on port {port} of {socket.gethostname()}: {os.strerror(error.errno or 0)}; "
                "if another run uses it, give every run its own MASTER_PORT (torchrun --master_port, or --standalone)"
            ) from error

    def _wait_for_listener(self, host: str, port: int) -> None:
        """Wait until a process listens at rank 0's address."""
        hint = "check MASTER_ADDR and MASTER_PORT, that rank 0 was started, and firewalls"
        if self._launch.one_host:
            hint = "for ranks on several hosts set MASTER_ADDR to rank 0's host"
        while error := connection_error(host, port):
            why = error.strerror or str(error)
            # Not at once: a service name may resolve only when rank 0's host is up.
            if isinstance(error, socket.gaierror) and self._clock.elapsed() > self._next_warning:
                raise PeerError(
                    f"{self._name()}: MASTER_ADDR={host} is not a known host name ({why}); give the name "
                    "or address of rank 0's host"
                )
            self._check_deadline(f"rank 0, which does not answer at {host}:{port} ({why}); {hint}")
            time.sleep(0.1)

    def _check_deadline(self, whom: str | Callable[[], str]) -> None:
        """Warn after 20 s and then every minute; PeerError after the join timeout or a stop request."""
        waited = self._clock.elapsed()
        if self._stop_requested():
            awaited = _describe(whom).partition(";")[0]  # without a remedy: nothing has failed
            raise PeerError(f"{self._name()} was requested to stop while it waited for {awaited}")
        if waited > self._join_seconds:
            raise PeerError(
                f"{self._name()} waited {waited:.0f} s (--distributed-timeout-minutes) for {_describe(whom)}"
            )
        if waited > self._next_warning:
            self._next_warning = waited + 60.0
            to_stderr(f"{self._name()} has waited {waited:.0f} s for {_describe(whom)}")

    def _name(self) -> str:
        return f"rank {self._launch.rank} on {socket.gethostname()}"

    def _register(self, store: dist.Store) -> None:
        """Register this rank; ConfigError on all ranks if it contradicts the others."""
        launch = self._launch
        store.add("came", 1)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "address": own_address(launch.master_addr)}
        size = store.compare_set("size", "", str(launch.world_size)).decode()
        if size != str(launch.world_size):
            self._reject(
                store,
                f"{self._name()} has world size {launch.world_size}, others have {size}: --nproc_per_node and "
                "--nnodes must be the same on all hosts",
            )
        if store.add(f"rank/{launch.rank}", 1) > 1:
            first = json.loads(store.get(f"who/{launch.rank}"))
            where = "twice there" if first["host"] == me["host"] else f"and on {me['host']}"
            self._reject(
                store,
                f"two processes have rank {launch.rank}: on {first['host']} (process {first['pid']}) "
                f"{where} (process {me['pid']}). Give every host its own --node_rank: 0 on the first, 1 on the "
                "second and so on (without the flag it is 0 everywhere)",
            )
        store.set(f"who/{launch.rank}", json.dumps(me))
        if problem := unusable_interfaces(self._backend, os.environ):
            self._reject(store, f"{self._name()}: {problem}")
        if gpu := named_gpu(launch, os.environ) if self._backend == "nccl" else "":
            other = store.compare_set(f"gpu/{host_identity()}/{gpu}", "", str(launch.rank)).decode()
            if other != str(launch.rank):
                self._reject(
                    store,
                    f"CUDA_VISIBLE_DEVICES={gpu} of ranks {other} and {launch.rank} on {me['host']} shows them the "
                    "same GPU; show each process its own, or all GPUs to all of them",
                )
        where = host_identity()
        if not launch.one_host or store.compare_set("host_identity", "", where).decode() != where:
            store.add("several hosts", 1)
        own = json.dumps({"name": f"rank {launch.rank} ({me['host']})", "facts": dict(self._facts)})
        first, mine = json.loads(store.compare_set("facts", "", own)), json.loads(own)
        if text := difference(mine["facts"], first["facts"], mine["name"], first["name"]):
            self._reject(store, text)
        store.add("here", 1)

    def _reject(self, store: dist.Store, message: str) -> NoReturn:
        store.set("refused", message)
        self._raise_rejection(store, message)

    def _raise_rejection(self, store: dist.Store, message: str) -> NoReturn:
        """Raise ConfigError; rank 0, which may own the store with the message, first waits until the others read it."""
        readers, deadline = store.add("read", 1), time.monotonic() + _SECONDS_FOR_OTHERS_TO_READ
        while self._launch.rank == 0 and readers < store.add("came", 0) and time.monotonic() < deadline:
            time.sleep(0.01)
            readers = store.add("read", 0)
        raise ConfigError(message)

    def _missing(self, store: dist.Store, key: str) -> str:
        size = self._launch.world_size
        missing = [rank for rank in range(size) if not store.check([f"{key}/{rank}"])]
        return f"{_list_ranks(missing)} of {size}, which did not arrive{self._address_hint()}"

    def _address_hint(self) -> str:
        """Return a hint if MASTER_ADDR, where the other ranks connect, is not an address of rank 0's host."""
        host = self._launch.master_addr
        if self._launch.rank != 0 or self.one_host or self._agent_owns_store or is_own_address(host):
            return ""
        return f"; MASTER_ADDR={host} is not an address of {socket.gethostname()}; check that it leads to rank 0"

    # Connections of the ranks to each other.

    @contextmanager
    def limit_connecting(self, connection: dist.Store) -> Iterator[None]:
        """Limit the time of the block, in which the ranks connect to each other, on all of them.

        If an interface is wrong, some ranks get an exception of the backend and others block in native code. A thread
        with its own connection enforces the limit.
        """
        board, done = StoreBoard(connection, self._launch.rank), threading.Event()
        with suppress(BoardUnavailable):
            board.write(f"interface-{self._launch.rank}", self._interface())
        thread = threading.Thread(target=self._end_when_late, args=(board, done), name="connecting", daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError as error:
            clock, shown = AwakeClock(), min(self._launch.world_size, _NAMED_RANKS)
            while (
                len(self._interfaces) < shown and clock.elapsed() < _SECONDS_FOR_OTHERS_TO_READ
            ):  # others may arrive later
                self._read_interfaces(board)
                time.sleep(0.1)
            text = self._not_connected(without_stack(error))
            with suppress(BoardUnavailable):
                board.write(_UNCONNECTED, text)
                time.sleep(_SECONDS_FOR_OTHERS_TO_READ)  # the store may end with this process
            raise PeerError(f"{self._name()}: {text}") from error
        finally:
            done.set()
            thread.join(2.0 * _POLL_SECONDS)

    def _end_when_late(self, board: StoreBoard, done: threading.Event) -> None:
        """End this process if the timeout has passed, or another rank has failed to connect."""
        clock = AwakeClock()
        while not done.wait(_POLL_SECONDS):
            text, waited = "", clock.elapsed()
            self._read_interfaces(board)
            with suppress(BoardUnavailable):
                text = board.read(_UNCONNECTED) or ""
            if waited > self._join_seconds:
                text = text or self._not_connected(f"after {waited:.0f} s (--distributed-timeout-minutes)")
            if self._stop_requested():
                text = "requested to stop while the ranks connected to each other"
            if text and not done.is_set():
                with suppress(BoardUnavailable):
                    board.write(_UNCONNECTED, text)
                to_stderr(f"{self._name()}: {text}")
                _exit_now(PeerError.exit_code)

    def _interface(self) -> str:
        """Return the interfaces that the backend uses on this rank, with their addresses if known."""
        named, found = os.environ.get(interface_variable(self._backend), ""), interfaces()
        addresses = [f"{name} {' '.join(found[name])}".strip() for name in named.split(",") if name in found]
        return f"{socket.gethostname()}: {', '.join(addresses) or named or 'chosen by ' + self._backend}"

    def _read_interfaces(self, board: StoreBoard) -> None:
        """Collect the interfaces of the first ranks while the store still answers."""
        with suppress(BoardUnavailable):
            for rank in range(min(self._launch.world_size, _NAMED_RANKS)):
                if rank not in self._interfaces and (text := board.read(f"interface-{rank}")):
                    self._interfaces[rank] = text

    def _not_connected(self, why: str) -> str:
        lines = [f"  rank {rank} on {text}" for rank, text in sorted(self._interfaces.items())]
        variable = interface_variable(self._backend)
        return "\n".join(
            [
                f"all ranks registered at {self._launch.master_addr}:{self._address[1]}, but could not connect to each "
                f"other with {self._backend} ({why}); set {variable} to the interface that leads to the other hosts, "
                "and check firewalls. Interfaces and addresses tried:",
                *lines,
            ]
        )


def _poll_intervals() -> Iterator[float]:
    """Yield seconds between polls of the store: short at first, as most ranks arrive together."""
    pause = 0.002
    while True:
        pause = min(2 * pause, 0.5)
        yield pause


def _first_line(error: BaseException) -> str:
    """Return the message of an error without the native stack that torch appends."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _round_prefix(number: str) -> str:
    return f"megalith/round-{number}"


def _describe(text: str | Callable[[], str]) -> str:
    return text if isinstance(text, str) else text()


def _list_ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_NAMED_RANKS])
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
