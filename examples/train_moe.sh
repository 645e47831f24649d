#!/usr/bin/env bash
# A mixture of eight experts a layer, of which two compute each token (Mixtral's form), on processes that hold a part of
# the experts each. Edit the paths and sizes here, or set them in the environment. On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 LENGTH=64 STEPS=20 bash examples/train_moe.sh
set -euo pipefail

DATA=${DATA:-my-gpt2_text_document}      # PREFIX of PREFIX.bin and PREFIX.idx (tools/preprocess_data.py makes them)
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/moe}

PROCESSES=${PROCESSES:-2} EXPERT_PARALLEL=${EXPERT_PARALLEL:-2} MICRO_BATCH=${MICRO_BATCH:-1}
LAYERS=${LAYERS:-12} HIDDEN=${HIDDEN:-768} HEADS=${HEADS:-12} LENGTH=${LENGTH:-512} STEPS=${STEPS:-1000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH" --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
)
MOE_ARGS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
)
PARALLEL_ARGS=(--expert-model-parallel-size "$EXPERT_PARALLEL" --use-distributed-optimizer)
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH" --global-batch-size 16 --train-iters "$STEPS"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .01
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
DATA_ARGS=(--data-path "$DATA" --vocab-file "$VOCAB" --merge-file "$MERGES" --split 949,50,1)
LOG_ARGS=(
    --log-interval 10 --eval-interval 100 --eval-iters 5
    --save-interval 100 --save "$CHECKPOINTS" --load "$CHECKPOINTS"
)

torchrun --nproc_per_node "$PROCESSES" --master_port "${MASTER_PORT:-6000}" "$HERE/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${LOG_ARGS[@]}" "$@"
