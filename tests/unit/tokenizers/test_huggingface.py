"""The tokenizer of a Hugging Face folder: which token ends a text, and what may be wrong."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from megalith.config import TokenizerConfig
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import build_tokenizer
from megalith.tokenizers.build import with_files_in
from megalith.tokenizers.fingerprint import fingerprint_differences, require_tokenizer_of_data, write_fingerprint
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalith.tokenizers.huggingface import HuggingFaceTokenizer, hub_cache
from megalith.tokenizers.sentence_piece import Llama2Tokenizer

LETTERS = pre_tokenizers.ByteLevel.alphabet()


def _write(folder: Path, *special: str, begins: bool = False) -> None:
    """A byte-level tokenizer: 256 bytes, then special tokens; perhaps with the first of them before every text."""
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(LETTERS))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def _say(folder: Path, file: str, **values: Any) -> None:
    (folder / file).write_text(json.dumps(values))


def test_text_there_and_back(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    text = "gr\u00fc\u00dfe, \u4e16\u754c </s>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.encode_batch([text, ""]) == [ids, []]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, None)
    assert 256 in ids  # a special token in a text is its id, as in Megatron
    of_sft = TokenizerConfig("SFTTokenizer", tokenizer_model=str(tmp_path))
    assert build_tokenizer(of_sft).fingerprint() == tokenizer.fingerprint()
    assert with_files_in(tmp_path / "nothing", of_sft) == of_sft


def test_what_stands_before_every_text_is_there(tmp_path: Path) -> None:
    _write(tmp_path, "<s>", "</s>", begins=True)
    assert HuggingFaceTokenizer(tmp_path).encode("a")[0] == 256


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert [len(ids) for ids in HuggingFaceTokenizer(tmp_path).encode_batch(["a", "abcdefgh"])] == [1, 8]


ENDS: dict[str, tuple[dict[str, dict[str, Any]], int]] = {
    "eos_token": ({"tokenizer_config.json": {"eos_token": "<b>"}}, 257),
    "as an object": ({"tokenizer_config.json": {"eos_token": {"content": "<b>", "lstrip": False}}}, 257),
    "special tokens": ({"special_tokens_map.json": {"eos_token": "<b>"}}, 257),
    "the model's, a number": ({"generation_config.json": {"eos_token_id": 257}}, 257),
    "the model's, several": ({"generation_config.json": {"eos_token_id": [257, 256]}}, 257),
    "of config.json": ({"config.json": {"eos_token_id": 256}}, 256),
    "the tokenizer's before the model's": (
        {"tokenizer_config.json": {"eos_token": "<b>"}, "config.json": {"eos_token_id": 256}},
        257,
    ),
    "unknown token": (
        {"tokenizer_config.json": {"eos_token": "<nowhere>"}, "config.json": {"eos_token_id": 256}},
        256,
    ),
    "a usual name": ({}, 258),
}


@pytest.mark.parametrize("case", ENDS)
def test_which_token_ends_a_text(tmp_path: Path, case: str) -> None:
    files, wanted = ENDS[case]
    _write(tmp_path, "<a>", "<b>", "<|endoftext|>")
    for name, values in files.items():
        _say(tmp_path, name, **values)
    assert HuggingFaceTokenizer(tmp_path).eod == wanted


def test_padding_that_is_the_end_is_none(tmp_path: Path) -> None:
    _write(tmp_path, "<a>", "<b>")
    _say(tmp_path, "tokenizer_config.json", eos_token="<a>", pad_token="<b>")
    assert HuggingFaceTokenizer(tmp_path).pad == 257
    _say(tmp_path, "tokenizer_config.json", eos_token="<a>", pad_token="<a>")
    assert HuggingFaceTokenizer(tmp_path).pad is None


def test_card_and_files(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    _say(tmp_path, "tokenizer_config.json", eos_token="</s>")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert set(tokenizer.files()) == {"tokenizer.json", "tokenizer_config.json"}
    card = tokenizer.fingerprint()
    assert (
        card["vocab_size"] == 257
        and card["special"] == {"eod": 256, "eos": 256}
        and len(card["files"]["tokenizer.json"]) == 64
    )
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert (
        fingerprint_differences(HuggingFaceTokenizer(other).fingerprint(), card) == {}
    )  # wherever it lies, whatever names its end


def test_what_is_no_text_or_no_id(tmp_path: Path) -> None:
    _write(tmp_path, "</s>")
    tokenizer = HuggingFaceTokenizer(tmp_path)
    with pytest.raises(DataError, match=r"character 1.*U\+D800"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode_batch(["a", "\ud800"])
    with pytest.raises(DataError, match="id 257"):
        tokenizer.decode([0, 257])


def test_what_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer-model is missing"):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer"))
    with pytest.raises(DataError, match=r"meta-llama/Llama-2-7b-hf"):
        HuggingFaceTokenizer("meta-llama/Llama-2-7b-hf")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ')
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)
    _write(tmp_path, "<a>")
    with pytest.raises(DataError, match=str(tmp_path)):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        HuggingFaceTokenizer(tmp_path)


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of links that `hf download` and transformers leave, by its path and by the model's name."""
    model = tmp_path / "hub" / "models--some--model"
    snapshot = model / "snapshots" / "0a1b2c"
    for folder in (snapshot, model / "blobs", model / "refs"):
        folder.mkdir(parents=True)
    _write(model / "blobs", "</s>")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/tokenizer.json")
    (model / "refs" / "main").write_text("0a1b2c")
    by_path = HuggingFaceTokenizer(snapshot)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert HuggingFaceTokenizer("some/model").fingerprint() == by_path.fingerprint()
    assert HuggingFaceTokenizer(snapshot / "tokenizer.json").fingerprint() == by_path.fingerprint()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match=r"some/model.*elsewhere"):
        HuggingFaceTokenizer("some/model")
    with pytest.raises(DataError, match=r"\.\./hub"):
        HuggingFaceTokenizer("../hub")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, "/home/me/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/scratch"}, "/scratch/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/scratch", "HF_HOME": "~/hf"}, "/home/me/hf/hub"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "$HOME/old"}, "/home/me/old"),
        ({"HF_HOME": "/hf", "HF_HUB_CACHE": "/models", "HUGGINGFACE_HUB_CACHE": "/old"}, "/models"),
        ({"HF_HOME": "/hf", "HF_HUB_CACHE": ""}, "/hf/hub"),
    ],
)
def test_where_the_cache_of_the_hub_is(environ: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert hub_cache(environ) == Path(folder)


def test_nothing_around_a_text_and_more_special_tokens(tmp_path: Path) -> None:
    _write(tmp_path, "<s>", "</s>", begins=True)
    config = TokenizerConfig(
        "HuggingFaceTokenizer",
        tokenizer_model=str(tmp_path),
        tokenizer_hf_no_include_special_tokens=True,
        tokenizer_special_tokens=("<extra_id_0>", "</s>"),
    )
    tokenizer = build_tokenizer(config)
    plain = HuggingFaceTokenizer(tmp_path)
    assert (plain.vocab_size, tokenizer.vocab_size, tokenizer.extra_ids) == (258, 259, (258,))
    assert plain.encode("a") == [256, *tokenizer.encode("a")]
    assert tokenizer.encode("<extra_id_0></s>") == [258, 257]
    differing = fingerprint_differences(plain.fingerprint(), tokenizer.fingerprint())
    assert set(differing) == {
        "vocabulary",
        "vocab_size",
        "setting include_special_tokens",
        "setting special_tokens",
    }


def test_special_ids_by_role(tmp_path: Path) -> None:
    _write(tmp_path, "<a>", "<b>", "<c>")
    _say(tmp_path, "tokenizer_config.json", bos_token="<a>", eos_token={"content": "<b>"}, mask_token="<nowhere>")
    _say(tmp_path, "special_tokens_map.json", cls_token="<c>")
    assert HuggingFaceTokenizer(tmp_path).special == {"eod": 257, "bos": 256, "eos": 257, "cls": 258}


def test_a_bert_folder_ends_texts_with_its_separator(tmp_path: Path) -> None:
    _write(tmp_path, "[CLS]", "[SEP]")
    assert HuggingFaceTokenizer(tmp_path).eod == 257


@pytest.fixture
def llama(shared: Path, tmp_path: Path) -> Path:
    """A folder as Llama's, without tokenizer.json."""
    shutil.copy(shared / "golden" / "tokenizers" / "sp.model", tmp_path / "tokenizer.model")
    _say(tmp_path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>")
    return tmp_path


def test_a_llama_folder_without_tokenizer_json(llama: Path, shared: Path) -> None:
    texts = json.loads((shared / "golden" / "tokenizers" / "texts.json").read_text())
    megatron = Llama2Tokenizer(llama / "tokenizer.model")
    tokenizer = HuggingFaceTokenizer(llama)
    special = {"<s>", "</s>", "<unk>"}
    plain = [text for text in texts if not any(token in text for token in special)]
    assert len(plain) > 30 and tokenizer.encode_batch(plain) == megatron.encode_batch(plain)
    assert (tokenizer.eod, tokenizer.vocab_size) == (megatron.eod, megatron.vocab_size)
    assert tokenizer.encode("a</s>b") == [*megatron.encode("a"), 2, *megatron.encode("b")[1:]]
    assert tokenizer.decode(tokenizer.encode("a</s>")) == "<s>a</s>"
    assert HuggingFaceTokenizer(llama, add_special_tokens=False).encode("a") == megatron.encode("a")[1:]
    assert set(tokenizer.fingerprint()["files"]) == {"tokenizer.model"} <= set(tokenizer.files())


def test_what_a_llama_folder_says_of_its_beginning_and_end(llama: Path) -> None:
    bare = HuggingFaceTokenizer(llama, add_special_tokens=False).encode("who")
    _say(llama, "tokenizer_config.json", add_bos_token=False, add_eos_token=True)
    assert HuggingFaceTokenizer(llama).encode("who") == [*bare, 2]
    added = {"800": {"content": "<|im_end|>"}, "x": 1}
    _say(llama, "tokenizer_config.json", added_tokens_decoder=added, eos_token="<|im_end|>")
    tokenizer = HuggingFaceTokenizer(llama)
    assert (tokenizer.vocab_size, tokenizer.eod) == (801, 800)
    assert tokenizer.encode("who<|im_end|>") == [1, *bare, 800]


def _bert_folder(folder: Path) -> Path:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "who", "are", "##s", "\u4e2d", "?"]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    _say(folder, "tokenizer_config.json", tokenizer_class="BertTokenizer", do_lower_case=True)
    return folder


def test_a_folder_for_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only transformers can read goes through its AutoTokenizer, without network or code of the folder."""
    made = tmp_path / "made"
    made.mkdir()
    _write(made, "[CLS]", "[SEP]")
    asked: list[Any] = []

    def from_pretrained(*place: str, **options: bool) -> SimpleNamespace:
        asked.append((place, options))
        return SimpleNamespace(backend_tokenizer=Tokenizer.from_file(str(made / "tokenizer.json")))

    library = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", library)
    folder = _bert_folder(tmp_path)
    tokenizer = HuggingFaceTokenizer(folder)
    assert (tokenizer.eod, set(tokenizer.fingerprint()["files"])) == (257, {"vocab.txt"})
    assert asked == [((str(folder),), {"local_files_only": True, "trust_remote_code": False})]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"vocab\.txt.*AutoTokenizer.*\bhf\b"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.full
def test_transformers_itself(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    tokenizer = HuggingFaceTokenizer(_bert_folder(tmp_path))
    assert tokenizer.encode("Who are\u4e2d?") == [2, 5, 6, 8, 9, 3]
    assert tokenizer.eod == 3


def test_an_export_reads_the_data_of_the_original(tmp_path: Path) -> None:
    """The ids of vocab.json and merges.txt are those of the tokenizer.json that transformers makes of them."""
    ids = {letter: number for number, letter in enumerate(sorted(LETTERS))}
    ids |= {"th": 256, "the": 257, "<|endoftext|>": 258}
    (tmp_path / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n", encoding="utf-8")
    original = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    folder = tmp_path / "export"
    folder.mkdir()
    made = Tokenizer(models.BPE({token: ids[token] for token in ids if ids[token] < 258}, [("t", "h"), ("th", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    _say(folder, "tokenizer_config.json", eos_token="<|endoftext|>")
    imported = HuggingFaceTokenizer(folder)
    assert imported.encode("the") == original.encode("the") == [257]
    write_fingerprint(str(tmp_path / "data"), original.fingerprint())
    assert require_tokenizer_of_data(str(tmp_path / "data"), imported.fingerprint()) is None
    # The same number of ids for other tokens is another tokenizer.
    other = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = other["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(DataError, match="vocabulary"):
        require_tokenizer_of_data(str(tmp_path / "data"), HuggingFaceTokenizer(folder).fingerprint())


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("tokenizer_config.json", {"additional_special_tokens": ["the"]}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<new>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<image>"}}),
        ("tokenizer_config.json", {"pad_token": "[PAD]"}),
        ("special_tokens_map.json", {"mask_token": {"content": "the", "lstrip": True}}),
        ("tokenizer_config.json", {"bos_token": "the"}),
        ("tokenizer_config.json", {"sep_token": "the", "unk_token": None}),
    ],
)
def test_special_tokens_of_byte_pairs_are_those_of_transformers(
    file: str, said: dict[str, Any], tmp_path: Path
) -> None:
    """Those that only transformers understands are left to it: other ids would come out of the same text."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    ids = {letter: number for number, letter in enumerate(sorted(LETTERS))}
    ids |= {"th": 256, "the": 257, "<|endoftext|>": 258}
    (tmp_path / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n", encoding="utf-8")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    _say(tmp_path, "tokenizer_config.json", **settings)
    _say(tmp_path, file, **{**(settings if file == "tokenizer_config.json" else {}), **said})
    text = "then the  the<|endoftext|>[PAD]<new><image>"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = HuggingFaceTokenizer(tmp_path)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.vocab_size == len(theirs)
