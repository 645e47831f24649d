"""Strict JSON, and the error responses of the server.

The reader accepts only JSON that all parsers read alike. Python's parser needs seconds for some MiB of the worst kinds,
during which other requests wait; so the number of objects is counted and bounded first, by searches at memory speed. An
error has a status, a message that names the field, and OpenAI's JSON form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_CONTAINERS, MAX_TEXTS, MAX_VALUES = 1 << 15, 1 << 17, 1 << 20
"""Maximum numbers of lists, objects and fields; of strings; of values: 128 prompts of 8192 ids."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class BadJson(ValueError):
    """The text is not JSON, or is ambiguous JSON. `field` is the name of the field concerned, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


def read_json(body: bytes) -> Any:
    """Parse one JSON text; raise BadJson if it is not UTF-8, not JSON, ambiguous, too large or too deep."""
    _check_size(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJson(f"the body is not UTF-8 (byte {error.start})") from None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except BadJson:
        raise
    except (ValueError, RecursionError) as error:  # JSONDecodeError, and integers of thousands of digits
        raise BadJson(f"the body is not JSON: {error}") from None


def _check_size(body: bytes) -> None:
    """Raise `BadJson` if a body has too many values, texts or containers, or is nested too deeply."""
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if without_escapes.count(b'"') > 2 * MAX_TEXTS:
        raise BadJson(f"the body has more than {MAX_TEXTS} texts and names")
    outside = b"".join(without_escapes.split(b'"')[::2])
    brackets = outside.translate(None, _NO_BRACKETS)
    if _depth(brackets[: 2 * MAX_CONTAINERS]) > MAX_DEPTH:
        raise BadJson(f"the body is nested deeper than {MAX_DEPTH} levels")
    if len(brackets) > 2 * MAX_CONTAINERS or outside.count(b":") > MAX_CONTAINERS:
        raise BadJson(f"the body has more than {MAX_CONTAINERS} lists, objects or fields")
    if outside.count(b",") > MAX_VALUES:
        raise BadJson(f"the body has more than {MAX_VALUES} values")


def _depth(brackets: bytes) -> int:
    """Return the nesting depth of brackets, or the first depth that is too great."""
    depth = deepest = 0
    for byte in brackets:
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            break
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            shown = printable(name)
            raise BadJson(f"the field {shown} occurs twice", shown)
        found[name] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise BadJson(f"{name} is not a JSON number")


def printable(text: str, length: int = 80) -> str:
    """Return a client's text for a message or log line: printable ASCII in one line, at most `length` characters."""
    shown = text[:length].encode("ascii", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in shown)
    return shown if len(text) <= length else f"{shown}..."


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = dict(headers or {})
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """JSON object of the answer. `message` is also at the top level, where Megatron's client reads it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        inner = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": inner, "message": self.message}

    @property
    def content(self) -> bytes:
        """Body of the answer in ASCII, so that nothing a client sent can break it."""
        return json.dumps(self.body).encode("ascii")


def refusal(field: str, rule: str, code: str = "invalid_value") -> ApiError:
    """Return the error 400 for a field of a request whose value is not accepted."""
    return ApiError(400, f"{field}: {rule}", field, code)
