"""What a checkpoint of another run is refused with, and one whose values are odd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalith.checkpoint.content import LoadedContent
from megalith.config import RunConfig
from megalith.config.build import from_values
from megalith.config.saved_args import megatron_args
from megalith.errors import CheckpointError
from megalith.train.checkpoint_fit import FoundCheckpoint, Identity, check_fits
from megalith.train.checkpoint_restore import strictness_notes, thread_notes

VALUES: dict[str, Any] = {
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8, "seq_length": 8},
    **{"micro_batch_size": 2, "train_iters": 10, "lr": 1e-3, "mock_data": True},
    **{"tokenizer_type": "NullTokenizer", "vocab_size": 10},
}
IDENTITY = Identity(tokenizer={"size": 10}, tokenizer_files={}, data={"seq_length": 8})


def run_of(**changes: object) -> RunConfig:
    return from_values({**VALUES, **changes})


def found_of(run: RunConfig, identity: Identity = IDENTITY) -> FoundCheckpoint:
    return FoundCheckpoint(5, (), megatron_args(run), {"tokenizer": identity.tokenizer, "data": identity.data})


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"bias_gelu_fusion": False}, "--no-bias-gelu-fusion"),
        ({"group_query_attention": True}, "--group-query-attention"),
    ],
)
def test_another_arithmetic_is_another_architecture(changes: dict[str, object], flag: str) -> None:
    check_fits(found_of(run_of()), run_of(), IDENTITY)
    with pytest.raises(CheckpointError) as raised:
        check_fits(found_of(run_of(**changes)), run_of(), IDENTITY)
    assert flag in str(raised.value) and "--finetune" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [({"add_bias_linear": False}, "--disable-bias-linear"), ({"qk_layernorm": True}, "--qk-layernorm")],
)
def test_flags_are_shown_as_typed(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(CheckpointError, match=f"{flag}: given .*, not given "):
        check_fits(found_of(run_of(**changes)), run_of(), IDENTITY)
    with pytest.raises(CheckpointError, match=f"{flag}: not given .*, given "):
        check_fits(found_of(run_of()), run_of(**changes), IDENTITY)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("no_rope_freq", {"position_embedding_type": "rope"}),
        ("window_attn_skip_freq", {"window_size": "4,0"}),
        ("moe_layer_freq", {"num_experts": 4}),
    ],
)
@pytest.mark.parametrize("spelling", ["[0,1,0,1]", "([0]+[1])*2", "[ 0, 1 ]*2"])
def test_layers_are_compared_however_their_list_is_spelled(name: str, more: dict[str, object], spelling: str) -> None:
    run, other = (run_of(num_layers=4, **more, **{name: value}) for value in (spelling, "[1,1,0,1]"))
    check_fits(found_of(run), run, IDENTITY)
    with pytest.raises(CheckpointError, match=f"--{name.replace('_', '-')}"):
        check_fits(found_of(run), other, IDENTITY)


def test_a_setting_without_effect_does_not_matter() -> None:
    gated = run_of(swiglu=True, ffn_hidden_size=16)
    check_fits(found_of(run_of(swiglu=True, ffn_hidden_size=16, bias_gelu_fusion=False)), gated, IDENTITY)


def test_offsets_of_experts_are_not_lost_unheard() -> None:
    runs = [
        run_of(num_experts=4, moe_router_load_balancing_type=(kind,), moe_latent_size=latent)
        for kind, latent in (("aux_loss", None), ("none", None), ("quantile_balancing", None), ("aux_loss", 4))
    ]
    check_fits(found_of(runs[0]), runs[1], IDENTITY)
    told = "--moe-router-load-balancing-type: quantile_balancing in the checkpoint, another here"
    for was, now, text in ((2, 0, told), (0, 2, "another in the checkpoint"), (3, 0, "--moe-latent-size: 4 in the")):
        with pytest.raises(CheckpointError, match=text):
            check_fits(found_of(runs[was]), runs[now], IDENTITY)


def test_another_number_of_threads_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_of(run_of())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    computed = {threads: replace(found, manifest={"threads": threads}) for threads in (1, 2, None)}
    (note,) = thread_notes(computed[1], torch.device("cpu"))
    assert "1 thread " in note and "has 2" in note and "OMP_NUM_THREADS=1" in note
    assert thread_notes(computed[1], torch.device("cuda")) == ()
    for same in (computed[2], computed[None], replace(found, manifest=None)):
        assert thread_notes(same, torch.device("cpu")) == ()


def test_finetune_is_a_remedy_for_other_data_only() -> None:
    other = replace(IDENTITY, data={"seq_length": 4})
    with pytest.raises(CheckpointError, match="--finetune"):
        check_fits(found_of(run_of()), run_of(), other)


@pytest.mark.parametrize("args", [{}, {"padded_vocab_size": None}])
def test_odd_values_are_an_error_of_the_checkpoint(args: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"iteration 5: .*common\.pt"):
        _ = FoundCheckpoint(5, (), args, None).padded_vocab_size


def test_what_a_checkpoint_has_beside_is_passed_over_said_or_refused() -> None:
    loaded = LoadedContent({}, {}, ("decoder.extra", "optimizer.state.exp_avg.decoder.extra"))
    said = ("the checkpoint holds what this run does not ask for: decoder.extra",)
    for how, notes in {
        "assume_ok_unexpected": (),
        "ignore_all": (),
        "log_all": said,
        "return_unexpected": said,
    }.items():
        assert strictness_notes(loaded, run_of(dist_ckpt_strictness=how), with_optimizer=False) == notes
    for how in ("raise_unexpected", "raise_all"):
        with pytest.raises(CheckpointError, match=rf"decoder\.extra.*--dist-ckpt-strictness {how}"):
            strictness_notes(loaded, run_of(dist_ckpt_strictness=how), with_optimizer=False)


@pytest.mark.parametrize(
    ("weights_only", "given", "named"),
    [
        (True, {"load": "L"}, "L"),
        (True, {"load": "L", "pretrained_checkpoint": "P"}, "P"),
        (False, {"load": "L", "pretrained_checkpoint": "P"}, "L"),
    ],
)
def test_the_folder_of_another_run_is_named(weights_only: bool, given: dict[str, str], named: str) -> None:
    run = run_of()
    run = replace(run, checkpoint=replace(run.checkpoint, **given))
    found = replace(found_of(run_of(qk_layernorm=True)), weights_only=weights_only)
    with pytest.raises(CheckpointError, match=f" in {named} is of another run"):
        check_fits(found, run, IDENTITY)
