"""Flags of the training that change its numbers do so: a few steps with and without each, from the flag to the weight.

What each one computes is checked elsewhere, against its formula or a golden; here that it arrives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.cli.train_hooks import dump_groups
from megalith.config import RunConfig, load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.train.checkpoint_content import content_of
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step

STEPS = 4
BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 --seq-length 8 "
    "--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --init-method-std 0.2 "
    "--hidden-dropout 0 --attention-dropout 0"
)
BY_ITERS = f"--global-batch-size 4 --train-iters {STEPS} --lr 1e-2 --lr-decay-style cosine --min-lr 1e-3"
BY_SAMPLES = f"--global-batch-size 4 --train-samples {4 * STEPS} --lr 1e-2 --lr-decay-style cosine"
WSD = f"{BY_ITERS} --lr-decay-style WSD --lr-wsd-decay-iters 3"
EXPERTS = f"{BY_ITERS} --num-experts 4 --moe-ffn-hidden-size 8"
MUON = f"{BY_ITERS} --optimizer muon --group-query-attention --num-query-groups 2"

EFFECTS = [
    # schedules
    (BY_ITERS, "--lr 2e-2"),
    (BY_ITERS, "--min-lr 5e-3"),
    (BY_ITERS, "--lr-decay-style linear"),
    (BY_ITERS, "--lr-decay-style constant"),
    (BY_ITERS, "--lr-decay-style inverse-square-root --lr-warmup-iters 1"),
    (BY_ITERS, "--lr-decay-style WSD --lr-wsd-decay-iters 3"),
    (WSD, "--lr-wsd-decay-style linear"),
    (WSD, "--lr-wsd-decay-style cosine"),
    (WSD, "--lr-wsd-decay-style minus_sqrt"),
    (WSD, "--lr-wsd-decay-iters 2"),
    (BY_ITERS, "--lr-decay-iters 8"),
    (BY_ITERS, "--lr-warmup-iters 2"),
    (BY_ITERS, "--lr-warmup-fraction 0.5"),
    (f"{BY_ITERS} --lr-warmup-iters 2", "--lr-warmup-init 5e-3"),
    (BY_SAMPLES, "--lr-decay-samples 32"),
    (BY_SAMPLES, "--lr-warmup-samples 8"),
    (f"{BY_SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 12", "--lr-wsd-decay-samples 8"),
    (BY_ITERS, "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4"),
    (f"{BY_ITERS} --decoupled-lr 1e-3 --decoupled-min-lr 1e-4", "--decoupled-min-lr 1e-5"),
    (BY_ITERS, "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"),
    (
        f"{BY_ITERS} --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--start-weight-decay .5",
    ),
    (
        f"{BY_ITERS} --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--end-weight-decay .5",
    ),
    (
        f"{BY_ITERS} --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--weight-decay-incr-style cosine",
    ),
    # batches
    (BY_ITERS, "--global-batch-size 8"),
    (BY_ITERS, "--rampup-batch-size 2 2 4"),
    (
        BY_ITERS.replace("--global-batch-size 4", "--step-batch-size-schedule 0:4"),
        "--step-batch-size-schedule 0:2,40:4",
    ),
    # optimizers
    (BY_ITERS, "--weight-decay 0.5"),
    (BY_ITERS, "--adam-beta1 0.5"),
    (BY_ITERS, "--adam-beta2 0.9"),
    (BY_ITERS, "--adam-eps 0.1"),
    (BY_ITERS, "--clip-grad 1e-3"),
    (BY_ITERS, "--optimizer sgd"),
    (f"{BY_ITERS} --optimizer sgd", "--sgd-momentum 0"),
    (BY_ITERS, "--optimizer lion"),
    (f"{BY_ITERS} --optimizer lion", "--lion-beta1 0.1"),
    (f"{BY_ITERS} --optimizer lion", "--lion-beta2 0.1"),
    (BY_ITERS, "--optimizer soap"),
    (f"{BY_ITERS} --optimizer soap", "--soap-shampoo-beta 0.5"),
    (f"{BY_ITERS} --optimizer soap", "--soap-precondition-frequency 3"),
    (BY_ITERS, "--optimizer muon"),
    (MUON, "--muon-momentum 0.5"),
    (MUON, "--muon-nesterov"),
    (MUON, "--muon-no-split-qkv"),
    (MUON, "--muon-scale-mode unit_rms_norm"),
    (MUON, "--muon-extra-scale-factor 0.2"),
    (MUON, "--muon-coefficient-type simple"),
    (MUON, "--muon-num-ns-steps 10"),
    (MUON, "--muon-scalar-optimizer lion"),
    (MUON, "--optimizer adaptive_muon"),
    (f"{BY_ITERS} --qk-layernorm --weight-decay 1", "--apply-wd-to-qk-layernorm"),
    (f"{BY_ITERS} --qk-layernorm --weight-decay 1", "--no-weight-decay-cond-type apply_wd_to_qk_layernorm"),
    (BY_ITERS, "--use-precision-aware-optimizer --exp-avg-dtype bf16"),
    (BY_ITERS, "--use-precision-aware-optimizer --exp-avg-sq-dtype bf16"),
    (BY_ITERS, "--use-precision-aware-optimizer --main-grads-dtype bf16"),
    (f"{BY_ITERS} --bf16", "--use-precision-aware-optimizer --main-params-dtype fp16"),
    (f"{BY_ITERS} --bf16", "--grad-reduce-in-bf16"),
    (f"{BY_ITERS} --bf16 --use-megatron-fsdp --grad-reduce-in-bf16", "--megatron-fsdp-main-grads-dtype fp32"),
    (f"{BY_ITERS} --fp16 --loss-scale 8", "--accumulate-allreduce-grads-in-fp32"),
    (f"{BY_ITERS} --bf16", "--fp32-residual-connection"),
    # loss
    (BY_ITERS, "--calculate-per-token-loss"),
    (BY_ITERS, "--label-smoothing 0.1"),
    # experts
    (BY_ITERS, "--num-experts 4"),
    (EXPERTS, "--moe-router-topk 3"),
    (EXPERTS, "--moe-latent-size 4"),
    (EXPERTS, "--moe-router-force-load-balancing"),
    (EXPERTS, "--moe-router-load-balancing-type quantile_balancing"),
    (f"{EXPERTS} --moe-router-load-balancing-type quantile_balancing", "--moe-router-quantile-balancing-ema 0.9"),
    (f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax", "--moe-apply-probs-on-input"),
    (EXPERTS, "--moe-router-topk-scaling-factor 3"),
    (EXPERTS, "--moe-router-score-function sigmoid"),
    (EXPERTS, "--moe-router-pre-softmax"),
    (EXPERTS, "--moe-input-jitter-eps 0.3"),
    (EXPERTS, "--moe-expert-capacity-factor 0.5"),
    (f"{EXPERTS} --moe-expert-capacity-factor 0.5", "--moe-token-drop-policy position"),
    (EXPERTS, "--moe-z-loss-coeff 0.1"),
    (EXPERTS, "--moe-aux-loss-coeff 0.1"),
    (f"{EXPERTS} --bf16", "--moe-router-dtype fp32"),
]


def _batches() -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(8).expand(2, 8)
    for number in range(100):
        ids = torch.randint(0, 30, (2, 9), generator=generator)
        mask = torch.ones(2, 8)
        mask[:, 8 - number % 4 :] = 0.0
        yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}


def _state(config: RunConfig) -> TrainState:
    context = ParallelContext.solo()
    streams = RandomStreams(1, context)
    chunks = build_chunks(config, 30, context, streams.own)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    return TrainState(chunks, optimizer, streams, build_schedule(config), context=context)


def _trained(flags: str) -> Tensor:
    """All weights after the steps of a run with these flags; micro-batches have 2 samples whatever they say."""
    config = load([*BASE.split(), *flags.split()], {}, files=False)
    state, batches = _state(config), _batches()
    for _ in range(STEPS):
        train_step(state, batches, config.batch_sizes.num_micro_batches(state.consumed_samples))
    return torch.cat([weight.detach().flatten().float() for weight in state.model.parameters()])


PLAIN: dict[str, Tensor] = {}


@pytest.mark.parametrize(("base", "option"), EFFECTS)
def test_the_flag_changes_the_weights(base: str, option: str) -> None:
    plain = PLAIN.setdefault(base, _trained(base)) if base not in PLAIN else PLAIN[base]
    other = _trained(f"{base} {option}")
    assert bool(other.isfinite().all())
    assert plain.shape != other.shape or not torch.equal(plain, other)


def test_the_same_flags_give_the_same_weights() -> None:
    """A difference that is there anyway would make the table hold for everything."""
    assert torch.equal(_trained(EXPERTS), _trained(EXPERTS))


def test_fp32_gradients_of_megatron_fsdp_are_those_without_the_flag_for_bf16() -> None:
    fsdp = f"{BY_ITERS} --bf16 --use-megatron-fsdp"
    asked = "--grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp32"
    assert torch.equal(_trained(f"{fsdp} {asked}"), _trained(fsdp))


def test_kv_channels_are_not_those_of_latent_heads() -> None:
    latent = f"{BY_ITERS} --multi-latent-attention --position-embedding-type rope --kv-lora-rank 8"
    latent = f"{latent} --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4"
    assert torch.equal(_trained(f"{latent} --kv-channels 16"), _trained(latent))


IDENTITY = ("end_wd", "max_lr", "min_lr", "optimizer", "start_wd", "wd_mult", "lr_mult")
IDENTITY = (*IDENTITY, "is_expert_parallel", "is_decoupled_lr", "default_config")
"""By what megatron-core 0.19.2 finds a group, what 0.16 to 0.18 do being among it, and whose rate it logs."""
DEFAULT_GROUP = (None, 1e-2, 1e-3, None, None, 1.0, 1.0, False, False, True)
WITHOUT_DECAY = (*DEFAULT_GROUP[:5], 0.0, *DEFAULT_GROUP[6:])
GROUP_KEYS = {"wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr", "default_config"}
GROUP_KEYS |= {"lr", "weight_decay", "betas", "eps", "decoupled_weight_decay"}
GROUP_KEYS |= {"amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize"}


@pytest.mark.parametrize(
    ("flags", "identities"),
    [
        ("", [DEFAULT_GROUP, WITHOUT_DECAY]),
        ("--decoupled-lr 2e-3", [DEFAULT_GROUP, WITHOUT_DECAY, (None, 2e-3, 1e-3, *DEFAULT_GROUP[3:9], False)]),
        (
            "--decoupled-lr 3e-2 --decoupled-min-lr 1e-5",
            [DEFAULT_GROUP, WITHOUT_DECAY, (None, 3e-2, 1e-5, *DEFAULT_GROUP[3:9], False)],
        ),
        (
            "--use-mup --mup-base-hidden-size 8",
            [DEFAULT_GROUP, WITHOUT_DECAY, (None, 5e-3, 5e-4, *DEFAULT_GROUP[3:9], False)],
        ),
    ],
)
def test_saved_groups_are_those_that_megatron_looks_for(flags: str, identities: list[tuple[object, ...]]) -> None:
    config = load([*BASE.split(), *BY_ITERS.split(), *flags.split()], {}, files=False)
    groups = content_of(_state(config), config).common["optimizer"]["param_groups"]
    assert [set(group) for group in groups] == [GROUP_KEYS] * len(groups)
    found = [tuple(group.get(key) for key in IDENTITY) for group in groups]
    assert sorted(found, key=str) == sorted(identities, key=str)


def test_the_groups_of_all_weights_are_written(tmp_path: Path) -> None:
    """`--dump-param-to-param-group-map`: which weights decay, have a rate of their own, or one scaled by the width."""
    flags = f"{BY_ITERS} --decoupled-lr 1e-3 --use-mup --mup-base-hidden-size 8"
    state = _state(load([*BASE.split(), *flags.split()], {}, files=False))
    dump_groups(str(tmp_path / "groups.json"), state)
    groups = json.loads((tmp_path / "groups.json").read_text())
    assert groups.keys() == {name for name, _ in state.model.named_parameters()}
    told = {name: (group["wd_mult"], group["lr_mult"], group["is_decoupled_lr"]) for name, group in groups.items()}
    assert told["decoder.layers.1.mlp.linear_fc1.weight"] == (1.0, 0.5, False)
    assert told["decoder.layers.1.mlp.linear_fc1.bias"] == (0.0, 1.0, False)
    assert told["embedding.word_embeddings.weight"] == (1.0, 1.0, True)
