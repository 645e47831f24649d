"""OpenAI's endpoints: their answers, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalith.serve.engine import Limits as EngineLimits
from megalith.serve.http import openai
from megalith.serve.http.schemas import ChatRequest, CompletionRequest
from megalith.serve.http.service import Collected, Sample
from megalith.serve.http.settings import Limits, ServerSettings
from megalith.serve.request import TextStream, Token
from megalith.tokenizers.chat_template import ChatTemplate

from .http_client import ALPHABET, EOD, LetterTokenizer, served

GREEDY = {"temperature": 0}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def after_colon(tokens: Sequence[int]) -> int:
    """The alphabet from c on, then the end: an answer of a dialogue."""
    last = tokens[-1]
    return ALPHABET.index("c") if ALPHABET[last] == ":" else EOD if ALPHABET[last] == "f" else last + 1


def post(body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
    async def ask() -> tuple[int, Any]:
        async with served(**options) as server:
            response = await server.client.post(path, json=body)
            return response.status_code, response.json()

    return asyncio.run(ask())


def stream(body: Any, path: str = "/v1/completions", **options: Any) -> list[Any]:
    async def ask() -> list[Any]:
        async with served(**options) as server:
            response = await server.client.post(path, json={**body, "stream": True})
            assert response.status_code == 200, response.text
            assert response.headers["content-type"].startswith("text/event-stream")
            parts = response.text.split("\n\n")
            assert parts[-2:] == ["data: [DONE]", ""]
            return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

    return asyncio.run(ask())


def test_a_completion() -> None:
    status, found = post({"model": "letters", "prompt": "ab", "max_tokens": 3, **GREEDY})
    assert status == 200
    assert found["object"] == "text_completion" and found["model"] == "letters"
    choice = {"index": 0, "text": "cde", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert found["choices"] == [choice]
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_the_end_of_a_text_is_a_stop_that_is_not_shown() -> None:
    _, found = post({"prompt": "x", **GREEDY})
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("yz", "stop")
    assert found["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}])
def test_special_tokens_are_shown_only_where_asked_for(extra: dict[str, Any]) -> None:
    body = {"prompt": "x", "ignore_eos": True, "max_tokens": 5, **extra, **GREEDY}
    for more, text in (({}, "yzab"), ({"skip_special_tokens": False}, "yz<end>ab")):
        (choice,) = post({**body, **more})[1]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert "".join(part["choices"][0]["text"] for part in stream({**body, **more})) == text
        if extra:
            table = choice["logprobs"]
            assert table["tokens"] == ["y", "z", "<end>", "a", "b"], "each token has its row"
            assert table["text_offset"][-1] == text.index("b")


def test_a_special_token_that_is_not_shown_is_a_stop_text_nevertheless() -> None:
    for more in ({}, {"skip_special_tokens": False}):
        body = {"prompt": "x", "ignore_eos": True, "max_tokens": 5, "stop": ["<end>"], **more, **GREEDY}
        (choice,) = post(body)[1]["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("yz", "stop")


def test_stop_token_ids_end_an_answer_besides_its_usual_end() -> None:
    stop = {"stop_token_ids": [ALPHABET.index("d"), ALPHABET.index("q")], **GREEDY}
    for more in ({}, {"ignore_eos": True}):
        (choice,) = post({"prompt": "a", **stop, **more})[1]["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("bc", "stop")
        assert choice["stop_reason"] == ALPHABET.index("d")
    assert post({"prompt": "x", **stop})[1]["choices"][0]["text"] == "yz"


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"},
        {"top_k": 1, "temperature": 1.0},
        {"suffix": None, "tools": None, "guided_json": None, "response_format": None, "stop": None},
        {"top_k": -1, "min_p": 1.0, "temperature": 1.0},
    ],
    ids=str,
)
def test_fields_that_clients_send_by_habit_are_taken(extra: dict[str, Any]) -> None:
    status, found = post({"prompt": "a", "max_tokens": 3, **GREEDY, **extra})
    assert (status, found["choices"][0]["text"]) == (200, "bcd"), found


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": []},
        {"tools": None, "tool_choice": "auto", "reasoning_effort": "low", "verbosity": "low", "modalities": ["text"]},
        {"store": False, "metadata": {}, "user": "u", "service_tier": "default", "response_format": {"type": "text"}},
    ],
    ids=str,
)
def test_a_dialogue_takes_what_openais_client_sends(extra: dict[str, Any]) -> None:
    back = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, **back},
        {"role": "user", "content": "hello"},
    ]
    options = {"template": ChatTemplate(TEMPLATE), "follow": after_colon, "path": "/v1/chat/completions"}
    status, found = post({"messages": said, **GREEDY, **extra}, **options)
    assert status == 200, found
    assert found["usage"]["prompt_tokens"] == len("u:hello\na:\nu:hello\na:"), "null is an empty content"


TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call", "type": "function", "function": {"name": "rain", "arguments": '{"day": 2}'}}


def test_tools_calls_and_their_results_go_to_a_template_that_takes_them() -> None:
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "y"}], "tool_call_id": "call"},
    ]
    template = ChatTemplate(
        "{% for t in tools or [] %}{{ t.function.name }}:{{ t.function.parameters.type }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{{ '!' * c.function.arguments.day }}{% endfor %}"
        "{{ '\n' }}{% endfor %}a:"
    )
    options = {"template": template, "follow": after_colon, "path": "/v1/chat/completions"}
    dialogue = "u:x\na:call!!\nt:ycall\na:"
    for extra, before in (({}, "rain:object\n"), ({"tool_choice": "none"}, "")):
        status, found = post({"messages": said, "tools": [TOOL], **GREEDY, **extra}, **options)
        assert status == 200, found
        assert found["usage"]["prompt_tokens"] == len(before + dialogue)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools.0.function.strict"),
        ({"functions": [TOOL["function"]]}, "functions"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_json": None, "no_such_field": None}, "no_such_field"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
    ],
    ids=str,
)
def test_fields_that_would_change_the_answer_are_refused(extra: dict[str, Any], field: str) -> None:
    options = {"template": ChatTemplate(TEMPLATE), "follow": after_colon, "path": "/v1/chat/completions"}
    status, found = post({"messages": [{"role": "user", "content": "a"}], **extra}, **options)
    assert (status, found["error"]["param"]) == (400, field), found
    assert "did you mean" not in found["message"], "there is no like field"


def test_what_no_queue_can_take_is_no_reason_to_come_back() -> None:
    """128 prompts of 128 samples are refused for good; what fits an empty queue is served."""
    status, found = post({"prompt": ["a"] * 128, "n": 128, "max_tokens": 1})
    assert (status, found["error"]["param"], found["error"]["code"]) == (400, "prompt", "invalid_value")
    assert "16384" in found["message"] and "--max-queue" in found["message"]
    few = {"settings": ServerSettings(limits=Limits(waiting=4)), "limits": EngineLimits(max_waiting=4)}
    assert post({"prompt": ["a"] * 3, "n": 2, "max_tokens": 1}, **few)[0] == 400
    assert post({"prompt": ["a"] * 2, "n": 2, "max_tokens": 1}, **few)[0] == 200
    assert post({"prompt": "a", "n": 8, "max_tokens": 1}, **few)[0] == 200


def test_a_stop_text_is_not_shown_and_is_named() -> None:
    _, found = post({"prompt": "a", "stop": ["fg", "zz"], **GREEDY})
    choice = found["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bcde", "stop", "fg")


def test_prompts_in_all_their_forms_in_order() -> None:
    ids = [ALPHABET.index(letter) for letter in "ab"]
    for prompt, texts in (
        (["a", "m"], ["b", "n"]),
        (ids, ["c"]),
        ([ids, ids[:1]], ["c", "b"]),
    ):
        _, found = post({"prompt": prompt, "max_tokens": 1, **GREEDY})
        assert [choice["text"] for choice in found["choices"]] == texts
        assert [choice["index"] for choice in found["choices"]] == list(range(len(texts)))


def test_samples_differ_and_a_seed_repeats_them() -> None:
    body = {"prompt": ["a", "b"], "n": 3, "seed": 5, "max_tokens": 8}
    first, again = post(body)[1], post(body)[1]
    texts = [choice["text"] for choice in first["choices"]]
    assert len(texts) == 6 and len(set(texts)) > 2
    assert texts == [choice["text"] for choice in again["choices"]]
    assert [choice["index"] for choice in first["choices"]] == list(range(6))


def test_the_parts_of_a_character_have_one_offset() -> None:
    class Bytes:
        def decode(self, ids: Sequence[int]) -> str:
            return bytes(ids).decode("utf-8", "replace")

    service, data = SimpleNamespace(tokenizer=Bytes()), "n\u00e9\u65e5m".encode()
    whole = openai._LogprobsTable(cast(Any, service), 0)
    whole.add_prompt(list(data), None)
    assert whole.json["text_offset"] == [0, 1, 1, 2, 2, 2, 3] and whole.offset == 4
    stream, offset, found = TextStream(Bytes().decode), 0, []
    for byte in data:
        table = openai._LogprobsTable(cast(Any, service), 0, offset)
        table.add([Token(byte, "")], None, stream)
        found += table.json["text_offset"]
        offset = table.offset
    assert found == whole.json["text_offset"], "one by one as all at once"


def test_variables_of_a_template_may_have_any_name() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"self": 1}, "max_tokens": 1}
    status, _ = post(body, "/v1/chat/completions", template=ChatTemplate(TEMPLATE), follow=after_colon)
    assert status == 200


def test_log_probabilities_with_the_prompt_as_lm_eval_reads_them() -> None:
    body = {"prompt": "abq", "echo": True, "logprobs": 2, "max_tokens": 1, **GREEDY}
    choice = post(body)[1]["choices"][0]
    table = choice["logprobs"]
    assert choice["text"] == "abqr" and table["tokens"] == ["a", "b", "q", "r"]
    assert table["text_offset"] == [0, 1, 2, 3]
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    greedy = [
        max(top.values()) == own
        for own, top in list(zip(table["token_logprobs"], table["top_logprobs"], strict=True))[1:]
    ]
    assert greedy == [True, False, True]  # q does not follow b
    for token, own, top in list(zip(table["tokens"], table["token_logprobs"], table["top_logprobs"], strict=True))[1:]:
        assert top[token] == own, "the token itself is listed too, however unlikely"
    assert len(table["top_logprobs"][2]) == 3 and len(table["top_logprobs"][1]) == 2
    scored = post({**body, "max_tokens": 0})[1]["choices"][0]
    assert scored["text"] == "abq" and scored["logprobs"]["token_logprobs"] == table["token_logprobs"][:3]


def test_a_prompt_of_one_token_has_no_score_and_one_that_was_never_read_none_either() -> None:
    body = {"prompt": ["a", "bcd"], "echo": True, "logprobs": 1, "max_tokens": 1, **GREEDY}
    first, second = post(body)[1]["choices"]
    assert first["logprobs"]["tokens"] == ["a", "b"] and first["logprobs"]["token_logprobs"][0] is None
    assert None not in second["logprobs"]["token_logprobs"][1:]

    async def ended_before_it_was_read() -> Any:
        async with served() as server:
            made = await openai.plan(server.service, CompletionRequest(prompt="bcd", echo=True, logprobs=1))
            return made._choice(0, Sample(), Collected([]))

    choice = asyncio.run(ended_before_it_was_read())
    assert choice["text"] == "bcd"
    assert choice["logprobs"]["token_logprobs"] == [None, None, None]


@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 2, "seed": 3, "echo": True}]
)
def test_a_stream_adds_up_to_the_whole_answer(extra: dict[str, Any]) -> None:
    body = {"prompt": ["uv", "c"], "max_tokens": 6, "stop": "gh", **(extra if "n" in extra else {**GREEDY, **extra})}
    whole = post(body)[1]
    parts = stream({**body, "stream_options": {"include_usage": True, "include_obfuscation": False}})
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        tables = [part["logprobs"] for part in mine if part["logprobs"]]
        for name in choice["logprobs"] or {}:
            assert [row for table in tables for row in table[name]] == choice["logprobs"][name]


def test_a_dialogue() -> None:
    options = {"template": ChatTemplate(TEMPLATE), "follow": after_colon, "path": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2, **GREEDY}
    status, found = post(body, **options)
    assert status == 200, found
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "cdef", "refusal": None}
    assert choice["finish_reason"] == "stop" and found["object"] == "chat.completion"
    assert found["usage"]["prompt_tokens"] == len("u:hello\na:")
    rows = choice["logprobs"]["content"]
    assert [row["token"] for row in rows] == ["c", "d", "e", "f", "<end>"]
    assert rows[0]["bytes"] == [ord("c")] and len(rows[0]["top_logprobs"]) == 2
    parts = stream(body, **options)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "cdef"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_likely_tokens_of_a_dialogue_are_spelt_as_the_token_itself() -> None:
    """Some tokenizers drop a space at the beginning of a text: a token alone has another text than where it stands."""

    class Words(LetterTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids).removeprefix(" ")

    class Spoken:
        tokenizer = Words()
        body = ChatRequest(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2)

    space, letter = ALPHABET.index(" "), ALPHABET.index("b")
    tokens = [Token(space, "", -0.1, ((space, -0.1), (letter, -2.0))), Token(space, "", -0.1, ((space, -0.1),))]
    for before in (letter, None):
        found = openai._Chat(cast(Any, Spoken), Spoken.body, [], {}, {})._logprobs(tokens, before)
        assert found is not None
        for row in found["content"]:
            assert row["token"] == row["top_logprobs"][0]["token"]
    assert found["content"][0]["top_logprobs"][1]["token"] == "b"


def test_a_dialogue_without_a_template_says_what_to_do() -> None:
    status, found = post({"messages": [{"role": "user", "content": "a"}]}, path="/v1/chat/completions")
    assert (status, found["error"]["code"]) == (400, "no_chat_template")
    assert "--chat-template" in found["error"]["message"] and "/v1/completions" in found["error"]["message"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str, said: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    status, found = post(body, path="/v1/chat/completions", template=ChatTemplate(source))
    assert status == 400 and said in found["message"].lower()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a" * 64}, "prompt"),
        ({"prompt": "a" * 60, "max_tokens": 5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_tokens": 3.5}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 10**6}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 4}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * 10**5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": {"a": "b"}}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ({"suffix": "a"}, "suffix"),
        ({"temperatur": 1}, "temperatur"),
        ({"a\n\u001b[31m": 1}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named(body: dict[str, Any], field: str | None) -> None:
    asked = body if not body or "prompt" in body else {"prompt": "a", **body}

    async def ask() -> tuple[int, Any]:
        async with served() as server:
            content = json.dumps(asked).encode()
            response = await server.client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            return response.status_code, response.json()

    status, found = asyncio.run(ask())
    assert status == 400
    assert set(found["error"]) == {"message", "type", "param", "code"}
    if field is not None:
        assert found["error"]["param"] == field
        assert field.split(".")[0] in found["error"]["message"]
    assert found["error"]["message"].isprintable()


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ([-1], "prompt[0]: -1"),
        ([3, 4, -7], "prompt[2]: -7"),
        ([[1], [2, -9]], "prompt[1][1]: -9"),
        (["a", ""], "prompt[1]: ''"),
        (["a", 1], "prompt[1]: 1"),
        ([1.5], "prompt[0]: 1.5"),
    ],
    ids=str,
)
def test_the_item_of_a_prompt_that_is_wrong_is_named(prompt: Any, place: str) -> None:
    status, found = post({"prompt": prompt})
    assert (status, found["error"]["param"]) == (400, "prompt")
    assert found["message"].startswith(place)


def test_a_near_name_is_guessed() -> None:
    _, found = post({"prompt": "a", "max_token": 3})
    assert "max_tokens?" in found["error"]["message"]


def test_models() -> None:
    async def ask() -> list[Any]:
        async with served(settings=ServerSettings(model_name="letters")) as server:
            names = ("", "/letters", "/other", "/../../etc/passwd", "/%2e%2e%2fetc", "/a%00b")
            return [await server.client.get(f"/v1/models{name}") for name in names]

    listed, one, *others = asyncio.run(ask())
    assert listed.json()["data"][0]["id"] == one.json()["id"] == "letters"
    assert one.json()["max_model_len"] == 64
    assert [answer.status_code for answer in others] == [404] * 4
    assert post({"prompt": "a", "model": "gpt-4"})[0] == 404


def test_the_tokenizer_of_the_double_is_one() -> None:
    tokenizer = LetterTokenizer()
    assert tokenizer.decode(tokenizer.encode(ALPHABET)) == ALPHABET
