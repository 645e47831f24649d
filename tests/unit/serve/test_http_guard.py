"""The gate: hosts, origins, keys, types and sizes; what the server does under load, when it stops and when it fails."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import math
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from megalith.cli.serve import _server_parser
from megalith.errors import PeerError
from megalith.serve.engine import Limits as EngineLimits
from megalith.serve.http.errors import BadJson, printable, read_json
from megalith.serve.http.guard import PAGE
from megalith.serve.http.settings import Limits, ServerSettings
from megalith.serve.runner import Batch

from ...fake_runner import FakeRunner
from .http_client import ALPHABET, Served, next_letter, served

JSON = {"content-type": "application/json"}
BODY = {"prompt": "a", "max_tokens": 2, "temperature": 0}


def ask(method: str, path: str, settings: ServerSettings | None = None, **request: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with served(settings=settings) as server:
            return await server.client.request(method, path, **request)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:5000", 200),
        ("localhost:5000", 200),
        ("LOCALHOST", 200),
        ("[::1]:5000", 200),
        ("evil.example:5000", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example@127.0.0.1", 403),
        ("10.0.0.1:5000", 403),
        ("", 403),
        ("[::1", 403),
        ("a" * 5000, 403),
    ],
)
def test_only_names_of_this_machine_address_a_server_without_a_key(host: str, status: int) -> None:
    assert ask("GET", "/v1/models", headers={"host": host}).status_code == status


def test_a_name_can_be_allowed() -> None:
    settings = ServerSettings(allowed_hosts=("gpu.example",))
    assert ask("GET", "/v1/models", settings, headers={"host": "gpu.example:5000"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:5000"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:8000"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-encoding": "gzip"}, 415),
    ],
)
def test_pages_of_others_cannot_ask(headers: dict[str, str], status: int) -> None:
    answer = ask("POST", "/v1/completions", content=json.dumps(BODY), headers={**JSON, **headers})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_an_origin_can_be_allowed() -> None:
    settings = ServerSettings(allowed_origins=("https://my.example",))
    headers = {"origin": "https://my.example"}
    answer = ask("POST", "/v1/completions", settings, json=BODY, headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://my.example")


def test_a_browser_may_ask_first_for_an_allowed_origin_alone() -> None:
    settings = ServerSettings(allowed_origins=("https://my.example",), api_keys=("s3cret",))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    answer = ask("OPTIONS", "/v1/completions", settings, headers={"origin": "https://my.example", **asked})
    assert answer.status_code == 204 and "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-origin"] == "https://my.example"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = ask("POST", "/v1/completions", settings, json=BODY, headers={"origin": "https://my.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://my.example")
    other = ask("OPTIONS", "/v1/completions", settings, headers={"origin": "https://evil.example", **asked})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["my.example", "*", "null", "https://my.example/page", "https://My.example"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    (violation,) = ServerSettings(allowed_origins=(origin,)).violations()
    assert "--allowed-origin" in violation and origin in violation


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic s3cret", 401),
        ("Bearer ", 401),
        ("Bearer s3cre", 401),
        ("Bearer s3cret", 200),
        ("bearer other", 200),
    ],
)
def test_a_key(given: str | None, status: int) -> None:
    settings = ServerSettings(host="0.0.0.0", api_keys=("s3cret", "other"))
    headers = {"host": "anything.example", **({"authorization": given} if given else {})}
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing"), ("PUT", "/api")):
        answer = ask(method, path, settings, headers=headers)
        assert (answer.status_code == 401) is (status == 401), (path, answer.text)
    assert ask("GET", "/health", settings, headers=headers).status_code == 200
    assert ask("GET", "/", settings, headers=headers).status_code == 200


def test_no_key_is_shown() -> None:
    async def run() -> str:
        async with served(settings=ServerSettings(api_keys=("s3cret",))) as server:
            for key in ("wrong1", "s3cret"):
                await server.client.put("/api", json={"prompts": 3}, headers={"authorization": f"Bearer {key}"})
            return "\n".join(server.lines)

    assert "PUT /api" in (lines := asyncio.run(run()))
    assert "s3cret" not in lines and "wrong1" not in lines


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (ServerSettings(host="0.0.0.0"), "--host 0.0.0.0"),
        (ServerSettings(host="::"), "--host ::"),
        (ServerSettings(host="gpu.example"), "--i-know-it-is-open"),
        (ServerSettings(port=70000), "--port 70000"),
        (ServerSettings(api_keys=("a b",)), "--api-key"),
        (ServerSettings(limits=Limits(waiting=0)), "--max-queue 0"),
        (ServerSettings(limits=Limits(request_seconds=math.nan)), "--request-timeout nan"),
        (ServerSettings(limits=Limits(drain_seconds=math.nan)), "--drain-timeout nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_would_be_open_or_senseless_are_refused(settings: ServerSettings, flag: str) -> None:
    assert any(flag in text for text in settings.violations())


def test_settings_that_are_private_or_knowingly_open_are_not() -> None:
    for settings in (
        ServerSettings(),
        ServerSettings(host="::1"),
        ServerSettings(host="0.0.0.0", api_keys=("k",)),
        ServerSettings(host="0.0.0.0", open_to_all=True),
    ):
        assert not settings.violations()


def test_a_body_is_bounded_whether_it_says_its_length_or_not() -> None:
    settings = ServerSettings(limits=Limits(body_bytes=1000))
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100_000):
            sent += 100
            yield b"x" * 100

    assert ask("POST", "/v1/completions", settings, content=b"x" * 1001, headers=JSON).status_code == 413
    assert ask("POST", "/v1/completions", settings, content=chunks(), headers=JSON).status_code == 413
    assert sent < 10_000
    huge = {**JSON, "content-length": "9" * 30}
    assert ask("POST", "/v1/completions", settings, content=b"{}", headers=huge).status_code == 413


def test_headers_are_bounded() -> None:
    assert ask("GET", "/health", headers={f"x-{number}": "a" for number in range(200)}).status_code == 431
    assert ask("GET", "/health", headers={"x": "a" * 40_000}).status_code == 431
    assert ask("GET", "/health", headers=[("host", "localhost"), ("host", "evil")]).status_code == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"temperature": Infinity}', "Infinity"),
        (b'{"prompt": "a", "prompt": "b"}', "prompt"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'"\\' + b'\\"' * 100_000, "not JSON"),
        (b'"' * 200_001, "not JSON"),
        (b'"' * 300_001, "texts"),
        (b"[]" * 10_000, "not JSON"),
        (b"[" + b"[]," * 100_000 + b"[]]", "lists"),
        (b"{" + b'"a":1,' * 100_000 + b"}", "fields"),
        (b"[" + b"1," * 2_000_000 + b"1]", "values"),
        (b"null", "no JSON object"),
    ],
    ids=range(17),
)
def test_what_is_no_json_is_refused_at_once(body: bytes, said: str) -> None:
    async def run() -> tuple[float, httpx.Response]:
        async with served() as server:
            await server.client.get("/health")
            began = time.thread_time()
            answer = await server.client.post("/v1/completions", content=body, headers=JSON)
            return time.thread_time() - began, answer

    seconds, answer = asyncio.run(run())
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert seconds < 0.25


def test_json_that_is_deep_only_in_its_texts() -> None:
    text = "[" * 500 + '\\"' + "{" * 500
    assert read_json(f'{{"a": "{text}"}}'.encode()) == {"a": "[" * 500 + '"' + "{" * 500}
    with pytest.raises(BadJson, match="twice"):
        read_json(b'{"x\\n": 1, "x\\n": 2}')
    assert printable("a\nb\x1b[0m\u202e", 20) == "a\\x0ab\\x1b[0m\\u202e"


def test_more_than_may_wait_is_told_when_to_come_back() -> None:
    async def run() -> list[httpx.Response]:
        limits = EngineLimits(max_num_seqs=2, max_waiting=4)
        async with served(limits=limits, context_length=40) as server:
            asked = [server.client.post("/v1/completions", json={**BODY, "max_tokens": 30}) for _ in range(60)]
            return list(await asyncio.gather(*asked))

    answers = asyncio.run(run())
    codes = [answer.status_code for answer in answers]
    # All may have come before the engine took the first: then only the waiting have a place.
    assert set(codes) == {200, 429} and codes.count(200) >= 4
    assert all(answer.headers["retry-after"] == "2" for answer in answers if answer.status_code == 429)


class _SlowRunner(FakeRunner):
    def run(self, batch: Batch) -> Any:
        time.sleep(0.01)
        return super().run(batch)


def slow() -> FakeRunner:
    return _SlowRunner(len(ALPHABET) + 1, 4000, num_blocks=1000, follow=lambda tokens: min(next_letter(tokens), 12))


async def _left(server: Served) -> None:
    """Wait until nothing is worked on."""
    for _ in range(200):
        stats = server.service.worker.stats()
        if not (stats.running or stats.waiting or stats.blocks_used):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(server.service.worker.stats())


@pytest.mark.parametrize("stream", [True, False])
def test_the_place_of_a_client_that_leaves_is_free_again(stream: bool) -> None:
    async def run() -> None:
        async with served(context_length=4000, runner=slow()) as server:
            body = json.dumps({**BODY, "max_tokens": 3000, "stream": stream}).encode()
            left, sent, reported = asyncio.Event(), list[Any](), list[Any]()
            asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
            scope = {
                **{
                    "type": "http",
                    "method": "POST",
                    "path": "/v1/completions",
                    "query_string": b"",
                    "headers": headers,
                },
                **{"client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"}},
                **{"server": ("127.0.0.1", 5000), "root_path": "", "raw_path": b"/v1/completions"},
            }
            asked = asyncio.ensure_future(server.app(scope, receive, send))
            for _ in range(300):
                if server.service.worker.stats().generated_tokens > 3:
                    break
                await asyncio.sleep(0.01)
            assert server.service.worker.stats().running == 1
            left.set()
            await asked
            at_leaving = server.service.worker.stats().generated_tokens
            await _left(server)
            assert server.service.worker.stats().generated_tokens <= at_leaving + 2
            assert server.service.metrics.disconnects == 1 and server.service.metrics.active == 0
            del asked
            gc.collect()
            assert reported == []  # a traceback on the console of each client that leaves

    asyncio.run(run())


def test_a_request_ends_in_time() -> None:
    async def run() -> tuple[httpx.Response, httpx.Response]:
        settings = ServerSettings(limits=Limits(request_seconds=0.2))
        async with served(settings=settings, context_length=4000, runner=slow()) as server:
            body = {**BODY, "max_tokens": 3000}
            whole = await server.client.post("/v1/completions", json=body)
            streamed = await server.client.post("/v1/completions", json={**body, "stream": True})
            await _left(server)
            return whole, streamed

    whole, streamed = asyncio.run(run())
    assert whole.status_code == 504 and "--request-timeout" in whole.json()["message"]
    assert '"finish_reason":"cancelled"' in streamed.text


def test_when_it_stops_there_is_no_new_work() -> None:
    async def run() -> list[httpx.Response]:
        async with served() as server:
            server.service.draining = True
            return [await server.client.post("/v1/completions", json=BODY), await server.client.get("/health")]

    assert [answer.status_code for answer in asyncio.run(run())] == [503, 503]


class _Dying(FakeRunner):
    def run(self, batch: Batch) -> Any:
        if len(self.batches) == 3:
            raise PeerError("a rank that shares the model does not answer")
        return super().run(batch)


def test_when_the_model_is_gone_everybody_is_told() -> None:
    async def run() -> list[httpx.Response]:
        runner = _Dying(len(ALPHABET) + 1, 64, follow=next_letter)
        async with served(runner=runner, blame=lambda: "rank 1 died") as server:
            bodies = [{**BODY, "max_tokens": 20}, {**BODY, "max_tokens": 20, "stream": True}]
            failed = asyncio.ensure_future(server.service.worker.failed())  # type: ignore[attr-defined]
            answers = await asyncio.gather(*(server.client.post("/v1/completions", json=body) for body in bodies))
            assert await asyncio.wait_for(failed, 5) == server.service.failure
            later = [await server.client.post("/v1/completions", json=BODY), await server.client.get("/health")]
            return [*answers, *later]

    whole, streamed, after, health = asyncio.run(run())
    assert whole.status_code == 503 and "rank 1 died" in whole.json()["message"]
    assert '"error"' in streamed.text and "rank 1 died" in streamed.text
    assert after.status_code == 503 and health.status_code == 503


def test_metrics_count_and_take_no_names_from_clients() -> None:
    async def run() -> str:
        async with served() as server:
            await server.client.post("/v1/completions", json=BODY)
            for number in range(50):
                await server.client.get(f"/made-up-{number}")
            await server.client.request("X" * 50, "/")
            answer = await server.client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            return answer.text

    text = asyncio.run(run())
    assert 'megalith_http_requests_total{method="POST",path="/v1/completions",status="200"} 1' in text
    assert 'path="other",status="404"} 50' in text
    assert "megalith_generated_tokens_total 2" in text
    assert 'megalith_samples_finished_total{reason="length"} 1' in text
    assert "made-up" not in text and "XXXX" not in text
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        assert line.startswith("# TYPE ") or (name and float(value) >= 0)


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_text() -> None:
    async def run() -> list[httpx.Response]:
        async with served() as server:
            return [await server.client.get(path) for path in ("/", "/page.js", "/page.css")]

    page, script, style = asyncio.run(run())
    for answer in (page, script, style):
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in answer.text and "https://" not in answer.text and "//cdn" not in answer.text
    assert "<script>" not in page.text and "onclick" not in page.text and "style=" not in page.text
    assert "innerHTML" not in script.text and "eval(" not in script.text


def test_the_libraries_of_the_page_are_those_that_are_stated(repository: Path) -> None:
    vendor = repository / "src/megalith/serve/http/page/vendor"
    rows = re.findall(
        r"^\| (\S+\.js) \|.*, (LICENSE\.\w+) \| (\w{64}) \|$", (vendor / "README.md").read_text(), re.MULTILINE
    )
    assert {f"/vendor/{name}" for name, _, _ in rows} == {path for path in PAGE if path.startswith("/vendor/")}
    for name, licence, stated in rows:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == stated
        assert (vendor / licence).stat().st_size > 1000
        answer = ask("GET", f"/vendor/{name}")
        assert (
            answer.content == (vendor / name).read_bytes()
            and "default-src" in answer.headers["content-security-policy"]
        )


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page/../../x", "//etc/passwd", "/a%00b"]
)
def test_no_path_leads_elsewhere(path: str) -> None:
    answer = ask("GET", path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_bounds_have_one_number_in_code_help_and_docs(repository: Path) -> None:
    flags = {
        "--max-queue": Limits().waiting,
        "--max-connections": Limits().connections,
        "--request-timeout": Limits().request_seconds,
        "--drain-timeout": Limits().drain_seconds,
    }
    assert EngineLimits().max_waiting == Limits().waiting
    help_text = " ".join(_server_parser().format_help().split())
    page = (repository / "docs/serving.md").read_text()
    for flag, value in flags.items():
        assert re.search(rf"{flag} \w+ [^()]*\(default: {value:g}\)", help_text), flag
        said = [line for line in page.splitlines() if f"`{flag}`" in line]
        assert any(re.search(rf"\b{value:g}\b", line) for line in said), flag
