"""Reliability F36: folders that transformers wrote come back byte for byte and compute the same logits.

Each model is small, random and of large weights, so that a swapped tensor or head cannot go unseen.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.assemble.huggingface import TOLERANCE, Comparison, compare_logits
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.adapters import Upcycling, args_of
from megalith.checkpoint.sources.huggingface import HuggingFaceSource
from megalith.checkpoint.sources.source import open_source
from megalith.checkpoint.writers.huggingface import ExportOptions, Weights, export
from megalith.cli.main import main
from megalith.errors import CheckpointError
from megalith.models.gpt import GPT
from megalith.nn.rope import LongContext
from megalith.tokenizers import train_byte_level_bpe
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer

from .goldens import Goldens

transformers = pytest.importorskip("transformers", reason="the outside truth needs the hf extra (transformers)")

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": 67, "n_positions": 48, "n_embd": 24, "n_layer": 2, "n_head": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS: dict[str, Any] = {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_mtp_layers": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2_SIZES),
    "gpt2-untied-erf": ("GPT2", {**GPT2_SIZES, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "llama": ("Llama", SIZES),
    "llama-one-group": ("Llama", {**SIZES, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama-biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-3.2": (
        "Llama",
        {**SIZES, "rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "llama-yarn": (
        "Llama",
        {
            **SIZES,
            "head_dim": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12},
        },
    ),
    "llama-linear": ("Llama", {**SIZES, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None, "head_dim": 8}),
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 5, "head_dim": 8}),
    "qwen2-window": (
        "Qwen2",
        {**SIZES, "num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2": ("Qwen2", {**SIZES, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "head_dim": 8, "rms_norm_eps": 1e-6}),
    "mixtral-window": ("Mixtral", {**SIZES, "num_local_experts": 3, "sliding_window": 5, "head_dim": 8}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SIZES, **EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "deepseek": ("DeepseekV3", {**SIZES, **DEEPSEEK}),
    "deepseek-yarn": (
        "DeepseekV3",
        {
            **SIZES,
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 12,
            },
        },
    ),
    "qwen3-moe-half": ("Qwen3Moe", {**SIZES, **EXPERTS, "mlp_only_layers": [0], "num_experts_per_tok": 3}),
}
Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Save a random model with `save_pretrained`; returns the folder `hf`."""

    def save(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        kind, sizes = MODELS[name]
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, f"{kind}Config")(**sizes, **ends)
        model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config)
        generator = torch.Generator().manual_seed(3)
        for weight in model.state_dict().values():  # DeepSeek's bias of experts is no parameter
            torch.nn.init.normal_(weight, std=0.3, generator=generator)
        model.to(dtype).save_pretrained(tmp_path / "hf", **options)
        return tmp_path / "hf"

    return save


def _with_prediction(folder: Path) -> dict[str, torch.Tensor]:
    """Add a layer of multi-token prediction to DeepSeek's files, as they are on the hub; the tensors."""
    tensors = load_file(folder / "model.safetensors")
    last, ahead = "model.layers.1.", "model.layers.2."
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[ahead + name.removeprefix(last)] = torch.randn(tensors[name].shape, generator=generator)
    for name, shape in (("enorm", (24,)), ("hnorm", (24,)), ("eh_proj", (24, 48)), ("shared_head.norm", (24,))):
        tensors[f"{ahead}{name}.weight"] = torch.randn(shape, generator=generator)
    tensors[f"{ahead}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{ahead}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return tensors


def test_layers_of_multi_token_prediction_come_back(build: Build) -> None:
    folder = build("deepseek")
    _with_prediction(folder)
    out = _there_and_back(folder)
    _assert_same_files(folder, out)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    params = _params_of(folder)
    assert params.model.predictions == 1 and params.shapes["mtp.layers.0.eh_proj.weight"] == (24, 48)
    assert _difference(folder, folder.parent / "saved/release") <= TOLERANCE


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_layers_of_prediction_with_tables_of_their_own_are_refused(build: Build, name: str) -> None:
    folder = build("deepseek")
    tensors = _with_prediction(folder)
    tensors[f"model.layers.2.{name}"] += 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"model.layers.2.{name} "):
        _there_and_back(folder)


def test_layers_of_prediction_that_are_said_and_not_there(build: Build) -> None:
    """As transformers leaves a folder that it has written again."""
    folder = build("deepseek")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert _params_of(folder).model.predictions == 0
    assert json.loads((_there_and_back(folder) / "config.json").read_text())["num_nextn_predict_layers"] == 0


def _there_and_back(folder: Path, **options: Any) -> Path:
    convert(folder, folder.parent / "saved", ConversionOptions(release=True))
    return export(folder.parent / "saved", folder.parent / "out", ExportOptions(**options)).path


def test_transformers_reads_an_exported_byte_level_tokenizer_as_the_training_did(build: Build) -> None:
    """Llama with GPT-2's tokenizer, whose files alone transformers took for a Llama's."""
    folder = build("llama")
    texts = ["the cat sat", " the  hat!\n\n\tand 1234 mats", "naïve café, 漢字 🙂", "it's they'll"]
    files = train_byte_level_bpe([*texts, "the cat sat on the mat"] * 3, 280, folder)
    out = _there_and_back(folder)
    theirs, reference = transformers.AutoTokenizer.from_pretrained(out), GPT2BPETokenizer(*files)
    assert [theirs(text)["input_ids"] for text in texts] == [reference.encode(text) for text in texts]
    assert (theirs.eos_token_id, len(theirs)) == (reference.eod, reference.vocab_size)
    assert theirs.decode(reference.encode(texts[1])) == texts[1]
    generation, config = (
        transformers.GenerationConfig.from_pretrained(out),
        transformers.AutoConfig.from_pretrained(out),
    )
    assert generation.eos_token_id == config.eos_token_id


def _assert_same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    different = [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (one, other))
    if was["model_type"] == "gpt2":  # n_ctx is added, which llama.cpp's converter needs and transformers does not write
        assert now == {**was, "n_ctx": was["n_positions"]}
        different.remove("config.json")
    assert different == []


def _params_of(folder: Path) -> GlobalParameters:
    return GlobalParameters.from_args(args_of(HuggingFaceSource(folder).common()), "")


def _difference(folder: Path, checkpoint: Path) -> float:
    params = _params_of(folder)
    compared = compare_logits(folder, Weights(open_source(checkpoint)), params, params.vocab_size)
    assert compared.difference is not None
    return compared.difference


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_comes_back_and_the_logits_are_theirs(build: Build, name: str) -> None:
    folder = build(name)
    out = _there_and_back(folder)
    _assert_same_files(folder, out)
    assert _difference(folder, folder.parent / "saved/release") <= TOLERANCE
    assert _difference(out, folder) <= TOLERANCE


@pytest.mark.parametrize(("name", "top_k"), [("llama", 1), ("llama-biases", 2), ("gpt2", 3)])
@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_a_mixture_of_copies_computes_what_the_dense_model_does(
    build: Build, name: str, top_k: int, format: str
) -> None:
    folder = build(name)
    convert(
        folder, folder.parent / "saved", ConversionOptions(format=format, release=True, upcycling=Upcycling(4, top_k))
    )
    tokens = torch.randint(0, 67, (2, 20), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    saved = open_source(folder.parent / "saved" / "release")
    weights, params = Weights(saved), GlobalParameters.from_args(args_of(saved.common()), "")
    ours = GPT(params.model, params.vocab_size).eval()
    with torch.no_grad():
        for parameter, weight in ours.named_parameters():
            weight.copy_(weights.read(parameter, weight.shape, params))
        assert any("local_experts.3." in parameter for parameter, _ in ours.named_parameters())
        wanted = theirs(tokens).logits
        assert float((ours(tokens) - wanted).abs().max() / wanted.abs().max()) < 1e-5
    arguments = ["checkpoint", "convert", str(folder.parent / "saved"), str(folder.parent / "more"), "--upcycle", "4"]
    assert main(arguments) == 4


def test_what_is_no_mixture_is_refused(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build("llama")
    convert_it = ["checkpoint", "convert", str(folder), str(folder.parent / "saved"), "--upcycle"]
    assert main([*convert_it, "1"]) == 2
    assert main([*convert_it, "4", "--moe-router-topk", "5"]) == 2
    said = capsys.readouterr().err
    assert "--upcycle 1: " in said
    assert "--moe-router-topk 5 with --upcycle 4: use 1 to 4" in said


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-3.2", "mistral", "qwen2", "qwen3"])
def test_shards_in_bf16(build: Build, name: str) -> None:
    folder = build(name, torch.bfloat16, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    out = _there_and_back(folder, max_shard_size="8KB")
    _assert_same_files(folder, out)
    assert _difference(out, folder) <= TOLERANCE


def test_fp16(build: Build) -> None:
    folder = build("llama", torch.float16)
    _assert_same_files(folder, _there_and_back(folder))


@pytest.mark.parametrize("name", MODELS)
def test_a_config_of_ours_says_the_same(build: Build, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the original config.json the one that is written means the same to transformers."""
    folder = build(name)
    kind = HuggingFaceSource(folder).about.family.model_type
    monkeypatch.setattr("megalith.checkpoint.writers.huggingface._original", lambda *_: None)
    made = export(folder, folder.parent / "out", ExportOptions(model_type=kind))
    assert (made.path / "config.json").read_bytes() != (folder / "config.json").read_bytes()
    assert _difference(made.path, folder) <= TOLERANCE
    ours, theirs = (transformers.AutoConfig.from_pretrained(path) for path in (made.path, folder))
    for key in ("vocab_size", "tie_word_embeddings", "rope_parameters", "sliding_window", "layer_types", "dtype"):
        assert getattr(ours, key, None) == getattr(theirs, key, None), key


@pytest.mark.parametrize("head_size", [8, 64, 128])
def test_stretched_frequencies(head_size: int) -> None:
    """Those of all three bands, for sequences as long as Llama 3.1 takes them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=LLAMA3,
    )
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (500000.0 ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size))
    ours = LongContext(32.0).scaled(plain)
    assert factor == 1.0
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    changed = ours != plain
    assert changed.any() and not changed.all()


@pytest.mark.parametrize("case", ["gpt2_tp2_torch", "llama_pp2_torch_dist", "llama_bf16_torch_dist"])
def test_checkpoints_of_megatron(golden: Goldens, tmp_path: Path, case: str) -> None:
    """What the real Megatron trained computes the same in transformers."""
    with tarfile.open(golden.path(f"pretrain/{case}/ckpt.tar.xz")) as archive:
        archive.extractall(tmp_path / "ckpt", filter="data")
    (tracker,) = (tmp_path / "ckpt").rglob("latest_checkpointed_iteration.txt")
    found: list[Comparison] = []
    made = export(
        tracker.parent, tmp_path / "out", ExportOptions(), check=lambda *model: found.append(compare_logits(*model))
    )
    assert found[0].difference is not None and found[0].difference <= TOLERANCE
    assert made.family.model_type == case.partition("_")[0]


def test_another_model_is_refused(build: Build) -> None:
    """The comparison finds a single pair of exchanged heads."""
    folder = build("llama")
    convert(folder, folder.parent / "saved", ConversionOptions(release=True))
    weights, params = Weights(open_source(folder.parent / "saved/release")), _params_of(folder)
    original = weights.read

    def exchanged(name: str, *rest: Any) -> torch.Tensor:
        tensor = original(name, *rest)
        if name == "decoder.layers.1.self_attention.linear_qkv.weight":
            return torch.cat([tensor[6:12], tensor[:6], tensor[12:]])  # as if the queries stood the other way round
        return tensor

    weights.read = exchanged  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=str(folder)):
        compare_logits(folder, weights, params, params.vocab_size)


def test_a_folder_that_transformers_cannot_load(build: Build) -> None:
    folder = build("llama")
    weights, params = Weights(HuggingFaceSource(folder)), _params_of(folder)
    broken = shutil.copytree(folder, folder.parent / "broken")
    (broken / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(CheckpointError, match="cannot load"):
        compare_logits(broken, weights, params, params.vocab_size)


def test_the_commands(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build("qwen3")
    saved, out = folder.parent / "s", folder.parent / "o"
    assert main(["checkpoint", "import", str(folder), str(saved)]) == 0
    text = capsys.readouterr().out
    assert re.search("logits .*transformers: .*difference", text) and f"--load {saved}" in text
    assert main(["checkpoint", "export", str(saved), str(out), "--max-shard-size", "9KB"]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    assert (out / "model.safetensors.index.json").exists()
    assert main(["checkpoint", "export", str(saved), str(folder.parent / "p"), "--no-compare"]) == 0
    assert "logits not compared (--no-compare)" in capsys.readouterr().out
    assert main(["checkpoint", "import", str(folder), str(saved)]) == 4  # there already


def test_commands_leave_nothing_where_logits_differ(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build("llama")
    saved, out = folder.parent / "s", folder.parent / "o"
    assert main(["checkpoint", "import", str(folder), str(saved)]) == 0
    before = {path: path.read_bytes() for path in sorted(saved.rglob("*")) if path.is_file()}
    monkeypatch.setattr("megalith.assemble.huggingface.TOLERANCE", -1.0)
    assert main(["checkpoint", "export", str(saved), str(out)]) == 4
    assert main(["checkpoint", "import", str(folder), str(folder.parent / "t")]) == 4
    assert not out.exists() and not list((folder.parent / "t").glob("*"))
    assert main(["checkpoint", "import", str(folder), str(saved), "--replace"]) == 4
    assert {path: path.read_bytes() for path in sorted(saved.rglob("*")) if path.is_file()} == before
    assert capsys.readouterr().err.count("of the largest logit") == 3


def test_without_transformers_it_says_so(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build("llama")
    monkeypatch.setattr("megalith.assemble.huggingface.find_spec", lambda name: None)
    assert main(["checkpoint", "import", str(folder), str(folder.parent / "s")]) == 0
    assert "logits not compared: " in capsys.readouterr().out
