"""Hugging Face folders as a source: what is read, links of the hub's cache, and everything that may be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.content import Chunk
from megalith.checkpoint.files.folder import CheckpointFolder
from megalith.checkpoint.formats.torch_dist import model_chunks, stacking_of
from megalith.checkpoint.sources.huggingface import HuggingFaceSource
from megalith.checkpoint.sources.source import open_source
from megalith.config import ModelConfig
from megalith.config.from_args import model_from_args
from megalith.errors import CheckpointError
from megalith.models.gpt import GPT
from megalith.models.language_model import named_placements
from megalith.nn.placement import local_part

from .huggingface_folders import GPT2, LLAMA, VOCAB, random_weights, write_folder


def _load(folder: Path) -> dict[str, Tensor]:
    """Every parameter of the model that the folder describes, as the folder says."""
    source = open_source(folder)
    assert source.problems() == []
    args = vars(source.common()["args"])
    model = GPT(model_from_args(args), args["padded_vocab_size"])
    chunks = model_chunks(named_placements(model), stacking_of(model.config))
    assert (
        CheckpointFolder(folder).open(CheckpointContent(chunks), [chunk.key for chunk in chunks]).load({}).objects == {}
    )
    return dict(model.named_parameters())


def test_a_folder_in_one_file_and_in_shards(tmp_path: Path) -> None:
    weights = write_folder(tmp_path / "one")
    write_folder(tmp_path / "three", shards=3)
    one, three = _load(tmp_path / "one"), _load(tmp_path / "three")
    assert all(torch.equal(one[name], three[name]) for name in one)
    qkv = one["decoder.layers.1.self_attention.linear_qkv.weight"]
    q, k, v = (weights[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv")
    assert torch.equal(qkv, torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]]))
    gate, up = (weights[f"model.layers.0.mlp.{kind}_proj.weight"] for kind in ("gate", "up"))
    assert torch.equal(one["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
    assert torch.equal(one["output_layer.weight"], weights["lm_head.weight"])


def test_any_box_of_it(tmp_path: Path) -> None:
    """What a tensor-parallel rank asks for, with its own cut of each parameter."""
    write_folder(tmp_path, shards=2)
    whole, source = _load(tmp_path), HuggingFaceSource(tmp_path)
    model = GPT(LLAMA, VOCAB, device="meta")
    for name, _, placement in named_placements(model):
        for rank in range(2):
            wanted = local_part(whole[name].detach(), placement, 2, rank).contiguous()
            found = torch.full_like(wanted, torch.nan)
            chunks = model_chunks([(name, found, placement)], stacking_of(LLAMA), rank=rank, size=2)
            source.read(CheckpointContent(chunks))
            assert torch.equal(found, wanted), (name, rank)


def test_what_it_is_called_in_model_space(tmp_path: Path) -> None:
    write_folder(tmp_path, dtype=torch.bfloat16)
    source = HuggingFaceSource(tmp_path)
    common, contents = source.common(), source.contents()
    args = vars(common["args"])
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    assert (args["params_dtype"], args["bf16"], args["padded_vocab_size"]) == ("bfloat16", True, VOCAB)
    assert contents.tensors["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 48, 16)
    assert {stored.dtype for stored in contents.tensors.values()} == {torch.bfloat16}
    assert not contents.objects
    store = DirectoryStore(tmp_path)
    assert (store.newest_verified(), store.weights_only(0)) == ((0, []), True)


def test_links_of_the_cache_of_the_hub(tmp_path: Path) -> None:
    write_folder(tmp_path / "plain", shards=2)
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert set(_load(snapshot)) == set(dict(GPT(LLAMA, VOCAB).named_parameters()))


def test_gpt2_without_prefix_and_with_its_masks(tmp_path: Path) -> None:
    """As openai-community/gpt2 has it."""
    plain = random_weights("gpt2", GPT2)
    write_folder(tmp_path / "new", "gpt2", GPT2, weights=plain)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in plain.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32).tril() for layer in range(2)}
    write_folder(tmp_path / "old", "gpt2", GPT2, weights={**bare, **masks})
    new, old = _load(tmp_path / "new"), _load(tmp_path / "old")
    assert all(torch.equal(new[name], old[name]) for name in new)


def test_a_tied_output_layer_that_is_stored_too(tmp_path: Path) -> None:
    model = ModelConfig(2, 16, 4, 32)
    weights = random_weights("gpt2", model)
    same = {**weights, "lm_head.weight": weights["transformer.wte.weight"].clone()}
    write_folder(tmp_path / "same", "gpt2", model, weights=same)
    assert "output_layer.weight" not in _load(tmp_path / "same")
    write_folder(tmp_path / "other", "gpt2", model, weights={**weights, "lm_head.weight": torch.ones(VOCAB, 16)})
    (problem,) = open_source(tmp_path / "other").problems()
    assert re.search(r"lm_head\.weight\b.*\btransformer\.wte\.weight", problem) and "tie_word_embeddings" in problem


def test_mixed_dtypes(tmp_path: Path) -> None:
    weights = random_weights("llama", LLAMA, torch.bfloat16)
    weights |= {name: tensor.float() for name, tensor in weights.items() if "norm" in name}
    write_folder(tmp_path, weights=weights)
    tensors = HuggingFaceSource(tmp_path).contents().tensors
    assert tensors["decoder.final_layernorm.weight"].dtype == torch.float32
    assert tensors["output_layer.weight"].dtype == torch.bfloat16


def _cut(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_header(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"<html>404</html>")


def _index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    body = json.loads(path.read_text())
    change(body["weight_map"])
    path.write_text(json.dumps(body))


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = random_weights("llama", LLAMA)
    change(weights)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing shard": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        ("lacks model-00002-of-00002.safetensors", "index.json", "download"),
    ),
    "cut shard": (_cut, ("model-00002-of-00002.safetensors is damaged or cut short", "download")),
    "a web page": (_no_header, ("model-00001-of-00002.safetensors is damaged",)),
    "empty shard": (
        lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b""),
        ("model-00001-of-00002.safetensors is damaged",),
    ),
    "index names what is not there": (
        lambda f: _index(f, lambda m: m.update(surprise="model-00001-of-00002.safetensors")),
        ("model-00001-of-00002.safetensors lacks surprise",),
    ),
    "index lacks a tensor": (lambda f: _index(f, lambda m: m.pop(NORM)), (f"{NORM} is missing",)),
    "index leads out of the folder": (
        lambda f: _index(f, lambda m: m.update({NORM: "../../etc/passwd"})),
        ("'../../etc/passwd'",),
    ),
    "index is no index": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        ("index.json has no weight_map",),
    ),
    "index is cut": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {'),
        ("index.json is damaged",),
    ),
    "config is cut": (lambda f: (f / "config.json").write_text('{"model_type": '), ("config.json is damaged",)),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ("config.json holds no JSON object",)),
    "wrong shape": (
        lambda f: _rewrite(f, lambda w: w.update({NORM: torch.ones(15)})),
        (f"{NORM} has shape [15]; by config.json it has [16]",),
    ),
    "transposed": (
        lambda f: _rewrite(f, lambda w: w.update({"lm_head.weight": torch.ones(16, VOCAB)})),
        ("lm_head.weight has shape [16, 35]",),
    ),
    "a tensor of another model": (
        lambda f: _rewrite(f, lambda w: w.update(score=torch.ones(2))),
        ("score ", "config.json"),
    ),
    "whole numbers": (
        lambda f: _rewrite(f, lambda w: w.update({NORM: torch.ones(16, dtype=torch.int8)})),
        (f"{NORM} is I8; this version reads F32, BF16, F16",),
    ),
    "one layer is missing": (
        lambda f: _rewrite(f, lambda w: [w.pop(name) for name in list(w) if ".layers.1." in name]),
        ("model.layers.1.self_attn.q_proj.weight is missing", f"{NORM} is missing"),
    ),
    "pickle only": (
        lambda f: [
            *(path.unlink() for path in f.glob("*.safetensors*")),
            (f / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR."),
        ],
        ("pytorch_model.bin, a pickle", "save_pretrained(NEW, safe_serialization=True)"),
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_before_anything_is_filled(tmp_path: Path, case: str) -> None:
    damage, fragments = DAMAGE[case]
    write_folder(tmp_path, shards=2)
    damage(tmp_path)
    (problem,) = open_source(tmp_path).problems()
    for fragment in fragments:
        assert fragment in problem
    with pytest.raises(CheckpointError):
        open_source(tmp_path).contents()


def test_a_key_that_is_half_there(tmp_path: Path) -> None:
    write_folder(tmp_path)
    source = HuggingFaceSource(tmp_path)
    beyond = Chunk("output_layer.weight", torch.empty(VOCAB + 1, 16), (0, 0), (VOCAB + 1, 16))
    with pytest.raises(CheckpointError, match=f"{VOCAB * 16} .*{(VOCAB + 1) * 16} "):
        source.read(CheckpointContent([beyond]))
