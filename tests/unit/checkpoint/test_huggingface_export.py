"""Exporting as a Hugging Face folder: bytes, shards, vocabulary, and what is left after a refusal."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.formats.torch_dist import model_chunks, stacking_of
from megalith.checkpoint.sources.huggingface import HuggingFaceSource
from megalith.checkpoint.writers.huggingface import ExportOptions, Weights, bytes_of_size, export
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.gpt import GPT
from megalith.models.language_model import named_placements
from megalith.tokenizers import train_byte_level_bpe
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalith.tokenizers.huggingface import HuggingFaceTokenizer

from .huggingface_folders import GPT2, LLAMA, VOCAB, write_folder, write_tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A save folder with the weights of a Hugging Face folder, `hf`, and its tokenizer."""
    write_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "saved", ConversionOptions(release=True))
    return tmp_path / "saved"


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_there_and_back(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    write_folder(tmp_path / "hf", kind, GPT2 if kind == "gpt2" else LLAMA, dtype=dtype)
    convert(tmp_path / "hf", tmp_path / "saved", ConversionOptions(release=True))
    made = export(tmp_path / "saved", tmp_path / "out", ExportOptions())
    assert made.family.model_type == kind and made.shards == 1
    assert _files(tmp_path / "out")["model.safetensors"] == _files(tmp_path / "hf")["model.safetensors"]
    was, now = (json.loads(_files(tmp_path / name)["config.json"]) for name in ("hf", "out"))
    assert was == now


def test_from_a_hugging_face_folder_itself(tmp_path: Path) -> None:
    weights = write_folder(tmp_path / "hf", shards=3)
    export(tmp_path / "hf", tmp_path / "out", ExportOptions())
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_mixed_dtypes_keep_their_order(tmp_path: Path) -> None:
    weights = write_folder(tmp_path / "a", dtype=torch.bfloat16)
    weights |= {name: tensor.float() for name, tensor in weights.items() if "norm" in name}
    write_folder(tmp_path / "hf", weights=weights, dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "out", ExportOptions())
    assert _files(tmp_path / "out")["model.safetensors"] == _files(tmp_path / "hf")["model.safetensors"]


def test_the_tokenizer_and_the_config_come_along(saved: Path, tmp_path: Path) -> None:
    made = export(saved, tmp_path / "out", ExportOptions())
    files = _files(tmp_path / "out")
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert set(files) == names
    config, generation = json.loads(files["config.json"]), json.loads(files["generation_config.json"])
    assert generation.get("eos_token_id") == config.get("eos_token_id")
    assert files["tokenizer.json"] == _files(tmp_path / "hf")["tokenizer.json"]
    assert made.notes == [] and made.vocab_size == VOCAB


def test_shards(saved: Path, tmp_path: Path) -> None:
    limit = 4096
    made = export(saved, tmp_path / "out", ExportOptions(max_shard_size=str(limit)))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert [path.name for path in files] == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert made.shards == count > 3
    held: dict[str, str] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118 - no mapping
            held |= dict.fromkeys(opened.keys(), path.name)
        assert sum(sizes) <= limit or len(sizes) == 1
    assert held == index["weight_map"] and index["metadata"]["total_size"] == made.bytes
    assert HuggingFaceSource(tmp_path / "out").problems() == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_another_dtype(saved: Path, tmp_path: Path, dtype: str) -> None:
    export(saved, tmp_path / "out", ExportOptions(dtype=dtype))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["torch_dtype"] == dtype
    weights, wanted = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(weights[name], wanted[name].to(getattr(torch, dtype))) for name in wanted)


def _trained(folder: Path, rows: int, manifest: dict[str, Any], config: ModelConfig = LLAMA, **args: Any) -> None:
    """A checkpoint as a training run with a padded vocabulary leaves it, its rows numbered."""
    common = HuggingFaceSource(folder / "hf").common()
    values = {**vars(common["args"]), "padded_vocab_size": rows, **args}
    common["args"].__dict__.update(values)
    model = GPT(config, rows)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        model.output_weight.copy_(torch.arange(float(rows))[:, None].expand(rows, 16))
    chunks = model_chunks(named_placements(model), stacking_of(config))
    DirectoryStore(folder / "trained").save(7, CheckpointContent(chunks, {}, {**common, "iteration": 7}), manifest)


def test_padding_is_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    _trained(tmp_path, 64, {"tokenizer": {"vocab_size": 41, "special": {"eod": 40}}})
    made = export(tmp_path / "trained", tmp_path / "out", ExportOptions())
    assert "41" in made.notes[0] and "23" in made.notes[0]
    assert "tokenizer" in made.notes[1]
    weights = load_file(tmp_path / "out/model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (41, 16)
    assert torch.equal(weights["lm_head.weight"][:, 0], torch.arange(41.0))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (41, 40)
    made = export(tmp_path / "trained", tmp_path / "more", ExportOptions(true_vocab_size=50))
    assert made.vocab_size == 50
    with pytest.raises(CheckpointError, match="--true-vocab-size 65 .*64"):
        export(tmp_path / "trained", tmp_path / "none", ExportOptions(true_vocab_size=65))


def test_padding_that_nobody_knows_of_is_kept_and_said(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    _trained(tmp_path, 64, {})
    made = export(tmp_path / "trained", tmp_path / "out", ExportOptions())
    assert made.vocab_size == 64 and "--true-vocab-size N" in made.notes[0]


def test_the_capacity_of_experts_stays_with_the_training(tmp_path: Path) -> None:
    mixture = dataclasses.replace(LLAMA, num_experts=4, moe_router_topk=2)
    write_folder(tmp_path / "hf", "mixtral", mixture)
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    _trained(tmp_path, 64, {}, mixture, **capacity)
    made = export(tmp_path / "trained", tmp_path / "out", ExportOptions())
    assert made.family.model_type == "mixtral"
    assert "--moe-expert-capacity-factor 1" in made.notes[0]


def test_a_family_of_choice(saved: Path, tmp_path: Path) -> None:
    made = export(saved, tmp_path / "out", ExportOptions(model_type="mistral"))
    assert made.family.architecture == "MistralForCausalLM"
    assert HuggingFaceSource(tmp_path / "out").about.model == HuggingFaceSource(tmp_path / "hf").about.model
    with pytest.raises(CheckpointError, match="qwen3.*qk_norm RMSNorm"):
        export(saved, tmp_path / "none", ExportOptions(model_type="qwen3"))
    assert not (tmp_path / "none").exists()


TEXTS = ("the cat sat", " the  hat!\n\n\tand 1234 mats", "naïve café, 漢字 🙂", "", "it's they'll")


@pytest.mark.parametrize(("kind", "model"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_a_byte_level_tokenizer_needs_no_transformers(
    kind: str, model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    write_folder(tmp_path / "hf", kind, model)
    vocab_file, merge_file = train_byte_level_bpe([*TEXTS, "the cat sat on the mat"] * 3, 280, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "saved", ConversionOptions(release=True))
    export(tmp_path / "saved", tmp_path / "out", ExportOptions())
    files = _files(tmp_path / "out")
    assert {"vocab.json", "merges.txt", "tokenizer.json", "generation_config.json"} <= set(files)
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["tokenizer_class"], settings["eos_token"]) == ("GPT2Tokenizer", "<|endoftext|>")
    assert settings["model_max_length"] == model.max_position_embeddings
    reference = GPT2BPETokenizer(vocab_file, merge_file)
    for _ in range(2):  # then as exports were that have no tokenizer.json
        found = HuggingFaceTokenizer(tmp_path / "out")
        assert [found.encode(text) for text in TEXTS] == [reference.encode(text) for text in TEXTS]
        assert [found.decode(found.encode(text)) for text in TEXTS] == list(TEXTS)
        assert (found.vocab_size, found.eod) == (reference.vocab_size, reference.eod)
        assert found.encode("a<|endoftext|>")[-1] == reference.eod
        (tmp_path / "out/tokenizer.json").unlink(missing_ok=True)
    convert(tmp_path / "out", tmp_path / "again", ConversionOptions(release=True))
    assert {"vocab.json", "merges.txt"} <= set(_files(tmp_path / "again/release"))


def test_converters_find_the_context_of_gpt2(tmp_path: Path) -> None:
    """llama.cpp's asks for n_ctx, which transformers no longer writes."""
    write_folder(tmp_path / "hf", "gpt2", GPT2)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config.pop("n_ctx") == config["n_positions"]
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    convert(tmp_path / "hf", tmp_path / "saved", ConversionOptions(release=True))
    export(tmp_path / "saved", tmp_path / "out", ExportOptions())
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**config, "n_ctx": config["n_positions"]}


def test_a_refusal_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    def refuse(folder: Path, *_: object) -> None:
        assert (folder / "model.safetensors").exists()
        raise CheckpointError("other logits")

    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="other logits"):
        export(saved, tmp_path / "out", ExportOptions(), check=refuse)
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(saved, tmp_path / "empty", ExportOptions())
    with pytest.raises(CheckpointError, match=str(tmp_path / "empty")):
        export(saved, tmp_path / "empty", ExportOptions())


def test_damage_is_found_first(saved: Path, tmp_path: Path) -> None:
    file = next(saved.glob("release/*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        export(saved, tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "model"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_one_tensor_at_a_time(kind: str, model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is read once, and whole; what is kept is that of which several tensors are made."""
    reads: list[str] = []
    original = Weights.read

    def counting(self: Weights, name: str, *rest: Any) -> torch.Tensor:
        reads.append(name)
        return original(self, name, *rest)

    monkeypatch.setattr(Weights, "read", counting)
    write_folder(tmp_path / "hf", kind, model)
    made = export(tmp_path / "hf", tmp_path / "out", ExportOptions())
    names = {part.parameter for tensor in made.family.tensors(model, VOCAB) for part in tensor.parts}
    assert sorted(reads) == sorted(names)


def test_nonsense_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export(tmp_path, tmp_path / "out", ExportOptions("int8", "5 parsecs", 0))
    assert len(caught.value.violations) == 3
    assert [bytes_of_size(text) for text in ("5GB", "1.5 kb", "700")] == [5 * 10**9, 1500, 700]
