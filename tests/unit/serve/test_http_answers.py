"""The server of a model that reads prompts with an encoder: texts of answers, without the prompt before them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from megalith.tokenizers.chat_template import ChatTemplate

from .http_client import ALPHABET, EOD, same_text, served

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def ask(body: Any, *, method: str = "POST", path: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
    async def asked() -> tuple[int, Any]:
        async with served(answers=True, follow=same_text, **options) as server:
            response = await server.client.request(method, path, json=body)
            return response.status_code, response.json()

    return asyncio.run(asked())


def stream(body: Any) -> list[Any]:
    async def asked() -> str:
        async with served(answers=True, follow=same_text) as server:
            return (await server.client.post("/v1/completions", json={**body, "stream": True})).text

    parts = [part.removeprefix("data: ") for part in asyncio.run(asked()).split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def test_answers_of_texts_and_ids() -> None:
    body = {"prompt": ["hello you", "abc"], "max_tokens": 20, "temperature": 0, "logprobs": 1, "n": 2}
    status, found = ask(body)
    assert status == 200, found
    assert [choice["text"] for choice in found["choices"]] == ["hello you"] * 2 + ["abc"] * 2
    assert {choice["finish_reason"] for choice in found["choices"]} == {"stop"}
    assert found["choices"][2]["logprobs"]["tokens"] == ["a", "b", "c", "<end>"]
    assert found["choices"][2]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert found["usage"] == {"prompt_tokens": 12, "completion_tokens": 28, "total_tokens": 40}
    ids = [ALPHABET.index(letter) for letter in "abc"]
    assert ask({"prompt": ids, "temperature": 0})[1]["choices"][0]["text"] == "abc"
    assert ask({"prompt": "abcd", "stop": "c", "temperature": 0})[1]["choices"][0]["text"] == "ab"


def test_a_stream_gives_the_answer_alone() -> None:
    parts = stream({"prompt": "hello", "temperature": 0, "logprobs": 0, "stream_options": {"include_usage": True}})
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == "hello"
    assert parts[-1]["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"echo": True}, "echo", "echo"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: 0 "),
        ({"max_tokens": 65}, "max_tokens", "65 is more than the 64 "),
        ({"prompt": "a" * 65}, "prompt", " 64 tokens"),
    ],
)
def test_what_no_answer_has_is_refused(body: dict[str, Any], field: str, said: str) -> None:
    status, found = ask({"prompt": "a", "temperature": 0, **body})
    assert (status, found["error"]["param"]) == (400, field) and said in found["message"]


def test_a_prompt_and_an_answer_have_room_of_their_own() -> None:
    status, found = ask({"prompt": "a" * 64, "max_tokens": 64, "temperature": 0})
    assert status == 200 and found["choices"][0]["text"] == "a" * 64


def put(body: Any, **options: Any) -> tuple[int, Any]:
    return ask({"top_k": 1, **body}, method="PUT", path="/api", **options)


def test_megatrons_endpoint_gives_answers_without_prompts() -> None:
    status, found = put({"prompts": ["hello", "ab"], "tokens_to_generate": 4, "logprobs": True})
    assert status == 200, found
    assert found["text"] == ["hell", "ab<end>"] and found["segments"][1] == ["a", "b", "<end>"]
    assert [len(row) for row in found["logprobs"]] == [4, 3]
    assert put({"prompts": ["ab" * 30], "tokens_to_generate": 60})[0] == 200
    status, found = put({"prompts": ["abc"], "tokens_to_generate": 3, "beam_width": 1, "stop_token": EOD})
    assert status == 200 and found["text"] == ["abc"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompts": ["a"], "add_BOS": True}, "add_BOS: the model answers the prompt"),
        ({"prompts": ["a" * 65]}, "65 > 64 tokens"),
        ({"prompts": ["a"], "tokens_to_generate": 65}, "65 > 64 tokens of an answer"),
        ({"prompts": ["a"], "tokens_to_generate": 0, "logprobs": True}, "tokens_to_generate: 0 is not 1 or more"),
    ],
)
def test_megatrons_endpoint_refuses_what_no_answer_has(body: dict[str, Any], said: str) -> None:
    status, found = put(body)
    assert status == 400 and said in found["message"]


def test_a_dialogue_is_read_by_its_template() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "logprobs": True}
    status, found = ask(body, path="/v1/chat/completions", template=ChatTemplate(TEMPLATE))
    assert status == 200, found
    assert found["choices"][0]["message"]["content"] == "hello"
    assert [row["token"] for row in found["choices"][0]["logprobs"]["content"]] == [*"hello", "<end>"]


def test_the_list_of_models_says_that_prompts_are_answered() -> None:
    assert ask(None, method="GET", path="/v1/models")[1]["data"][0]["continues_prompts"] is False
