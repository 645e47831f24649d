"""Connections that end before their client is done: the answer arrives, and the rest is bounded."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the serve extra is not installed")
import uvicorn
from uvicorn.server import ServerState

from megalith.serve.http.guard import App, Guard
from megalith.serve.http.server import _LingeringTransport, bind, bounded_connection, serve
from megalith.serve.http.settings import Limits, ServerSettings

from ...fake_runner import FakeRunner
from .http_client import ALPHABET, next_letter, served

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
SIZED = b"Content-Length: 3145728\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n100000\r\n"
KEY = b"Authorization: Bearer k\r\n"
LIMITS = Limits(body_bytes=1000, body_seconds=0.2, header_bytes=8192)


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 405, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def listening(
    limits: Limits, draining: bool = False, app: App = _nothing, stopping: Callable[[], bool] = lambda: False
) -> AsyncIterator[int]:
    """The port of the guard behind real sockets."""
    guard = Guard(app, ServerSettings(api_keys=("k",), limits=limits), lambda: draining)
    config = uvicorn.Config(
        guard, log_config=None, access_log=False, lifespan="off", h11_max_incomplete_event_size=limits.header_bytes
    )
    state, kind = ServerState(), bounded_connection(limits, stopping)
    server = await asyncio.get_running_loop().create_server(
        lambda: kind(config, state, {}), "127.0.0.1", 0, backlog=256
    )
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that few answers lie in the kernel
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


def _send_after_the_answer(port: int, head: bytes, rest: int) -> bytes:
    """Go on to send once the answer lies here unread, and only then read it, to its end."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head)
        assert connection.recv(1, socket.MSG_PEEK)
        for _ in range(rest >> 16):
            connection.sendall(b"x" * 65536)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + SIZED, 401),
        (HEAD + KEY + b"Origin: http://evil.example\r\n" + SIZED, 403),
        (HEAD + KEY + b"Content-Type: text/plain\r\n" + SIZED, 415),
        (HEAD + KEY + JSON + JSON + SIZED, 400),
        (HEAD + KEY + JSON + SIZED, 413),
        (HEAD + KEY + JSON + CHUNKED + b"x" * 2000, 413),
        (HEAD + KEY + JSON + b"Transfer-Encoding: chunked\r\n\r\n10\r\nx", 408),
        (HEAD + KEY + JSON + b"Transfer-Encoding: chunked\r\n\r\nno length\r\n", 400),
        (HEAD + b"".join(b"X%d: x\r\n" % number for number in range(150)) + SIZED, 431),
        (HEAD + b"X: " + b"x" * 9000, 431),
        (b"\x16\x03\x01\x00\xff nonsense\r\n\r\n", 400),
        (HEAD.replace(b"POST", b"DELETE") + KEY + SIZED, 405),
    ],
    ids=[
        *("no key", "origin", "type", "header twice", "too long", "too long in chunks", "too slow", "no chunk"),
        *("many headers", "long header", "no HTTP", "a body that nobody reads"),
    ],
)
def test_an_answer_that_leaves_a_body_unread_arrives(head: bytes, status: int) -> None:
    async def run() -> bytes:
        async with listening(LIMITS) as port:
            return await asyncio.to_thread(_send_after_the_answer, port, head, 1 << 21)

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close\r\n" in answer
    assert answer.endswith(b"}") or status == 405


_TEN = b"Content-Length: 10\r\n"
_CHUNKS = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (HEAD + KEY + JSON + _TEN + _CHUNKS + b"\r\n", b"Transfer-Encoding"),
        (HEAD + KEY + JSON + b"transfer-encoding: chunked\r\nCONTENT-LENGTH: 0\r\n\r\n", b"Transfer-Encoding"),
        (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + KEY + JSON + _CHUNKS + b"\r\n", b"Transfer-Encoding"),
        ((HEAD + KEY + JSON + _TEN + b"\r\n").replace(b"\r\n", b"\n"), b"CRLF"),
        (HEAD + b"X: a\n" + KEY + JSON + _TEN + b"\r\n", b"CRLF"),
        (HEAD + KEY + JSON + _TEN + b"\n", b"CRLF"),
        (HEAD + KEY + JSON + b"X: a\r\n b\r\n" + _TEN + b"\r\n", b"folded"),
        (HEAD + KEY + JSON + b"X: a\r\n\tContent-Length: 5\r\n" + _TEN + b"\r\n", b"folded"),
    ],
    ids=["CL TE", "TE CL", "HTTP/1.0 TE", "LF", "one LF", "empty line of LF", "obs-fold", "obs-fold of a length"],
)
@pytest.mark.parametrize("before", [b"", HEAD + KEY + JSON + b"Content-Length: 2\r\n\r\n{}"], ids=["", "pipelined"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_request_that_a_proxy_may_frame_otherwise_is_refused(
    head: bytes, said: bytes, before: bytes, pieces: int
) -> None:
    """Nothing of it, or behind it, is taken for a request: that would be request smuggling."""
    seen: list[str] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["method"])
        await _nothing(scope, receive, send)

    def send(port: int) -> bytes:
        whole = before + head + b"{}        GET /smuggled HTTP/1.1\r\nHost: localhost\r\n" + KEY + b"\r\n"
        size = -(-len(whole) // pieces)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(whole), size):
                connection.sendall(whole[start : start + size])
            answer = b""
            while part := connection.recv(65536):
                answer += part
            return answer

    async def run() -> bytes:
        async with listening(LIMITS, app=noted) as port:
            return await asyncio.to_thread(send, port)

    answer = asyncio.run(run())
    assert seen == ["POST"] * bool(before)
    assert answer.count(b"HTTP/1.1 400 ") == 1 and said in answer, answer


def test_a_body_may_hold_what_headers_may_not() -> None:
    body = json.dumps({"a": [1, 2]}, indent=1).encode() + b"\n\n transfer-encoding: chunked\n"

    def send(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(HEAD + KEY + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            return connection.recv(65536)

    async def run() -> bytes:
        async with listening(LIMITS) as port:
            return await asyncio.to_thread(send, port)

    assert b" 405 " in asyncio.run(run())


def test_a_server_that_stops_says_so_to_those_who_send() -> None:
    async def run() -> bytes:
        async with listening(LIMITS, draining=True) as port:
            return await asyncio.to_thread(_send_after_the_answer, port, HEAD + KEY + JSON + SIZED, 1 << 21)

    assert b" 503 " in asyncio.run(run())


def test_a_body_that_is_read_leaves_the_connection_open() -> None:
    def twice(port: int) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            for _ in range(2):
                connection.sendall(HEAD + KEY + JSON + b"Content-Length: 2\r\n\r\n{}")
                answer = connection.recv(65536)
                assert b" 405 " in answer and b"connection: close" not in answer
        return 2

    async def run() -> int:
        async with listening(LIMITS) as port:
            return await asyncio.to_thread(twice, port)

    assert asyncio.run(run()) == 2


@pytest.mark.parametrize(
    "limits",
    [Limits(lingering_bytes=1 << 20), Limits(lingering_seconds=0.2)],
    ids=["bytes", "seconds"],
)
def test_nobody_is_listened_to_for_ever(limits: Limits) -> None:
    """Sends until the server ends it; with these limits of the one the other would take far longer."""

    def flood(port: int) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(HEAD + JSON + b"Content-Length: 99999999999\r\n\r\n")
            assert connection.recv(1, socket.MSG_PEEK)
            sent = 0
            try:
                while sent < 1 << 40:
                    connection.sendall(b"x" * (65536 if limits.lingering_seconds > 1 else 1))
                    sent += 1
            except ConnectionError:
                return sent
        raise AssertionError("it was read to its end")

    async def run() -> int:
        async with listening(limits) as port:
            return await asyncio.to_thread(flood, port)

    assert asyncio.run(run()) > 0


@pytest.mark.parametrize("stops", [False, True], ids=["serving", "stopping"])
def test_a_stream_that_nobody_reads_is_cut_off_and_holds_up_nobody(stops: bool) -> None:
    """Nor does it hold up the end of the server, which does not wait as long for a reader."""
    limits, tokens = Limits(stalled_seconds=600.0 if stops else 0.2), 8000
    stopping = asyncio.Event()
    asked = {"prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True, "logprobs": 20}

    def request(body: dict[str, Any]) -> bytes:
        content = json.dumps(body).encode()
        return HEAD + KEY + JSON + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content

    async def run() -> None:
        runner = FakeRunner(len(ALPHABET) + 1, tokens + 1, follow=next_letter, block_size=64)
        async with (
            served(runner=runner, context_length=tokens + 1) as server,
            listening(limits, app=server.app, stopping=stopping.is_set) as port,
        ):
            with socket.socket() as stalled:
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stalled.connect(("127.0.0.1", port))
                stalled.sendall(request(asked))
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request({"prompt": "a", "max_tokens": 2}))
                assert b" 200 " in await reader.readline()
                writer.close()
                if stops:
                    stopping.set()
                while not server.service.metrics.disconnects or server.service.worker.stats().running:
                    await asyncio.sleep(0.01)
            assert server.service.metrics.active == 0
            assert server.service.worker.stats().generated_tokens < tokens

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_client_that_has_reset_its_connection_is_let_go() -> None:
    """Its last bytes are read before the reset is noticed, which only shows when the connection is shut down."""

    class Reset(asyncio.Transport):
        aborted = False

        def is_closing(self) -> bool:
            return self.aborted

        def write_eof(self) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        def abort(self) -> None:
            self.aborted = True

    async def run() -> bool:
        transport = Reset()
        parting = _LingeringTransport(transport, LIMITS, lambda: True)
        parting.close()
        parting.lost()
        return transport.aborted

    assert asyncio.run(run())


def test_a_probe_does_not_wait_for_a_crowd() -> None:
    """Eighty have asked when the server first looks, and then one asks how it is."""
    order: list[str] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        order.append(scope["path"])
        await _nothing(scope, receive, send)

    async def run() -> None:
        async with listening(LIMITS, app=noted) as port:
            asked = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(81)]
            for number, connection in enumerate(asked[:-1]):
                connection.sendall(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n" % number + KEY + b"\r\n")
            asked[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for connection in asked:
                connection.setblocking(False)
                assert await asyncio.get_running_loop().sock_recv(connection, 65536)
                connection.close()

    asyncio.run(run())
    assert order.index("/health") < 40
    order.remove("/health")
    assert order == [f"/{number}" for number in range(80)]


def test_a_server_ends_without_those_who_never_send_or_read(caplog: pytest.LogCaptureFixture) -> None:
    """Idle, half-sent and unread connections are ended; a task that had to be cancelled would leave a traceback."""

    async def run() -> bool:
        gone = asyncio.Event()

        async def failed() -> str:
            await gone.wait()
            return "the test is over"

        async with served() as server:
            listener = bind(ServerSettings(port=0))
            port = listener.getsockname()[1]
            serving = asyncio.ensure_future(
                serve(server.app, server.service, listener, failed=failed, say=server.lines.append, greeting=["ready"])
            )
            while "ready" not in server.lines:
                await asyncio.sleep(0.01)
            clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(4)]
            clients[1].sendall(HEAD)
            clients[2].sendall(HEAD + JSON + b"Content-Length: 100\r\n\r\n{")
            clients[3].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            clients[3].sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)
            await asyncio.sleep(0.3)
            gone.set()
            fine = await serving
            for client in clients:
                client.close()
            return fine

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(asyncio.wait_for(run(), 60))
    assert not caplog.records, caplog.text
