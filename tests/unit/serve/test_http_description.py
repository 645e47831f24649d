"""The OpenAPI description is true: requests made from it, good and bad, never find an error of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from megalith.serve.http.app import describe

from .http_client import served

schemathesis = pytest.importorskip("schemathesis", reason="the dev extra is not installed")


def description() -> dict[str, Any]:
    """What /openapi.json says."""

    async def run() -> Any:
        async with served() as server:
            return (await server.client.get("/openapi.json")).json()

    found: dict[str, Any] = asyncio.run(run())
    return found


def test_all_parts_that_it_speaks_of_are_there() -> None:
    found = description()
    assert {"/api", "/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(
        found["paths"]
    )
    text = json.dumps(found)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= set(found["components"]["schemas"])
    assert "put" in found["paths"]["/api"] and "post" not in found["paths"]["/api"]
    assert describe


async def _ask_all(cases: list[Any]) -> list[tuple[Any, httpx.Response]]:
    async with served() as server:
        return [(case, await _ask(server.client, case)) for case in cases]


async def _ask(client: httpx.AsyncClient, case: Any) -> httpx.Response:
    body = case.body if isinstance(case.body, (dict, list, str, int, float, bool, type(None))) else None
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    path = case.formatted_path
    headers = {"content-type": "application/json"}
    if case.method in ("GET", "HEAD"):
        return await client.request(case.method, httpx.URL(path).raw_path.decode())
    return await client.request(case.method, path, content=content, headers=headers)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(
    ("path", "method"), [("/api", "PUT"), ("/v1/completions", "POST"), ("/v1/chat/completions", "POST")]
)
def test_requests_made_from_it_never_break_the_server(path: str, method: str, mode: str) -> None:
    schema = schemathesis.openapi.from_dict(description())
    operation = schema[path][method]
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    seen: list[Any] = []

    @given(case=strategy)
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def collect(case: Any) -> None:
        seen.append(case)

    collect()
    assert seen
    answers = asyncio.run(_ask_all(seen))
    for case, answer in answers:
        assert answer.status_code < 500, (case.body, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
