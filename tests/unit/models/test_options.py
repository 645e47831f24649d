"""Each option of the model has its effect, which is the one that its formula says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig, load
from megalith.config.from_args import model_from_args
from megalith.config.saved_args import megatron_args
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.attend import AttentionRule, attend_unfused
from megalith.nn.norm import build_norm

BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 24 --seq-length 24 "
    "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 "
    "--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.3"
)
ROPE = "--position-embedding-type rope --kv-channels 16"
YARN = (
    "--kv-channels 16 --position-embedding-type yarn --yarn-original-max-position-embeddings 200 "
    "--rotary-scaling-factor 4"
)
GATED = "--disable-bias-linear --ffn-hidden-size 32"


def _config(flags: str) -> ModelConfig:
    return load([*BASE.split(), *flags.split()], {}, files=False).model


def _model(flags: str, dtype: torch.dtype = torch.float64) -> GPT:
    model = GPT(_config(flags), 40, dtype=dtype)
    initialise(model, seed=5)
    return model


def _losses(model: GPT) -> Tensor:
    tokens = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))
    losses: Tensor = model(tokens, labels_BS=tokens.roll(-1, 1))
    return losses


EFFECTS = [
    (ROPE, "--rotary-percent 0.5"),
    (ROPE, "--rotary-interleaved"),
    (ROPE, "--rotary-base 500"),
    (ROPE, "--rotary-seq-len-interpolation-factor 2"),
    (ROPE, "--use-rope-scaling"),
    (f"{ROPE} --use-rope-scaling", "--rope-scaling-factor 2"),
    (ROPE, "--no-rope-freq 4"),
    (f"{ROPE} --no-rope-freq 4", "--no-rope-freq [1,0,0,0]"),
    (ROPE, YARN),
    (YARN, "--rotary-scaling-factor 8"),
    (YARN, "--yarn-original-max-position-embeddings 100"),
    (YARN, "--yarn-beta-fast 2"),
    (YARN, "--yarn-beta-slow 0.05"),
    (f"{YARN} --yarn-beta-fast 4 --yarn-beta-slow 0.3", "--no-yarn-correction-range-round-to-int"),
    (YARN, "--mscale 3"),
    (YARN, "--mscale-all-dim 1"),
    ("", "--qk-layernorm"),
    ("", "--qk-l2-norm"),
    ("", "--attention-output-gate"),
    ("", "--softmax-type off-by-one"),
    ("", "--softmax-type learnable"),
    ("", "--softmax-scale 0.2"),
    ("", "--window-size 4,0"),
    ("--window-size 4,0", "--window-attn-skip-freq 2"),
    ("--window-size 4,0 --window-attn-skip-freq 4", "--window-attn-skip-freq [0,1,1,1]"),
    ("", "--openai-gelu --no-bias-gelu-fusion --norm-epsilon 0.1"),
    ("--no-bias-gelu-fusion", "--openai-gelu"),
    ("--no-bias-gelu-fusion", "--onnx-safe true"),
    ("", "--squared-relu"),
    ("", "--relu"),
    ("", "--geglu"),
    ("", "--quick-geglu"),
    (f"--swiglu {GATED}", "--glu-linear-offset 1"),
    (f"--swiglu {GATED}", "--activation-func-clamp-value 0.1"),
    ("", "--apply-residual-connection-post-layernorm"),
    ("", "--embedding-init-method-std 0.1"),
    ("", "--init-method-xavier-uniform"),
    ("--init-method-xavier-uniform", "--embedding-init-method-std 0.1"),
    ("", "--label-smoothing 0.1"),
    ("", "--add-qkv-bias --disable-bias-linear"),
    ("", "--use-mup"),
    ("--use-mup", "--mup-base-hidden-size 4"),
    ("--use-mup", "--mup-base-head-dim 4"),
    ("--use-mup", "--mup-attn-scale-power 0.5"),
    ("--use-mup", "--mup-embedding-mult 3"),
    ("--use-mup", "--mup-output-mult 3"),
]


@pytest.mark.parametrize(("base", "option"), EFFECTS)
def test_the_option_changes_the_loss(base: str, option: str) -> None:
    plain, other = (_losses(_model(flags)).detach() for flags in (base, f"{base} {option}"))
    assert float((plain - other).abs().max()) > 1e-7
    assert bool(other.isfinite().all())


def test_a_window_hides_what_lies_before_it() -> None:
    """Two layers of window 3 see 6 positions back; the seventh changes nothing."""
    model = _model("--num-layers 2 --window-size 3,0 --position-embedding-type none").eval()
    tokens = torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(2))
    logits = model(tokens)
    for back, seen in ((7, False), (6, True)):
        changed = tokens.clone()
        changed[0, 11 - back] = (changed[0, 11 - back] + 1) % 40
        assert bool((model(changed)[0, 11] - logits[0, 11]).abs().max() > 1e-9) == seen


def test_layers_without_rotation_do_not_know_distances() -> None:
    model = _model(f"{ROPE} --num-layers 1 --no-rope-freq 1").eval()
    tokens = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(2))
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    torch.testing.assert_close(model(tokens)[0, -1], model(swapped)[0, -1])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_around_one(kind: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    around, plain = (build_norm(kind, 6, 1e-5, around_one=one, **options) for one in (True, False))
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64)
    for norm, shift in ((around, 0.0), (plain, 1.0)):
        torch.nn.init.zeros_(norm.get_parameter("bias")) if kind == "LayerNorm" else None
        norm.get_parameter("weight").data.copy_(weight + shift)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(around(x), plain(x))
    fresh = dict(_model("--apply-layernorm-1p").named_parameters())
    assert fresh["decoder.layers.0.input_layernorm.weight"].unique().tolist() == [0.0]
    torch.testing.assert_close(_losses(_model("--apply-layernorm-1p")), _losses(_model("")))


def test_the_norm_of_llama_4_has_no_weights() -> None:
    norm = build_norm("L2Norm", 6, 1e-5, dtype=torch.float64, device=torch.device("cpu"))
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert not list(norm.parameters())


def test_wide_residuals_stay_in_fp32() -> None:
    flags = "--bf16 --fp32-residual-connection"
    wide, narrow = _model(flags, torch.bfloat16), _model("", torch.bfloat16)
    same = _model("")
    same.load_state_dict(narrow.state_dict())
    seen = []
    wide.decoder.layers["1"].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    exact = _losses(same)
    errors = [float((_losses(model).double() - exact).detach().abs().mean()) for model in (wide, narrow)]
    assert seen == [(torch.float32, torch.float32)]
    assert errors[0] < errors[1]
    assert wide.hidden_dtype == torch.float32 and narrow.hidden_dtype == torch.bfloat16


def test_layer_scaling_keeps_scores_within_fp16() -> None:
    """Scores of 2^17 overflow in fp16 and are fine once they are divided by 4."""
    q = torch.full((2, 1, 1, 64), 128.0, dtype=torch.float16)
    v = torch.tensor([1.0, 3.0], dtype=torch.float16).view(2, 1, 1, 1).expand(2, 1, 1, 64)
    plain = attend_unfused(q, q, v, 0.0, AttentionRule(), softmax_in_fp32=True)
    scaled = attend_unfused(q, q, v, 0.0, AttentionRule(layer_scaling=4), softmax_in_fp32=True)
    assert not bool(plain.isfinite().all())
    assert scaled[:, 0, 0, 0].tolist() == [1.0, 2.0]
    config = _config("--apply-query-key-layer-scaling --attention-backend unfused")
    assert config.softmax_in_fp32
    blocks = GPT(config, 40, device="meta").decoder.layers.values()
    assert [block.self_attention.rule.layer_scaling for block in blocks] == [1, 2, 3, 4]


@pytest.mark.parametrize(("flags", "wanted"), [("--attention-softmax-in-fp32", torch.float32), ("", torch.bfloat16)])
def test_the_dtype_of_the_softmax(monkeypatch: pytest.MonkeyPatch, flags: str, wanted: torch.dtype) -> None:
    seen, softmax = set(), torch.softmax

    def noted(x: Tensor, dim: int) -> Tensor:
        seen.add(x.dtype)
        return softmax(x, dim)

    monkeypatch.setattr(torch, "softmax", noted)
    _losses(_model(f"--attention-backend unfused {flags}", torch.bfloat16))
    assert seen == {wanted}


def test_a_gate_of_zero_halves_the_attention() -> None:
    """sigmoid(0) = 1/2: with all gates zero the layer is that of half the values."""
    gated, plain = _model("--attention-output-gate --num-layers 1"), _model("--num-layers 1")
    weights = dict(plain.named_parameters())
    for name, parameter in gated.named_parameters():
        if "linear_qkv" not in name:
            parameter.data.copy_(weights[name])
            continue
        whole = weights[name].data.unflatten(0, (4, 3, 4))
        groups = parameter.data.unflatten(0, (4, 4, 4))
        groups[:, 0], groups[:, 1], groups[:, 2], groups[:, 3] = whole[:, 0], 0.0, whole[:, 1], whole[:, 2] * 2
    torch.testing.assert_close(_losses(gated), _losses(plain))


def test_initial_weights_by_option() -> None:
    xavier = dict(_model("--init-method-xavier-uniform").named_parameters())
    fc1 = xavier["decoder.layers.0.mlp.linear_fc1.weight"]
    most = math.sqrt(6 / (16 + 64))
    assert float(fc1.abs().max()) <= most and float(fc1.std()) == pytest.approx(most / math.sqrt(3), rel=0.1)
    small = dict(_model("--embedding-init-method-std 0.01 --untie-embeddings-and-output-weights").named_parameters())
    assert float(small["embedding.word_embeddings.weight"].std()) == pytest.approx(0.01, rel=0.15)
    assert float(small["embedding.position_embeddings.weight"].std()) == pytest.approx(0.01, rel=0.15)
    assert float(small["output_layer.weight"].std()) == pytest.approx(0.3, rel=0.15)


def test_label_smoothing_is_of_training_only() -> None:
    smooth, plain = _model("--label-smoothing 0.3"), _model("")
    assert torch.equal(_losses(smooth.eval()), _losses(plain.eval()))


def test_every_setting_of_a_new_model_is_saved_and_read_again() -> None:
    flags = (
        f"{YARN} --softmax-type learnable --window-size 4,0 --window-attn-skip-freq [1,0]*2 --no-rope-freq 2 "
        "--apply-layernorm-1p --geglu --softmax-scale 0.5 --attention-output-gate --qk-l2-norm"
    )
    run = load([*BASE.split(), *flags.split()], {}, files=False)
    args = megatron_args(run)
    assert args["window_size"] == (4, 0) and args["window_attn_skip_freq"] == [1, 0, 1, 0]
    assert args["no_rope_freq"] == 2 and args["layernorm_zero_centered_gamma"] is True
    assert args["yarn_rotary_scaling_factor"] == 4 and args["yarn_mscale"] == 1
    again = model_from_args(args)
    assert model_from_args({**args, "yarn_rotary_scaling_factor": 8.0}).rotary_scaling_factor == 8
    changes = {"kv_channels": 16, "ffn_hidden_size": 64, "window_attn_skip_freq": "[1, 0, 1, 0]"}
    assert again == dataclasses.replace(run.model, **changes)
