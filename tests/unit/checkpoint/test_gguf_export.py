"""Exporting as GGUF: names, order of rows, types, vocabulary, and the tokens that llama.cpp generates."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.assemble.gguf import compare_with_llama_cpp
from megalith.checkpoint.writers.gguf import export_gguf, modelfile, neighbouring_pairs
from megalith.checkpoint.writers.huggingface import ExportOptions, Weights
from megalith.cli.main import main
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, DataError
from megalith.tokenizers import train_byte_level_bpe

from .huggingface_folders import GPT2, LLAMA, random_weights, write_folder, write_tokenizer

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

ROWS = 300
WIDE = dataclasses.replace(LLAMA, hidden_size=64, ffn_hidden_size=96, max_position_embeddings=64)
WIDE_GPT2 = dataclasses.replace(GPT2, hidden_size=64, max_position_embeddings=64)
MIXTURE = {"num_experts": 4, "moe_router_topk": 2}
MODELS: dict[str, tuple[str, ModelConfig]] = {
    "llama": ("llama", WIDE),
    "llama-biases": ("llama", dataclasses.replace(WIDE, add_bias_linear=True)),
    "llama3-scaling": ("llama", dataclasses.replace(WIDE, use_rope_scaling=True, rotary_base=500000)),
    "linear-scaling": ("llama", dataclasses.replace(WIDE, rotary_seq_len_interpolation_factor=2)),
    "yarn": (
        "llama",
        dataclasses.replace(
            WIDE,
            position_embedding_type="yarn",
            rotary_scaling_factor=4.0,
            yarn_original_max_position_embeddings=16,
            yarn_beta_fast=32.0,
            yarn_beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=0.0,
        ),
    ),
    "mistral": ("mistral", WIDE),
    "qwen2": ("qwen2", dataclasses.replace(WIDE, add_qkv_bias=True)),
    "qwen3": ("qwen3", dataclasses.replace(WIDE, qk_layernorm=True, kv_channels=32)),
    "mixtral": ("mixtral", dataclasses.replace(WIDE, **MIXTURE)),
    "qwen3_moe": ("qwen3_moe", dataclasses.replace(WIDE, qk_layernorm=True, moe_ffn_hidden_size=32, **MIXTURE)),
    "gpt2": ("gpt2", WIDE_GPT2),
}
TEXTS = ("the cat sat on the mat", "it's they'll 1234  \n\n\tnaïve café 漢字")


def folder_of(path: Path, name: str) -> dict[str, Tensor]:
    """Write a Hugging Face folder with an own tokenizer and more rows than it has tokens; return the weights."""
    kind, model = MODELS[name]
    weights = {key: tensor * 0.2 for key, tensor in random_weights(kind, model).items()}
    generator = torch.Generator().manual_seed(3)
    for key, tensor in weights.items():
        if tensor.shape[0] == 35:
            weights[key] = torch.randn((ROWS, *tensor.shape[1:]), generator=generator)
        elif "norm" in key or "ln_" in key:
            weights[key] = tensor + 1
    write_folder(path, kind, model, weights=weights, vocab_size=ROWS)
    train_byte_level_bpe(TEXTS * 3, 290, path)
    return weights


def read(folder: Path) -> Any:
    (file,) = folder.glob("*.gguf")
    return gguf.GGUFReader(file)


def tensors(folder: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in read(folder).tensors}


def value(reader: Any, key: str) -> Any:
    return reader.get_field(key).contents()


def test_names_and_order_of_rows(tmp_path: Path) -> None:
    weights = folder_of(tmp_path / "hf", "llama")
    made = export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"out-f32.gguf", "Modelfile"}
    found = tensors(tmp_path / "out")
    assert len(found) == len(weights) and made.architecture == "llama" and made.dtype == "float32"
    assert np.array_equal(found["token_embd.weight"].data, weights["model.embed_tokens.weight"])
    assert np.array_equal(found["blk.1.ffn_down.weight"].data, weights["model.layers.1.mlp.down_proj.weight"])
    queries = weights["model.layers.0.self_attn.q_proj.weight"]
    size = 64 // 4
    wanted = [head * size + half * size // 2 + i for head in range(4) for i in range(size // 2) for half in range(2)]
    assert np.array_equal(found["blk.0.attn_q.weight"].data, queries[wanted])
    assert torch.equal(neighbouring_pairs(queries, 4), queries[wanted])
    values = weights["model.layers.0.self_attn.v_proj.weight"]
    assert np.array_equal(found["blk.0.attn_v.weight"].data, values)


def test_gpt2_is_stored_transposed(tmp_path: Path) -> None:
    weights = folder_of(tmp_path / "hf", "gpt2")
    export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
    found = tensors(tmp_path / "out")
    assert np.array_equal(found["blk.0.attn_qkv.weight"].data, weights["transformer.h.0.attn.c_attn.weight"].T)
    assert "output.weight" not in found


def test_experts_are_stacked(tmp_path: Path) -> None:
    weights = folder_of(tmp_path / "hf", "mixtral")
    export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions(dtype="f16"))
    found = tensors(tmp_path / "out")
    up = [weights[f"model.layers.1.block_sparse_moe.experts.{n}.w3.weight"] for n in range(4)]
    assert np.array_equal(found["blk.1.ffn_up_exps.weight"].data, torch.stack(up).half())
    assert found["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"


@pytest.mark.parametrize(("dtype", "name"), [("q8_0", "Q8_0"), ("bf16", "BF16"), ("float16", "F16")])
def test_types(tmp_path: Path, dtype: str, name: str) -> None:
    weights = folder_of(tmp_path / "hf", "llama")
    export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions(dtype=dtype))
    found = tensors(tmp_path / "out")
    matrix, wanted = found["blk.0.ffn_up.weight"], weights["model.layers.0.mlp.up_proj.weight"]
    assert matrix.tensor_type.name == name and list(matrix.shape) == [64, 96]
    back = gguf.dequantize(matrix.data, matrix.tensor_type)
    if name == "Q8_0":  # 32 values and their scale in 34 bytes
        assert matrix.n_bytes == wanted.numel() // 32 * 34
        step = wanted.view(-1, 32).abs().amax(1, keepdim=True) / 127
        # Half a step of rounding, and the rounding of the scale to fp16, which 127 steps multiply.
        assert ((torch.tensor(back).view(-1, 32) - wanted.view(-1, 32)).abs() <= step * (0.501 + 127 / 2**11)).all()
    else:
        assert np.array_equal(back, wanted.to({"F16": torch.float16, "BF16": torch.bfloat16}[name]).float())
    norm = found["blk.0.attn_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, weights["model.layers.0.input_layernorm.weight"])


def test_rows_that_are_no_blocks_are_in_float16_and_it_is_said(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", vocab_size=257, weights=_with_rows(257))
    write_tokenizer(tmp_path / "hf")
    made = export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions(dtype="q8_0"))
    assert tensors(tmp_path / "out")["blk.0.attn_q.weight"].tensor_type.name == "F16"
    assert any("32" in note for note in made.notes)


def _with_rows(rows: int) -> dict[str, Tensor]:
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    return random_weights("llama", LLAMA) | {name: torch.randn(rows, 16) for name in ends}


def test_the_vocabulary_comes_along(tmp_path: Path) -> None:
    folder_of(tmp_path / "hf", "llama")
    export_gguf(tmp_path / "hf", tmp_path / "first", ExportOptions())
    reader = read(tmp_path / "first")
    ids = json.loads((tmp_path / "hf/vocab.json").read_text())
    tokens = value(reader, "tokenizer.ggml.tokens")
    assert tokens[: len(ids)] == sorted(ids, key=ids.__getitem__) and len(tokens) == ROWS
    assert value(reader, "tokenizer.ggml.pre") == "gpt-2" and value(reader, "tokenizer.ggml.model") == "gpt2"
    assert value(reader, "tokenizer.ggml.eos_token_id") == ids["<|endoftext|>"]
    types = value(reader, "tokenizer.ggml.token_type")
    assert types[ids["<|endoftext|>"]] == gguf.TokenType.CONTROL and types[-1] == gguf.TokenType.UNUSED


def test_a_chat_template_comes_along(tmp_path: Path) -> None:
    template = "{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}"
    write_folder(tmp_path / "hf", vocab_size=257, weights=_with_rows(257))
    write_tokenizer(tmp_path / "hf")
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(settings))
    export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
    assert value(read(tmp_path / "out"), "tokenizer.chat_template") == template
    text = (tmp_path / "out/Modelfile").read_text()
    assert "FROM ./out-f32.gguf\n" in text and "PARAMETER num_ctx 32\n" in text and '"<|im_end|>"' in text


def test_the_template_of_ollama() -> None:
    assert "{{ .Prompt }}" in modelfile("a.gguf", None, 8)
    assert "\nTEMPLATE" not in modelfile("a.gguf", "[INST] {{ messages }}", 8)


@pytest.mark.parametrize("name", list(MODELS))
def test_llama_cpp_continues_alike(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    folder_of(tmp_path / "hf", name)
    compared = []
    export_gguf(
        tmp_path / "hf",
        tmp_path / "out",
        ExportOptions(dtype="float32"),
        check=lambda *model: compared.append(compare_with_llama_cpp(*model)),
    )
    assert compared[0].equal == compared[0].tokens == 32 and compared[0].same_ids
    assert compared[0].difference < 1e-3


def test_other_tokens_are_refused_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    folder_of(tmp_path / "hf", "llama")
    unlike = "megalith.checkpoint.writers.gguf.neighbouring_pairs"
    monkeypatch.setattr(unlike, lambda tensor, heads: tensor)
    before = sorted(tmp_path.iterdir())
    assert main(["checkpoint", "export", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "gguf"]) == 4
    assert sorted(tmp_path.iterdir()) == before


def test_each_parameter_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = Weights.read

    def counting(self: Weights, name: str, *rest: Any) -> Tensor:
        reads.append(name)
        return original(self, name, *rest)

    monkeypatch.setattr(Weights, "read", counting)
    folder_of(tmp_path / "hf", "llama")
    export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
    assert len(reads) == len(set(reads)) > 10


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (["--dtype", "q4_k"], 2, "--dtype q4_k"),
        (["--max-shard-size", "1GB"], 2, "--max-shard-size"),
        (["--true-vocab-size", "0"], 2, "--true-vocab-size"),
    ],
)
def test_bad_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, named: str) -> None:
    folder_of(tmp_path / "hf", "llama")
    assert main(["checkpoint", "export", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "gguf", *flags]) == code
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_unknown_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", "export", str(tmp_path), str(tmp_path / "out"), "--to", "onnx"])
    assert caught.value.code == 2 and "--to" in capsys.readouterr().err


def test_places_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path / "hf", "llama")
    export = ["checkpoint", "export", str(tmp_path / "hf")]
    assert main([*export, str(tmp_path / "model.gguf"), "--to", "gguf"]) == 2
    assert "model.gguf" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    assert main([*export, str(tmp_path / "taken"), "--to", "gguf"]) == 4
    assert "taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "model", "named"),
    [
        ("mistral", dataclasses.replace(WIDE, window_size="15,0"), "sliding window"),
        ("qwen3_moe", dataclasses.replace(MODELS["qwen3_moe"][1], moe_router_pre_softmax=True), "norm_topk_prob"),
        ("qwen3_moe", dataclasses.replace(MODELS["qwen3_moe"][1], moe_layer_freq="[0, 1]"), "experts"),
    ],
)
def test_models_that_llama_cpp_has_not(tmp_path: Path, kind: str, model: ModelConfig, named: str) -> None:
    write_folder(tmp_path / "hf", kind, model)
    with pytest.raises(CheckpointError, match=named):
        export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_llama_cpp_has_not(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", vocab_size=257, weights=_with_rows(257))
    with pytest.raises(DataError, match="tokenizer.json"):
        export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
    write_tokenizer(tmp_path / "hf")
    content = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="Whitespace.*--to hf"):
        export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out").exists()


SENTENCES = [text for text in (*TEXTS, "Hello, world! we'll see. def f(x): return x") for _ in range(9)]


def _byte_level(folder: Path, split: list[dict[str, Any]], *, ignore_merges: bool = False) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    learned = json.loads(_learned(split).to_str())
    content |= {"model": {**learned["model"], "ignore_merges": ignore_merges}, "added_tokens": []}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": split}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def _learned(split: list[dict[str, Any]]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    content = {**json.loads(tokenizer.to_str()), "pre_tokenizer": {"type": "Sequence", "pretokenizers": split}}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def _sentence_piece(folder: Path, kind: str) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, list[dict[str, Any]]] = {
    "llama-bpe": [{**SPLIT, "pattern": {"Regex": LLAMA3}}, {**BYTES, "use_regex": False}],
    "qwen2": [
        {**SPLIT, "pattern": {"Regex": LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")}},
        {**BYTES, "use_regex": False},
    ],
    "smollm": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
}
SPLITS["dbrx"] = SPLITS["llama-bpe"]


@pytest.mark.parametrize("pre", [*SPLITS, "default"])
def test_llama_cpp_makes_the_same_ids(tmp_path: Path, pre: str) -> None:
    """Of byte-level tokenizers by what splits their texts, and of a SentencePiece model."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    write_folder(tmp_path / "hf", vocab_size=400, weights=_with_rows(400))
    if pre in SPLITS:
        _byte_level(tmp_path / "hf", SPLITS[pre], ignore_merges=pre == "llama-bpe")
    else:
        pytest.importorskip("sentencepiece", reason="the extra data is not installed")
        _sentence_piece(tmp_path / "hf", "bpe")
    compared = []
    export_gguf(
        tmp_path / "hf",
        tmp_path / "out",
        ExportOptions(),
        check=lambda *model: compared.append(compare_with_llama_cpp(*model)),
    )
    assert value(read(tmp_path / "out"), "tokenizer.ggml.pre") == pre and compared[0].same_ids


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the extra data is not installed")
    write_folder(tmp_path / "hf", vocab_size=400, weights=_with_rows(400))
    _sentence_piece(tmp_path / "hf", "unigram")
    with pytest.raises(DataError, match="unigram.*--to hf"):
        export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "hf", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DataError, match="gguf"):
        export_gguf(tmp_path / "hf", tmp_path / "out", ExportOptions())
