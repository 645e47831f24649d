"""A server process from bound port to exit code: takes requests, drains on a signal, ends when the model is gone."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from megalith.errors import ConfigError
from megalith.serve.http.connection import bounded_connection
from megalith.serve.http.guard import App
from megalith.serve.http.service import Service
from megalith.serve.http.settings import ServerSettings

_SECONDS_TO_SAY_SO = 1.0
"""How long answers that have been ended may take to reach their clients."""

_FAMILIES = {True: socket.AF_INET6, False: socket.AF_INET}


def bind(settings: ServerSettings) -> socket.socket:
    """Take the port, before anything slow; nobody can connect until `serve` listens.

    Raises:
        ConfigError: it is in use, or not ours to take.
    """
    listener = socket.socket(_FAMILIES[":" in settings.host], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--port {settings.port} of {settings.host} cannot be taken: {reason}; another server may run there: give "
            "another --port, or 0 for any that is free"
        ) from error
    listener.set_inheritable(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client finds the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's, whose signals are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    app: App,
    service: Service,
    listener: socket.socket,
    *,
    failed: Callable[[], Awaitable[str]],
    say: Callable[[str], None],
    greeting: Sequence[str] = (),
    debounce_seconds: float = 0.0,
) -> bool:
    """Serve until a signal, or until the model fails.

    SIGTERM and Ctrl-C: no new work, and what runs may end within `drain_seconds`; what is left then is ended with the
    finish reason "cancelled". A second signal ends it at once.

    Args:
        failed: returns when the model can answer no more, and says why.
        say: takes a line for the console.
        greeting: lines that are said when clients can connect.
        debounce_seconds: signals this soon after the first are taken for the same request. A launcher forwards the
            Ctrl-C that the terminal has already sent to its processes.

    Returns:
        Whether it ended because it was asked to.
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
    server, stopping = _Server(config), asyncio.Event()
    loop = asyncio.get_running_loop()

    first_at = 0.0

    def asked(name: str) -> None:
        nonlocal first_at
        if stopping.is_set() and loop.time() - first_at < debounce_seconds:
            return
        if stopping.is_set():
            server.force_exit = server.should_exit = True
            service.cancel_all()
            return
        service.draining = True  # before it is said
        say(f"{name}: no new requests; up to {limits.drain_seconds:g} s for those that run, once more to leave at once")
        stopping.set()
        first_at = loop.time()

    in_main_thread = threading.current_thread() is threading.main_thread()  # only that one may take signals
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if in_main_thread else ()
    kept = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    for number in kept:
        loop.add_signal_handler(number, asked, number.name)
    serving = asyncio.ensure_future(server.serve([listener]))
    stop, failure = asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(failed())
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.005)
        for line in greeting:
            say(line)
        await asyncio.wait({serving, stop, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            say(f"the model cannot answer any more: {failure.result()}")
            service.cancel_all()
            await _quiet(service, _SECONDS_TO_SAY_SO)
        else:
            await _quiet(service, limits.drain_seconds, lambda: server.force_exit or failure.done())
            service.cancel_all()
            await _quiet(service, _SECONDS_TO_SAY_SO)
        server.should_exit = True
        loop.call_later(_SECONDS_TO_SAY_SO, _abort_connections, server)
        with suppress(asyncio.CancelledError):
            await serving
        return service.failure is None
    finally:
        stop.cancel()
        failure.cancel()
        for number in kept:
            loop.remove_signal_handler(number)


def _abort_connections(server: uvicorn.Server) -> None:
    """End what idle connections did not: requests that never came whole, and answers that nobody reads."""
    for connection in list(server.server_state.connections):
        connection.transport.abort()


async def _quiet(service: Service, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
    """Wait until no answer is open, at most so long."""
    deadline = asyncio.get_running_loop().time() + seconds
    while service.metrics.active and asyncio.get_running_loop().time() < deadline and not enough():
        await asyncio.sleep(0.02)
