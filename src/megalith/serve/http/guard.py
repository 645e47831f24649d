"""Middleware before every endpoint: authentication, origin checks, and limits on size, time and number of requests.

One ASGI middleware without FastAPI. It refuses requests before reading the body if possible, reads a body within limits
of size and time, and passes it on complete. Against CSRF and DNS rebinding: the Host must be a name of this server, a
foreign Origin is refused, bodies must be declared as JSON, and only origins of --allowed-origin are allowed (CORS).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from megalith.serve.http.errors import ApiError, printable
from megalith.serve.http.settings import ServerSettings, ip_address, is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_SCRIPTS = ("/page.js", "/vendor/marked.js", "/vendor/purify.js", "/vendor/highlight.js")
PAGE = {"/": "text/html", "/page.css": "text/css", **dict.fromkeys(_SCRIPTS, "text/javascript")}
"""Paths of the page, files of the folder `page`, with their types."""

OPEN_PATHS = frozenset({*PAGE, "/favicon.ico", "/health", "/v1/health"})
"""What needs no key: the page is empty without one, and a health check has none."""

_WITH_BODY = ("POST", "PUT", "PATCH")
_PREFLIGHT = b"access-control-request-method"
_CLOSE = (b"connection", b"close")
"""Of an answer that leaves a body unread; `connection` sees to it that the client gets it nevertheless."""

_SAME_SITE = (b"same-origin", b"none")
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """Lets through what may pass.

    `check_room` raises where there is no place for more work, before a body is understood. `served` receives (method,
    path, status, client, seconds) at the end of each request.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        draining: Callable[[], bool] = lambda: False,
        check_room: Callable[[], None] = lambda: None,
        served: Callable[[str, str, int, str, float], None] = lambda *_: None,
    ) -> None:
        self._app, self._settings = app, settings
        self._draining, self._check_room, self._served = draining, check_room, served
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        names = {"localhost", *settings.allowed_hosts}
        if not is_loopback(settings.host):
            names |= {settings.host, socket.gethostname(), socket.getfqdn()}
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        began, status, unread, allowing = time.monotonic(), 500, _has_body(scope), self._allowing(scope)

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                closing = (_CLOSE,) if unread else ()
                message["headers"] = [*message.get("headers", ()), *_ALWAYS, *allowing, *closing]
            await send(message)

        def body_read() -> None:
            nonlocal unread
            unread = False

        try:
            await self._guarded(scope, receive, watched_send, body_read)
        except ApiError as error:
            await _answer(error, watched_send)
        finally:
            client = (scope.get("client") or ("-",))[0]
            self._served(scope["method"], scope["path"], status, client, time.monotonic() - began)

    async def _guarded(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, body_read: Callable[[], None]
    ) -> None:
        headers = self._headers(scope)
        self._check_place(scope, headers)
        if scope["method"] == "OPTIONS" and _PREFLIGHT in headers and self._allowing(scope):
            await _allow(headers, send)  # before the key, which browsers do not send with this question
            return
        self._check_key(scope, headers)
        if scope["method"] in _WITH_BODY:
            if self._draining():
                raise ApiError(503, "the server is stopping; ask another one")
            self._check_type(headers)
            body = await self._read(headers, receive)
            body_read()
            self._check_room()
            receive = _replay(body, receive)
        await self._app(scope, receive, send)

    def _headers(self, scope: MutableMapping[str, Any]) -> dict[bytes, bytes]:
        """Return the headers by lower-case name."""
        raw, limits = scope["headers"], self._settings.limits
        if len(raw) > limits.headers or sum(len(name) + len(value) for name, value in raw) > limits.header_bytes:
            raise ApiError(431, f"more than {limits.headers} headers, or {limits.header_bytes} bytes of them")
        found: dict[bytes, bytes] = {}
        for name, value in raw:
            if name in found and name in (b"host", b"origin", b"authorization", b"content-length", b"content-type"):
                raise ApiError(400, f"the header {name.decode()} occurs twice", name.decode())
            found[name] = value
        return found

    def _allowing(self, scope: MutableMapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """Return the header by which a browser lets a page of an allowed origin read the answer, if one asks."""
        return [
            (b"access-control-allow-origin", value)
            for name, value in scope["headers"]
            if name == b"origin" and value.decode("latin-1") in self._settings.allowed_origins
        ]

    def _check_place(self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        # A key is nothing that a page of another site has: with one, a proxy may call the server by any name.
        if not self._settings.api_keys and not self._is_own(host):
            raise ApiError(
                403,
                f"the Host {printable(host)} is unknown; start it with --allowed-host NAME to allow it",
                "host",
                "host_not_allowed",
            )
        origin = headers.get(b"origin")
        if origin is not None and not self._is_same(origin.decode("latin-1"), host):
            shown = printable(origin.decode("latin-1"))
            raise ApiError(
                403, f"the Origin {shown} is another site; --allowed-origin lets it in", "origin", "origin_not_allowed"
            )
        site = headers.get(b"sec-fetch-site")
        if origin is None and scope["method"] != "GET" and site is not None and site not in _SAME_SITE:
            raise ApiError(403, "a page of another site asked", "sec-fetch-site", "origin_not_allowed")

    def _is_own(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, _ = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            return False
        if parts.path or parts.query or parts.fragment or parts.username is not None:
            return False
        if name in self._names:
            return True
        address = ip_address(name)
        # A rebound name is never an address, so an address is safe where others may reach the server at all.
        return address is not None and (address.is_loopback or not is_loopback(self._settings.host))

    def _is_same(self, origin: str, host: str) -> bool:
        if origin in self._settings.allowed_origins:
            return True
        scheme, _, place = origin.partition("://")
        return scheme in ("http", "https") and place.lower() == host.lower() and bool(place)

    def _check_key(self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = _digest(key.strip())
        # All keys are compared, each in constant time, so that the time tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            said = "a wrong key was given" if key else "a key is needed"
            raise ApiError(
                401,
                f"{said}: send the header `Authorization: Bearer KEY`",
                "authorization",
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )

    def _check_type(self, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            shown = printable(kind.decode("latin-1")) or "nothing"
            raise ApiError(415, f"Content-Type is {shown}; send application/json", "content-type")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "Content-Encoding is not supported; send the JSON as it is", "content-encoding")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """Read the body, at most `body_bytes` of it."""
        limit, deadline = self._settings.limits.body_bytes, time.monotonic() + self._settings.limits.body_seconds
        too_long = ApiError(413, f"the body is longer than {limit} bytes, the limit of --max-body-bytes")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise too_long
        body = bytearray()
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.001, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body took longer than {self._settings.limits.body_seconds:g} s") from None
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client left before the end of its body")
            body += message.get("body", b"")
            if len(body) > limit:
                raise too_long
            if not message.get("more_body", False):
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays the body read so far, then continues with the connection."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def _has_body(scope: MutableMapping[str, Any]) -> bool:
    """Return whether the request announces a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )


def _digest(key: bytes) -> bytes:
    """Hash a key to a fixed length, so that a comparison does not tell its length."""
    return hashlib.sha256(key).digest()


async def _allow(headers: dict[bytes, bytes], send: Send) -> None:
    """Answer a browser that asks whether a page of an allowed origin may send a request with these headers."""
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, PUT"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


async def _answer(error: ApiError, send: Send) -> None:
    content = error.content
    headers = {"content-type": "application/json", "content-length": str(len(content)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": content})
