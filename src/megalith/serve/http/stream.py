"""Answers as they grow: events of several requests in one order, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megalith.serve.http.errors import ApiError
from megalith.serve.http.service import Answer, Service, disconnected
from megalith.serve.request import Event, Token

DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode  # json.dumps makes one for every call


class EventStream(Response):
    """A response of server-sent events. However it ends, the places of its requests are given back.

    Args:
        objects: what is sent, one JSON object in each event.
        answers: the requests that it is made of.
    """

    def __init__(self, service: Service, objects: AsyncIterator[Mapping[str, Any]], answers: Sequence[Answer]) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._objects, self._answers = service, objects, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._service.settings.limits.request_seconds
        timer = asyncio.get_running_loop().call_later(limit, self._cut_off)
        work = asyncio.ensure_future(self._send(send))
        left = asyncio.ensure_future(disconnected(receive))
        try:
            done, _ = await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                work.result()
            else:
                self._service.metrics.disconnects += 1
        finally:
            timer.cancel()
            left.cancel()
            work.cancel()
            self._service.release(self._answers)

    def _cut_off(self) -> None:
        for answer in self._answers:
            answer.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for item in self._objects:
                await send({"type": "http.response.body", "body": _event(item), "more_body": True})
        except ApiError as error:  # the status is sent already
            await send({"type": "http.response.body", "body": _event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _event(item: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(item).encode("ascii") + b"\n\n"


async def merged(service: Service, answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Event]]:
    """The events of all answers as they come, each with the number of its answer."""
    began, waiting = time.monotonic(), set(range(len(answers)))
    async for number, event in _in_order(answers):
        if waiting and number in waiting and isinstance(event, Token):
            waiting.remove(number)
            service.metrics.first_token.add(time.monotonic() - began)
        yield number, event


async def _in_order(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Event]]:
    if len(answers) == 1:  # the usual case, without a task and a queue more for every token
        async for only in answers[0]:
            yield 0, only
        return
    queue: asyncio.Queue[tuple[int, Event | BaseException | None]] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async for event in answers[number]:
                queue.put_nowait((number, event))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(pump(number)) for number in range(len(answers))]
    open_ones = len(answers)
    try:
        while open_ones:
            number, event = await queue.get()
            if event is None:
                open_ones -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield number, event
    finally:
        for task in tasks:
            task.cancel()
