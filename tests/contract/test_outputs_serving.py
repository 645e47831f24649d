"""What a server answers: routes, fields of requests and answers, errors, streams, Prometheus metrics, its console."""

from __future__ import annotations

import http.client
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import pytest
from tests.e2e.warm import Running, WarmProcess

from .outputs import Found, console_lines, fields_of, missing_lines, problems, recorded
from .test_outputs_commands import Tools

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("uvicorn", reason="the serve extra is not installed")

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
PROMPT = {"prompt": "the king", "max_tokens": 4, "temperature": 0}
MESSAGES = {"messages": [{"role": "user", "content": "the king"}], "max_tokens": 4, "temperature": 0}
MEGATRON = {"prompts": ["the king"], "tokens_to_generate": 4}
EXCHANGES: dict[str, tuple[str, str, Any]] = {
    "models": ("GET", "/v1/models", None),
    "one model": ("GET", "/v1/models/letters", None),
    "health": ("GET", "/health", None),
    "completion": ("POST", "/v1/completions", {**PROMPT, "model": "letters", "logprobs": 2}),
    "chat": ("POST", "/v1/chat/completions", {**MESSAGES, "logprobs": True, "top_logprobs": 2}),
    "megatron": ("PUT", "/api", MEGATRON),
    "megatron with logprobs": ("PUT", "/api", {**MEGATRON, "logprobs": True}),
    "megatron with beams": ("PUT", "/api", {**MEGATRON, "beam_width": 2}),
}
STREAMS = {
    "streamed completion": ("/v1/completions", {**PROMPT, "logprobs": 2}),
    "streamed chat": ("/v1/chat/completions", {**MESSAGES, "logprobs": True, "top_logprobs": 2}),
}
REFUSALS: dict[str, tuple[str, str, Any, dict[str, str]]] = {
    "no key": ("GET", "/v1/models", None, {"Authorization": ""}),
    "no JSON": ("POST", "/v1/completions", b"{", {}),
    "a field that is not known": ("POST", "/v1/completions", {**PROMPT, "colour": 1}, {}),
    "a field that is not supported": ("POST", "/v1/completions", {**PROMPT, "response_format": {}}, {}),
    "a missing field": ("POST", "/v1/completions", {}, {}),
    "a wrong value": ("POST", "/v1/completions", {**PROMPT, "temperature": -1}, {}),
    "another model": ("POST", "/v1/completions", {**PROMPT, "model": "other"}, {}),
    "a long prompt": ("POST", "/v1/completions", {"prompt": "a" * 600}, {}),
    "a wrong value of Megatron": ("PUT", "/api", {"prompts": []}, {}),
    "no such path": ("GET", "/nowhere", None, {}),
    "no such method": ("DELETE", "/v1/models", None, {}),
    "no content type": ("POST", "/v1/completions", PROMPT, {"Content-Type": "text/plain"}),
    "a large body": ("POST", "/v1/completions", b" " * 70000, {}),
    "a foreign page": ("POST", "/v1/completions", PROMPT, {"Origin": "http://elsewhere.example"}),
}
ROUTES = (
    *("GET /", "GET /page.js", "GET /page.css", "GET /favicon.ico", "GET /health", "GET /v1/health", "GET /metrics"),
    *(f"GET /vendor/{name}.js" for name in ("marked", "purify", "highlight")),
    *("GET /openapi.json", "GET /v1/models", "GET /v1/models/letters", "PUT /api"),
    *("POST /v1/completions", "POST /completions", "POST /v1/chat/completions", "POST /chat/completions"),
)


class Server(Tools):
    """A server of a tiny model with a key."""

    @cached_property
    def running(self) -> Running:
        (self.folder / "template.jinja").write_text(TEMPLATE)
        (self.folder / "key").write_text("secret\n")
        (self.folder / "key").chmod(0o600)
        flags = ("--served-model-name", "letters", "--chat-template", "template.jinja", "--api-key-file", "key")
        running = self.start(
            *("serve", self.gpt2, "--port", 0, *flags, "--max-body-bytes", 65536, "--device", "cpu"),
            OMP_NUM_THREADS="1",
        )
        running.wait_for("Running on http://127.0.0.1:", 120)
        return running

    def __exit__(self, *error: object) -> None:
        if "running" in self.__dict__:
            self.running.send(signal.SIGTERM)
            self.running.finish()
        super().__exit__(*error)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; returns status, headers by their names in lower case, and body."""
        found = re.search(r"Running on http://127\.0\.0\.1:(\d+)", self.running.text)
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        usual = {"Authorization": "Bearer secret", **({} if body is None else {"Content-Type": "application/json"})}
        connection.request(method, path, content, {**usual, **(headers or {})})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, data


def answers(server: Server) -> Found:
    """Fields of answers, whole and streamed."""
    found = {}
    for name, (method, path, body) in EXCHANGES.items():
        status, _, data = server.ask(method, path, body)
        assert status == 200, (name, data)
        found[f"{name}: {method} {path}"] = fields_of([json.loads(data)], ("choices[].logprobs.top_logprobs[]",))
    for name, (path, body) in STREAMS.items():
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        status, headers, data = server.ask("POST", path, streamed)
        assert status == 200, (name, data)
        *events, done, rest = data.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        found[f"{name}: POST {path}"] = {
            **fields_of(chunks, ("choices[].logprobs.top_logprobs[]",)),
            "(content-type)": headers["content-type"],
            "(each event)": "data: JSON",
            "(the last event)": "data: [DONE]",
        }
    return found


def errors(server: Server) -> Found:
    """Status, type and code of refusals, and the fields of what they say."""
    found, bodies = {}, []
    for name, (method, path, body, headers) in REFUSALS.items():
        status, answered, data = server.ask(method, path, body, headers)
        content = json.loads(data)
        bodies.append(content)
        error = content["error"]
        found[name] = {"status": str(status), "error.type": error["type"], "error.code": error["code"] or "null"}
        found[name] |= {
            f"({header})": answered[header] for header in ("www-authenticate", "allow") if header in answered
        }
    return {**found, "the body": fields_of(bodies)}


def routes(server: Server) -> Found:
    """Paths with the status and content type of an answer."""
    found = {}
    for route in ROUTES:
        method, path = route.split()
        body = None if method == "GET" else MEGATRON if path == "/api" else MESSAGES if "chat" in path else PROMPT
        status, headers, _ = server.ask(method, path, body)
        found[route] = {"status": str(status), "content-type": headers.get("content-type", "none")}
    return found


def requests(server: Server) -> Found:
    """Fields that requests may have, with their types, as /openapi.json describes them."""
    description = json.loads(server.ask("GET", "/openapi.json")[2])
    found = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            if body := operation.get("requestBody"):
                schema = body["content"]["application/json"]["schema"]
                found[f"{method.upper()} {path}"] = dict(_accepted(schema, description, ""))
    return found


def _accepted(schema: dict[str, Any], description: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    types: dict[str, set[str]] = {}
    for name, kind in _options(schema, description, path):
        types.setdefault(name, set()).add(kind)
    yield from ((name, "|".join(sorted(kinds))) for name, kinds in types.items() if name)


def _options(schema: dict[str, Any], description: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    if "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for option in schema.get("anyOf", ()):
        yield from _options(option, description, path)
    if "const" in schema or "enum" in schema:
        yield from ((path, repr(value)) for value in schema.get("enum", [schema.get("const")]))
    elif "type" in schema:
        yield path, schema["type"]
    for name, inner in schema.get("properties", {}).items():
        yield from _options(inner, description, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from _options(schema["items"], description, f"{path}[]")


def prometheus(server: Server) -> Found:
    """Names of metrics with their types, labels and bounds."""
    answers(server)
    text = server.ask("GET", "/metrics")[2].decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found: dict[str, dict[str, str]] = {name: {"(type)": kind} for name, kind in kinds.items()}
    for name, labels in re.findall(r"^(megalith_\w+?)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        owner = re.sub(r"_(bucket|sum|count)$", "", name)
        entry = found[owner if kinds.get(owner) == "histogram" else name]
        if owner != name:
            entry[name.removeprefix(owner)] = "series"
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            entry[f'le="{value}"' if label == "le" else label] = "bucket" if label == "le" else "label"
    return found


SUBJECTS: dict[str, Callable[[Server], Found]] = {
    "http_routes": routes,
    "http_requests": requests,
    "http_answers": answers,
    "http_errors": errors,
    "prometheus": prometheus,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcess) -> Iterator[Server]:
    """A running one."""
    with Server(tmp_path_factory.mktemp("server"), warm) as server:
        yield server


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_recorded_is_missing_or_of_another_type(server: Server, subject: str) -> None:
    found = SUBJECTS[subject](server)
    assert problems(recorded(subject), found, accepted=subject == "http_requests") == []


def test_the_lines_that_others_parse(server: Server) -> None:
    server.ask("PUT", "/api", MEGATRON)
    assert console_lines("serving") and missing_lines("serving", server.running.text) == [], server.running.text
