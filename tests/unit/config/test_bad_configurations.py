"""A table of bad configurations: each is answered by one message naming flag, value and remedy (reliability F13)."""

from __future__ import annotations

import shlex
from operator import attrgetter
from pathlib import Path
from string import Formatter

import pytest

from megalith.config import layout_rules, load
from megalith.config.rule import Draft, Rule
from megalith.config.rules import FILE_RULES, NOTICES, RULES
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

_LATENT = "--multi-latent-attention --position-embedding-type rope"
_WORD_PIECE = "-tokenizer-type -vocab-size --tokenizer-type BertWordPieceLowerCase --vocab-file {data}/vocab.json"
_T5_ALONE = f"-mock-data --data-path {{data}}/real --model-family t5 {_WORD_PIECE} --vocab-extra-ids 100"
_T5 = f"{_T5_ALONE} --decoder-seq-length 32"
_BERT_ALONE = "-tokenizer-type -vocab-size --model-family bert --vocab-file {data}/vocab.json"
_BERT = f"-mock-data --data-path {{data}}/real {_BERT_ALONE}"

# What is added to (or, with a leading minus, taken from) GOOD -> what the one message contains.
TABLE: list[tuple[str, tuple[str, ...]]] = [
    # required
    ("-num-layers", ("--num-layers is required",)),
    ("-hidden-size", ("--hidden-size is required",)),
    ("-num-attention-heads", ("--num-attention-heads is required",)),
    ("-max-position-embeddings", ("--max-position-embeddings is required",)),
    ("-seq-length", ("--seq-length is required",)),
    ("-micro-batch-size", ("--micro-batch-size is required",)),
    ("-lr", ("--lr is required",)),
    ("-train-iters", ("--train-iters N or --train-samples N",)),
    ("-mock-data", ("--data-path PREFIX", "--mock-data")),
    ("-vocab-size", ("NullTokenizer requires --vocab-size N",)),
    # values that are no values
    ("--num-layers twelve", ("--num-layers twelve: not a whole number", "must be at least 1")),
    ("--num-layers 2.5", ("--num-layers 2.5: not a whole number", "nearest: 2")),
    ("--train-iters 1e3", ("--train-iters 1e3: not a whole number", "nearest: 1000")),
    ("--lr fast", ("--lr fast: not a number", "must be at least 0")),
    ("--lr nan", ("--lr nan: not a finite number",)),
    ("--lr", ("--lr needs a value",)),
    ("--lr --fp16", ("--lr needs a value",)),
    ("--fp16=true", ("--fp16 takes no value; write it alone",)),
    ("--split ''", ("--split '': the value is empty",)),
    ("--split ,", ("--split ,: 0 parts", "949,50,1")),
    ("--save '' --save-interval 5", ("--save '': the value is empty",)),
    ("--config {data}/empty.toml --config b.toml", ("--config b.toml: one recipe is read already",)),
    ("--cp-comm-type p2p a2a", ("--cp-comm-type p2p a2a: it is the same in all layers here", "give one of them")),
    ("'file>'", ("file> belongs to no flag", "to be filled in")),
    ("stray", ("stray belongs to no flag",)),
    ("''", ("'' belongs to no flag", "empty variable")),
    # values outside the legal range
    ("--num-layers 0", ("--num-layers 0: must be at least 1",)),
    ("--hidden-size -12", ("--hidden-size -12: must be at least 1",)),
    ("--micro-batch-size 0", ("--micro-batch-size 0: must be at least 1",)),
    ("--hidden-dropout 1.0", ("--hidden-dropout 1.0: must be at least 0 and below 1",)),
    ("--attention-dropout -0.1", ("--attention-dropout -0.1: must be at least 0 and below 1",)),
    ("--adam-beta1 1.0", ("--adam-beta1 1.0: must be at least 0 and below 1",)),
    ("--adam-beta2 1.5", ("--adam-beta2 1.5: must be at least 0 and below 1",)),
    ("--adam-eps 0", ("--adam-eps 0.0: must be above 0",)),
    ("--clip-grad -1", ("--clip-grad -1.0: must be at least 0",)),
    ("--weight-decay -0.1", ("--weight-decay -0.1: must be at least 0",)),
    ("--seed 0", ("--seed 0: must be at least 1",)),
    ("--rotary-percent 0", ("--rotary-percent 0.0: must be above 0 and at most 1",)),
    ("--lr-warmup-fraction 1.0", ("--lr-warmup-fraction 1.0: must be at least 0 and below 1",)),
    ("--eval-interval 0", ("--eval-interval 0: must be at least 1",)),
    ("--log-interval 0", ("--log-interval 0: must be at least 1",)),
    ("--num-workers -1", ("--num-workers -1: must be at least 0",)),
    ("--fp16 --loss-scale 0", ("--loss-scale 0.0: must be above 0",)),
    ("--init-method-std -1", ("--init-method-std -1.0: must be at least 0",)),
    # batch sizes
    ("--rampup-batch-size", ("--rampup-batch-size needs a value (START INCREMENT SAMPLES",)),
    ("--rampup-batch-size 4 4", ("--rampup-batch-size 4 4: 2 numbers; give three",)),
    ("--rampup-batch-size 4 3 100", ("no multiple of the increment 3", "use an increment of 1 or 2 or 4")),
    ("--rampup-batch-size 8 8 100", ("starts at 8, and --global-batch-size 8 is not above it",)),
    ("-global-batch-size --rampup-batch-size 2 2 100", ("requires --global-batch-size",)),
    ("--rampup-batch-size 1 1 100", ("global batches of 1, 3, 5 ...", "--micro-batch-size 2", "multiples of 2")),
    (
        "WORLD_SIZE=2 --rampup-batch-size 2 2 100",
        ("global batches of 2, 6 samples", "times data-parallel size 2", "multiples of 4"),
    ),
    (
        "--step-batch-size-schedule 0:4,900:8",
        ("--step-batch-size-schedule 0:4,900:8 and --global-batch-size 8 exclude",),
    ),
    ("-global-batch-size --step-batch-size-schedule 0:x", ("not of the form TOKENS:SIZE", "'0:768 250B:1536'")),
    ("-global-batch-size --step-batch-size-schedule 1K:4", ("1000 tokens", "begin with 0:SIZE")),
    ("-global-batch-size --step-batch-size-schedule 0:4,1K:7", ("global batches of 7 samples", "multiples of 2")),
    (
        "--phase-transition-iterations 4,x",
        ("--phase-transition-iterations 4,x: x is no iteration", "such as 1000,5000"),
    ),
    ("--phase-transition-iterations 4,10", ("10 is no iteration to end a phase at", "below --train-iters 10")),
    (
        "--phase-transition-iterations 4 --rampup-batch-size 2 2 100",
        ("--phase-transition-iterations 4 and --rampup-batch-size 2 2 100 exclude each other",),
    ),
    # optimizers
    ("--optimizer muon --use-distributed-optimizer", ("--optimizer muon needs the whole gradient", "--optimizer adam")),
    (
        "WORLD_SIZE=4 --optimizer muon --tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2 "
        "--global-batch-size 8",
        ("--num-query-groups 2", "--tensor-model-parallel-size 2 or less", "--muon-tp-mode blockwise"),
    ),
    (
        "WORLD_SIZE=2 --micro-batch-size 1 --global-batch-size 4 --eval-micro-batch-size 3",
        ("--eval-micro-batch-size 3 times data-parallel size 2", "use --eval-global-batch-size 6"),
    ),
    ("--eval-global-batch-size 7 --eval-micro-batch-size 2", ("--eval-global-batch-size 7", "size 6 or 8")),
    ("--optimizer adaptive_muon --use-torch-fsdp2", ("--optimizer adaptive_muon needs the whole gradient",)),
    ("--optimizer muon --optimizer-cpu-offload", ("--optimizer-cpu-offload with --optimizer muon", "--optimizer adam")),
    ("--optimizer muon --muon-num-ns-steps 7", ("--muon-num-ns-steps 7 is no multiple of the 5", "steps 5")),
    ("--optimizer shampoo", ("--optimizer shampoo: not one of", "adaptive_muon, lion, soap")),
    ("--optimizer soap --use-distributed-optimizer", ("--optimizer soap needs the whole gradient", "--optimizer adam")),
    ("--optimizer soap --optimizer-cpu-offload", ("--optimizer-cpu-offload with --optimizer soap",)),
    ("--optimizer soap --soap-precondition-frequency 0", ("--soap-precondition-frequency 0: must be at least 1",)),
    ("--exp-avg-dtype bf16", ("--exp-avg-dtype bf16 requires --use-precision-aware-optimizer",)),
    (
        "--optimizer sgd --use-precision-aware-optimizer --main-grads-dtype bf16",
        ("--main-grads-dtype bf16 works with --optimizer adam and lion, not with sgd",),
    ),
    ("--use-precision-aware-optimizer --main-params-dtype fp16", ("in fp32 the weights are the main parameters",)),
    (
        "WORLD_SIZE=2 --bf16 --use-torch-fsdp2 --use-precision-aware-optimizer --main-params-dtype fp16",
        ("--main-params-dtype fp16 and --use-torch-fsdp2 exclude each other",),
    ),
    (
        "--optimizer sgd --ckpt-format torch --save {data}/c --save-interval 5",
        ("--ckpt-format torch", "--optimizer sgd", "torch_dist"),
    ),
    *(
        (f"{words} --ckpt-format torch --save {{data}}/c --save-interval 5", ("--ckpt-format", words, "torch_dist"))
        for words in ("--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type qwen3_next")
    ),
    ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", ("--decoupled-min-lr 0.001 is above --decoupled-lr 0.0001",)),
    ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", ("exclude each other",)),
    (
        "--bf16 --megatron-fsdp-main-grads-dtype fp32",
        ("--megatron-fsdp-main-grads-dtype fp32 is of --use-megatron-fsdp", "leave it out"),
    ),
    (
        "--bf16 --use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16",
        ("--megatron-fsdp-main-grads-dtype bf16", "kept and summed in fp32", "add --grad-reduce-in-bf16"),
    ),
    (
        "--bf16 --use-megatron-fsdp --grad-reduce-in-bf16 --megatron-fsdp-main-grads-dtype fp32 "
        "--megatron-fsdp-grad-comm-dtype bf16",
        ("--megatron-fsdp-grad-comm-dtype bf16", "kept and summed in fp32", "use auto or fp32"),
    ),
    # choices
    ("--lr-decay-style cosin", ("--lr-decay-style cosin: not one of", "inverse-square-root", "did you mean cosine?")),
    ("--normalization rmsnorm", ("--normalization rmsnorm: not one of", "did you mean RMSNorm?")),
    ("--distributed-backend mpi", ("--distributed-backend mpi: not one of nccl, gloo",)),
    ("--position-embedding-type mrope", ("--position-embedding-type mrope: comes with", "learned_absolute, rope")),
    # options of the model
    ("--swiglu --squared-relu --ffn-hidden-size 16", ("--swiglu and --squared-relu name different activations",)),
    ("--qk-layernorm --qk-l2-norm", ("--qk-layernorm and --qk-l2-norm", "leave one of them out")),
    ("--window-size 5", ("--window-size 5: it must be two numbers LEFT,RIGHT such as 4096,0",)),
    ("--window-size 5,0 --window-attn-skip-freq [1]*3", ("[1]*3 is a list for 3 layers", "give 2 entries")),
    (
        "--window-size 5,0 --window-attn-skip-freq os.system(1)",
        ("--window-attn-skip-freq os.system(1): it must be a number N, or a list of 0 and 1 such as [0]*3+[1]",),
    ),
    (
        "--position-embedding-type rope --kv-channels 4 --no-rope-freq [0,2]",
        ("--no-rope-freq [0,2]: the list may hold 0 and 1 only",),
    ),
    (
        "--position-embedding-type rope --kv-channels 4 --no-rope-freq 3",
        ("--num-layers 2 is not divisible by --no-rope-freq 3", "use 1 or 2"),
    ),
    (
        "--position-embedding-type yarn --kv-channels 4",
        ("--position-embedding-type yarn needs --yarn-original-max-position-embeddings",),
    ),
    (
        "--position-embedding-type yarn --kv-channels 4 --yarn-original-max-position-embeddings 8 --rotary-interleaved",
        ("yarn rotates halves of heads, not --rotary-interleaved pairs",),
    ),
    (
        "--position-embedding-type yarn --kv-channels 4 --yarn-original-max-position-embeddings 8 --yarn-beta-slow 40",
        ("must be above --yarn-beta-slow 40",),
    ),
    (
        "--use-mup --mup-base-hidden-size 6 --mup-width-mult 4",
        ("--mup-width-mult 4 is not --hidden-size 12 / --mup-base-hidden-size 6", "use --mup-width-mult 2"),
    ),
    (f"--use-mup {_LATENT}", ("--use-mup with --multi-latent-attention", "leave it out")),
    (
        "--use-mup --ckpt-format torch --save {data}/c --save-interval 5",
        ("--ckpt-format torch with --use-mup", "use torch_dist"),
    ),
    ("--mup-embedding-mult 0", ("--mup-embedding-mult 0.0: must be above 0",)),
    ("--fp32-residual-connection", ("--fp32-residual-connection needs --fp16 or --bf16",)),
    (
        "--recompute-granularity selective --recompute-modules moe_acts",
        ("--recompute-modules moe_acts", "did you mean moe_act?"),
    ),
    (
        "--moe-layer-recompute --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        ("--moe-layer-recompute with --recompute-granularity full", "leave it out"),
    ),
    ("--ckpt-format torch_dcp", ("--ckpt-format torch_dcp: comes with", "in this version: torch_dist, torch")),
    ("--dataloader-type external", ("--dataloader-type external means a loader", "use single or cyclic")),
    ("--dataloader-type random", ("--dataloader-type random: not one of single, cyclic, external",)),
    ("--tokenizer-type SFTTokenizer", ("SFTTokenizer: comes with", "GPT2BPETokenizer")),
    ("--tokenizer-type Llama2Tokenizer", ("Llama2Tokenizer requires --tokenizer-model FILE",)),
    ("--null-tokenizer-eod-id 100", ("--null-tokenizer-eod-id 100 is not below --vocab-size 100",)),
    ("--tokenizer-special-tokens <a>", ("--tokenizer-type NullTokenizer takes none", "TikTokenizer")),
    (
        "--tokenizer-type TikTokenizer --tokenizer-model {data}/vocab.json --tiktoken-num-special-tokens 2",
        ("--tiktoken-num-special-tokens 2: there are 3 special tokens with a name", "from 3 to 99"),
    ),
    ("--tokenizer-type HuggingFaceTokenizer", ("HuggingFaceTokenizer requires --tokenizer-model DIR",)),
    ("--device gpu", ("--device gpu: not one of auto, cpu, cuda",)),
    # experts over ranks
    ("--expert-model-parallel-size 2", ("--expert-model-parallel-size 2 divides the experts", "give --num-experts")),
    (
        "WORLD_SIZE=2 --num-experts 5 --expert-model-parallel-size 2",
        (
            "--num-experts 5 is not divisible by --expert-model-parallel-size 2",
            "use --expert-model-parallel-size 1 or 5",
        ),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-model-parallel-size 4",
        ("over the processes of data and context parallelism", "2 processes make 2: use", "1 or 2"),
    ),
    (
        "--num-experts 4 --expert-tensor-parallel-size 2",
        ("--expert-tensor-parallel-size 2: each expert is shared", "use --expert-tensor-parallel-size 1"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ("--expert-tensor-parallel-size 1 differs from --tensor-model-parallel-size 2", "give --sequence-parallel too"),
    ),
    (
        "WORLD_SIZE=4 --num-experts 4 --expert-tensor-parallel-size 2 --expert-model-parallel-size 4",
        ("--expert-model-parallel-size 4 divides experts", "--expert-tensor-parallel-size 2 leaves 2"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-tensor-parallel-size 2 --ckpt-format torch --save {data}/saved "
        "--save-interval 5",
        ("--expert-tensor-parallel-size 2 with --ckpt-format torch", "use --ckpt-format torch_dist"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-tensor-parallel-size 2 --optimizer muon",
        ("--expert-tensor-parallel-size 2 with --optimizer muon",),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-tensor-parallel-size 2 --use-torch-fsdp2",
        ("--use-torch-fsdp2 cuts all weights over the same processes, and --expert-tensor-parallel-size 2",),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --moe-ffn-hidden-size 7 --expert-tensor-parallel-size 2",
        ("--moe-ffn-hidden-size 7 is not divisible by --expert-tensor-parallel-size 2",),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --expert-model-parallel-size 2 --use-torch-fsdp2",
        ("--use-torch-fsdp2 cuts all weights", "use --use-distributed-optimizer"),
    ),
    (
        "WORLD_SIZE=2 --num-experts 4 --moe-ffn-hidden-size 7 --tensor-model-parallel-size 2",
        ("--moe-ffn-hidden-size 7 is not divisible by --tensor-model-parallel-size 2", "6 or 8"),
    ),
    ("--num-experts 4 --moe-dispatch-fwd-dtype fp8", ("--moe-dispatch-fwd-dtype", "in the dtype of the hidden states")),
    # experts
    ("--num-experts -1", ("--num-experts -1: must be at least 0",)),
    (
        "--num-experts 2 --moe-router-topk 3",
        ("--moe-router-topk 3 is more than --num-experts 2", "use --moe-router-topk 1 to 2"),
    ),
    ("--num-experts 4 --moe-router-topk 1", ("--moe-router-topk 1", "--moe-router-pre-softmax")),
    ("--num-experts 4 --moe-layer-freq [1]", ("--moe-layer-freq [1] is a list for 1 layers", "give 2 entries")),
    ("--num-experts 4 --moe-router-num-groups 2", ("--moe-router-num-groups 2 needs --moe-router-group-topk",)),
    (
        "--num-experts 4 --moe-router-num-groups 3 --moe-router-group-topk 1",
        ("--num-experts 4 does not divide into --moe-router-num-groups 3",),
    ),
    ("--num-experts 4 --moe-router-enable-expert-bias", ("use --moe-router-score-function sigmoid",)),
    (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
        ("are 2 kinds", "has 1 numbers"),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        ("leave --moe-aux-loss-coeff out",),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1.5",
        ("--moe-expert-capacity-factor 1.5 with sinkhorn",),
    ),
    ("--num-experts 4 --moe-latent-size 0", ("--moe-latent-size 0",)),
    ("--num-experts 4 --moe-pad-expert-input-to-capacity", ("needs --moe-expert-capacity-factor",)),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing aux_loss --moe-aux-loss-coeff 0 0.1",
        ("quantile_balancing balances by the choice itself", "leave --moe-aux-loss-coeff out"),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-num-groups 2 "
        "--moe-router-group-topk 1",
        ("--moe-router-num-groups 2 with", "quantile_balancing, which chooses among all"),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid",
        ("--moe-router-enable-expert-bias with", "offsets of its own"),
    ),
    (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing --moe-router-topk 4",
        ("--moe-router-topk 4 of --num-experts 4", "every token goes to all"),
    ),
    ("--num-experts 4 --moe-router-quantile-balancing-ema 1", ("--moe-router-quantile-balancing-ema 1",)),
    ("--num-experts 4 --moe-apply-probs-on-input", ("needs --moe-router-topk 1, and --moe-router-topk 2",)),
    # unknown, renamed, refused
    ("--num-layer 2", ("--num-layer is not a flag; did you mean --num-layers?",)),
    ("-num-layers=2", ("-num-layers is not a flag; did you mean --num-layers?",)),
    ("\u2013lr 1", ("\u2013lr is not a flag", "two hyphens")),
    ("--gibberish 1 2", ("--gibberish is not a flag", "megalith config --flags")),
    ("--batch-size 8", ("--batch-size 8: it is called --micro-batch-size now",)),
    ("--checkpoint-activations", ("it is called --recompute-activations now",)),
    ("--nproc-per-node 2", ("--nproc-per-node 2: it belongs to torchrun", "--nproc N")),
    ("--nproc 2 --nnodes 2", ("--nnodes 2: it belongs to torchrun", "--nproc N on this one only")),
    (
        "--moe-mlp-glu-interleave-size 8 --moe-shared-expert-glu-interleave-size 8",
        ("--moe-mlp-glu-interleave-size 8, --moe-shared-expert-glu-interleave-size 8: gated layers keep",),
    ),
    ("--moe-router-force-biased 0.1", ("--moe-router-force-load-balancing makes them even",)),
    ("--moe-token-dropping", ("--moe-expert-capacity-factor gives each expert room",)),
    ("--moe-router-topk-limited-devices 2", ("--moe-router-group-topk",)),
    (
        "--num-experts 4 --moe-routing-trace-path t --moe-routing-trace-max-training-iters 0",
        ("--moe-routing-trace-max-training-iters 0",),
    ),
    (
        "--num-experts 8 --moe-use-upcycling",
        ("--moe-use-upcycling: a checkpoint with experts is made", "convert --upcycle N"),
    ),
    ("--fp8-format e4m3", ("--fp8-format e4m3: FP8",)),
    ("--distribute-saved-activations", ("--distribute-saved-activations: --sequence-parallel divides all",)),
    # across settings
    (
        "--hidden-size 1000 --num-attention-heads 12",
        (
            "--hidden-size 1000 is not divisible by --num-attention-heads 12 (1000 = 83*12 + 4)",
            "nearest: 996 or 1008, or use 10 heads",
        ),
    ),
    (
        "--group-query-attention --num-query-groups 3",
        ("--num-attention-heads 4 is not divisible by --num-query-groups 3", "use 1 or 2 or 4 groups"),
    ),
    ("--seq-length 128", ("--seq-length 128 is longer than --max-position-embeddings 64", "embeddings 128")),
    ("--swiglu", ("--swiglu with --hidden-size 12", "--ffn-hidden-size, for example 48")),
    ("--position-embedding-type rope", ("heads of 3 are odd", "--kv-channels 4")),
    (
        "--position-embedding-type rope --kv-channels 20 --rotary-percent 0.25",
        ("--rotary-percent 0.25 of heads of 20 is 5 channels", "--rotary-percent 0.2 (4 channels) or 0.3"),
    ),
    ("--no-position-embedding", ("--no-position-embedding", "use --position-embedding-type rope")),
    ("--fp16 --bf16", ("--fp16 and --bf16 exclude each other",)),
    ("--fp16 --min-loss-scale 4 --initial-loss-scale 2", ("--min-loss-scale 4 is above --initial-loss-scale 2",)),
    (
        "--global-batch-size 10 --micro-batch-size 4",
        ("--global-batch-size 10 is not divisible by --micro-batch-size 4", "nearest: 8 or 12", "1 or 2 or 5"),
    ),
    ("--train-samples 100", ("--train-iters 10 and --train-samples 100 exclude each other",)),
    ("-train-iters --train-samples 5", ("--train-samples 5 is less than one global batch of 8", "at least 8")),
    ("--lr-decay-samples 100", ("--lr-decay-samples 100", "--train-iters 10", "-iters flags")),
    ("-train-iters --train-samples 80 --lr-warmup-iters 2", ("--lr-warmup-iters 2", "--train-samples 80", "-samples")),
    ("--min-lr 1e-2", ("--min-lr 0.01 is above --lr 0.001", "at most 0.001")),
    ("--lr-warmup-init 1", ("--lr-warmup-init 1 is above --lr 0.001",)),
    ("--lr-warmup-fraction .1 --lr-warmup-iters 2", ("--lr-warmup-fraction 0.1 and --lr-warmup-iters 2 exclude",)),
    ("--lr-warmup-iters 10", ("--lr-warmup-iters 10 is not below the length of the decay, 10 iters", "at most 9")),
    ("--lr-decay-iters 5 --lr-warmup-iters 7", ("5 iters (--lr-decay-iters 5)", "at most 4")),
    ("--lr-decay-style WSD", ("--lr-decay-style WSD requires --lr-wsd-decay-iters",)),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", ("--lr-wsd-decay-iters 11 is longer", "use at most 10")),
    ("--override-opt-param-scheduler --use-checkpoint-opt_param-scheduler", ("exclude each other",)),
    ("--start-weight-decay 0.1", ("--start-weight-decay 0.1", "--weight-decay-incr-style linear or cosine")),
    ("--weight-decay-incr-style linear --end-weight-decay 1", ("requires both --start-weight-decay and --end",)),
    (
        "--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay .5",
        ("--start-weight-decay 1 is above --end-weight-decay 0.5",),
    ),
    ("--data-path {data}/real", ("--data-path", "--mock-data exclude each other")),
    (
        "-mock-data --data-path {data}/real --data-args-path {data}/words",
        ("--data-path and --data-args-path exclude each other",),
    ),
    ("-mock-data --train-data-path {data}/real --per-split-data-args-path {data}/splits", ("exclude each other",)),
    ("-mock-data --data-path 0.5 {data}/real b {data}/real", ("'b' stands in the place of the weight",)),
    ("-mock-data --data-path 0.5 {data}/real 0 {data}/real", ("weight 0 of {data}/real is not above 0; leave out",)),
    ("--data-source-weights 0.5", ("--data-source-weights 0.5", "--data-source that they are of")),
    ("-mock-data --data-path 0.5 {data}/real 0.5", ("the last weight has no prefix behind it",)),
    (
        "-mock-data --train-data-path {data}/real --valid-data-path x {data}/real 1 {data}/real",
        ("--valid-data-path x {data}/real 1 {data}/real: 'x' stands in the place of the weight",),
    ),
    (
        "-mock-data --train-data-path {data}/real --test-data-path -1 {data}/real",
        ("--test-data-path -1 {data}/real: weight -1",),
    ),
    ("-mock-data --train-data-path nan {data}/real", ("--train-data-path nan {data}/real: weight nan",)),
    ("-mock-data --valid-data-path {data}/real", ("--valid-data-path without --train-data-path",)),
    (
        "-mock-data --train-data-path {data}/real --split 1,0,0",
        ("--split 1,0,0 with --train-data-path", "leave out --split"),
    ),
    (
        "-mock-data --data-path 1 {data}/real 2 {data}/real --full-validation",
        ("--full-validation takes every validation sample once", "--valid-data-path"),
    ),
    ("--multiple-validation-sets", ("--valid-data-path", "none are given")),
    (
        "-mock-data --train-data-path {data}/real --valid-data-path {data}/real {data}/real {data}/real "
        "--multiple-validation-sets --validation-set-names a b",
        ("--validation-set-names a b: --valid-data-path names 3 datasets",),
    ),
    (
        "--reset-attention-mask --reset-position-ids --dataloader-inter-document-masking",
        ("--reset-attention-mask and --reset-position-ids with --dataloader-inter-document-masking", "use one of them"),
    ),
    ("--mid-level-dataset-surplus -0.1", ("--mid-level-dataset-surplus -0.1: must be at least 0",)),
    ("--split 1,2,3,4", ("--split 1,2,3,4: 4 parts", "949,50,1")),
    ("--split 0,50,50", ("--split 0,50,50: nothing is left for training",)),
    ("--split 90%,10%", ("--split 90%,10%: not numbers",)),
    ("--tokenizer-type GPT2BPETokenizer", ("--vocab-file and --merge-file are required",)),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file {data}/real.bin", ("--merge-file is required",)),
    ("--save {data}/ckpt", ("--save {data}/ckpt requires --save-interval N",)),
    (
        "--save {data}/ckpt --save-interval 5 --async-save --ckpt-format torch",
        ("--async-save with --ckpt-format torch", "use --ckpt-format torch_dist"),
    ),
    (
        "--save {data}/ckpt --save-interval 4 --save-retain-interval 6",
        ("--save-retain-interval 6 is no multiple of --save-interval 4", "nearest: 4 or 8"),
    ),
    (
        "--save {data}/ckpt --save-interval 5 --non-persistent-save-interval 2",
        ("--non-persistent-save-interval 2 requires --non-persistent-ckpt-type global or local",),
    ),
    (
        "--save {data}/c --save-interval 5 --non-persistent-save-interval 2 --non-persistent-ckpt-type in_memory",
        ("--non-persistent-ckpt-type in_memory is not supported (", "use --non-persistent-ckpt-type global"),
    ),
    (
        "--save {data}/c --save-interval 5 --non-persistent-save-interval 2 --non-persistent-ckpt-type local",
        ("--non-persistent-ckpt-type local requires --non-persistent-local-ckpt-dir DIR",),
    ),
    ("--ckpt-convert-format torch", ("--ckpt-convert-format torch requires --load and --ckpt-convert-save DIR",)),
    ("--ckpt-convert-save {data}/c", ("requires --ckpt-convert-format torch or torch_dist",)),
    ("--replication", ("--replication: checkpoints on the disks of several nodes", "use --async-save")),
    ("--keep-last 0", ("--keep-last 0: must be at least 1",)),
    (
        "--tensor-model-parallel-size 2",
        ("--tensor-model-parallel-size 2 needs a multiple of 2 processes and 1 process was", "or with 1 leave it out"),
    ),
    # layouts
    (
        "WORLD_SIZE=2 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 "
        "--num-attention-heads 96 --hidden-size 12288",
        ("size 16 needs a multiple of 128", "start 128 (WORLD_SIZE), or with 2 use", "-size 2, or --tensor-"),
    ),
    (
        "WORLD_SIZE=4 --tensor-model-parallel-size 4 --context-parallel-size 4 --pipeline-model-parallel-size 2",
        ("-model-parallel-size 2 --context-parallel-size 2, or --context-parallel-size 4, or --pipeline-model-",),
    ),
    (
        "WORLD_SIZE=3 --ffn-hidden-size 66 --tensor-model-parallel-size 3",
        ("heads 4 is not", "nearest: --tensor-model-parallel-size 1"),
    ),
    (
        "WORLD_SIZE=2 --ffn-hidden-size 65 --tensor-model-parallel-size 2",
        ("layers of 65", "--tensor-model-parallel-size 1, or --ffn-hidden-size 64 or 66"),
    ),
    (
        "WORLD_SIZE=4 --num-attention-heads 12 --hidden-size 24 --group-query-attention --num-query-groups 6 "
        "--tensor-model-parallel-size 4",
        ("--num-query-groups 6 neither divides by", "nearest: --tensor-model-parallel-size 1 or 2"),
    ),
    ("WORLD_SIZE=2 --seq-length 62 --context-parallel-size 2", ("not divisible by 4", "nearest: 60 or 64")),
    (
        "WORLD_SIZE=4 --num-attention-heads 2 --context-parallel-size 4 --cp-comm-type a2a",
        ("a2a exchanges heads", "p2p"),
    ),
    (
        "WORLD_SIZE=3 --pipeline-model-parallel-size 3 --num-layers 8",
        ("do not divide into 3", "size 1, or --decoder-first-pipeline-num-layers 2 (3 in the others)"),
    ),
    ("WORLD_SIZE=4 --pipeline-model-parallel-size 4 --num-layers 2", ("do not divide into 4", "size 1 or 2")),
    ("WORLD_SIZE=2 --num-virtual-stages-per-pipeline-rank 2", ("needs --pipeline-model-parallel-size",)),
    (
        "WORLD_SIZE=2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
        "--global-batch-size 6",
        ("rounds of 2 micro-batches", "makes 3", "nearest: 4 or 8"),
    ),
    (
        "WORLD_SIZE=2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4 "
        "--pipeline-schedule zb-h1",
        ("zb-h1 has no virtual stages",),
    ),
    ("WORLD_SIZE=4 --nproc 2", ("--nproc 2 starts 2 processes itself", "already started 4")),
    ("--max-restarts 3", ("--max-restarts 3 needs --nproc N",)),
    (
        "WORLD_SIZE=2 --use-torch-fsdp2 --use-distributed-optimizer",
        ("--use-torch-fsdp2 and --use-distributed-optimizer exclude each other", "use one of them"),
    ),
    (
        "WORLD_SIZE=2 --use-torch-fsdp2 --use-megatron-fsdp",
        ("--use-torch-fsdp2 and --use-megatron-fsdp exclude each other", "use one of them"),
    ),
    (
        "WORLD_SIZE=4 --use-megatron-fsdp --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        ("--pipeline-schedule zb-h1", "--use-megatron-fsdp", "use --pipeline-schedule 1f1b"),
    ),
    (
        "WORLD_SIZE=2 --optimizer muon --use-megatron-fsdp --data-parallel-sharding-strategy optim",
        ("--optimizer muon needs the whole gradient of a matrix, and --use-megatron-fsdp cuts it",),
    ),
    ("--data-parallel-sharding-strategy zero", ("--data-parallel-sharding-strategy zero: not one of no_shard, optim",)),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", ("--ckpt-format fsdp_dtensor: comes with", "torch_dist, torch")),
    ("--outer-dp-sharding-strategy optim", ("--outer-dp-sharding-strategy optim: hybrid sharding",)),
    (
        "WORLD_SIZE=4 --use-torch-fsdp2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        ("--pipeline-schedule zb-h1", "--use-torch-fsdp2", "use --pipeline-schedule 1f1b"),
    ),
    # recomputation
    ("--recompute-granularity full", ("full requires --recompute-method uniform", "and --recompute-num-layers N")),
    ("--recompute-granularity full --recompute-num-layers 1", ("full requires --recompute-method uniform",)),
    (
        "--recompute-granularity full --recompute-method block",
        ("requires --recompute-num-layers N", "the default of older Megatron versions"),
    ),
    ("--recompute-granularity whole", ("--recompute-granularity whole: not one of full, selective",)),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
        ("--recompute-num-layers 0: must be at least 1",),
    ),
    (
        "--recompute-granularity selective --recompute-method uniform --recompute-num-layers 1",
        (
            "--recompute-method uniform and --recompute-num-layers 1 with --recompute-granularity selective",
            "--recompute-granularity full",
        ),
    ),
    # what is printed, recorded and measured
    ("--log-interval 10 --log-memory-interval 25", ("--log-memory-interval 25 is no multiple of", "nearest: 20 or 30")),
    ("--profile --profile-step-end 10", ("--profile-step-end 10 is not above --profile-step-start 10", "at least 11")),
    ("--profile --profile-ranks 0 3", ("--profile-ranks 0 3: ranks are 0 to 0",)),
    ("--wandb-project p", ("--wandb-project p requires --wandb-exp-name NAME",)),
    ("--timing-log-level 3", ("--timing-log-level 3: must be at least 0 and at most 2",)),
    ("--timing-log-option mean", ("--timing-log-option mean: not one of max, minmax, all",)),
    ("--exit-signal 9", ("--exit-signal 9: signals other than SIGINT", "use --exit-signal 15")),
    # files
    ("-mock-data --data-args-path {data}/empty.toml", ("--data-args-path {data}/empty.toml: it names no dataset",)),
    ("-mock-data --data-args-path {data}/none", ("--data-args-path {data}/none: cannot be read: No such file",)),
    ("-mock-data --data-args-path {data}/reels", ("--data-args-path {data}/reel: ", "did you mean", "{data}/real?")),
    ("-mock-data --per-split-data-args-path {data}/empty.toml", ("not JSON",)),
    ("-mock-data --per-split-data-args-path {data}/no_train", ('has no "train"',)),
    (
        "-mock-data --train-data-path {data}/real --valid-data-path 1 {data}/real 2 {data}/half",
        ("--valid-data-path {data}/half: {data}/half.idx does not exist",),
    ),
    ("-mock-data --data-path {data}/reel", ("reel.bin and", "reel.idx do not exist", "did you mean --data-path")),
    ("-mock-data --data-path {data}/real.bin", ("did you mean --data-path {data}/real?",)),
    ("-mock-data --data-path {data}/half", ("half.idx does not exist",)),
    ("-mock-data --data-path {data}/text", ("did you mean --data-path {data}/text_text_document?",)),
    ("--vocab-file {data}/vocap.json", ("vocap.json: no such file", "did you mean {data}/vocab.json?")),
    ("--merge-file {data}/none/merges.txt", ("no such file", "the folder {data}/none does not exist")),
    (
        "-tokenizer-type -vocab-size --tokenizer-type Llama2Tokenizer --tokenizer-model {data}/vocab.model",
        ("--tokenizer-model {data}/vocab.model: no such file", "did you mean {data}/vocab.json?"),
    ),
    ("--save {data}/real.bin --save-interval 5", ("--save {data}/real.bin is a file; give a folder",)),
    ("--save {data}/hf --save-interval 5", ("--save {data}/hf is the folder of a Hugging Face", "--load {data}/hf")),
    ("--save s3://b/c --save-interval 5", ("--save s3://b/c: s3:// is not", "mount")),
    ("--load GS://b/c", ("--load GS://b/c: GS:// is not", "mount")),
    ("--save file:///c --save-interval 5", ("--save file:///c: give the path without file://",)),
    ("-mock-data --data-path 0.5 s3://b/c 0.5 {data}/real", ("--data-path s3://b/c: s3:// is not",)),
    ("-mock-data --train-data-path hdfs://b/c --save hdfs://b --save-interval 5", ("--train-data-path hdfs", "--save")),
    ("-mock-data --data-args-path s3://b/c", ("--data-args-path s3://b/c",)),
    ("--data-cache-path msc://b/c", ("--data-cache-path msc://b/c",)),
    ("--tensorboard-dir s3://b/c", ("--tensorboard-dir s3://b/c",)),
    (
        "-tokenizer-type -vocab-size --tokenizer-type HuggingFaceTokenizer --tokenizer-model hf://org/name",
        ("--tokenizer-model hf://org/name",),
    ),
    ("--load {data}/real.bin", ("--load {data}/real.bin is a file; give a folder",)),
    (
        "--load {data} --non-persistent-ckpt-type global --non-persistent-global-ckpt-dir {data}/real.bin",
        ("--non-persistent-global-ckpt-dir {data}/real.bin is a file; give a folder",),
    ),
    (
        "--load {data} --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {data}/real.bin",
        ("--non-persistent-local-ckpt-dir {data}/real.bin is a file; give a folder",),
    ),
    # T5
    (_T5_ALONE, ("--decoder-seq-length is required for T5",)),
    (f"{_T5} --decoder-seq-length 65", ("--decoder-seq-length 65", "--max-position-embeddings 65")),
    (
        f"WORLD_SIZE=2 {_T5} --tensor-model-parallel-size 2 --sequence-parallel --decoder-seq-length 31",
        ("--decoder-seq-length 31 is not divisible by --tensor-model-parallel-size 2", "30 or 32"),
    ),
    (f"{_T5} --vocab-extra-ids 0", ("--vocab-extra-ids is required for T5",)),
    (
        "-mock-data --data-path {data}/real --model-family t5 --decoder-seq-length 32",
        ("NullTokenizer has no tokens <extra_id_N>", "--vocab-extra-ids 100"),
    ),
    ("--position-embedding-type relative", ("relative is that of T5",)),
    (
        f"{_T5} --position-embedding-type relative --relative-attention-num-buckets 31",
        ("--relative-attention-num-buckets 31 is odd",),
    ),
    (
        f"{_T5} --position-embedding-type relative --relative-attention-max-distance 16",
        ("--relative-attention-max-distance 16", "above 16"),
    ),
    (f"WORLD_SIZE=2 {_T5} --pipeline-model-parallel-size 2", ("T5 has no pipeline parallelism",)),
    (f"WORLD_SIZE=2 {_T5} --context-parallel-size 2", ("context parallelism is for causal attention",)),
    (f"{_T5} --group-query-attention --num-query-groups 2", ("--group-query-attention", "own keys and values")),
    (f"{_T5} --qk-layernorm", ("--qk-layernorm: T5 has no norms of heads",)),
    (f"{_T5} --qk-l2-norm", ("--qk-l2-norm: T5 has no norms of heads",)),
    (f"{_T5} --window-size 8,0", ("T5 has no window",)),
    (f"{_T5} --softmax-type off-by-one", ("T5 has no attention sinks",)),
    (f"{_T5} --attention-output-gate", ("T5 has no gates of heads",)),
    # multi-token prediction
    (f"{_T5} --mtp-num-layers 1", ("--mtp-num-layers 1", "is for GPT")),
    ("--mtp-num-layers 64", ("--mtp-num-layers 64 looks beyond the 64 tokens",)),
    ("--mtp-num-layers -1", ("--mtp-num-layers -1: must be at least 0",)),
    (
        "WORLD_SIZE=2 --mtp-num-layers 1 --pipeline-model-parallel-size 2",
        ("--mtp-num-layers 1 with --position-embedding-type learned_absolute", "use --position-embedding-type rope"),
    ),
    (
        "--mtp-num-layers 1 --window-size 4,0 --window-attn-skip-freq 2",
        ("--mtp-num-layers 1 with --window-attn-skip-freq 2", "leave one of them out"),
    ),
    (
        "--kv-channels 4 --mtp-num-layers 1 --position-embedding-type rope --no-rope-freq [0,1]",
        ("--mtp-num-layers 1 with --no-rope-freq [0,1]",),
    ),
    ("--mtp-num-layers 1 --use-mup", ("--mtp-num-layers 1 with --use-mup", "leave one out")),
    ("--mtp-use-repeated-layer", ("this variant of multi-token prediction is not built",)),
    # multi-latent attention
    (f"{_T5} --multi-latent-attention", ("--multi-latent-attention", "is for GPT")),
    (f"{_T5} --use-mup", ("--use-mup", "GPT")),
    (f"{_LATENT} --qk-pos-emb-head-dim 7", ("--qk-pos-emb-head-dim 7", "positions turn pairs", "6 or 8")),
    ("--rope-type yarn", ("--rope-type yarn is of --multi-latent-attention", "--position-embedding-type yarn")),
    (f"{_LATENT} --group-query-attention", ("with --group-query-attention", "one latent vector")),
    (f"{_LATENT} --attention-output-gate", ("with --attention-output-gate", "no gates")),
    (f"{_LATENT} --add-qkv-bias", ("with --add-qkv-bias", "no biases")),
    (f"{_LATENT} --qk-l2-norm", ("with --qk-l2-norm", "--qk-layernorm")),
    (f"{_LATENT} --softmax-type off-by-one", ("with --softmax-type off-by-one", "no sinks")),
    (f"{_LATENT} --no-rope-freq 2", ("with --no-rope-freq 2", "every layer")),
    (f"{_LATENT} --rotary-interleaved", ("with --rotary-interleaved", "neighbouring")),
    (f"{_LATENT} --use-rope-scaling", ("with --use-rope-scaling", "--rotary-scaling-factor")),
    (
        f"{_LATENT} --rotary-seq-len-interpolation-factor 2",
        ("with --rotary-seq-len-interpolation-factor 2", "--rope-type yarn"),
    ),
    (f"{_T5} --position-embedding-type rope --kv-channels 8 --no-rope-freq 2", ("two stacks are alike",)),
    (
        f"{_T5} --position-embedding-type yarn --yarn-original-max-position-embeddings 32 --kv-channels 8",
        ("T5 has learned_absolute, relative, rope or none",),
    ),
    (
        f"--model-family t5 {_WORD_PIECE} --vocab-extra-ids 100 --decoder-seq-length 32",
        ("T5 learns from text in sentences", "--split-sentences"),
    ),
    (f"{_T5} --reset-attention-mask", ("--reset-attention-mask: a sample of T5 is from one document",)),
    (f"{_T5} --dataloader-inter-document-masking", ("--dataloader-inter-document-masking: a sample of T5",)),
    # BERT
    (
        "-mock-data --data-path {data}/real --model-family bert",
        ("--tokenizer-type NullTokenizer has no [CLS]", "BertWordPieceLowerCase or BertWordPieceCase"),
    ),
    (f"{_BERT} -seq-length --seq-length 4", ("--seq-length 4: three tokens", "at least 8")),
    (f"WORLD_SIZE=2 {_BERT} --context-parallel-size 2", ("context parallelism is for causal", "--sequence-parallel")),
    (f"{_BERT} --num-experts 2", ("--num-experts 2: mixtures of experts are for GPT",)),
    (f"{_BERT} --window-size 8,0", ("--window-size 8,0: BERT sees all positions",)),
    (f"{_BERT} --softmax-type off-by-one", ("BERT has no attention sinks",)),
    (f"{_BERT} --calculate-per-token-loss", ("--calculate-per-token-loss: BERT's two losses",)),
    (
        _BERT_ALONE,
        ("--mock-data: BERT learns from text in sentences", "--split-sentences"),
    ),
    (f"{_BERT} --eod-mask-loss", ("--eod-mask-loss: a sample of BERT is from one document",)),
    (f"{_BERT} --reset-position-ids", ("--reset-position-ids: a sample of BERT",)),
    (f"{_BERT} --reset-attention-mask", ("--reset-attention-mask: a sample of BERT",)),
    (f"{_BERT} --dataloader-inter-document-masking", ("--dataloader-inter-document-masking: a sample of BERT",)),
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
    for fragment in expected:
        assert fragment.format(data=data) in message


def test_local_checkpoints_are_for_one_machine(data: Path) -> None:
    words = command_line("--save {data}/c --save-interval 5 --non-persistent-ckpt-type local", data)
    words += ["--non-persistent-local-ckpt-dir", str(data / "l")]
    two_hosts = {**environment("WORLD_SIZE=2"), "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.7"}
    for meeting in ("10.0.0.7", "localhost"):  # the first host may be reached by that name from itself
        with pytest.raises(ConfigError, match=r"local is not supported \(of the 2 processes 1 are on this .*global"):
            load(words, {**two_hosts, "MASTER_ADDR": meeting})
    assert load(words, {**two_hosts, "LOCAL_WORLD_SIZE": "2"}).checkpoint.passing_folder("c") == str(data / "l")


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
    in_test_environment = {layout_rules.rank_is_in_the_world.name}
    in_test_registered = {"bert_is_without_data_source", "t5_is_without_data_source"}
    elsewhere = as_for_save_and_load | in_test_environment | in_test_registered
    assert {rule.name for rule in (*RULES, *FILE_RULES)} - broken == elsewhere


def test_messages_name_settings_and_what_a_run_has(data: Path) -> None:
    run = load(command_line("", data), {})
    named = {field for rule in (*RULES, *NOTICES) for _, field, _, _ in Formatter().parse(rule.name) if field}
    computed = {"fitting", "last", "least", "nearest", "reason", "width"}
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
        "needs a multiple of 8 processes and 2 processes were started",
        "did you mean --hidden-dropout",
    ):
        assert fragment in text
