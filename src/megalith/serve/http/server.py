"""The server process, from bound port to exit code: it takes requests, drains on a signal, and ends on model failure.

All uses of uvicorn beyond its documented interface are in this module; `tests/unit/serve/test_uvicorn_internals.py` has
a canary for each, and pyproject.toml bounds the version. uvicorn limits the time between requests only; this module
adds limits on the time from the first byte to the last header, on sockets that the client does not read, and on the
number of connections. When hundreds of clients connect at once, a few are read at a time, in order of arrival, after
probes of /health: read in lockstep, each would wait for all others. If an answer leaves a body unread, the connection
closes in stages (RFC 9112, 9.6): closing a socket with unread bytes resets it and loses the answer.

h11 tolerates requests that a proxy may parse differently (request smuggling): a bare LF as the end of a line, folded
headers, and Content-Length together with Transfer-Encoding. They are refused here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megalith.errors import ConfigError
from megalith.serve.http.errors import ApiError
from megalith.serve.http.guard import App
from megalith.serve.http.service import Service
from megalith.serve.http.settings import Limits, ServerSettings

_READS_PER_ROUND = 8
_PROBE = b"GET /health "
_PATIENCE_WHEN_STOPPING = 2.0
"""Seconds without a read after which a stopping server drops a client; clients that read slowly are waited for."""
_SECONDS_BETWEEN_STALL_CHECKS = 0.25

_END_OF_HEADERS = re.compile(rb"\n\r?\n")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_FOLDED_LINE = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length[ \t]*:", re.IGNORECASE)
_CODING = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)


class _FirstReads:
    """Runs callbacks in order of arrival, a few in each iteration of the event loop."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()

    def add(self, callback: Callable[[], None]) -> None:
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._run)
        self._queue.append(callback)

    def _run(self) -> None:
        for _ in range(min(_READS_PER_ROUND, len(self._queue))):
            self._queue.popleft()()
        if self._queue:
            asyncio.get_running_loop().call_soon(self._run)


class _LingeringTransport(asyncio.Transport):
    """A transport that closes in stages (lingering close) if the client may still be sending (`still_sends`).

    It first shuts down its sending side, so that the client sees the end of the answer, and discards what it receives:
    at most `lingering_bytes`, for at most `lingering_seconds`.
    """

    def __init__(self, transport: asyncio.Transport, limits: Limits, still_sends: Callable[[], bool]) -> None:
        super().__init__()
        self._transport, self._limits, self._still_sends = transport, limits, still_sends
        self._left = limits.lingering_bytes
        self._due: asyncio.TimerHandle | None = None

    @property
    def lingers(self) -> bool:
        """True while the transport waits for a client that is still sending."""
        return self._due is not None

    def close(self) -> None:
        """Close the connection; a second call closes it at once."""
        if self.lingers or self._transport.is_closing() or not self._still_sends():
            self._transport.close()
            return
        self._due = asyncio.get_running_loop().call_later(self._limits.lingering_seconds, self._transport.abort)
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection
            self._transport.abort()
        else:
            self._transport.resume_reading()

    def discard(self, size: int) -> None:
        """Count bytes received after the answer."""
        self._left -= size
        if self._left < 0:
            self._transport.abort()

    def lost(self) -> None:
        """Stop waiting for a client that is gone."""
        if self._due is not None:
            self._due.cancel()

    def write(self, data: Any) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def pause_reading(self) -> None:
        if not self.lingers:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class _AmbiguousRequest(h11.RemoteProtocolError):
    """Headers that another HTTP implementation may parse differently."""


class _StrictParser(h11.Connection):
    """h11's parser, without its leniency."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            _require_clear_headers(self.trailing_data[0])
        return super().next_event()


def _require_clear_headers(received: bytes) -> None:
    """Check the headers received so far; raise _AmbiguousRequest if other parsers may read them differently."""
    end = _END_OF_HEADERS.search(received)
    headers = received[: end.end()] if end else received
    if _BARE_LF.search(headers):
        raise _AmbiguousRequest("a line of the headers ends in LF; it must end in CRLF (RFC 9112, 2.2)")
    if _FOLDED_LINE.search(headers):
        raise _AmbiguousRequest("a header is folded over two lines; send it in one line (RFC 9112, 5.2)")
    if end and _CODING.search(headers):
        if _LENGTH.search(headers):
            raise _AmbiguousRequest("Content-Length and Transfer-Encoding exclude each other (RFC 9112, 6.3)")
        if b" HTTP/1.0\r\n" in headers:
            raise _AmbiguousRequest("HTTP/1.0 has no Transfer-Encoding (RFC 9112, 6.1)")


class _Connection(H11Protocol):
    """A connection with limits on headers, on unread answers and on the number of connections."""

    limits: Limits
    first_reads: _FirstReads
    stopping: Callable[[], bool]

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _is_new, _is_refused = True, False

    def connection_made(self, transport: Any) -> None:
        self.transport: _LingeringTransport
        self.conn = _StrictParser(h11.SERVER, self.config.h11_max_incomplete_event_size or self.limits.header_bytes)
        super().connection_made(_LingeringTransport(transport, self.limits, self._still_sends))
        if len(self.connections) > self.limits.connections:
            transport.abort()
        else:
            self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.lingers:
            self.transport.discard(len(data))
        elif self._is_new and not data.startswith(_PROBE):
            self._is_new = False
            self.transport.pause_reading()
            self.first_reads.add(functools.partial(self._read_first, data))
        else:
            self._read(data)

    def _read_first(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self._read(data)

    def _read(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_header_timer()
        elif self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_header_timer()  # of the next request on this connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_stall_timer()
        self.transport.lost()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stall_timer()
        self._check_stall(self.loop.time())

    def _check_stall(self, since: float) -> None:
        """Abort the connection if its client has not read for too long."""
        patience = self.limits.stalled_seconds
        if self.stopping():
            patience = min(patience, _PATIENCE_WHEN_STOPPING)
        left = since + patience - self.loop.time()
        if left <= 0.0:
            self.transport.abort()
            return
        self._stall_timer = self.loop.call_later(min(left, _SECONDS_BETWEEN_STALL_CHECKS), self._check_stall, since)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with an error in JSON; abort the connection if an answer has begun."""
        if self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE:
            self.transport.abort()
            return
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)  # 431: more headers than h11 takes
        said = str(error) if isinstance(error, _AmbiguousRequest) else msg
        content = ApiError(status, "the headers are too long" if status == 431 else said).content
        self._is_refused = True
        headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
        response = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
        for event in (response, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its body will never be complete
            self.cycle.message_event.set()

    def _still_sends(self) -> bool:
        unread = self._is_refused or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        return unread or self.flow.read_paused

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def bounded_connection(limits: Limits, stopping: Callable[[], bool] = lambda: False) -> type[H11Protocol]:
    """Return a connection class with these limits; while `stopping`, clients that do not read are dropped early."""
    values = {"limits": limits, "first_reads": _FirstReads(), "stopping": staticmethod(stopping)}
    return type("BoundedConnection", (_Connection,), values)


_SECONDS_TO_FLUSH = 1.0
"""Time for cancelled answers to reach their clients."""

_FAMILIES = {True: socket.AF_INET6, False: socket.AF_INET}


def bind(settings: ServerSettings) -> socket.socket:
    """Bind the port before any slow work; `serve` listens later. Raise a ConfigError if the port is in use."""
    listener = socket.socket(_FAMILIES[":" in settings.host], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--port {settings.port} of {settings.host} cannot be bound: {reason}; another server may use it: give "
            "another --port, or 0 for any free port"
        ) from error
    listener.set_inheritable(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_signals() -> Iterator[int | None]:
    """Write the signals that stop a server to a pipe; yield its read end, None outside the main thread.

    The event loop reads them at once, in any thread, also while the main thread computes.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield None
        return
    handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    previous = {number: signal.signal(number, lambda *_: None) for number in handled}
    previous_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(write_end)
        os.close(read_end)


class _StopSignals:
    """Stops a server on SIGTERM, SIGINT and SIGHUP: the first signal drains it, a second ends it at once."""

    def __init__(
        self,
        server: uvicorn.Server,
        service: Service,
        say: Callable[[str], None],
        debounce_seconds: float,
        pipe: int | None,
    ) -> None:
        self.received = asyncio.Event()
        self._server, self._service, self._say, self._pipe = server, service, say, pipe
        self._debounce_seconds, self._first_at = debounce_seconds, 0.0

    def __enter__(self) -> _StopSignals:
        if self._pipe is not None:
            asyncio.get_running_loop().add_reader(self._pipe, self._read, self._pipe)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)

    def _read(self, pipe: int) -> None:
        for number in os.read(pipe, 64):
            if number in _STOP_SIGNALS:
                self._receive(signal.Signals(number).name)

    def _receive(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        if not self.received.is_set():
            self._service.draining = True  # before the message is printed
            seconds = self._service.settings.limits.drain_seconds
            self._say(f"{name}: no new requests; up to {seconds:g} s for those that run, once more to leave at once")
            self.received.set()
            self._first_at = now
        elif now - self._first_at >= self._debounce_seconds:
            self._server.force_exit = self._server.should_exit = True
            self._service.cancel_all()


async def serve(
    app: App,
    service: Service,
    listener: socket.socket,
    *,
    failed: Callable[[], Awaitable[str]],
    say: Callable[[str], None],
    greeting: Sequence[str] = (),
    debounce_seconds: float = 0.0,
    signals_from: int | None = None,
) -> bool:
    """Serve until a signal (return True), or until `failed` returns because the model has failed (return False).

    Signals come from the pipe of `stop_signals`; without a pipe only `failed` ends the server. After SIGTERM or Ctrl-C
    new requests are refused, and running ones may finish within `drain_seconds`; then they end with the finish reason
    "cancelled". A second signal ends them at once, unless it is within `debounce_seconds` of the first: a launcher
    forwards the Ctrl-C that the terminal has already sent to its processes.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    limits = service.settings.limits
    config = uvicorn.Config(
        app,
        http=bounded_connection(limits, lambda: service.draining),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    with _StopSignals(server, service, say, debounce_seconds, signals_from) as signals:
        serving = asyncio.ensure_future(server.serve([listener]))
        stop, failure = asyncio.ensure_future(signals.received.wait()), asyncio.ensure_future(failed())
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(0.005)
            for line in greeting:
                say(line)
            await asyncio.wait({serving, stop, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                say(f"the model cannot answer any more: {failure.result()}")
            else:
                await _quiet(service, limits.drain_seconds, lambda: server.force_exit or failure.done())
            service.cancel_all()
            await _quiet(service, _SECONDS_TO_FLUSH)
            server.should_exit = True
            asyncio.get_running_loop().call_later(_SECONDS_TO_FLUSH, _abort_connections, server)
            with suppress(asyncio.CancelledError):
                await serving
            return service.failure is None
        finally:
            stop.cancel()
            failure.cancel()


def _abort_connections(server: uvicorn.Server) -> None:
    """Abort the remaining connections: incomplete requests, and answers that no client reads."""
    for connection in list(server.server_state.connections):
        connection.transport.abort()


async def _quiet(service: Service, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
    """Wait until no request is active, at most this many seconds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while service.metrics.active and asyncio.get_running_loop().time() < deadline and not enough():
        await asyncio.sleep(0.02)
