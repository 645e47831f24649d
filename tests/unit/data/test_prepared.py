"""Conversations given as text: Megatron's formats token by token, what is kept and found again, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megalith.config import DataConfig, TokenizerConfig
from megalith.config.data_sources import data_sources, is_text, with_prefixes
from megalith.data import prepared
from megalith.data.indexed import LOSS_MASK, IndexedDataset
from megalith.data.prepared import Preparation
from megalith.data.preprocess import PreprocessOptions, preprocess
from megalith.data.sources import SourceOptions
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer

SPECIAL = ["<end>", "<|im_start|>", "<|im_end|>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"]
OWN = "{% for m in messages %}{{ m.role[0] + m.content + '<end>' }}{% endfor %}"


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


FIRST = [say("system", " Be kind. /think"), say("user", "Who? /no_think\n"), say("assistant", " A king.\n")]
SECOND = [say("system", "s"), say("user", "u"), say("assistant", "a"), say("user", "v"), say("assistant", "b<end>")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes, so that the ids of a text are those of its pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": OWN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def preparation(folder: Path, **data: Any) -> Preparation:
    config = TokenizerConfig(tokenizer_type="SFTTokenizer", tokenizer_model=str(folder))
    return Preparation(DataConfig(64, sft=True, **data), config, build_tokenizer(config))


def prepare(made: Preparation, text: Path) -> tuple[str, str]:
    """Prepare a text; return the prefix of its dataset and what was said."""
    said: list[str] = []
    key = made.key(str(text))
    made.prepare(str(text), key, said.append)
    return made.prefix(str(text), key), "\n".join(said)


def write(path: Path, *rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def bytes_of(prefix: str) -> list[bytes]:
    return [Path(prefix + end).read_bytes() for end in (".bin", ".idx", f"{LOSS_MASK}.bin", f"{LOSS_MASK}.idx")]


MEGATRON = {  # format -> pieces of both conversations, and whether each is learnt
    "nemotron-h-aligned": [
        [("<SPECIAL_10>System\nBe kind. /think\n<SPECIAL_11>User\nWho? /no_think\n<SPECIAL_11>Assistant\n", 0)]
        + [("A king.\n<end>", 1)],
        [("<SPECIAL_10>System\ns\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n", 0), ("a\n", 1)]
        + [("<SPECIAL_11>User\nv\n<SPECIAL_11>Assistant\n", 0), ("b<end>\n<end>", 1)],
    ],
    "nemotron-nano-v2": [
        [("<SPECIAL_10>System\nBe kind.\n<SPECIAL_11>User\nWho?\n", 0)]
        + [("<SPECIAL_11>Assistant\n", 0), ("A king.\n<SPECIAL_12>\n<end>", 1)],
        [("<SPECIAL_10>System\ns\n<SPECIAL_11>User\nu\n<SPECIAL_11>Assistant\n", 0), ("a\n<SPECIAL_12>\n", 1)]
        + [("<SPECIAL_11>User\nv\n<SPECIAL_11>Assistant\n", 0), ("b<end>\n<SPECIAL_12>\n<end>", 1)],
    ],
    "identity": [
        [(" Be kind. /thinkWho? /no_think\n", 0), (" A king.\n<end>", 1)],
        [("su", 0), ("a", 1), ("v", 0), ("b<end>", 1)],
    ],
    "default": [
        [("s Be kind. /think<end>uWho? /no_think\n<end>a A king.\n<end>", 1)],
        [("ss<end>uu<end>aa<end>uv<end>ab<end><end>", 1)],
    ],
}


@pytest.mark.parametrize("name", MEGATRON)
def test_formats_of_megatron_have_its_tokens_and_targets(tmp_path: Path, folder: Path, name: str) -> None:
    """A line may hold several conversations, each of which begins with a system message."""
    text = write(tmp_path / "talk.jsonl", [*FIRST, *SECOND], SECOND)
    prefix, said = prepare(preparation(folder, sft_tokenizer_prompt_format=name), text)
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="SFTTokenizer", tokenizer_model=str(folder)))
    tokens, masks = IndexedDataset(prefix), IndexedDataset(prefix + LOSS_MASK)
    first, second = MEGATRON[name]
    assert len(tokens) == 3 and prefix in said and len(said.splitlines()) == 1
    for number, pieces in enumerate((first, second, second)):
        encoded = [(tokenizer.encode(piece), learnt) for piece, learnt in pieces]
        assert tokens.get(number).tolist() == [one for ids, _ in encoded for one in ids]
        assert masks.get(number).tolist() == [learnt for ids, learnt in encoded for _ in ids]


def test_text_is_prepared_once_as_preprocess_does(tmp_path: Path, folder: Path) -> None:
    text, cache = write(tmp_path / "talk.jsonl", FIRST, SECOND), tmp_path / "cache"
    config = TokenizerConfig(tokenizer_type="SFTTokenizer", tokenizer_model=str(folder))
    source = SourceOptions(keys=("messages",))
    options = PreprocessOptions((str(text),), str(tmp_path / "by-hand"), config, source, loss_mask="assistant")
    made = preparation(folder, data_cache_path=str(cache), sft_tokenizer_prompt_format="chatml")
    preprocess(replace(options, chat_template="chatml"))
    prefix, said = prepare(made, text)
    assert bytes_of(prefix) == bytes_of(f"{tmp_path}/by-hand_messages_document")
    assert Path(prefix).parent == cache and "prepared" in said
    there = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert prepare(made, text) == (prefix, said.replace("; prepared in", "; found in"))
    assert there == {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    own, _ = prepare(preparation(folder), text)  # beside the text, where folders of text are not searched for it
    assert Path(own).parent == tmp_path / ".sft"
    every, _ = prepare(preparation(folder, sft_tokenizer_prompt_format="default"), text)
    changed, _ = prepare(made, write(text, FIRST))
    assert len({prefix, own, every, changed}) == 4 and len(IndexedDataset(changed)) == 1


def test_a_killed_preparation_is_done_again(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, made = write(tmp_path / "talk.jsonl", FIRST, SECOND), preparation(folder)
    prefix, _ = prepare(made, text)
    whole = bytes_of(prefix)
    for ends in (".jinja", f"{LOSS_MASK}.idx", ".idx"):  # in the opposite order of their making
        Path(prefix + ends).unlink()
        assert "prepared" in prepare(made, text)[1] and bytes_of(prefix) == whole
    calls: list[PreprocessOptions] = []
    monkeypatch.setattr(prepared, "preprocess", lambda options, listener: calls.append(options))
    prepare(made, text)
    assert not calls


def test_what_cannot_be_learnt_from_is_named_with_its_remedy(tmp_path: Path, folder: Path) -> None:
    text = write(tmp_path / "talk.jsonl", FIRST, FIRST[:2])
    with pytest.raises(DataError, match=r"talk\.jsonl, line 2: (.|\n)*megalith preprocess (.|\n)*--bad-lines skip"):
        prepare(preparation(folder), text)
    assert not list((tmp_path / ".sft").glob("*.idx"))
    for name in ("nemotron", str(tmp_path)):
        with pytest.raises(ConfigError, match=f"--sft-tokenizer-prompt-format {name}: .*chatml"):
            preparation(folder, sft_tokenizer_prompt_format=name)
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    with pytest.raises(ConfigError, match="--sft-tokenizer-prompt-format is missing.*chatml"):
        Preparation(DataConfig(64, sft=True), null, build_tokenizer(null))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"--data-cache-path: the folder {tmp_path}/file"):
        prepare(preparation(folder, data_cache_path=f"{tmp_path}/file/cache"), write(text, FIRST))


def test_datasets_take_the_places_of_their_texts(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text("0.1 a.jsonl 3 b")
    (tmp_path / "splits").write_text('{"train": ["2", "a.jsonl", "1", "b"], "valid": "a.jsonl"}')
    for given in (
        {"data_path": ("a.jsonl",)},
        {"data_path": ("0.1", "a.jsonl", "3", "b")},
        {"data_args_path": str(tmp_path / "blend")},
        {"train_data_path": ("a.jsonl", "b"), "valid_data_path": ("1", "a.jsonl", "1e-3", "c")},
        {"per_split_data_args_path": str(tmp_path / "splits")},
    ):
        data = DataConfig(64, sft=True, **given)  # type: ignore[arg-type]
        before, after = data_sources(data), data_sources(with_prefixes(data, {"a.jsonl": "cache/a"}))
        assert repr(after) == repr(before).replace("a.jsonl", "cache/a") != repr(before)


def test_text_is_told_from_datasets(tmp_path: Path) -> None:
    (tmp_path / "talk" / "cache").mkdir(parents=True)  # the index caches of a dataset
    (tmp_path / "folder").mkdir()
    for name in ("talk.idx", "talk.bin", "lost.bin", "a.jsonl", "folder/a.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "lost" / "cache").mkdir(parents=True)
    found = [
        name for name in ("talk", "talk.bin", "lost", "none", "a.jsonl", "folder") if is_text(f"{tmp_path}/{name}")
    ]
    assert found == ["a.jsonl", "folder"]
