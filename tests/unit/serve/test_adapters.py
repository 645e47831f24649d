"""LoRA adapters beside one model: each row of a batch has its own, by name in the API, loaded and unloaded meanwhile.

Models, adapters and their logits are those that PEFT wrote (tests/parity/peft_writer.py).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.assemble.adapters import Adapters, adapter_reader, adapter_template
from megalith.assemble.trained import Trained, load_trained
from megalith.cli.main import main
from megalith.config.groups import TokenizerConfig
from megalith.distributed.context import ParallelContext
from megalith.errors import CheckpointError, ConfigError
from megalith.serve.engine import Engine
from megalith.serve.http.adapters import AdapterNames
from megalith.serve.http.settings import ServerSettings
from megalith.serve.model_runner import ModelRunner, runner_of
from megalith.serve.request import Request, RequestError, Sampling
from megalith.serve.runner import Batch, Chunk
from megalith.tokenizers.chat_template import ChatFormat

from .http_client import Served, served
from .models import collect, tokens_of

FIXTURES = Path(__file__).parents[2] / "parity" / "fixtures" / "lora"
FAMILIES = ("llama", "qwen2", "qwen3")


def _load_base(family: str) -> Trained:
    tokenizer = TokenizerConfig("NullTokenizer", vocab_size=47)
    return load_trained(FIXTURES / family / "base", torch.device("cpu"), tokenizer=tokenizer)


_trained = cache(_load_base)


def _reader(family: str) -> Any:
    return adapter_reader(_trained(family), FIXTURES / family / "base", ParallelContext.solo())


def _runner(family: str, **options: Any) -> ModelRunner:
    runner = runner_of(_load_base(family).gpt, 64, **options)
    assert isinstance(runner, ModelRunner)
    return runner


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_its_adapters_and_others_none(family: str, packs: bool) -> None:
    golden = load_file(FIXTURES / family / "golden.safetensors")
    tokens, wanted = golden["tokens"][:, :-1].tolist(), golden["logits"]
    number = len(tokens[0])
    runner = _runner(family, packs_weights=packs, adapts=True)
    plain = Batch([Chunk(tokens[1], 0, [1, 2], num_logits=number)])
    (alone,) = runner.run(plain).split(number)
    runner.add_adapters(5, _reader(family)(FIXTURES / family / "adapter"))
    rows = [(tokens[0], 5), (tokens[1], 0), (tokens[1], 5), (tokens[0], 9)]
    found = runner.run(
        Batch([Chunk(ids, 0, [3 * i, 3 * i + 1], number, adapter=one) for i, (ids, one) in enumerate(rows)])
    ).split(number)
    scale = float(wanted.abs().max())
    assert (found[0] - wanted[0]).abs().max() < 1e-6 * scale
    assert (found[2] - wanted[1]).abs().max() < 1e-6 * scale
    assert (found[1] - alone).abs().max() < 1e-6 * scale and (found[1] - found[2]).abs().max() > 0.01 * scale
    runner.remove_adapters(5)
    assert torch.equal(runner.run(plain), alone)


def test_a_server_without_adapters_has_the_products_of_before() -> None:
    runner = _runner("qwen3")
    assert not runner._banks
    assert all(getattr(module, "adapter", None) is None for module in runner.model.modules())


def _halved(adapters: Adapters) -> Adapters:
    """Other adapters of the same model."""
    for adapter in adapters.values():
        adapter.lora_B.weight.mul_(-0.5)
    return adapters


def _engine(family: str = "qwen3") -> Engine:
    engine, read = Engine(_runner(family, adapts=True), _trained(family).tokenizer), _reader(family)
    engine.add_adapters(1, read(FIXTURES / family / "adapter"))
    engine.add_adapters(2, _halved(read(FIXTURES / family / "adapter")))
    return engine


def _request(prompt: tuple[int, ...], adapter: int, **options: Any) -> Request:
    return Request(prompt, 12, Sampling(0.0), stop_ids=(), adapter=adapter, **options)


def test_a_mixed_batch_answers_as_each_alone_and_blocks_of_others_are_not_found() -> None:
    prompt = tuple(range(3, 23))  # more than a block, which is in the prefix cache after the first request
    requests = [_request(prompt, number) for number in (0, 1, 2, 1, 0, 2)]
    alone = [tokens_of(collect(_engine(), [request])[0]) for request in requests[:3]]
    assert len({tuple(ids) for ids in alone}) == 3
    engine = _engine()
    together = [tokens_of(events) for events in collect(engine, requests, gaps=[0, 3, 1, 2, 3, 0])]
    assert together == [*alone, alone[1], alone[0], alone[2]]
    assert engine.stats().reused_tokens == 3 * 16, "only of a request with the same adapters"
    searched = collect(engine, [_request(prompt, 1, beam_width=3), _request(prompt, 2, n=2)])
    assert len(searched[0]) == 2 and tokens_of(searched[1], 1) == alone[2]


def test_unloaded_adapters_serve_what_runs_and_nothing_else() -> None:
    prompt = tuple(range(3, 9))
    (wanted,) = collect(_engine(), [_request(prompt, 1)])
    engine, found = _engine(), []
    handle = engine.submit(_request(prompt, 1))
    for _ in range(3):
        found += [event for owner, event in engine.step() if owner is handle]
    engine.remove_adapters(1)
    with pytest.raises(RequestError) as refused:
        engine.submit(_request(prompt, 1))
    assert refused.value.field == "adapter"
    while engine.has_work:
        found += [event for _, event in engine.step()]
    assert tokens_of(found) == tokens_of(wanted)
    engine.step()
    assert isinstance(engine.runner, ModelRunner)
    assert {number for bank in engine.runner._banks.values() for number in bank.factors} == {2}


def test_adapters_of_another_model_and_full_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="qwen3"):
        _reader("llama")(FIXTURES / "qwen3" / "adapter")
    with pytest.raises(CheckpointError, match="no adapters"):
        _reader("llama")(FIXTURES / "llama" / "base")
    folder = tmp_path / "wide"
    shutil.copytree(FIXTURES / "llama" / "adapter", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(FIXTURES / "llama" / "base")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "down_proj.lora_A" in name)
    save_file({**tensors, name: torch.zeros(tensors[name].shape[0], 7)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lora_A"):
        _reader("llama")(folder)
    with pytest.raises(ConfigError, match="--lora"):
        beside = load_trained(FIXTURES / "llama" / "adapter", torch.device("cpu"),
                              tokenizer=TokenizerConfig("NullTokenizer", vocab_size=47))  # fmt: skip
        adapter_reader(beside, FIXTURES / "llama" / "adapter", ParallelContext.solo())


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--lora", "a"], "--lora a"),
        (["--lora", "a=x", "a=y"], "--lora"),
        (["--lora", "a b=x"], "--lora"),
        (["--lora-dir", "nowhere"], "--lora-dir"),
        (["--lora-dir", ".", "--host", "0.0.0.0", "--i-know-it-is-open"], "--lora-dir"),
    ],
)
def test_flags_that_cannot_be_are_refused(words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(FIXTURES / "llama" / "base"), *words]) == 2
    assert flag in capsys.readouterr().err


# --- over HTTP ---


@asynccontextmanager
async def _server(folder: Path | None) -> AsyncIterator[Served]:
    """A server of the model `letters` with the adapters `first`."""
    runner: Any = _runner("qwen3", adapts=True)
    runner.add_adapters(1, _reader("qwen3")(FIXTURES / "qwen3" / "adapter"))
    settings = ServerSettings(model_name="letters")
    async with served(settings=settings, runner=runner, tokenizer=_trained("qwen3").tokenizer) as server:
        server.service.worker._engine.adapters.add(1)
        server.service.adapters = AdapterNames({"first": 1}, folder, _reader("qwen3"))
        yield server


def _ask(folder: Path | None, *posts: tuple[str, dict[str, Any]]) -> list[tuple[int, Any]]:
    async def ask() -> list[tuple[int, Any]]:
        found = []
        async with _server(folder) as server:
            for path, body in posts:
                response = await (server.client.post(path, json=body) if body else server.client.get(path))
                plain = response.headers["content-type"].startswith("text/plain")
                found.append((response.status_code, response.text if plain else response.json()))
        return found

    return asyncio.run(ask())


def _text(model: str | None) -> tuple[str, dict[str, Any]]:
    ids = list(range(3, 9))
    return "/v1/completions", {"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "model": model}


def _load(name: str, path: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **more}


def _unload(name: str) -> tuple[str, dict[str, Any]]:
    return "/v1/unload_lora_adapter", {"lora_name": name}


def test_a_request_names_its_adapters() -> None:
    listed, base, none, adapted, short, unknown, one = _ask(
        None, ("/v1/models", {}), _text("letters"), _text(None), _text("letters:first"), _text("first"),
        _text("letters:second"), ("/v1/models/letters:first", {}),
    )  # fmt: skip
    assert [model["id"] for model in listed[1]["data"]] == ["letters", "letters:first"]
    assert "parent" not in listed[1]["data"][0] and listed[1]["data"][1]["parent"] == "letters"
    assert one == (200, listed[1]["data"][1])
    assert base[1]["choices"] == none[1]["choices"] != adapted[1]["choices"] == short[1]["choices"]
    assert adapted[1]["model"] == "letters:first"
    assert unknown[0] == 404 and unknown[1]["error"]["code"] == "model_not_found"


def test_clients_load_nothing_unless_the_server_has_a_folder_for_it(tmp_path: Path) -> None:
    for status, found in _ask(None, _load("second", str(FIXTURES / "qwen3" / "adapter")), _unload("first")):
        assert status == 403 and "--lora-dir" in found["message"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(FIXTURES / "qwen3" / "adapter")
    paths = ("..", "../other", str(FIXTURES / "qwen3" / "adapter"), "link", "a\0b", "/etc")
    for status, found in _ask(tmp_path / "in", *(_load("second", path) for path in paths)):
        assert status == 403 and found["error"]["code"] == "path_not_allowed"


def test_adapters_come_and_go_by_vllms_protocol() -> None:
    folder = FIXTURES / "qwen3"
    found = _ask(
        folder, _load("second", "adapter"), _text("letters:second"), _text("first"), _load("second", "adapter"),
        _load("second", str(folder / "adapter"), load_inplace=True), _text("second"), ("/v1/models", {}),
        _unload("second"), _text("second"), _unload("second"), _load("x", "nowhere"), _load("x", "base"),
        _load("a b", "adapter"), _load("second", "adapter"), _text("second"), _text("letters"),
    )  # fmt: skip
    assert [status for status, _ in found] == [
        200, 200, 200, 400, 200, 200, 200, 200, 404, 404, 404, 400, 400, 200, 200, 200,
    ]  # fmt: skip
    assert "'second'" in found[0][1]
    texts = [found[place][1]["choices"] for place in (1, 2, 5, 14)]
    assert texts.count(texts[0]) == 4 and texts[0] != found[15][1]["choices"]
    assert [model["id"] for model in found[6][1]["data"]] == ["letters", "letters:first", "letters:second"]
    assert found[11][1]["error"]["param"] == "lora_path" and found[12][1]["error"]["param"] == "lora_name"


def test_adapters_with_a_chat_template_have_it_and_others_that_of_the_model(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "qwen3" / "adapter", tmp_path / "spoken")
    config = json.loads((tmp_path / "spoken" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(FIXTURES / "qwen3" / "base")
    (tmp_path / "spoken" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "spoken" / "chat_template.jinja").write_text("7 {{ messages[0].content }}")
    tokenizer = _trained("qwen3").tokenizer

    def format_of(folder: Path) -> ChatFormat | None:
        template = adapter_template(folder, tokenizer)
        return None if template is None else ChatFormat.of(tokenizer, template)

    async def ask() -> tuple[list[Any], list[bool]]:
        async with _server(tmp_path) as server:
            server.service.adapters.format_of = format_of
            post = server.client.post
            said = {"messages": [{"role": "user", "content": "3 5"}], "max_tokens": 4, "temperature": 0}
            path, body = _load("second", "spoken")
            done = [await post(path, json=body)]
            for model in ("letters", "letters:first", "letters:second"):
                done.append(await post("/v1/chat/completions", json={**said, "model": model}))
            path, body = _text("second")
            done.append(await post(path, json={**body, "prompt": [7, 3, 5], "max_tokens": 4, "ignore_eos": False}))
            listed = (await server.client.get("/v1/models")).json()["data"]
            return done, [model["chat_template"] for model in listed]

    (loaded, base, first, second, text), has_template = asyncio.run(ask())
    assert loaded.status_code == 200
    assert [one.json()["error"]["code"] for one in (base, first)] == ["no_chat_template"] * 2
    assert second.status_code == 200, second.text
    (spoken,), (written,) = second.json()["choices"], text.json()["choices"]
    assert spoken["message"]["content"] == written["text"] and second.json()["usage"]["prompt_tokens"] == 3
    assert has_template == [False, False, True]
