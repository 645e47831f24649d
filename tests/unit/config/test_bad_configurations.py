"""A table of bad configurations: each is answered by one message naming flag, value and remedy (reliability F13)."""

from __future__ import annotations

import re
import shlex
from operator import attrgetter
from pathlib import Path
from string import Formatter

import pytest

from megalith.config import load
from megalith.config.rules import FILE_RULES, NOTICES, RULES, expert, layout, lora, model
from megalith.config.rules.rule import Draft, Rule
from megalith.config.run import all_settings
from megalith.errors import ConfigError

GOOD = {
    "--num-layers": "2",
    "--hidden-size": "12",
    "--num-attention-heads": "4",
    "--max-position-embeddings": "64",
    "--seq-length": "64",
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--mock-data": "",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
}

_LORA = "--lora-rank 4 --load {data}/c"
_LATENT = "--multi-latent-attention --position-embedding-type rope"
_WORD_PIECE = "-tokenizer-type -vocab-size --tokenizer-type BertWordPieceLowerCase --vocab-file {data}/vocab.json"
_T5_ALONE = f"-mock-data --data-path {{data}}/real --model-family t5 {_WORD_PIECE} --vocab-extra-ids 100"
_T5 = f"{_T5_ALONE} --decoder-seq-length 32"
_BERT_ALONE = "-tokenizer-type -vocab-size --model-family bert --vocab-file {data}/vocab.json"
_BERT = f"-mock-data --data-path {{data}}/real {_BERT_ALONE}"

# What is added to (or, with a leading minus, taken from) GOOD -> the flags, values and files that the message names.
TABLE: list[tuple[str, tuple[str, ...]]] = [
    # required
    ("-num-layers", ("--num-layers",)),
    ("-hidden-size", ("--hidden-size",)),
    ("-num-attention-heads", ("--num-attention-heads",)),
    ("-max-position-embeddings", ("--max-position-embeddings",)),
    ("-seq-length", ("--seq-length",)),
    ("-micro-batch-size", ("--micro-batch-size",)),
    ("-lr", ("--lr",)),
    ("-train-iters", ("--train-iters", "--train-samples")),
    ("-mock-data", ("--data-path", "--mock-data")),
    ("-vocab-size", ("NullTokenizer", "--vocab-size")),
    # values that are no values
    ("--num-layers twelve", ("--num-layers twelve", "1")),
    ("--num-layers 2.5", ("--num-layers 2.5", "2")),
    ("--train-iters 1e3", ("--train-iters 1e3", "1000")),
    ("--lr fast", ("--lr fast", "0")),
    ("--lr nan", ("--lr nan",)),
    ("--lr", ("--lr",)),
    ("--lr --fp16", ("--lr",)),
    ("--fp16=true", ("--fp16",)),
    ("--split ''", ("--split ''",)),
    ("--split ,", ("--split ,", "0", "949", "50", "1")),
    ("--save '' --save-interval 5", ("--save ''",)),
    ("--config {data}/empty.toml --config b.toml", ("--config b.toml",)),
    ("--cp-comm-type p2p a2a", ("--cp-comm-type p2p", "a2a")),
    ("'file>'", ("file>",)),
    ("stray", ("stray",)),
    ("''", ("''",)),
    # values outside the legal range
    ("--num-layers 0", ("--num-layers 0", "1")),
    ("--hidden-size -12", ("--hidden-size -12", "1")),
    ("--micro-batch-size 0", ("--micro-batch-size 0", "1")),
    ("--hidden-dropout 1.0", ("--hidden-dropout 1.0", "1")),
    ("--attention-dropout -0.1", ("--attention-dropout -0.1", "0")),
    ("--adam-beta1 1.0", ("--adam-beta1 1.0", "1")),
    ("--adam-beta2 1.5", ("--adam-beta2 1.5", "0", "1")),
    ("--adam-eps 0", ("--adam-eps 0.0",)),
    ("--clip-grad -1", ("--clip-grad -1.0",)),
    ("--weight-decay -0.1", ("--weight-decay -0.1", "0")),
    ("--seed 0", ("--seed 0", "1")),
    ("--rotary-percent 0", ("--rotary-percent 0.0", "1")),
    ("--lr-warmup-fraction 1.0", ("--lr-warmup-fraction 1.0", "1")),
    ("--eval-interval 0", ("--eval-interval 0", "1")),
    ("--log-interval 0", ("--log-interval 0", "1")),
    ("--num-workers -1", ("--num-workers -1", "0")),
    ("--seed 4294967296", ("--seed 4294967296", "4294967295")),
    ("--fp16 --loss-scale 0", ("--loss-scale 0.0",)),
    ("--fp16 --loss-scale 1e-50", ("--loss-scale 1e-50",)),
    ("--fp16 --initial-loss-scale 1e39", ("--initial-loss-scale 1e+39",)),
    ("--init-method-std -1", ("--init-method-std -1.0",)),
    ("--rerun-mode disabled --nan-policy rerun", ("--rerun-mode disabled", "--nan-policy rerun")),
    (
        "--decoder-last-pipeline-num-layers 1",
        ("--decoder-last-pipeline-num-layers 1", "--pipeline-model-parallel-size"),
    ),
    # batch sizes
    ("--rampup-batch-size", ("--rampup-batch-size",)),
    ("--rampup-batch-size 4 4", ("--rampup-batch-size 4", "2")),
    ("--rampup-batch-size 0 4 100", ("--rampup-batch-size 0 4 100", "1")),
    ("--rampup-batch-size 4 3 100", ("--rampup-batch-size", "3", "1", "2", "4")),
    ("--rampup-batch-size 8 8 100", ("--global-batch-size 8",)),
    ("-global-batch-size --rampup-batch-size 2 2 100", ("--global-batch-size",)),
    ("--rampup-batch-size 1 1 100", ("1", "3", "5", "--micro-batch-size 2")),
    (
        "WORLD_SIZE=2 --rampup-batch-size 2 2 100",
        ("--rampup-batch-size", "2", "6", "4"),
    ),
    (
        "--step-batch-size-schedule 0:4,900:8",
        ("--step-batch-size-schedule 0:4,900:8", "--global-batch-size 8"),
    ),
    ("-global-batch-size --step-batch-size-schedule 0:x", ("--step-batch-size-schedule", "0", "768", "1536")),
    ("-global-batch-size --step-batch-size-schedule 1K:4", ("--step-batch-size-schedule", "1000", "0")),
    ("-global-batch-size --step-batch-size-schedule 0:4,1K:7", ("--step-batch-size-schedule", "7", "2")),
    (
        "--phase-transition-iterations 4,x",
        ("--phase-transition-iterations 4,x", "1000", "5000"),
    ),
    ("--phase-transition-iterations 4,10", ("--train-iters 10",)),
    (
        "--phase-transition-iterations 4 --rampup-batch-size 2 2 100",
        ("--phase-transition-iterations 4", "--rampup-batch-size 2", "100"),
    ),
    # optimizers
    ("--optimizer muon --use-distributed-optimizer", ("--optimizer muon", "--optimizer adam")),
    (
        "WORLD_SIZE=4 --optimizer muon --tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2 "
        "--global-batch-size 8",
        ("--num-query-groups 2", "--tensor-model-parallel-size 2", "--muon-tp-mode blockwise"),
    ),
    (
        "WORLD_SIZE=2 --micro-batch-size 1 --global-batch-size 4 --eval-micro-batch-size 3",
        ("--eval-micro-batch-size 3", "2", "--eval-global-batch-size 6"),
    ),
    ("--eval-global-batch-size 7 --eval-micro-batch-size 2", ("--eval-global-batch-size 7", "6", "8")),
    ("--optimizer adaptive_muon --use-torch-fsdp2", ("--optimizer adaptive_muon",)),
    ("--optimizer muon --optimizer-cpu-offload", ("--optimizer-cpu-offload", "--optimizer muon", "--optimizer adam")),
    ("--optimizer muon --muon-num-ns-steps 7", ("--muon-num-ns-steps 7", "5")),
    ("--optimizer shampoo", ("--optimizer shampoo", "adaptive_muon", "lion", "soap")),
    ("--optimizer soap --use-distributed-optimizer", ("--optimizer soap", "--optimizer adam")),
    ("--optimizer soap --optimizer-cpu-offload", ("--optimizer-cpu-offload", "--optimizer soap")),
    ("--optimizer soap --soap-precondition-frequency 0", ("--soap-precondition-frequency 0", "1")),
    ("--exp-avg-dtype bf16", ("--exp-avg-dtype bf16", "--use-precision-aware-optimizer")),
    (
        "--optimizer sgd --use-precision-aware-optimizer --main-grads-dtype bf16",
        ("--main-grads-dtype bf16", "--optimizer adam", "lion", "sgd"),
    ),
    ("--use-precision-aware-optimizer --main-params-dtype fp16", ("--main-params-dtype", "fp32")),
    (
        "WORLD_SIZE=2 --bf16 --use-torch-fsdp2 --use-precision-aware-optimizer --main-params-dtype fp16",
        ("--main-params-dtype fp16", "--use-torch-fsdp2"),
    ),
    (
        "--optimizer sgd --ckpt-format torch --save {data}/c --save-interval 5",
        ("--ckpt-format torch", "--optimizer sgd", "torch_dist"),
    ),
    *(
        (f"{words} --ckpt-format torch --save {{data}}/c --save-interval 5", ("--ckpt-format", words, "torch_dist"))
        for words in ("--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type qwen3_next")
    ),
    ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", ("--decoupled-min-lr 0.001", "--decoupled-lr 0.0001")),
    (
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        ("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
    ),
    (
        "--bf16 --megatron-fsdp-main-grads-dtype fp32",
        ("--megatron-fsdp-main-grads-dtype fp32", "--use-megatron-fsdp"),
    ),
    (
        "--bf16 --use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16",
        ("--megatron-fsdp-main-grads-dtype bf16", "fp32", "--grad-reduce-in-bf16"),
    ),
    (
        "--bf16 --use-megatron-fsdp --grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype fp32 "
        "--megatron-fsdp-grad-comm-dtype bf16",
        ("--megatron-fsdp-grad-comm-dtype bf16", "fp32"),
    ),
    # choices
    ("--lr-decay-style cosin", ("--lr-decay-style cosin", "inverse-square-root", "cosine")),
    ("--normalization rmsnorm", ("--normalization rmsnorm", "RMSNorm")),
    ("--distributed-backend mpi", ("--distributed-backend mpi", "nccl", "gloo")),
    ("--position-embedding-type mrope", ("--position-embedding-type mrope", "learned_absolute", "rope")),
    # options of the model
    ("--swiglu --squared-relu --ffn-hidden-size 16", ("--swiglu", "--squared-relu")),
    ("--qk-layernorm --qk-l2-norm", ("--qk-layernorm", "--qk-l2-norm")),
    ("--window-size 5", ("--window-size 5", "4096", "0")),
    ("--window-size 5,0 --window-attn-skip-freq [1]*3", ("--window-attn-skip-freq", "[1]*3", "2")),
    (
        "--window-size 5,0 --window-attn-skip-freq os.system(1)",
        ("--window-attn-skip-freq os.system(1)", "[0]*3+[1]"),
    ),
    (
        "--position-embedding-type rope --kv-channels 4 --no-rope-freq [0,2]",
        ("--no-rope-freq [0,2]", "1"),
    ),
    (
        "--position-embedding-type rope --kv-channels 4 --no-rope-freq 3",
        ("--num-layers 2", "--no-rope-freq 3", "1"),
    ),
    (
        "--position-embedding-type yarn --kv-channels 4",
        ("--position-embedding-type yarn", "--yarn-original-max-position-embeddings"),
    ),
    (
        "--position-embedding-type yarn --kv-channels 4 --yarn-original-max-position-embeddings 8 --rotary-interleaved",
        ("yarn", "--rotary-interleaved"),
    ),
    (
        "--position-embedding-type yarn --kv-channels 4 --yarn-original-max-position-embeddings 8 --yarn-beta-slow 40",
        ("--yarn-beta-slow 40", "--yarn-beta-fast 32"),
    ),
    (f"{_LATENT} --yarn-beta-fast 1", ("--yarn-beta-slow 1", "--yarn-beta-fast 1")),
    (
        "--use-mup --mup-base-hidden-size 6 --mup-width-mult 4",
        ("--mup-width-mult 4", "--hidden-size 12", "--mup-base-hidden-size 6", "--mup-width-mult 2"),
    ),
    (f"--use-mup {_LATENT}", ("--use-mup", "--multi-latent-attention")),
    (
        "--use-mup --ckpt-format torch --save {data}/c --save-interval 5",
        ("--ckpt-format torch", "--use-mup", "torch_dist"),
    ),
    ("--mup-embedding-mult 0", ("--mup-embedding-mult 0.0",)),
    ("--fp32-residual-connection", ("--fp32-residual-connection", "--fp16", "--bf16")),
    (
        "--recompute-granularity selective --recompute-modules moe_acts",
        ("--recompute-modules moe_acts", "moe_act"),
    ),
    (
        "--moe-layer-recompute --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        ("--moe-layer-recompute", "--recompute-granularity full"),
    ),
    ("--ckpt-format torch_dcp", ("--ckpt-format torch_dcp", "torch_dist", "torch")),
    ("--dataloader-type external", ("--dataloader-type external", "cyclic")),
    ("--dataloader-type random", ("--dataloader-type random", "cyclic", "external")),
    ("--tokenizer-type ByteLevelTokenizer", ("--tokenizer-type", "ByteLevelTokenizer", "GPT2BPETokenizer")),
    ("--tokenizer-type Llama2Tokenizer", ("Llama2Tokenizer", "--tokenizer-model")),
    ("--null-tokenizer-eod-id 100", ("--null-tokenizer-eod-id 100", "--vocab-size 100")),
    ("--tokenizer-special-tokens <a>", ("--tokenizer-type NullTokenizer", "TikTokenizer")),
    (
        "--tokenizer-type TikTokenizer --tokenizer-model {data}/vocab.json --tiktoken-num-special-tokens 2",
        ("--tiktoken-num-special-tokens 2", "3", "99"),
    ),
    ("--tokenizer-type HuggingFaceTokenizer", ("HuggingFaceTokenizer", "--tokenizer-model")),
    (
        "--early-stopping-patience 3 --eval-iters 0",
        ("--early-stopping-patience 3", "--eval-iters 0", "--full-validation"),
    ),
    (
        "--keep-best --save {data}/c --save-interval 5 --eval-iters 0",
        ("--keep-best", "--eval-iters 0", "--full-validation"),
    ),
    (
        "-mock-data --data-path {data}/real --early-stopping-patience 3 --split 1,0,1",
        ("--early-stopping-patience 3", "--split 1,0,1"),
    ),
    (
        "-mock-data --train-data-path {data}/real --keep-best --save {data}/c --save-interval 5",
        ("--keep-best", "--valid-data-path"),
    ),
    ("--tokenizer-type CharacterTokenizer", ("CharacterTokenizer", "--vocab-file")),
    ("--device gpu", ("--device gpu", "cpu", "cuda")),
    # experts over ranks
    ("--expert-model-parallel-size 2", ("--expert-model-parallel-size 2", "--num-experts")),
    (
        "WORLD_SIZE=2 --num-experts 5 --expert-model-parallel-size 2",
        ("--num-experts 5", "--expert-model-parallel-size 2", "--expert-model-parallel-size 1"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-model-parallel-size 4",
        ("--expert-model-parallel-size", "2", "1"),
    ),
    (
        "--num-experts 4 --expert-tensor-parallel-size 2",
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 1"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ("--expert-tensor-parallel-size 1", "--tensor-model-parallel-size 2", "--sequence-parallel"),
    ),
    (
        "WORLD_SIZE=4 --num-experts 4 --expert-tensor-parallel-size 2 --expert-model-parallel-size 4",
        ("--expert-model-parallel-size 4", "--expert-tensor-parallel-size 2"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-tensor-parallel-size 2 --ckpt-format torch --save {data}/saved "
        "--save-interval 5",
        ("--expert-tensor-parallel-size 2", "--ckpt-format torch", "--ckpt-format torch_dist"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-tensor-parallel-size 2 --optimizer muon",
        ("--expert-tensor-parallel-size 2", "--optimizer muon"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-tensor-parallel-size 2 --use-torch-fsdp2",
        ("--use-torch-fsdp2", "--expert-tensor-parallel-size 2"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --moe-ffn-hidden-size 7 --expert-tensor-parallel-size 2",
        ("--moe-ffn-hidden-size 7", "--expert-tensor-parallel-size 2"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-model-parallel-size 2 --use-torch-fsdp2",
        ("--use-torch-fsdp2", "--use-distributed-optimizer"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --moe-ffn-hidden-size 7 --tensor-model-parallel-size 2",
        ("--moe-ffn-hidden-size 7", "--tensor-model-parallel-size 2", "6", "8"),
    ),
    ("--num-experts 4 --moe-dispatch-fwd-dtype fp8", ("--moe-dispatch-fwd-dtype",)),
    # experts
    ("--num-experts -1", ("--num-experts -1", "0")),
    (
        "--num-experts 2 --moe-router-topk 3",
        ("--moe-router-topk 3", "--num-experts 2", "--moe-router-topk 1"),
    ),
    ("--num-experts 4 --moe-router-topk 1", ("--moe-router-topk 1", "--moe-router-pre-softmax")),
    ("--num-experts 4 --moe-layer-freq [1]", ("--moe-layer-freq [1]", "2")),
    ("--num-experts 4 --moe-router-num-groups 2", ("--moe-router-num-groups 2", "--moe-router-group-topk")),
    (
        "--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1",
        ("--num-experts 4", "--moe-router-num-groups 3"),
    ),
    ("--num-experts 4 --moe-router-enable-expert-bias", ("--moe-router-score-function sigmoid",)),
    (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
        ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "2", "1"),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.2",
        ("--moe-router-load-balancing-type aux_loss aux_loss",),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        ("--moe-aux-loss-coeff",),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1.5",
        ("--moe-expert-capacity-factor 1.5", "sinkhorn"),
    ),
    ("--num-experts 4 --moe-latent-size 0", ("--moe-latent-size 0",)),
    ("--num-experts 4 --moe-pad-expert-input-to-capacity", ("--moe-expert-capacity-factor",)),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing aux_loss --moe-aux-loss-coeff 0 0.1",
        ("quantile_balancing", "--moe-aux-loss-coeff"),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-num-groups 2 "
        "--moe-router-group-topk 1",
        ("--moe-router-num-groups 2", "quantile_balancing"),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid",
        ("--moe-router-enable-expert-bias",),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-topk 4",
        ("--moe-router-topk 4", "--num-experts 4"),
    ),
    ("--num-experts 4 --moe-router-quantile-balancing-ema 1", ("--moe-router-quantile-balancing-ema 1.0",)),
    ("--num-experts 4 --moe-apply-probs-on-input", ("--moe-router-topk 1", "--moe-router-topk 2")),
    # unknown, renamed, refused
    ("--num-layer 2", ("--num-layer", "--num-layers")),
    ("-num-layers=2", ("-num-layers", "--num-layers")),
    ("\u2013lr 1", ("\u2013lr",)),
    ("--gibberish 1 2", ("--gibberish", "--flags")),
    ("--batch-size 8", ("--batch-size 8", "--micro-batch-size")),
    ("--checkpoint-activations", ("--recompute-activations",)),
    ("--nproc-per-node 2", ("--nproc-per-node 2", "--nproc")),
    ("--nproc 2 --nnodes 2", ("--nnodes 2", "--nproc")),
    (
        "--moe-mlp-glu-interleave-size 8 --moe-shared-expert-glu-interleave-size 8",
        ("--moe-mlp-glu-interleave-size 8", "--moe-shared-expert-glu-interleave-size 8"),
    ),
    ("--moe-router-force-biased 0.1", ("--moe-router-force-load-balancing",)),
    ("--moe-token-dropping", ("--moe-expert-capacity-factor",)),
    ("--moe-router-topk-limited-devices 2", ("--moe-router-group-topk",)),
    (
        "--num-experts 4 --moe-routing-trace-path t --moe-routing-trace-max-training-iters 0",
        ("--moe-routing-trace-max-training-iters 0",),
    ),
    (
        "--num-experts 8 --moe-use-upcycling",
        ("--moe-use-upcycling", "--upcycle"),
    ),
    ("--fp8-format e4m3", ("--fp8-format e4m3",)),
    ("--distribute-saved-activations", ("--distribute-saved-activations", "--sequence-parallel")),
    # across settings
    (
        "--hidden-size 1000 --num-attention-heads 12",
        ("--hidden-size 1000", "--num-attention-heads 12", "83", "4", "996", "1008", "10"),
    ),
    (
        "--group-query-attention --num-query-groups 3",
        ("--num-attention-heads 4", "--num-query-groups 3", "1", "2"),
    ),
    ("--seq-length 128", ("--seq-length 128", "--max-position-embeddings 64")),
    ("--swiglu", ("--swiglu", "--hidden-size 12", "--ffn-hidden-size", "48")),
    ("--position-embedding-type rope", ("3", "--kv-channels 4")),
    (
        "--position-embedding-type rope --kv-channels 20 --rotary-percent 0.25",
        ("--rotary-percent 0.25", "20", "5", "--rotary-percent 0.2", "4", "0.3"),
    ),
    ("--no-position-embedding", ("--no-position-embedding", "--position-embedding-type rope")),
    ("--fp16 --bf16", ("--fp16", "--bf16")),
    ("--fp16 --min-loss-scale 4 --initial-loss-scale 2", ("--min-loss-scale 4", "--initial-loss-scale 2")),
    (
        "--global-batch-size 10 --micro-batch-size 4",
        ("--global-batch-size 10", "--micro-batch-size 4", "8", "12", "1", "2", "5"),
    ),
    ("--train-samples 100", ("--train-iters 10", "--train-samples 100")),
    ("-train-iters --train-samples 5", ("--train-samples 5", "8")),
    ("--lr-decay-samples 100", ("--lr-decay-samples 100", "--train-iters 10")),
    ("-train-iters --train-samples 80 --lr-warmup-iters 2", ("--lr-warmup-iters 2", "--train-samples 80")),
    ("--min-lr 1e-2", ("--min-lr 0.01", "--lr 0.001")),
    ("--lr-warmup-init 1", ("--lr-warmup-init 1", "--lr 0.001")),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 2", ("--lr-warmup-fraction 0.1", "--lr-warmup-iters 2")),
    ("--lr-warmup-iters 10", ("--lr-warmup-iters 10", "9")),
    ("--lr-decay-iters 5 --lr-warmup-iters 7", ("--lr-decay-iters 5", "4")),
    ("--lr-decay-style WSD", ("--lr-decay-style WSD", "--lr-wsd-decay-iters")),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", ("--lr-wsd-decay-iters 11", "10")),
    ("--override-opt-param-scheduler --use-checkpoint-opt_param-scheduler", ("--override-opt-param-scheduler",)),
    ("--start-weight-decay 0.1", ("--start-weight-decay 0.1", "--weight-decay-incr-style linear", "cosine")),
    ("--weight-decay-incr-style linear --end-weight-decay 1", ("--start-weight-decay",)),
    (
        "--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay .5",
        ("--start-weight-decay 1", "--end-weight-decay 0.5"),
    ),
    ("--data-path {data}/real", ("--data-path", "--mock-data")),
    (
        "-mock-data --data-path {data}/real --data-args-path {data}/words",
        ("--data-path", "--data-args-path"),
    ),
    (
        "-mock-data --train-data-path {data}/real --per-split-data-args-path {data}/splits",
        ("--train-data-path", "--per-split-data-args-path"),
    ),
    ("-mock-data --data-path 0.5 {data}/real b {data}/real", ("--data-path",)),
    ("-mock-data --data-path 0.5 {data}/real 0 {data}/real", ("--data-path", "0", "{data}/real")),
    ("--data-source-weights 0.5", ("--data-source-weights 0.5", "--data-source")),
    ("-mock-data --data-path 0.5 {data}/real 0.5", ("--data-path",)),
    (
        "-mock-data --train-data-path {data}/real --valid-data-path x {data}/real 1 {data}/real",
        ("--valid-data-path x", "{data}/real", "1"),
    ),
    (
        "-mock-data --train-data-path {data}/real --test-data-path -1 {data}/real",
        ("--test-data-path -1", "{data}/real"),
    ),
    ("-mock-data --train-data-path nan {data}/real", ("--train-data-path nan", "{data}/real")),
    ("-mock-data --valid-data-path {data}/real", ("--valid-data-path", "--train-data-path")),
    (
        "-mock-data --train-data-path {data}/real --split 1,0,0",
        ("--split 1,0,0", "--train-data-path"),
    ),
    (
        "-mock-data --data-path 1 {data}/real 2 {data}/real --full-validation",
        ("--full-validation", "--valid-data-path"),
    ),
    ("--multiple-validation-sets", ("--valid-data-path",)),
    (
        "-mock-data --train-data-path {data}/real --valid-data-path {data}/real {data}/real {data}/real "
        "--multiple-validation-sets --validation-set-names a b",
        ("--validation-set-names a", "--valid-data-path", "3"),
    ),
    (
        "--reset-attention-mask --reset-position-ids --dataloader-inter-document-masking",
        ("--reset-attention-mask", "--reset-position-ids", "--dataloader-inter-document-masking"),
    ),
    ("--sft", ("--sft", "--loss-mask", "--mock-data")),
    (
        "-mock-data --train-data-path {data}/real --sft --eod-mask-loss --reset-position-ids",
        ("--eod-mask-loss", "--reset-position-ids", "--sft"),
    ),
    (
        "WORLD_SIZE=2 -mock-data --train-data-path {data}/real --sft --sft-sample-prompts 2 "
        "--pipeline-model-parallel-size 2",
        ("--sft-sample-prompts 2",),
    ),
    ("WORLD_SIZE=2 --sample-prompts Once upon --pipeline-model-parallel-size 2", ("--sample-prompts Once upon",)),
    ("WORLD_SIZE=2 --sample-prompts Once --context-parallel-size 2", ("--sample-prompts Once",)),
    (f"{_BERT} --sample-prompts Once", ("--sample-prompts Once", "--model-family bert")),
    (f"{_BERT} --sft", ("--sft", "--model-family bert")),
    ("--mid-level-dataset-surplus -0.1", ("--mid-level-dataset-surplus -0.1", "0")),
    ("--split 1,2,3,4", ("--split 1,2,3,4", "949", "50")),
    ("--split 0,50,50", ("--split 0,50,50",)),
    ("--split 90%,10%", ("--split 90%,10%",)),
    ("--tokenizer-type GPT2BPETokenizer", ("--vocab-file", "--merge-file")),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file {data}/real.bin", ("--merge-file",)),
    ("--save {data}/ckpt", ("--save {data}/ckpt", "--save-interval")),
    (
        "--save {data}/ckpt --save-interval 5 --async-save --ckpt-format torch",
        ("--async-save", "--ckpt-format torch", "--ckpt-format torch_dist"),
    ),
    (
        "--save {data}/ckpt --save-interval 4 --save-retain-interval 6",
        ("--save-retain-interval 6", "--save-interval 4", "8"),
    ),
    (
        "--save {data}/ckpt --save-interval 5 --non-persistent-save-interval 2",
        ("--non-persistent-save-interval 2", "--non-persistent-ckpt-type global"),
    ),
    (
        "--save {data}/c --save-interval 5 --non-persistent-save-interval 2 --non-persistent-ckpt-type in_memory",
        ("--non-persistent-ckpt-type in_memory", "--non-persistent-ckpt-type global"),
    ),
    (
        "--save {data}/c --save-interval 5 --non-persistent-save-interval 2 --non-persistent-ckpt-type local",
        ("--non-persistent-ckpt-type local", "--non-persistent-local-ckpt-dir"),
    ),
    ("--ckpt-convert-format torch", ("--ckpt-convert-format torch", "--load", "--ckpt-convert-save")),
    ("--ckpt-convert-save {data}/c", ("--ckpt-convert-format torch", "torch_dist")),
    ("--replication", ("--replication", "--async-save")),
    ("--keep-last 0", ("--keep-last 0", "1")),
    (
        "--tensor-model-parallel-size 2",
        ("--tensor-model-parallel-size 2", "1"),
    ),
    # layouts
    (
        "WORLD_SIZE=2 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 "
        "--num-attention-heads 96 --hidden-size 12288",
        ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "16", "128", "WORLD_SIZE", "2"),
    ),
    (
        "WORLD_SIZE=4 --tensor-model-parallel-size 4 --context-parallel-size 4 --pipeline-model-parallel-size 2",
        ("--context-parallel-size 2", "--context-parallel-size 4"),
    ),
    (
        "WORLD_SIZE=3 --ffn-hidden-size 66 --tensor-model-parallel-size 3",
        ("4", "--tensor-model-parallel-size 1"),
    ),
    (
        "WORLD_SIZE=2 --ffn-hidden-size 65 --tensor-model-parallel-size 2",
        ("65", "--tensor-model-parallel-size 1", "--ffn-hidden-size 64", "66"),
    ),
    (
        "WORLD_SIZE=4 --num-attention-heads 12 --hidden-size 24 --group-query-attention --num-query-groups 6 "
        "--tensor-model-parallel-size 4",
        ("--num-query-groups 6", "--tensor-model-parallel-size 1", "2"),
    ),
    (
        "WORLD_SIZE=2 --seq-length 62 --context-parallel-size 2",
        ("--seq-length", "--context-parallel-size", "4", "60", "64"),
    ),
    (
        "WORLD_SIZE=4 --num-attention-heads 2 --context-parallel-size 4 --cp-comm-type a2a",
        ("--num-attention-heads", "--context-parallel-size", "--cp-comm-type", "a2a", "p2p"),
    ),
    (
        "WORLD_SIZE=3 --pipeline-model-parallel-size 3 --num-layers 8",
        ("3", "1", "--decoder-first-pipeline-num-layers 2"),
    ),
    (
        "WORLD_SIZE=4 --pipeline-model-parallel-size 4 --num-layers 2",
        ("--pipeline-model-parallel-size", "--num-layers", "4", "1", "2"),
    ),
    ("WORLD_SIZE=2 --num-virtual-stages-per-pipeline-rank 2", ("--pipeline-model-parallel-size",)),
    (
        "WORLD_SIZE=2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
        "--global-batch-size 6",
        ("--global-batch-size", "2", "3", "4", "8"),
    ),
    (
        "WORLD_SIZE=2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4 "
        "--pipeline-schedule zb-h1",
        ("--pipeline-schedule", "zb-h1"),
    ),
    (
        "WORLD_SIZE=2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3 --global-batch-size 8",
        ("--global-batch-size 8", "6 or 10"),
    ),
    (
        "WORLD_SIZE=2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
        "--microbatch-group-size-per-virtual-pipeline-stage 1 --global-batch-size 4",
        ("--microbatch-group-size-per-virtual-pipeline-stage 1", "--pipeline-model-parallel-size 2"),
    ),
    *(
        (f"WORLD_SIZE=2 --pipeline-model-parallel-size 2 --num-layers 4 --pipeline-model-parallel-layout {text}", named)
        for text, named in (
            ("Ett|tXtL", ("--pipeline-model-parallel-layout Ett|tXtL", "X")),
            ("Ett|(tt", ("--pipeline-model-parallel-layout Ett|(tt", "(")),
            ("tt|ttL", ("--pipeline-model-parallel-layout tt|ttL", "E")),
            ("|EttttL", ("--pipeline-model-parallel-layout |EttttL", "E")),
            ("Ett|t*3L", ("--pipeline-model-parallel-layout Ett|t*3L", "5 t", "--num-layers 4")),
            ("Ett|ttmL", ("--pipeline-model-parallel-layout Ett|ttmL", "1 m", "--mtp-num-layers 0")),
            ("Et|t|ttL", ("--pipeline-model-parallel-layout Et|t|ttL", "3", "--pipeline-model-parallel-size 2")),
            (
                "Ettm|ttmL --mtp-num-layers 2 --position-embedding-type rope --kv-channels 4",
                ("Ettm|ttmL", "m right before L"),
            ),
            ("Etttt|L --lora-rank 2 --load {data}/c", ("Etttt|L", "--lora-rank 2")),
            ("Ett|ttL --decoder-first-pipeline-num-layers 2", ("Ett|ttL", "--decoder-first-pipeline-num-layers 2")),
        )
    ),
    (
        "WORLD_SIZE=4 --pipeline-model-parallel-size 4 --num-layers 4 --pipeline-model-parallel-layout Ett||tt|L",
        ("--pipeline-model-parallel-layout Ett||tt|L", "rank 1"),
    ),
    ("WORLD_SIZE=4 --nproc 2", ("--nproc 2", "4")),
    ("--max-restarts 3", ("--max-restarts 3", "--nproc")),
    (
        "WORLD_SIZE=2 --use-torch-fsdp2 --use-distributed-optimizer",
        ("--use-torch-fsdp2", "--use-distributed-optimizer"),
    ),
    (
        "WORLD_SIZE=2 --use-torch-fsdp2 --use-megatron-fsdp",
        ("--use-torch-fsdp2", "--use-megatron-fsdp"),
    ),
    (
        "WORLD_SIZE=4 --use-megatron-fsdp --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        ("--pipeline-schedule zb-h1", "--use-megatron-fsdp", "--pipeline-schedule 1f1b"),
    ),
    (
        "WORLD_SIZE=2 --optimizer muon --use-megatron-fsdp --data-parallel-sharding-strategy optim",
        ("--optimizer muon", "--use-megatron-fsdp"),
    ),
    ("--data-parallel-sharding-strategy zero", ("--data-parallel-sharding-strategy zero", "no_shard", "optim")),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", ("--ckpt-format fsdp_dtensor", "torch_dist", "torch")),
    ("--outer-dp-sharding-strategy optim", ("--outer-dp-sharding-strategy optim",)),
    (
        "WORLD_SIZE=4 --use-torch-fsdp2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        ("--pipeline-schedule zb-h1", "--use-torch-fsdp2", "--pipeline-schedule 1f1b"),
    ),
    # recomputation
    ("--recompute-granularity full", ("--recompute-method uniform", "--recompute-num-layers")),
    ("--recompute-granularity full --recompute-num-layers 1", ("--recompute-method uniform",)),
    (
        "--recompute-granularity full --recompute-method block",
        ("--recompute-num-layers",),
    ),
    ("--recompute-granularity whole", ("--recompute-granularity whole", "selective")),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
        ("--recompute-num-layers 0", "1"),
    ),
    (
        "--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1",
        (
            "--recompute-method uniform",
            "--recompute-num-layers 1",
            "--recompute-granularity selective",
            "--recompute-granularity full",
        ),
    ),
    # what is printed, recorded and measured
    ("--log-interval 10 --log-memory-interval 25", ("--log-memory-interval 25", "20", "30")),
    ("--profile --profile-step-end 10", ("--profile-step-end 10", "--profile-step-start 10", "11")),
    ("--profile --profile-ranks 0 3", ("--profile-ranks 0", "3")),
    ("--wandb-project p", ("--wandb-project p", "--wandb-exp-name")),
    ("--timing-log-level 3", ("--timing-log-level 3", "0", "2")),
    ("--timing-log-option mean", ("--timing-log-option mean", "max", "minmax")),
    ("--exit-signal 9", ("--exit-signal 9", "--exit-signal 15")),
    # files
    ("-mock-data --data-args-path {data}/empty.toml", ("--data-args-path {data}/empty.toml",)),
    ("-mock-data --data-args-path {data}/none", ("--data-args-path {data}/none",)),
    ("-mock-data --data-args-path {data}/reels", ("--data-args-path", "{data}/reel", "{data}/real")),
    ("-mock-data --per-split-data-args-path {data}/empty.toml", ("--per-split-data-args-path",)),
    ("-mock-data --per-split-data-args-path {data}/no_train", ("--per-split-data-args-path",)),
    (
        "-mock-data --train-data-path {data}/real --valid-data-path 1 {data}/real 2 {data}/half",
        ("--valid-data-path {data}/half", "{data}/half.idx"),
    ),
    ("-mock-data --data-path {data}/reel", ("reel.bin", "reel.idx", "--data-path")),
    ("-mock-data --data-path {data}/real.bin", ("--data-path", "{data}/real")),
    ("-mock-data --data-path {data}/half", ("--data-path", "half.idx")),
    ("-mock-data --data-path {data}/text", ("--data-path", "{data}/text_text_document")),
    ("--vocab-file {data}/vocap.json", ("--vocab-file", "vocap.json", "{data}/vocab.json")),
    ("--merge-file {data}/none/merges.txt", ("--merge-file", "{data}/none")),
    (
        "-tokenizer-type -vocab-size --tokenizer-type Llama2Tokenizer --tokenizer-model {data}/vocab.model",
        ("--tokenizer-model {data}/vocab.model", "{data}/vocab.json"),
    ),
    ("--save {data}/real.bin --save-interval 5", ("--save {data}/real.bin",)),
    ("--save {data}/hf --save-interval 5", ("--save {data}/hf", "--load {data}/hf")),
    ("--save s3://b/c --save-interval 5", ("--save s3://b/c",)),
    ("--load GS://b/c", ("--load GS://b/c",)),
    ("--save file:///c --save-interval 5", ("--save file:///c",)),
    ("-mock-data --data-path 0.5 s3://b/c 0.5 {data}/real", ("--data-path s3://b/c",)),
    ("-mock-data --train-data-path hdfs://b/c --save hdfs://b --save-interval 5", ("--train-data-path", "--save")),
    ("-mock-data --data-args-path s3://b/c", ("--data-args-path s3://b/c",)),
    ("--data-cache-path msc://b/c", ("--data-cache-path msc://b/c",)),
    ("--tensorboard-dir s3://b/c", ("--tensorboard-dir s3://b/c",)),
    (
        "-tokenizer-type -vocab-size --tokenizer-type HuggingFaceTokenizer --tokenizer-model hf://org/name",
        ("--tokenizer-model hf://org/name",),
    ),
    ("--load {data}/real.bin", ("--load {data}/real.bin",)),
    (
        "--load {data} --non-persistent-ckpt-type global --non-persistent-global-ckpt-dir {data}/real.bin",
        ("--non-persistent-global-ckpt-dir {data}/real.bin",),
    ),
    (
        "--load {data} --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {data}/real.bin",
        ("--non-persistent-local-ckpt-dir {data}/real.bin",),
    ),
    # T5
    (_T5_ALONE, ("--decoder-seq-length",)),
    (f"{_T5} --decoder-seq-length 65", ("--decoder-seq-length 65", "--max-position-embeddings 65")),
    (
        f"WORLD_SIZE=2 {_T5} --tensor-model-parallel-size 2 --sequence-parallel --decoder-seq-length 31",
        ("--decoder-seq-length 31", "--tensor-model-parallel-size 2", "30", "32"),
    ),
    (f"{_T5} --vocab-extra-ids 0", ("--vocab-extra-ids",)),
    (
        "-mock-data --data-path {data}/real --model-family t5 --decoder-seq-length 32",
        ("NullTokenizer", "extra_id_N", "--vocab-extra-ids 100"),
    ),
    ("--position-embedding-type relative", ("--position-embedding-type", "relative")),
    (
        f"{_T5} --position-embedding-type relative --relative-attention-num-buckets 31",
        ("--relative-attention-num-buckets 31",),
    ),
    (
        f"{_T5} --position-embedding-type relative --relative-attention-max-distance 16",
        ("--relative-attention-max-distance 16",),
    ),
    (f"WORLD_SIZE=2 {_T5} --pipeline-model-parallel-size 2", ("--pipeline-model-parallel-size",)),
    (f"WORLD_SIZE=2 {_T5} --context-parallel-size 2", ("--context-parallel-size",)),
    (f"{_T5} --group-query-attention --num-query-groups 2", ("--group-query-attention",)),
    (f"{_T5} --qk-layernorm", ("--qk-layernorm",)),
    (f"{_T5} --qk-l2-norm", ("--qk-l2-norm",)),
    (f"{_T5} --window-size 8,0", ("--window-size",)),
    (f"{_T5} --softmax-type off-by-one", ("--softmax-type",)),
    (f"{_T5} --attention-output-gate", ("--attention-output-gate",)),
    # multi-token prediction
    (f"{_T5} --mtp-num-layers 1", ("--mtp-num-layers 1",)),
    ("--mtp-num-layers 64", ("--mtp-num-layers 64",)),
    ("--mtp-num-layers -1", ("--mtp-num-layers -1", "0")),
    (
        "WORLD_SIZE=2 --mtp-num-layers 1 --pipeline-model-parallel-size 2",
        ("--mtp-num-layers 1", "--position-embedding-type learned_absolute", "--position-embedding-type rope"),
    ),
    (
        "--mtp-num-layers 1 --window-size 4,0 --window-attn-skip-freq 2",
        ("--mtp-num-layers 1", "--window-attn-skip-freq 2"),
    ),
    (
        "--kv-channels 4 --mtp-num-layers 1 --position-embedding-type rope --no-rope-freq [0,1]",
        ("--mtp-num-layers 1", "--no-rope-freq [0,1]"),
    ),
    ("--mtp-num-layers 1 --use-mup", ("--mtp-num-layers 1", "--use-mup")),
    ("--mtp-use-repeated-layer", ("--mtp-use-repeated-layer",)),
    # LoRA
    ("--lora-rank 4", ("--lora-rank 4", "--pretrained-checkpoint", "--load")),
    ("--lora-rank 0 --load {data}/c", ("--lora-rank 0", "1")),
    ("--lora-rank 4 --load {data}/c --lora-targets attention,q_prj", ("--lora-targets", "q_prj", "q_proj")),
    ("--lora-rank 4 --load {data}/c --lora-targets gate_proj", ("--lora-targets gate_proj", "--swiglu", "up_proj")),
    (f"{_LORA} --num-experts 2", ("--lora-targets", "--num-experts 2", "--lora-targets attention")),
    (f"{_LORA} {_LATENT}", ("--lora-targets", "--multi-latent-attention", "--lora-targets mlp")),
    (f"{_LORA} {_LATENT} --num-experts 2 --lora-targets attention", ("--multi-latent-attention", "leave --lora-rank")),
    (f"{_LORA} {_LATENT} --num-experts 2 --lora-targets mlp", ("--num-experts 2", "leave --lora-rank")),
    (
        f"{_LORA} --lora-targets attention --num-experts 2 --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid",
        ("--lora-rank 4", "--moe-router-bias-update-rate 0", "--moe-router-enable-expert-bias"),
    ),
    (f"{_LORA} --optimizer muon", ("--lora-rank 4", "--optimizer muon")),
    (f"{_LORA} --ckpt-format torch", ("--lora-rank 4", "--ckpt-format torch")),
    (f"{_LORA} --mtp-num-layers 1", ("--lora-rank 4", "--mtp-num-layers 1")),
    (f"{_LORA} --use-mup", ("--lora-rank 4", "--use-mup")),
    (f"{_LORA} --use-cpu-initialization", ("--lora-rank 4", "--use-cpu-initialization")),
    (f"{_LORA} --decoupled-lr 1e-3", ("--lora-rank 4", "--decoupled-lr")),
    (f"{_LORA} --compile", ("--lora-rank 4", "--compile")),
    (f"WORLD_SIZE=2 {_LORA} --use-torch-fsdp2", ("--lora-rank 4", "--use-distributed-optimizer")),
    (f"{_T5} {_LORA}", ("--lora-rank 4", "--model-family t5")),
    # multi-latent attention
    (f"{_T5} --multi-latent-attention", ("--multi-latent-attention",)),
    (f"{_T5} --use-mup", ("--use-mup",)),
    (f"{_LATENT} --qk-pos-emb-head-dim 7", ("--qk-pos-emb-head-dim 7", "6", "8")),
    ("--rope-type yarn", ("--rope-type yarn", "--multi-latent-attention", "--position-embedding-type yarn")),
    (f"{_LATENT} --group-query-attention", ("--group-query-attention",)),
    (f"{_LATENT} --attention-output-gate", ("--attention-output-gate",)),
    (f"{_LATENT} --add-qkv-bias", ("--add-qkv-bias",)),
    (f"{_LATENT} --qk-l2-norm", ("--qk-l2-norm", "--qk-layernorm")),
    (f"{_LATENT} --softmax-type off-by-one", ("--softmax-type off-by-one",)),
    (f"{_LATENT} --no-rope-freq 2", ("--no-rope-freq 2",)),
    (f"{_LATENT} --rotary-interleaved", ("--rotary-interleaved",)),
    (f"{_LATENT} --use-rope-scaling", ("--use-rope-scaling", "--rotary-scaling-factor")),
    (
        f"{_LATENT} --rotary-seq-len-interpolation-factor 2",
        ("--rotary-seq-len-interpolation-factor 2", "--rope-type yarn"),
    ),
    (f"{_T5} --position-embedding-type rope --kv-channels 8 --no-rope-freq 2", ("--no-rope-freq",)),
    (
        f"{_T5} --position-embedding-type yarn --yarn-original-max-position-embeddings 32 --kv-channels 8",
        ("--position-embedding-type", "learned_absolute", "relative", "rope"),
    ),
    (
        f"--model-family t5 {_WORD_PIECE} --vocab-extra-ids 100 --decoder-seq-length 32",
        ("--split-sentences",),
    ),
    (f"{_T5} --reset-attention-mask", ("--reset-attention-mask",)),
    (f"{_T5} --dataloader-inter-document-masking", ("--dataloader-inter-document-masking",)),
    # BERT
    (
        "-mock-data --data-path {data}/real --model-family bert",
        ("--tokenizer-type NullTokenizer", "[CLS]", "BertWordPieceLowerCase", "BertWordPieceCase"),
    ),
    (f"{_BERT} -seq-length --seq-length 4", ("--seq-length 4", "8")),
    (f"WORLD_SIZE=2 {_BERT} --context-parallel-size 2", ("--sequence-parallel",)),
    (f"{_BERT} --num-experts 2", ("--num-experts 2",)),
    (f"{_BERT} --window-size 8,0", ("--window-size 8,0",)),
    (f"{_BERT} --softmax-type off-by-one", ("--softmax-type",)),
    (f"{_BERT} --calculate-per-token-loss", ("--calculate-per-token-loss",)),
    (
        _BERT_ALONE,
        ("--mock-data", "--split-sentences"),
    ),
    (f"{_BERT} --eod-mask-loss", ("--eod-mask-loss",)),
    (f"{_BERT} --reset-position-ids", ("--reset-position-ids",)),
    (f"{_BERT} --reset-attention-mask", ("--reset-attention-mask",)),
    (f"{_BERT} --dataloader-inter-document-masking", ("--dataloader-inter-document-masking",)),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with an indexed dataset, half of another, and a vocabulary."""
    for name in (
        "real.bin",
        "real.idx",
        "half.bin",
        "text_text_document.bin",
        "text_text_document.idx",
        "vocab.json",
        "empty.toml",
    ):
        (tmp_path / name).touch()
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).touch()
    (tmp_path / "words").write_text(f"0.3 {tmp_path}/real 0.7 {tmp_path}/real\n")
    (tmp_path / "reels").write_text(f"0.3 {tmp_path}/real 0.7 {tmp_path}/reel\n")
    (tmp_path / "splits").write_text(f'{{"train": [1, "{tmp_path}/real"]}}')
    (tmp_path / "no_train").write_text(f'{{"valid": "{tmp_path}/real"}}')
    return tmp_path


def command_line(changes: str, data: Path) -> list[str]:
    """GOOD with the changes of a row of the table."""
    words = [word for word in shlex.split(changes.format(data=data)) if not word.startswith("WORLD_SIZE=")]
    removed = {"-" + word for word in words if "-" + word in GOOD}
    kept = [word for flag, value in GOOD.items() if flag not in removed for word in (flag, value) if word]
    return kept + [word for word in words if "-" + word not in removed]


def environment(changes: str) -> dict[str, str]:
    """WORLD_SIZE where the row of the table begins with it."""
    name, _, size = changes.partition(" ")[0].partition("=")
    return {name: size, "RANK": "0"} if name == "WORLD_SIZE" else {}


def test_the_good_one_is_good(data: Path) -> None:
    assert load(command_line("", data), {}).notes == ()


@pytest.mark.parametrize(("changes", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_one_mistake_gives_one_message_with_value_and_remedy(
    changes: str, expected: tuple[str, ...], data: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(command_line(changes, data), environment(changes))
    assert len(caught.value.violations) == 1, caught.value.violations
    (message,) = caught.value.violations
    for fact in expected:
        assert re.search(rf"(?<![\w.-]){re.escape(fact.format(data=data))}(?![\w-]|\.\d)", message), (fact, message)


def test_local_checkpoints_are_for_one_machine(data: Path) -> None:
    words = command_line("--save {data}/c --save-interval 5 --non-persistent-ckpt-type local", data)
    words += ["--non-persistent-local-ckpt-dir", str(data / "l")]
    two_hosts = {**environment("WORLD_SIZE=2"), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.7"}
    for meeting in ("10.0.0.7", "localhost"):  # the first host may be reached by that name from itself
        with pytest.raises(ConfigError, match="--non-persistent-ckpt-type local"):
            load(words, {**two_hosts, "MASTER_ADDR": meeting})
    assert load(words, {**two_hosts, "LOCAL_WORLD_SIZE": "2"}).checkpoint.ephemeral_dir("c") == str(data / "l")


def test_the_table_breaks_every_rule(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: set[str] = set()
    original = Rule.broken

    def recording(rule: Rule, draft: Draft) -> str:
        message = original(rule, draft)
        broken.update([rule.name] if message else [])
        return message

    monkeypatch.setattr(Rule, "broken", recording)
    for changes, _ in TABLE:
        with pytest.raises(ConfigError):
            load(command_line(changes, data), environment(changes))
    as_for_save_and_load = {"data_cache_path_is_a_folder", "tensorboard_dir_is_a_folder"}
    in_test_environment = {layout.rank_is_in_the_world.name, layout.machine_is_in_the_world.name}
    in_test_environment |= {layout.local_rank_is_on_the_machine.name}
    in_test_registered = {"bert_is_without_data_source", "t5_is_without_data_source"}
    in_test_registered |= {model.own_attention_is_for_gpt.name, model.own_mlp_is_for_gpt.name}
    in_test_registered |= {one.name for one in (*expert.own_router_is_without, expert.own_router_is_the_choice)}
    in_test_registered |= {lora.lora_is_beside_known_layers.name}
    in_test_registered |= {model.own_positions_are_for_usual_attention.name}
    in_test_registered |= {model.per_rank_files_hold_known_models.name, model.own_loss_is_for_gpt.name}
    elsewhere = as_for_save_and_load | in_test_environment | in_test_registered
    assert {rule.name for rule in (*RULES, *FILE_RULES)} - broken == elsewhere


def test_messages_name_settings_and_what_a_run_has(data: Path) -> None:
    run = load(command_line("", data), {})
    named = {field for rule in (*RULES, *NOTICES) for _, field, _, _ in Formatter().parse(rule.name) if field}
    computed = {"fast", "fitting", "last", "least", "nearest", "reason", "remedy", "slow", "width"}
    assert {name for name in named if "." not in name} - computed <= all_settings().keys()
    for name in named:
        if "." in name:
            attrgetter(name.removeprefix("run."))(run)  # raises for what a run does not have


def test_all_mistakes_are_reported_at_once(data: Path) -> None:
    changes = (
        "--hidden-size 1000 --num-attention-heads 12 --adam-beta2 1.0 --lr-decay-style cosin --fp8-format e4m3 "
        "--hiden-dropout 0.1 --tensor-model-parallel-size 8 --global-batch-size 9 --train-iters x --split a"
    )
    with pytest.raises(ConfigError) as caught:
        load(command_line(changes, data), {"WORLD_SIZE": "2", "RANK": "one"})
    text = str(caught.value)
    assert len(caught.value.violations) == 11, text
    for fragment in (
        "RANK=one",
        "--train-iters x",
        "--tensor-model-parallel-size 8",
        "--hidden-dropout",
    ):
        assert fragment in text
