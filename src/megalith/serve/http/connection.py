"""A connection of uvicorn that does not wait for ever: for headers, for a reader, for a place.

uvicorn has a limit of time between requests only. This adds: the first byte to the last header, a socket that the
client does not read, and the number of connections.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megalith.serve.http.errors import ApiError
from megalith.serve.http.settings import Limits


def bounded_connection(limits: Limits) -> type[H11Protocol]:
    """The class of connections with these limits."""

    class Bounded(H11Protocol):
        _headers_due: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            else:
                self._expect_headers()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._forget_headers()
            elif self._headers_due is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_headers()  # of the next request on this connection

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_headers()
            self._flows()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._flows()
            self._stalled = self.loop.call_later(limits.stalled_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._flows()
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            """Answer what is no HTTP, in JSON; where an answer has begun, the connection just ends."""
            if self.conn.our_state is not h11.IDLE and self.conn.our_state is not h11.SEND_RESPONSE:
                self.transport.abort()
                return
            status = getattr(sys.exc_info()[1], "error_status_hint", 400)  # 431: more headers than h11 takes
            content = ApiError(status, "the headers are too long" if status == 431 else msg).content
            headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
            response = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
            for event in (response, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _expect_headers(self) -> None:
            self._headers_due = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _forget_headers(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

        def _flows(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

    return Bounded
