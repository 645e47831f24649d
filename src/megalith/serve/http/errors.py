"""What a client is told when its request is not served: a status, a text that names the field, OpenAI's JSON shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: names the value, the rule and the remedy.
        field: of the request that is at fault, if one is.
        code: a word for programs.
        headers: of the answer, besides the usual ones.
    """

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
        """The JSON of the answer. `message` stands outside too, where Megatron's client reads it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        inner = {"message": self.message, "type": kind, "param": self.field, "code": self.code}
        return {"error": inner, "message": self.message}

    @property
    def content(self) -> bytes:
        """The bytes of the answer: ASCII, so that nothing a client sent can break them."""
        return json.dumps(self.body).encode("ascii")
