"""`PUT /api` as Megatron's users know it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from megalith.serve.http.settings import Defaults

from .http_client import EOD, LetterTokenizer, Served, served

GREEDY = {"top_k": 1}


def put(body: Any, **options: Any) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        async with served(**options) as server:
            response = await server.client.put("/api", json=body)
            return response.status_code, response.json()

    return asyncio.run(ask())


def test_the_curl_of_the_first_users() -> None:
    async def ask(server: Served) -> bytes:
        headers = {"Content-Type": "application/json; charset=UTF-8"}
        content = b'{"prompts":["hello abc"], "tokens_to_generate":1, "top_k":1}'
        return (await server.client.put("/api", content=content, headers=headers)).content

    async def run() -> bytes:
        async with served() as server:
            return await ask(server)

    assert asyncio.run(run()) == (
        b'{"logprobs":null,"segments":[["h","e","l","l","o"," ","a","b","c","d"]],"text":["hello abcd"]}'
    )


def test_defaults_are_megatrons() -> None:
    status, found = put({"prompts": ["a"]}, context_length=65)
    assert status == 200
    assert len(found["segments"][0]) <= 65 and found["logprobs"] is None
    assert put({"prompts": ["aa"]}, context_length=65)[0] == 400  # 64 tokens are asked for


def test_texts_end_at_one_length_or_at_the_end_of_the_text_which_is_shown() -> None:
    status, found = put({"prompts": ["a", "uvw"], "tokens_to_generate": 4, **GREEDY})
    assert status == 200
    assert found["text"] == ["abcdefg", "uvwxyz<end>"]
    assert found["segments"][1][-1] == "<end>"


def test_log_probabilities_are_those_of_all_tokens_but_the_first() -> None:
    _, found = put({"prompts": ["abc", "b"], "tokens_to_generate": 2, "logprobs": True, **GREEDY})
    assert [len(row) for row in found["logprobs"]] == [len(row) - 1 for row in found["segments"]]
    assert all(value < 0.0 for row in found["logprobs"] for value in row)


def test_no_tokens_only_score_the_prompt() -> None:
    status, found = put({"prompts": ["abc"], "tokens_to_generate": 0, "logprobs": True})
    assert status == 200
    assert found["text"] == ["abc"] and len(found["logprobs"][0]) == 2


def test_a_beginning_of_text_is_the_end_of_a_document() -> None:
    _, found = put({"prompts": [""], "tokens_to_generate": 2, "add_BOS": True, **GREEDY})
    assert found["text"] == ["<end>ab"]


def test_without_an_end_of_document_texts_have_no_beginning_and_end_at_their_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LetterTokenizer, "eod", None)
    status, found = put({"prompts": ["a"], "tokens_to_generate": 2, "add_BOS": True, **GREEDY})
    assert (status, found["error"]["param"]) == (400, "add_BOS")
    _, found = put({"prompts": ["yz"], "tokens_to_generate": 3, **GREEDY})
    assert len(found["segments"][0]) == 5


def test_an_end_of_line_ends_a_text_in_place_of_the_documents_end() -> None:
    letters = iter([EOD, 5, 0, 6])
    _, found = put(
        {"prompts": ["a"], "tokens_to_generate": 4, "stop_on_eol": True, **GREEDY}, follow=lambda _: next(letters)
    )
    assert found["text"] == ["a<end>b\n"]


def test_two_ends_of_lines_in_a_row() -> None:
    script = {1: 0, 2: 5, 3: 0, 4: 0, 5: 7}
    _, found = put(
        {"prompts": ["a"], "tokens_to_generate": 6, "stop_on_double_eol": True, **GREEDY},
        follow=lambda tokens: script.get(len(tokens), 8),
    )
    assert found["text"] == ["a\nb\n\n"]


def test_the_end_of_the_prompts_line_is_the_first_of_two() -> None:
    body = {"prompts": ["a\n"], "tokens_to_generate": 3, "stop_on_double_eol": True, **GREEDY}
    assert put(body, follow=lambda _: 0)[1]["text"] == ["a\n\n"]


def test_no_newline_after_a_colon() -> None:
    body = {"prompts": ["a:"], "tokens_to_generate": 1, **GREEDY}
    assert put(body, follow=lambda _: 0)[1]["text"] == ["a:\n"]
    assert put({**body, "prevent_newline_after_colon": True}, follow=lambda _: 0)[1]["text"] != ["a:\n"]


def test_a_seed_repeats_an_answer_and_tells_equal_prompts_apart() -> None:
    body = {"prompts": ["a", "a", "a"], "tokens_to_generate": 12, "random_seed": 7}
    first, again = put(body)[1], put(body)[1]
    assert first == again
    assert len(set(first["text"])) > 1


def test_beams_come_with_scores_best_first() -> None:
    status, found = put({"prompts": ["a"], "tokens_to_generate": 3, "beam_width": 3, "stop_token": EOD})
    assert status == 200
    assert set(found) == {"scores", "segments", "text"}
    assert len(found["text"]) == 3 and found["text"][0] == "abcd"
    assert found["scores"] == sorted(found["scores"], reverse=True)


def test_defaults_of_the_launch() -> None:
    defaults = Defaults(tokens_to_generate=3, top_k=1)
    assert put({"prompts": ["a"]}, defaults=defaults)[1]["text"] == ["abcd"]
    assert put({"prompts": ["aaa"]}, defaults=Defaults(top_k=1, length=5))[1]["text"] == ["aaabc"]
    assert put({"prompts": ["a"], "top_p": 0.5}, defaults=defaults)[0] == 200  # the other one is off then


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({}, "prompts", "prompts argument required"),
        ({"prompts": ["a"], "max_len": 3}, "max_len", "Replace with tokens_to_generate"),
        ({"prompts": ["a"], "sentences": ["a"]}, "sentences", "Replace with prompts"),
        ({"prompts": "a"}, "prompts", "not a list of strings"),
        ({"prompts": []}, "prompts", "prompts is empty"),
        ({"prompts": ["a"] * 129}, "prompts", "Maximum number of prompts is 128"),
        ({"prompts": [1]}, "prompts", "not a list of strings"),
        ({"prompts": [""]}, "prompts", "Empty prompts require add_BOS=true"),
        ({"prompts": ["A"]}, "prompts", "has no id"),
        ({"tokens_to_generate": -1}, "tokens_to_generate", "greater than or equal to 0"),
        ({"tokens_to_generate": True}, "tokens_to_generate", "must be an integer"),
        ({"tokens_to_generate": 0}, "tokens_to_generate", "implies logprobs=True"),
        ({"tokens_to_generate": 10**9}, "tokens_to_generate", "longer than allowed"),
        ({"logprobs": 1}, "logprobs", "must be a boolean value"),
        ({"temperature": 0}, "temperature", "positive number less than or equal to 100.0"),
        ({"temperature": 1e308}, "temperature", "positive number less than or equal to 100.0"),
        ({"temperature": True}, "temperature", "positive number"),
        ({"top_k": 1.0}, "top_k", "must be an integer"),
        ({"top_k": 1001}, "top_k", "less than or equal to 1000"),
        ({"top_p": 1}, "top_p", "must be a positive float"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1.0"),
        ({"top_p": 0.5, "top_k": 3}, "top_p", "cannot set both top-k and top-p"),
        ({"top_p_decay": 0.5}, "top_p_decay", "cannot be set without top_p"),
        ({"top_p": 0.5, "top_p_decay": 2.0}, "top_p_decay", "less than or equal to 1.0"),
        ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound", "less than top_p"),
        ({"add_BOS": "yes"}, "add_BOS", "must be a boolean value"),
        ({"random_seed": -1}, "random_seed", "positive integer"),
        ({"random_seed": 10**30}, "random_seed", "positive integer"),
        ({"no_log": 0}, "no_log", "must be a boolean value"),
        ({"beam_width": 0}, "beam_width", "must be an integer"),
        ({"beam_width": 100, "tokens_to_generate": 2}, "beam_width", "half of the vocabulary"),
        ({"prompts": ["a", "b"], "beam_width": 3}, "prompts", "batch size must be 1"),
        ({"beam_width": 2, "length_penalty": 1}, "length_penalty", "must be a float"),
        ({"beam_width": 2, "stop_token": 500, "tokens_to_generate": 2}, "stop_token", "vocabulary"),
        ({"beam_width": 2, "tokens_to_generate": 64}, "tokens_to_generate", "too large"),
        ([], "body", "no JSON object"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_status_400(body: Any, field: str, text: str) -> None:
    asked = {"prompts": ["a"], **body} if isinstance(body, dict) and body and "prompts" not in body else body
    status, found = put(asked)
    assert (status, found["error"]["param"]) == (400, field)
    assert text in found["message"] == found["error"]["message"]


def test_too_many_tokens_for_one_request() -> None:
    status, found = put({"prompts": ["a"] * 4, "tokens_to_generate": 9}, defaults=Defaults(max_tokens=30))
    assert (status, found["message"][:42]) == (400, "Too many tokens.  40 is greater than 30; pr"[:42])


def test_the_console_shows_who_asked_what_and_when_on_lines_of_its_own() -> None:
    async def run() -> list[str]:
        async with served() as server:
            await server.client.put(
                "/api", json={"prompts": ["a"], "tokens_to_generate": 2, "x": "\x1b[31mred\r\nstart time: lie"}
            )
            await server.client.put("/api", json={"prompts": ["secret"], "no_log": True})
            await server.client.get("/%0d%0afake%1b[31m")
            return server.lines

    lines = asyncio.run(run())
    assert lines[0] == "request IP: 127.0.0.1"
    assert json.loads(lines[1])["prompts"] == ["a"]
    assert lines[2].startswith("start time:  20")
    assert '"PUT /api HTTP/1.1" 200' in lines[3]
    assert not any("secret" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_only_put() -> None:
    async def run() -> int:
        async with served() as server:
            return (await server.client.post("/api", json={"prompts": ["a"]})).status_code

    assert asyncio.run(run()) == 405
