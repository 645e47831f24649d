"""The parity matrix (reliability F08): in every layout the loss and each gradient are those of one process, in fp64.

With PARITY_TABLE=docs/parity.md in the environment (`make test-full` sets it) the table of what was found is written
there. `make test` runs rows of two ranks in which every two things that come together in such rows do so (two options,
a model and an option, ...), a row of each way to divide four ranks, one of each further law and a curve of 50 steps;
the rest is left to `make test-full`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients, draw_weights
from megalith.config import RunConfig, load
from megalith.data.blend import BlendedDataset
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.loader import BatchLoader
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.layout import Layout
from megalith.prove.compare import TOLERANCE, Comparison, compare_gradients
from megalith.prove.record import gradient_pieces
from megalith.schedules.parameters import LearningRateSchedule, ParameterSchedule, WeightDecaySchedule
from megalith.tokenizers.null import NullTokenizer
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step
from megalith.train.step_hooks import BlendCount

LENGTH, SAMPLES, STEPS = 16, 8, 3


@dataclass(frozen=True)
class Model:
    """A variant of the model: flags, the rows of its vocabulary, and fields of its configuration without a flag."""

    flags: str
    vocab_size: int = 40
    fields: Mapping[str, Any] = field(default_factory=dict)


_MIXTURE = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_z_loss_coeff": 1e-3,
    "moe_shared_expert_intermediate_size": 8,
}
MODELS = {
    "gpt2": Model(""),
    "mixture": Model(
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_aux_loss_coeff": (0.05,), "moe_layer_freq": "[1,0,1,1]"},
    ),
    "mixture-sigmoid": Model(
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 24",
        fields=_MIXTURE
        | {
            "moe_router_load_balancing_type": ("seq_aux_loss",),
            "moe_aux_loss_coeff": (0.05,),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.1,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_shared_expert_gate": True,
        },
    ),
    "mixture-softplus": Model(
        "--swiglu --disable-bias-linear --ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_aux_loss_coeff": (0.05,), "moe_router_score_function": "sqrtsoftplus"},
    ),
    "mixture-biases": Model(
        "--position-embedding-type rope --ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_aux_loss_coeff": (0.05,), "moe_router_pre_softmax": True, "num_experts": 8},
    ),
    "mixture-latent": Model(
        "--position-embedding-type rope --ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_aux_loss_coeff": (0.05,), "moe_latent_size": 6, "moe_router_score_function": "sigmoid"},
    ),
    "mixture-quantiles": Model(
        "--position-embedding-type rope --ffn-hidden-size 24",
        fields=_MIXTURE
        | {
            "moe_router_load_balancing_type": ("quantile_balancing",),
            "moe_router_quantile_balancing_ema": 0.3,
            "moe_router_score_function": "sigmoid",
        },
    ),
    "mixture-weighed-inputs": Model(
        "--position-embedding-type rope --ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
    "mixture-sinkhorn": Model(
        "--position-embedding-type rope --ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_router_load_balancing_type": ("sinkhorn",), "moe_router_topk": 1},
    ),
    "mixture-capacity": Model(
        "--swiglu --disable-bias-linear --ffn-hidden-size 24",
        fields=_MIXTURE
        | {
            "moe_expert_capacity_factor": 0.7,
            "moe_router_load_balancing_type": ("seq_aux_loss", "aux_loss"),
            "moe_aux_loss_coeff": (0.05, 0.02),
        },
    ),
    "mixture-per-token": Model(
        "--calculate-per-token-loss --swiglu --ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_aux_loss_coeff": (0.05,)},
    ),
    "llama": Model(
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 24 "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
    ),
    "uneven-vocabulary": Model("", vocab_size=43),
    "qwen3": Model(
        "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 24 "
        "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --qk-layernorm"
    ),
    "one-group": Model("--group-query-attention --num-query-groups 1 --position-embedding-type rope --add-qkv-bias"),
    "sinks": Model(
        "--position-embedding-type rope --group-query-attention --num-query-groups 2 --softmax-type learnable "
        "--window-size 5,0 --window-attn-skip-freq 2 --softmax-scale 0.7 --no-rope-freq [0]*3+[1] --rotary-percent 0.5"
    ),
    "gates": Model(
        "--position-embedding-type rope --group-query-attention --num-query-groups 2 --attention-output-gate "
        "--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 0.5 --apply-layernorm-1p --qk-l2-norm "
        "--rotary-interleaved --disable-bias-linear --ffn-hidden-size 24"
    ),
    "yarn": Model(
        "--position-embedding-type yarn --yarn-original-max-position-embeddings 8 --rotary-scaling-factor 4 "
        "--squared-relu --label-smoothing 0.1 --apply-residual-connection-post-layernorm "
        "--apply-query-key-layer-scaling --softmax-type off-by-one --attention-backend unfused",
        vocab_size=43,
    ),
    "latent": Model(
        "--multi-latent-attention --q-lora-rank 6 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 6 --qk-layernorm --rotary-scaling-factor 8 --mscale-all-dim 0.7 --position-embedding-type rope "
        "--yarn-original-max-position-embeddings 8 --normalization RMSNorm --swiglu --ffn-hidden-size 24 "
        "--disable-bias-linear --untie-embeddings-and-output-weights"
    ),
    "prediction": Model("--mtp-num-layers 2 --position-embedding-type rope --mtp-loss-scaling-factor 0.4"),
    "prediction-apart": Model(
        "--mtp-num-layers 1 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--ffn-hidden-size 24 --untie-embeddings-and-output-weights --decoupled-lr 0.005 --calculate-per-token-loss",
        vocab_size=43,
    ),
    "prediction-mixture": Model(
        "--mtp-num-layers 1 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--ffn-hidden-size 24",
        fields=_MIXTURE | {"moe_aux_loss_coeff": (0.05,), "moe_layer_freq": "[1,0,1,1]"},
    ),
    "prediction-learned": Model("--mtp-num-layers 1 --label-smoothing 0.1 --openai-gelu --no-bias-gelu-fusion"),
    "t5": Model("", vocab_size=43, fields={"model_family": "t5", "decoder_num_layers": 3}),
    "t5-relative": Model(
        "--swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 24 "
        "--untie-embeddings-and-output-weights",
        fields={"model_family": "t5", "position_embedding_type": "relative", "relative_attention_num_buckets": 8},
    ),
    "t5-published": Model(
        "--normalization RMSNorm --disable-bias-linear --softmax-scale 1.0 --relu --no-t5-logits-bias "
        "--t5-scaled-logits",
        vocab_size=43,
        fields={"model_family": "t5", "position_embedding_type": "relative", "relative_attention_num_buckets": 8},
    ),
    "bert": Model("", vocab_size=43, fields={"model_family": "bert"}),
    "bert-published": Model(
        "--apply-residual-connection-post-layernorm --attention-backend unfused --untie-embeddings-and-output-weights "
        "--label-smoothing 0.1 --bert-no-binary-head",
        fields={"model_family": "bert"},
    ),
    "sgd": Model("--optimizer sgd --decoupled-lr 0.02 --calculate-per-token-loss"),
    "muon": Model(
        "--optimizer muon --muon-nesterov --position-embedding-type rope --swiglu --ffn-hidden-size 24 "
        "--group-query-attention --num-query-groups 2 --qk-layernorm --apply-wd-to-qk-layernorm "
        "--untie-embeddings-and-output-weights --decoupled-lr 0.002"
    ),
    "adaptive-muon": Model("--optimizer adaptive_muon --position-embedding-type rope --swiglu --ffn-hidden-size 24"),
    "soap": Model(
        "--optimizer soap --adam-eps 1e-4 --position-embedding-type rope --swiglu --ffn-hidden-size 24 "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --disable-bias-linear"
    ),
    "mup": Model(
        "--use-mup --mup-base-hidden-size 4 --mup-base-head-dim 2 --mup-embedding-mult 3 --decoupled-lr 0.01 "
        "--adam-eps 1e-3"
    ),
    "mup-sgd": Model(
        "--use-mup --mup-base-hidden-size 4 --mup-output-mult 0.7 --optimizer sgd --untie-embeddings-and-output-weights"
    ),
    "llama-3.1": Model(
        "--position-embedding-type rope --kv-channels 8 --rotary-base 500 --use-rope-scaling --rope-scaling-factor 4 "
        "--rotary-seq-len-interpolation-factor 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-3 "
        "--disable-bias-linear --ffn-hidden-size 24 --optimizer lion --weight-decay 0.5"
    ),
    "gelu-erf": Model("--no-bias-gelu-fusion --onnx-safe true --kv-channels 6 --qk-layernorm --apply-layernorm-1p"),
    "ramp-up": Model("--rampup-batch-size 4 4 8 --decoupled-lr 0.005", vocab_size=43),
    "per-token": Model(
        "--calculate-per-token-loss --geglu --label-smoothing 0.2 --init-method-xavier-uniform --window-size 3,0 "
        "--embedding-init-method-std 0.3 --untie-embeddings-and-output-weights"
    ),
}

FSDP_FLAGS = {
    "": "",
    "zero3": "--use-torch-fsdp2",
    "zero2": "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
}
BASE = (
    f"--num-layers 4 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings {LENGTH} "
    f"--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size {SAMPLES} --train-iters {STEPS} --lr 1e-2 "
    "--hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 "
    "--clip-grad 0.05 --init-method-std 0.2"
)


@dataclass(frozen=True)
class Case:
    """A row of the table: the model, the sizes of the layout, and what else.

    `recompute` is method and layers, or `parts` and those, `fsdp` the stage of ZeRO by torch's flags or a strategy of
    Megatron's, `data` what the samples are: random tokens, such with documents that attention stays inside of, or those
    of a blend read by each replica, `compiled` whether torch.compile makes something else of the layers.
    """

    layout: Layout
    model: str = "gpt2"
    sequence_parallel: bool = False
    virtual_stages: int = 1
    zero1: bool = False
    schedule: str = "auto"
    exchange: str = "p2p"
    recompute: str = ""
    fsdp: str = ""
    data: str = ""
    dispatcher: str = "allgather"
    compiled: bool = False

    @property
    def reference(self) -> str:
        """What one process computes for the same model and data."""
        return f"{self.model} {self.data}".strip()

    @property
    def options(self) -> str:
        """What there is beside the sizes of the layout."""
        parts = ["sp"] * self.sequence_parallel + [f"vpp{self.virtual_stages}"] * (self.virtual_stages > 1)
        parts += ["zero1"] * self.zero1 + [self.schedule] * (self.schedule != "auto")
        parts += [f"fsdp-{self.fsdp}"] * bool(self.fsdp)
        parts += [self.dispatcher] * (self.layout.ep > 1)
        parts += ["compiled"] * self.compiled
        parts += ["a2a"] * (self.exchange == "a2a") + [f"recompute-{self.recompute}"] * bool(self.recompute)
        return " ".join([*parts, self.data]).strip()

    def __str__(self) -> str:
        parts = [self.model, *str(self.layout).split(" x "), *self.options.split(" ")]
        return "-".join(part for part in parts if part).replace("one process", "solo")

    def config(self, more: str = "") -> RunConfig:
        """The configuration of the case; `more` flags may be added."""
        sizes = self.layout
        flags = [
            f"--tensor-model-parallel-size {sizes.tp} --pipeline-model-parallel-size {sizes.pp}",
            f"--context-parallel-size {sizes.cp} --cp-comm-type {self.exchange} --pipeline-schedule {self.schedule}",
            "--sequence-parallel" if self.sequence_parallel else "",
            f"--num-virtual-stages-per-pipeline-rank {self.virtual_stages}" if self.virtual_stages > 1 else "",
            "--use-distributed-optimizer" if self.zero1 else "",
            "--compile" if self.compiled else "",
            "--reset-attention-mask" if self.compiled and self.data == "documents" else "",  # which is not compiled
            FSDP_FLAGS.get(self.fsdp, f"--use-megatron-fsdp --data-parallel-sharding-strategy {self.fsdp}"),
        ]
        if self.recompute:
            method, _, what = self.recompute.partition("-")
            flags.append(
                f"--recompute-granularity selective --recompute-modules {what.replace('+', ' ')}"
                if method == "parts"
                else f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {what}"
            )
        argv = " ".join([BASE, MODELS[self.model].flags, *flags, more])
        words = [word for word in argv.split(" ") if word]
        run = load(words, {"WORLD_SIZE": str(sizes.world_size), "RANK": "0"}, files=False)
        fields = {**MODELS[self.model].fields, "moe_token_dispatcher_type": self.dispatcher}
        return dataclasses.replace(
            run,
            model=dataclasses.replace(run.model, **fields),
            parallel=dataclasses.replace(
                run.parallel, expert_model_parallel_size=sizes.ep, expert_tensor_parallel_size=sizes.etp
            ),
        )


def required_cases() -> Iterator[Case]:
    """Every factorisation of 1, 2 and 4 ranks, with every option."""
    for world in (2, 4):
        sizes = [n for n in (1, 2, 4) if world % n == 0]
        for tp in sizes:
            for cp in sizes:
                for pp in sizes:
                    if world % (tp * cp * pp) == 0:
                        yield from _options(Layout(tp=tp, cp=cp, dp=world // (tp * cp * pp), pp=pp))


def _options(layout: Layout) -> Iterator[Case]:
    for sp in (False, True) if layout.tp > 1 else (False,):
        for vpp in (1, 2) if layout.pp == 2 else (1,):
            for zero1 in (False, True) if layout.dp * layout.cp > 1 else (False,):
                yield Case(layout, sequence_parallel=sp, virtual_stages=vpp, zero1=zero1)


EXPERTS = [
    Case(Layout(tp=2), "mixture"),
    Case(Layout(tp=2, cp=2), "mixture", sequence_parallel=True),
    Case(Layout(tp=2, pp=2), "mixture-sigmoid", sequence_parallel=True, virtual_stages=2),
    Case(Layout(dp=2, pp=2), "mixture", zero1=True),
    Case(Layout(cp=2, dp=2), "mixture-sigmoid", exchange="a2a"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-softplus", sequence_parallel=True, zero1=True),
    Case(Layout(pp=2), "mixture", schedule="zb-h1"),
    Case(Layout(tp=2), "mixture", sequence_parallel=True, recompute="uniform-2"),
    Case(Layout(dp=2), "mixture-sigmoid", fsdp="zero3"),
]
EXPERT_PARALLEL = [
    Case(Layout(dp=2, ep=2), "mixture", dispatcher="alltoall", zero1=True),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-sigmoid", sequence_parallel=True, zero1=True),
    Case(Layout(tp=2), "mixture-biases", sequence_parallel=True),
    Case(Layout(dp=2, ep=2), "mixture"),
    Case(Layout(dp=4, ep=2), "mixture-sigmoid", dispatcher="alltoall", zero1=True),
    Case(Layout(dp=4, ep=4), "mixture-biases", dispatcher="alltoall"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture", sequence_parallel=True, dispatcher="alltoall", zero1=True),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-biases"),
    Case(Layout(pp=2, dp=2, ep=2), "mixture-sigmoid", virtual_stages=2, dispatcher="alltoall", zero1=True),
    Case(Layout(pp=2, dp=2, ep=2), "mixture", schedule="zb-h1", dispatcher="alltoall"),
    Case(Layout(pp=2, cp=2, ep=2), "mixture-biases", zero1=True),
    Case(Layout(cp=2, dp=2, ep=2), "mixture", dispatcher="alltoall", zero1=True),
    Case(Layout(cp=2, dp=2, ep=4), "mixture-sigmoid", exchange="a2a"),
    Case(Layout(cp=2, ep=2), "mixture-sigmoid", dispatcher="alltoall"),
    Case(Layout(tp=2, cp=2, ep=2), "mixture-sigmoid", sequence_parallel=True, dispatcher="alltoall"),
    Case(Layout(dp=2, ep=2), "mixture", dispatcher="alltoall", recompute="uniform-2"),
    Case(Layout(dp=2, ep=2), "mixture", dispatcher="alltoall", recompute="parts-moe", zero1=True),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-sigmoid", sequence_parallel=True, recompute="parts-moe+layernorm"),
    Case(Layout(dp=4, ep=2), "mixture-per-token", zero1=True),
    Case(Layout(dp=2, ep=2), "mixture", dispatcher="alltoall", recompute="parts-moe_act+shared_experts"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-sigmoid", sequence_parallel=True, recompute="parts-moe_act+shared_experts"),
    Case(Layout(pp=2), "mixture-biases", schedule="zb-h1", recompute="parts-moe_act+shared_experts"),
    Case(Layout(dp=2), "mixture", fsdp="zero3", recompute="parts-moe_act+shared_experts"),
]
"""Experts divided over ranks; the first two rows are always run."""
EXPERTS_OF_LATENT_VECTORS = [
    Case(Layout(tp=2), "mixture-latent"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-latent", sequence_parallel=True, dispatcher="alltoall", zero1=True),
    Case(Layout(tp=2, pp=2), "mixture-latent", sequence_parallel=True, virtual_stages=2),
    Case(Layout(tp=2, dp=2, ep=2, etp=1), "mixture-latent", sequence_parallel=True, zero1=True),
    Case(Layout(cp=2, dp=2, ep=4), "mixture-latent", dispatcher="alltoall"),
    Case(Layout(dp=2, etp=2), "mixture-latent", zero1=True),
    Case(Layout(pp=2, dp=2, ep=2), "mixture-latent", schedule="zb-h1"),
    Case(Layout(dp=2), "mixture-latent", fsdp="zero3"),
    Case(Layout(dp=2, ep=2), "mixture-latent", dispatcher="alltoall", recompute="uniform-2"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-latent", sequence_parallel=True, recompute="parts-moe+layernorm"),
    Case(Layout(tp=2), "mixture-latent", sequence_parallel=True, recompute="parts-moe_act+shared_experts+layernorm"),
    Case(Layout(tp=2), "mixture-latent", sequence_parallel=True, compiled=True),
]
"""Projections around the experts; the first row is always run."""
WHOLE_SEQUENCES_OF_EXPERTS = [
    Case(Layout(dp=2, ep=2), "mixture-capacity", recompute="uniform-2"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-capacity", zero1=True),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-sinkhorn"),
    Case(Layout(dp=4, ep=4), "mixture-capacity", dispatcher="alltoall"),
    Case(Layout(pp=2, dp=2, ep=2), "mixture-sinkhorn", dispatcher="alltoall", zero1=True),
    Case(Layout(tp=2), "mixture-sinkhorn", recompute="parts-moe"),
]
"""Choices that look at all tokens of a sequence, in layouts that keep these together; the first row is always run."""
EXPERTS_BY_QUANTILES = [
    Case(Layout(tp=2), "mixture-quantiles"),
    Case(Layout(tp=2, dp=2, ep=2), "mixture-quantiles", sequence_parallel=True, dispatcher="alltoall", zero1=True),
    Case(Layout(cp=2, dp=2, ep=2), "mixture-quantiles", dispatcher="alltoall"),
    Case(Layout(pp=2, dp=2), "mixture-quantiles", virtual_stages=2, zero1=True),
    Case(Layout(dp=2), "mixture-quantiles", recompute="uniform-2"),
    Case(Layout(tp=2), "mixture-quantiles", sequence_parallel=True, recompute="parts-moe"),
    Case(Layout(dp=2), "mixture-quantiles", fsdp="zero3"),
    Case(Layout(tp=2, dp=2, ep=2, etp=1), "mixture-weighed-inputs", sequence_parallel=True, zero1=True),
    Case(Layout(dp=2, etp=2), "mixture-weighed-inputs", recompute="parts-moe_act"),
]
"""Offsets of experts from quantiles, and experts that weigh their inputs; the first row is always run."""
EXPERT_TENSOR = [
    Case(Layout(tp=2, dp=2, ep=2, etp=1), "mixture", sequence_parallel=True, zero1=True),
    Case(Layout(dp=4, ep=2, etp=2), "mixture-biases", dispatcher="alltoall", zero1=True),
    Case(Layout(tp=2, pp=2, ep=2, etp=1), "mixture-sigmoid", sequence_parallel=True, dispatcher="alltoall"),
    Case(Layout(tp=4, ep=2, etp=2), "mixture-biases", sequence_parallel=True),
    Case(Layout(tp=2, dp=2, ep=4, etp=1), "mixture-sigmoid", sequence_parallel=True, dispatcher="alltoall"),
    Case(Layout(tp=2, cp=2, ep=2, etp=1), "mixture", sequence_parallel=True),
    Case(Layout(tp=2, dp=2, etp=4), "mixture", sequence_parallel=True, zero1=True),
    Case(Layout(tp=2, etp=1), "mixture-biases", sequence_parallel=True),
    Case(Layout(tp=2, etp=1), "mixture", sequence_parallel=True, zero1=True),
    Case(Layout(dp=2, etp=2), "mixture-per-token", zero1=True),
    Case(Layout(pp=2, dp=2, etp=2), "mixture", virtual_stages=2, zero1=True),
    Case(Layout(tp=2, dp=2, ep=2, etp=1), "mixture", sequence_parallel=True, recompute="uniform-2"),
    Case(Layout(tp=2, pp=2, ep=2, etp=1), "prediction-mixture", sequence_parallel=True, zero1=True),
]
"""Each expert shared by other ranks than the layers are; the first row is always run."""
FURTHER = [
    Case(Layout(tp=2), "llama"),
    Case(Layout(tp=4), "llama", sequence_parallel=True),
    Case(Layout(tp=2, pp=2), "llama", sequence_parallel=True, virtual_stages=2),
    Case(Layout(cp=2, tp=2), "llama", sequence_parallel=True, zero1=True),
    Case(Layout(cp=2, pp=2), "llama"),
    Case(Layout(cp=2, dp=2), "llama", exchange="a2a", zero1=True),
    Case(Layout(cp=2, tp=2), exchange="a2a"),
    Case(Layout(tp=2), "uneven-vocabulary"),
    Case(Layout(tp=4), "uneven-vocabulary", sequence_parallel=True),
    Case(Layout(tp=2, pp=2), "uneven-vocabulary"),
    Case(Layout(tp=4), "one-group"),
    Case(Layout(tp=2, cp=2), "one-group", sequence_parallel=True),
    Case(Layout(tp=2), "qwen3"),
    Case(Layout(tp=4), "qwen3", sequence_parallel=True),
    Case(Layout(tp=2, dp=2), "qwen3", zero1=True),
    Case(Layout(tp=2, cp=2), "qwen3", exchange="a2a"),
    Case(Layout(pp=2), schedule="zb-h1"),
    Case(Layout(pp=4), "llama", schedule="zb-h1"),
    Case(Layout(pp=2, tp=2), schedule="zb-h1", sequence_parallel=True),
    Case(Layout(pp=2, dp=2), schedule="zb-h1", zero1=True),
    Case(Layout(tp=2), sequence_parallel=True, recompute="uniform-2"),
    Case(Layout(tp=2), "llama", recompute="block-3"),
    Case(Layout(pp=2), virtual_stages=2, recompute="uniform-1"),
    Case(Layout(pp=2), "llama", schedule="zb-h1", recompute="uniform-1"),
    Case(Layout(pp=2), schedule="zb-h1", recompute="block-1"),
    Case(Layout(cp=2), recompute="uniform-3"),
    Case(Layout(cp=2), "llama", exchange="a2a", recompute="block-2"),
    Case(Layout(dp=2), zero1=True, recompute="block-2"),
    Case(Layout(dp=2), "llama", zero1=True, recompute="uniform-4"),
    Case(Layout(tp=2, pp=2), sequence_parallel=True, schedule="zb-h1", recompute="uniform-2"),
    Case(Layout(tp=2, cp=2), "llama", sequence_parallel=True, zero1=True, recompute="uniform-1"),
]
FSDP = [
    Case(Layout(dp=2), fsdp="zero3"),
    Case(Layout(dp=2), "uneven-vocabulary", fsdp="zero2"),
    Case(Layout(dp=2), "llama", fsdp="zero3", recompute="uniform-2"),
    Case(Layout(dp=2), fsdp="zero2", recompute="block-2"),
    Case(Layout(dp=4), "uneven-vocabulary", fsdp="zero3"),
    Case(Layout(dp=4), "llama", fsdp="zero2"),
    Case(Layout(cp=2), fsdp="zero3"),
    Case(Layout(cp=2, dp=2), fsdp="zero3"),
    Case(Layout(cp=2, dp=2), "llama", exchange="a2a", fsdp="zero2"),
    Case(Layout(tp=2, dp=2), fsdp="zero3"),
    Case(Layout(tp=2, dp=2), "uneven-vocabulary", sequence_parallel=True, fsdp="zero3"),
    Case(Layout(tp=2, dp=2), "llama", sequence_parallel=True, fsdp="zero2"),
    Case(Layout(tp=2, dp=2), "one-group", sequence_parallel=True, fsdp="zero3"),
    Case(Layout(tp=2, cp=2), "one-group", fsdp="zero3", recompute="uniform-1"),
    Case(Layout(tp=2, dp=2), "qwen3", sequence_parallel=True, fsdp="zero3"),
    Case(Layout(pp=2, dp=2), fsdp="zero3"),
    Case(Layout(pp=2, dp=2), virtual_stages=2, fsdp="zero3"),
    Case(Layout(pp=2, dp=2), "llama", virtual_stages=2, fsdp="zero2"),
    Case(Layout(pp=2, dp=2), "uneven-vocabulary", fsdp="zero2", recompute="uniform-1"),
    Case(Layout(pp=2, cp=2), fsdp="zero3"),
]
FURTHER_OPTIONS = [
    Case(layout, model, sequence_parallel=layout.tp == 2, virtual_stages=vpp, zero1=zero1, fsdp=fsdp)
    for model in ("llama-3.1", "gelu-erf")
    for layout, vpp, zero1, fsdp in (
        (Layout(tp=2), 1, False, ""),
        (Layout(pp=2), 2, False, ""),
        (Layout(cp=2), 1, False, ""),
        (Layout(dp=2), 1, True, ""),
        (Layout(dp=2), 1, False, "zero3"),
    )
]
MEGATRON_FSDP = [
    Case(Layout(dp=2), "llama", fsdp="no_shard"),
    Case(Layout(dp=2), "llama", fsdp="optim"),
    Case(Layout(dp=2), "llama", fsdp="optim_grads"),
    Case(Layout(tp=2, dp=2), "llama", sequence_parallel=True, fsdp="optim_grads_params"),
]
OPTIONS = [
    Case(Layout(tp=2), "gates", sequence_parallel=True),
    Case(Layout(cp=2), "sinks"),
    Case(Layout(dp=2), "per-token", zero1=True),
    Case(Layout(tp=2), "yarn", recompute="parts-core_attn+mlp+layernorm"),
    *(
        Case(layout, model, sequence_parallel=layout.tp == 4, virtual_stages=vpp, exchange=exchange, zero1=zero1)
        for model in ("sinks", "gates", "yarn", "per-token")
        for layout, vpp, exchange, zero1 in (
            (Layout(tp=4), 1, "p2p", False),
            (Layout(pp=2), 2, "p2p", False),
            (Layout(pp=2, tp=2), 1, "p2p", False),
            (Layout(cp=4), 1, "p2p", False),
            (Layout(cp=2), 1, "a2a", False),
            (Layout(cp=2, tp=2), 1, "p2p", True),
            (Layout(cp=2, dp=2), 1, "a2a", True),
            (Layout(pp=2, dp=2), 1, "p2p", False),
        )
    ),
    *(Case(Layout(dp=2), model, fsdp="zero3") for model in ("sinks", "gates", "yarn", "per-token")),
    Case(Layout(tp=2, dp=2), "gates", sequence_parallel=True, fsdp="zero2"),
    Case(Layout(dp=2), "gates", fsdp="zero3", recompute="parts-mlp+layernorm"),
    Case(Layout(dp=2), "sinks", fsdp="zero3", recompute="parts-layernorm"),
    Case(Layout(pp=2), "per-token", schedule="zb-h1"),
    Case(Layout(pp=2), "gates", schedule="zb-h1", recompute="parts-mlp+layernorm"),
    Case(Layout(tp=2), "gates", sequence_parallel=True, recompute="parts-mlp+layernorm"),
    Case(Layout(tp=2, pp=2), "sinks", sequence_parallel=True, recompute="parts-layernorm"),
    Case(Layout(cp=2), "yarn", exchange="a2a", recompute="parts-core_attn"),
    Case(Layout(dp=2), "yarn", zero1=True, recompute="uniform-2"),
    Case(Layout(cp=2), "sinks", recompute="block-1"),
]
"""Options of the model, each in every kind of layout; the first two rows are always run."""
LATENT = [
    Case(Layout(tp=2), "latent", sequence_parallel=True),
    Case(Layout(tp=2), "latent", recompute="parts-core_attn+mlp"),
    Case(Layout(tp=2), "latent", sequence_parallel=True, recompute="parts-mla_up_proj"),
    Case(Layout(cp=2), "latent", recompute="parts-mla_up_proj"),
    Case(Layout(dp=2), "latent", fsdp="zero3", recompute="parts-mla_up_proj+mlp"),
    Case(Layout(pp=2), "latent", schedule="zb-h1", recompute="parts-mla_up_proj+core_attn"),
    Case(Layout(tp=4), "latent"),
    Case(Layout(tp=2, pp=2), "latent", sequence_parallel=True, virtual_stages=2),
    Case(Layout(cp=2), "latent"),
    Case(Layout(cp=2, tp=2), "latent", exchange="a2a", sequence_parallel=True),
    Case(Layout(pp=2), "latent", schedule="zb-h1"),
    Case(Layout(dp=2, tp=2), "latent", sequence_parallel=True, zero1=True),
    Case(Layout(dp=2, tp=2), "latent", sequence_parallel=True, fsdp="zero3"),
    Case(Layout(cp=2, tp=2), "latent", data="documents"),
]
"""Multi-latent attention; the first row is always run."""
OPTIMISERS = [
    Case(Layout(tp=2), "soap", sequence_parallel=True),
    Case(Layout(tp=2), "muon", sequence_parallel=True),
    Case(Layout(dp=2), "sgd", zero1=True),
    Case(Layout(pp=2), "ramp-up", virtual_stages=2),
    Case(Layout(pp=2), "mup", virtual_stages=2),
    Case(Layout(pp=2), "muon"),
    Case(Layout(dp=2), "muon"),
    Case(Layout(cp=2, tp=2), "muon", sequence_parallel=True),
    Case(Layout(tp=2, pp=2), "muon", virtual_stages=2),
    Case(Layout(tp=2, dp=2), "muon"),
    Case(Layout(tp=2), "adaptive-muon"),
    Case(Layout(tp=2, pp=2), "adaptive-muon", sequence_parallel=True),
    Case(Layout(dp=2), "adaptive-muon"),
    Case(Layout(tp=2), "sgd"),
    Case(Layout(dp=2), "sgd", fsdp="zero3"),
    Case(Layout(cp=2, dp=2), "sgd", zero1=True),
    Case(Layout(pp=2, dp=2), "sgd"),
    Case(Layout(dp=2), "ramp-up", zero1=True),
    Case(Layout(dp=2), "ramp-up", fsdp="zero2"),
    Case(Layout(dp=4), "ramp-up"),
    Case(Layout(tp=2, dp=2), "ramp-up", sequence_parallel=True, zero1=True),
    Case(Layout(pp=2), "ramp-up", schedule="zb-h1"),
    Case(Layout(tp=4), "soap"),
    Case(Layout(tp=2, pp=2), "soap", virtual_stages=2),
    Case(Layout(cp=2, dp=2), "soap"),
    Case(Layout(tp=2), "mup"),
    Case(Layout(dp=2), "mup", zero1=True),
    Case(Layout(dp=2), "mup", fsdp="zero3"),
    Case(Layout(tp=2, pp=2), "mup", sequence_parallel=True, virtual_stages=2),
    Case(Layout(cp=2), "mup"),
    Case(Layout(tp=2, dp=2), "mup-sgd", sequence_parallel=True, zero1=True),
    Case(Layout(pp=2), "mup-sgd", schedule="zb-h1"),
    Case(Layout(cp=2, dp=2), "mup-sgd", exchange="a2a"),
]
"""Optimizers, rates of their own and growing batches, over three updates; the first three rows are always run."""
DATA = [
    Case(Layout(tp=2), data="documents", sequence_parallel=True),
    Case(Layout(cp=2), data="documents"),
    Case(Layout(cp=2), "sinks", data="documents", exchange="a2a"),
    Case(Layout(dp=2), "llama", data="blend", zero1=True),
    Case(Layout(tp=4), "sinks", data="documents"),
    Case(Layout(pp=2), "llama", data="documents", schedule="zb-h1"),
    Case(Layout(tp=2, pp=2), "yarn", data="documents", virtual_stages=2),
    Case(Layout(cp=4), "sinks", data="documents"),
    Case(Layout(cp=2, pp=2), "llama", data="documents"),
    Case(Layout(cp=2, tp=2), "yarn", data="documents", exchange="a2a", sequence_parallel=True),
    Case(Layout(cp=2), "llama", data="documents", recompute="uniform-2"),
    Case(Layout(dp=4), data="blend"),
    Case(Layout(dp=2, pp=2), data="blend", virtual_stages=2),
    Case(Layout(dp=2, tp=2), data="blend", fsdp="zero3", recompute="block-2"),
    Case(Layout(dp=2, cp=2), "one-group", data="blend"),
    Case(Layout(dp=2, cp=2), data="blend", exchange="a2a", zero1=True),
]
BERT = [
    Case(Layout(tp=2), "bert", data="pairs", sequence_parallel=True),
    Case(Layout(pp=2), "bert", data="pairs"),
    Case(Layout(dp=2), "bert", data="pairs", zero1=True),
    Case(Layout(tp=2), "bert", data="pairs"),
    Case(Layout(tp=4), "bert", data="pairs", sequence_parallel=True),
    Case(Layout(pp=2), "bert", data="pairs", schedule="zb-h1"),
    Case(Layout(tp=2, pp=2), "bert", data="pairs", sequence_parallel=True, virtual_stages=2),
    Case(Layout(tp=2, dp=2), "bert", data="pairs", sequence_parallel=True, zero1=True),
    Case(Layout(tp=2, dp=2), "bert", data="pairs", sequence_parallel=True, fsdp="zero3"),
    Case(Layout(dp=2), "bert", data="pairs", fsdp="zero2", recompute="uniform-2"),
    Case(Layout(tp=2), "bert", data="pairs", recompute="parts-core_attn+mlp"),
    Case(Layout(tp=2), "bert-published", data="pairs", sequence_parallel=True),
    Case(Layout(pp=2), "bert-published", data="pairs"),
    Case(Layout(tp=2, dp=2), "bert-published", data="pairs", zero1=True),
]
"""BERT on pairs of texts with padding; the first two rows are always run."""
T5 = [
    Case(Layout(tp=2), "t5-relative", data="spans", sequence_parallel=True),
    Case(Layout(dp=2), "t5", data="spans", zero1=True),
    Case(Layout(tp=2), "t5", data="spans"),
    Case(Layout(tp=4), "t5", data="spans", sequence_parallel=True),
    Case(Layout(dp=2), "t5-relative", data="spans"),
    Case(Layout(tp=2), "t5-relative", data="spans"),
    Case(Layout(tp=2, dp=2), "t5-relative", data="spans", sequence_parallel=True, zero1=True),
    Case(Layout(tp=2), "t5-published", data="spans", sequence_parallel=True),
    Case(Layout(tp=2, dp=2), "t5-published", data="spans", zero1=True),
    Case(Layout(dp=4), "t5-relative", data="spans", zero1=True),
    Case(Layout(dp=2), "t5", data="spans", fsdp="zero3"),
    Case(Layout(tp=2, dp=2), "t5-relative", data="spans", sequence_parallel=True, fsdp="zero2"),
    Case(Layout(tp=2), "t5-relative", data="spans", sequence_parallel=True, recompute="uniform-2"),
    Case(Layout(dp=2), "t5", data="spans", zero1=True, recompute="parts-core_attn+mlp+layernorm"),
]
"""T5 on texts and the spans taken out of them, with padding; the first two rows are always run."""
COMPILED = [
    dataclasses.replace(case, compiled=True)
    for case in (
        Case(Layout(dp=2), zero1=True),
        Case(Layout(tp=2), "llama", sequence_parallel=True),
        Case(Layout()),
        Case(Layout(), "llama"),
        Case(Layout(dp=2)),
        Case(Layout(dp=2), "llama", fsdp="zero2"),
        Case(Layout(dp=2), fsdp="zero3"),
        Case(Layout(tp=2)),
        Case(Layout(pp=2)),
        Case(Layout(pp=2), "llama", virtual_stages=2),
        Case(Layout(pp=2), schedule="zb-h1"),
        Case(Layout(cp=2)),
        Case(Layout(cp=2), "llama", exchange="a2a"),
        Case(Layout(tp=2, dp=2), "gates", sequence_parallel=True, zero1=True),
        Case(Layout(tp=2, pp=2), "latent", sequence_parallel=True),
        Case(Layout(cp=2), "sinks"),
        Case(Layout(dp=2, ep=2), "mixture", zero1=True),
        Case(Layout(dp=2, ep=2), "mixture-sigmoid", dispatcher="alltoall"),
        Case(Layout(tp=2, dp=2, ep=2), "mixture", sequence_parallel=True),
        Case(Layout(pp=2), "prediction"),
        Case(Layout(dp=2), "muon"),
        Case(Layout(tp=2), "bert", data="pairs"),
        Case(Layout(dp=2), "t5-relative", data="spans"),
        Case(Layout(dp=2), zero1=True, recompute="uniform-2"),
        Case(Layout(tp=2), "llama", sequence_parallel=True, recompute="block-1"),
        Case(Layout(dp=2), "llama", recompute="parts-mlp+layernorm"),
        Case(Layout(tp=2), "yarn", recompute="parts-core_attn"),
        Case(Layout(dp=2), "mixture", recompute="parts-moe_act+shared_experts"),
        Case(Layout(tp=2), "latent", recompute="parts-mla_up_proj"),
        Case(Layout(tp=2), "llama", data="documents", sequence_parallel=True),
        Case(Layout(cp=2), data="documents"),
        Case(Layout(pp=2), "latent", data="documents"),
    )
]
"""Layers that are compiled; the first row is always run."""
EIGHT = [
    Case(Layout(tp=2, pp=2, dp=2), "one-group", sequence_parallel=True, virtual_stages=2, fsdp="zero3"),
    Case(Layout(tp=2, pp=2, dp=2), "llama", sequence_parallel=True, virtual_stages=2, zero1=True),
    Case(Layout(tp=2, cp=2, pp=2), sequence_parallel=True),
    Case(Layout(cp=2, pp=2, dp=2), zero1=True),
    Case(Layout(tp=2, cp=2, dp=2), "llama", zero1=True),
]


def _batches(vocab_size: int, layout: Layout, replica: int, steps: int) -> Iterator[MicroBatch]:
    """One-sample micro-batches of a replica: random tokens, an uneven number of them masked out in each."""
    generator = torch.Generator().manual_seed(5)
    positions = torch.arange(LENGTH)[None]
    for number in range(steps * SAMPLES):
        ids = torch.randint(0, vocab_size, (1, LENGTH + 1), generator=generator)
        mask = torch.ones(1, LENGTH)
        mask[:, LENGTH - number % 5 :] = 0.0
        if number % layout.dp == replica:
            yield {"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": mask}


def _with_documents(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """The same with documents: one, up to four, or as many as tokens in a sample."""
    for number, batch in enumerate(batches):
        rows = [[0], [0, 3, 4, 11], range(LENGTH), [0, 8], [0, 15]]
        ids = torch.zeros(1, LENGTH, dtype=torch.int32)
        ids[0, list(rows[number % 5])[1:]] = 1
        yield {**batch, "document_ids": ids.cumsum(1, dtype=torch.int32)}


def _pairs_of_texts(vocab_size: int, layout: Layout, replica: int, steps: int) -> Iterator[MicroBatch]:
    """Samples of BERT: two texts of random tokens, a few hidden, padding behind all but every third."""
    generator = torch.Generator().manual_seed(6)
    for number in range(steps * SAMPLES):
        ids = torch.randint(0, vocab_size, (1, LENGTH), generator=generator)
        length = LENGTH - 2 * (number % 3)
        mask = torch.zeros(1, LENGTH, dtype=torch.int64)
        mask[:, 1 : length : 2 + number % 4] = 1
        positions = torch.arange(LENGTH)[None]
        if number % layout.dp == replica:
            yield {
                "text": torch.where(mask == 1, ids.flip(1), ids),
                "types": ((positions >= length // 2) & (positions < length)).long(),
                "labels": torch.where(mask == 1, ids, -1),
                "is_random": torch.tensor([number % 2]),
                "padding_mask": (positions < length).long(),
                "loss_mask": mask,
                "truncated": torch.tensor([0]),
            }


def _spans_of_texts(vocab_size: int, layout: Layout, replica: int, steps: int) -> Iterator[MicroBatch]:
    """Samples of T5: random tokens for the encoder and fewer for the decoder, padding behind all but every third."""
    generator, short = torch.Generator().manual_seed(7), LENGTH // 2
    for number in range(steps * SAMPLES):
        seen = torch.randint(0, vocab_size, (1, LENGTH), generator=generator)
        told = torch.randint(0, vocab_size, (1, short + 1), generator=generator)
        enc_mask = (torch.arange(LENGTH)[None] < LENGTH - 2 * (number % 3)).long()
        dec_mask = (torch.arange(short)[None] < short - number % 3).long()
        if number % layout.dp == replica:
            yield {
                "text_enc": seen,
                "text_dec": told[:, :-1],
                "labels": torch.where(dec_mask == 1, told[:, 1:], -1),
                "loss_mask": dec_mask,
                "truncated": torch.tensor([0]),
                "enc_mask": enc_mask,
                "dec_mask": dec_mask,
            }


class _Texts:
    """Thirty documents of random tokens."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(0, 40, 30, np.int32)
        self._tokens = [rng.integers(0, vocab_size, length) for length in self.lengths]

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> Any:
        return self._tokens[sequence][offset : None if length is None else offset + length]


SOURCES = ("one", "other")


def _blend(vocab_size: int, layout: Layout, replica: int, steps: int) -> Iterator[MicroBatch]:
    """Micro-batches of a replica out of two datasets; attention stays inside documents, whose ends have no loss."""
    options = GPTDatasetOptions(LENGTH, 1, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    datasets = [
        GPTDataset(
            _Texts(vocab_size, seed),
            SplitSpec(0, steps * SAMPLES, SplitRatios.parse(None), name),
            options=options,
            tokenizer=NullTokenizer(vocab_size - 1),
        )
        for seed, name in enumerate(SOURCES)
    ]
    blend = BlendedDataset(datasets, (0.3, 0.7), steps * SAMPLES, cache_folder=None)
    return BatchLoader(blend, 1, 0, num_workers=2, rank=replica, num_ranks=layout.dp)


def batches_of(case: Case, replica: int, steps: int) -> Iterator[MicroBatch]:
    """The micro-batches of a replica for so many steps."""
    read = {"blend": _blend, "pairs": _pairs_of_texts, "spans": _spans_of_texts}.get(case.data, _batches)
    batches = read(MODELS[case.model].vocab_size, case.layout, replica, steps)
    return _with_documents(batches) if case.data == "documents" else batches


def state_of(case: Case, flags: str = "", steps: int = STEPS, device: str = "cpu") -> tuple[RunConfig, TrainState]:
    """A run of the case before its first step. In fp64, or in the precision of the flags."""
    config, model = case.config(flags), MODELS[case.model]
    here = torch.device(device)
    context = ParallelContext.create(case.layout, here) if case.layout.world_size > 1 else ParallelContext.solo(here)
    streams = RandomStreams(1, context)
    dtype = None if flags else torch.float64
    chunks = build_chunks(config, model.vocab_size, context, streams.own, dtype=dtype)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    total, rate = steps * SAMPLES, 1e-2 if steps == STEPS else 1e-3
    decoupled = config.optimizer.decoupled_lr
    schedule = ParameterSchedule(
        LearningRateSchedule(rate, rate, total, "constant"),
        WeightDecaySchedule(0.01, 0.01, total),
        None if decoupled is None else LearningRateSchedule(decoupled, decoupled, total, "constant"),
    )
    deferred = defer_weight_gradients(config, chunks, optimizer)
    return config, TrainState(chunks, optimizer, streams, schedule, context=context, deferred=deferred)


def _run(case: Case, flags: str = "", steps: int = STEPS) -> dict[str, Any]:
    """Train in the layout of the case; what this rank saw and holds."""
    if case.compiled:
        torch._dynamo.reset()  # else the layers of an earlier case count against its limit of compilations
    config, state = state_of(case, flags, steps)
    context = state.context
    batches = batches_of(case, context.dp.index, steps)
    gradients, results, tokens = None, [], []
    for _ in range(steps):
        size = config.batch_sizes.num_micro_batches(state.consumed_samples)
        result = train_step(
            state,
            batches,
            size,
            pipeline_schedule=config.pipeline_schedule,
            sum_over_ranks=make_sum_over_ranks(state),
            hooks=[BlendCount(state, SOURCES)] if case.data == "blend" else (),
        )
        gradients = gradients or gradient_pieces(state)
        results.append((sum(result.further_losses.values(), result.loss), result.grad_norm))
        tokens.append(dict(result.source_tokens))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if case.compiled else 0
    return {"steps": results, "gradients": gradients, "tokens": tokens, "graphs": graphs}


def make_sum_over_ranks(state: TrainState) -> Any:
    from megalith.train.consensus import NeverStop, RankConsensus

    return RankConsensus(NeverStop(), state.context, contributes=state.contributes_losses).sum_over_ranks


class _Alone(dict[str, dict[str, Any]]):
    """What one process computes, by `Case.reference`, computed when it is first asked for."""

    def __missing__(self, reference: str) -> dict[str, Any]:
        model, _, data = reference.partition(" ")
        self[reference] = _run(Case(Layout(), model, data=data))
        return self[reference]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return _Alone()


FOUND: dict[Case, tuple[float, float, int]] = {}
"""Relative error of the loss, largest relative error of a gradient, number of gradients."""

_HEAD = """# Parity of layouts

Written by `make test-full` (tests/distributed/test_parity.py): training steps of each layout against one process, in
fp64, dropout 0, with clipping active, an uneven number of masked tokens in every sample and one padded vocabulary.
For each gradient max|a - b| / max|b| over all ranks and rows; the bound is 1e-10. `zero1` is
`--use-distributed-optimizer`, `sp` `--sequence-parallel`, `vpp2` two virtual stages, `a2a` `--cp-comm-type a2a`,
`recompute-uniform-2` full recomputation by this method and number of layers, `fsdp-zero3` `--use-torch-fsdp2`,
`fsdp-zero2` the same with `--torch-fsdp2-no-reshard-after-forward`, `fsdp-optim` and the like
`--use-megatron-fsdp --data-parallel-sharding-strategy optim`; `documents` attention that stays inside documents,
`blend` the same with the samples of a blend of two datasets, read by each replica for itself; `pairs` pairs of texts
with padding, as BERT reads them; `compiled` layers through torch.compile; `spans` texts and spans of them, as T5 does.

| layout | model | options | loss | worst of the gradients | gradients |
|---|---|---|---|---|---|
"""


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """Write the table, if it is asked for, of what this run has found."""
    yield
    path = os.environ.get("PARITY_TABLE")
    if path and FOUND:
        rows = [
            f"| {case.layout} | {case.model} | {case.options} | {loss:.1e} | {worst:.1e} | {count} |"
            for case, (loss, worst, count) in FOUND.items()
        ]
        Path(path).write_text(_HEAD + "\n".join(rows) + "\n")


def _check(case: Case, ranks: Any, alone: dict[str, dict[str, Any]]) -> None:
    reference = alone[case.reference]
    seconds = 600.0 if case.compiled else 120.0
    results = ranks.run(case.layout.world_size, _run, case, seconds=seconds)
    for result in results:
        assert bool(result["graphs"]) is case.compiled
        assert result["tokens"] == reference["tokens"]
        for (loss, norm), (wanted_loss, wanted_norm) in zip(result["steps"], reference["steps"], strict=True):
            assert loss == pytest.approx(wanted_loss, rel=TOLERANCE)
            assert norm == pytest.approx(wanted_norm, rel=TOLERANCE)
    found = Comparison()
    compare_gradients(found, reference["gradients"], [result["gradients"] for result in results], 1, floor=1e-15)
    assert not found.differences, str(found.differences[0])
    losses = zip(results[0]["steps"], reference["steps"], strict=True)
    loss_error = max(abs(loss - wanted_loss) / wanted_loss for (loss, _), (wanted_loss, _) in losses)
    FOUND[case] = (loss_error, found.worst["gradient"][0], found.counts["gradient"])


PREDICTION = [
    Case(Layout(dp=2), "prediction-apart", fsdp="zero2"),
    Case(Layout(pp=2, tp=2), "prediction", sequence_parallel=True, virtual_stages=2),
    Case(Layout(cp=2, dp=2), "prediction-apart", zero1=True),
    Case(Layout(pp=2, dp=2, ep=2), "prediction-mixture", dispatcher="alltoall", zero1=True),
    Case(Layout(pp=2), "prediction", schedule="zb-h1"),
    Case(Layout(tp=2), "prediction"),
    Case(Layout(tp=4), "prediction-apart", sequence_parallel=True),
    Case(Layout(pp=4), "prediction-apart"),
    Case(Layout(pp=2, dp=2), "prediction-apart", zero1=True),
    Case(Layout(pp=2, cp=2), "prediction", exchange="a2a"),
    Case(Layout(tp=2, dp=2, ep=2), "prediction-mixture", sequence_parallel=True, zero1=True),
    Case(Layout(pp=2, cp=2, ep=2), "prediction-mixture"),
    Case(Layout(dp=2), "prediction", fsdp="zero3"),
    Case(Layout(tp=2), "prediction-learned", sequence_parallel=True),
    Case(Layout(tp=2), "prediction", sequence_parallel=True, recompute="uniform-1"),
    Case(Layout(pp=2), "prediction-mixture", recompute="block-1"),
    Case(Layout(cp=2), "prediction", data="documents"),
]
CASES = [*required_cases(), *FURTHER, *FSDP]


def _pairs(case: Case) -> set[tuple[Any, ...]]:
    """Every two things that come together in a case."""
    sizes = dataclasses.asdict(case.layout).items()
    options = [(name, value) for name, value in dataclasses.asdict(case).items() if name != "layout"]
    facts = [*sizes, *options]
    return {(one, other) for number, one in enumerate(facts) for other in facts[number + 1 :]}


def _covering(cases: list[Case]) -> set[Case]:
    """A few of the cases in which every pair of things that comes together in any case does so, found greedily."""
    left = set().union(*map(_pairs, cases))
    chosen: set[Case] = set()
    while left:
        best = max(cases, key=lambda case: len(_pairs(case) & left))
        chosen.add(best)
        left -= _pairs(best)
    return chosen


SAMPLE = _covering(CASES)
TWO_RANKS = _covering([case for case in CASES if case.layout.world_size == 2])
FOUR_RANKS = {
    Case(Layout(tp=4), "one-group"),
    Case(Layout(cp=4), zero1=True),
    Case(Layout(dp=4), "uneven-vocabulary", fsdp="zero3"),
    Case(Layout(pp=4), "llama", schedule="zb-h1"),
    Case(Layout(tp=2, pp=2), sequence_parallel=True, virtual_stages=2),
    Case(Layout(tp=2, cp=2), "llama", sequence_parallel=True, zero1=True, recompute="uniform-1"),
    Case(Layout(tp=2, dp=2), "llama", sequence_parallel=True, fsdp="zero2"),
    Case(Layout(cp=2, pp=2), virtual_stages=2, zero1=True),
    Case(Layout(cp=2, dp=2), "llama", exchange="a2a", zero1=True),
    Case(Layout(pp=2, dp=2), schedule="zb-h1", zero1=True),
}
ALWAYS = (
    TWO_RANKS
    | FOUR_RANKS
    | set(OPTIONS[:2])
    | set(OPTIMISERS[:3])
    | set(DATA[:2])
    | set(EXPERTS[:1])
    | set(LATENT[:1])
    | set(BERT[:2])
    | set(T5[:2])
    | set(EXPERT_PARALLEL[:2])
    | set(EXPERT_TENSOR[:1])
    | set(EXPERTS_OF_LATENT_VECTORS[:1])
    | set(EXPERTS_BY_QUANTILES[:1])
    | set(WHOLE_SEQUENCES_OF_EXPERTS[:1])
    | set(PREDICTION[:2])
)
ALL = [
    *CASES,
    *FURTHER_OPTIONS,
    *MEGATRON_FSDP,
    *OPTIONS,
    *OPTIMISERS,
    *DATA,
    *EXPERTS,
    *EXPERT_PARALLEL,
    *EXPERT_TENSOR,
    *EXPERTS_OF_LATENT_VECTORS,
    *EXPERTS_BY_QUANTILES,
    *WHOLE_SEQUENCES_OF_EXPERTS,
    *LATENT,
    *PREDICTION,
    *BERT,
    *T5,
    *COMPILED,
]
assert set(ALL) >= ALWAYS
NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.full] * (case not in ALWAYS) + [NEEDS_A_COMPILER] * case.compiled


ROWS = [pytest.param(case, marks=_marks(case)) for case in ALL]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_layout_equals_one_process(case: Case, ranks: Any, alone: dict[str, dict[str, Any]]) -> None:
    _check(case, ranks, alone)


@pytest.mark.full
@pytest.mark.parametrize("case", EIGHT, ids=str)
def test_eight_ranks_equal_one_process(case: Case, ranks: Any, alone: dict[str, dict[str, Any]]) -> None:
    _check(case, ranks, alone)


def test_the_reference_moves(alone: dict[str, dict[str, Any]]) -> None:
    """A law that compares zeros would hold for everything."""
    for result in alone.values():
        losses = [loss for loss, _ in result["steps"]]
        assert len(set(losses)) == STEPS
        assert all(float(pieces[0].tensor.abs().max()) > 0 for name, pieces in result["gradients"].items())


def test_muon_of_each_rank_alone_makes_other_steps(ranks: Any) -> None:
    """The first loss is the same, the one after an update of parts by themselves is not."""
    losses = {}
    for mode in ("duplicated", "distributed", "blockwise"):
        found = ranks.run(2, _run, Case(Layout(tp=2), "muon"), f"--muon-tp-mode {mode}")
        losses[mode] = [loss for loss, _ in found[0]["steps"]]
    assert losses["distributed"] == pytest.approx(losses["duplicated"], rel=1e-5)
    assert losses["blockwise"][0] == losses["duplicated"][0]
    assert losses["blockwise"][1:] != pytest.approx(losses["duplicated"][1:], rel=1e-4)


CURVE_STEPS = 50
PRECISIONS = {
    "fp32": ("--seed 1234", 1e-5),
    "bf16": ("--bf16", 2e-2),
    "fp16": ("--fp16 --initial-loss-scale 8192", 4e-3),
}
"""Flags, and by how much a loss of 50 steps may differ from one process's: half precision rounds partial sums.

The loss scale is so low that no layout skips a step. A replica divides its loss by the number of its own micro-batches,
as Megatron does: with 4 replicas gradients are 4 times those of one process until they are averaged, and overflow
earlier (at 65536 in the sixth step)."""

SAMPLE_OF_CURVES = [
    pytest.param(Case(Layout(tp=2, pp=2), sequence_parallel=True), "fp32", marks=pytest.mark.full),
    (Case(Layout(dp=2), zero1=True), "bf16"),
    pytest.param(Case(Layout(cp=2)), "fp16", marks=pytest.mark.full),
]


def _check_curve(case: Case, precision: str, ranks: Any) -> None:
    flags, tolerance = PRECISIONS[precision]
    wanted = [loss for loss, _ in _run(Case(Layout(), case.model), flags, CURVE_STEPS)["steps"]]
    found = ranks.run(case.layout.world_size, _run, case, flags, CURVE_STEPS)[0]["steps"]
    assert wanted[-1] < wanted[0]
    for step, ((loss, _), reference) in enumerate(zip(found, wanted, strict=True)):
        assert loss == pytest.approx(reference, rel=tolerance), f"step {step}"


@pytest.mark.parametrize(("case", "precision"), SAMPLE_OF_CURVES, ids=str)
def test_curves_of_fifty_steps(case: Case, precision: str, ranks: Any) -> None:
    _check_curve(case, precision, ranks)


def test_residuals_in_fp32_stay_so_between_stages(ranks: Any) -> None:
    """Of the first step, before sums of gradients differ in their order, the loss is the same to the last bit."""
    losses = {}
    for flags in ("--bf16", "--bf16 --fp32-residual-connection"):
        alone = _run(Case(Layout()), flags, 1)["steps"][0]
        (loss, norm), *_ = ranks.run(2, _run, Case(Layout(pp=2), virtual_stages=2), flags, 1)[0]["steps"]
        assert loss == alone[0]
        assert norm == pytest.approx(alone[1], rel=1e-5)
        losses[flags] = loss
    assert len(set(losses.values())) == 2


@pytest.mark.full
@pytest.mark.parametrize("case", list(required_cases()), ids=str)
def test_curves_of_every_required_layout(case: Case, ranks: Any) -> None:
    _check_curve(case, "fp32", ranks)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", sorted(SAMPLE, key=str), ids=str)
def test_curves_in_half_precision(case: Case, precision: str, ranks: Any) -> None:
    _check_curve(case, precision, ranks)
