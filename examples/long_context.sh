#!/usr/bin/env bash
# A long sequence on two processes, each of which holds half of it (--context-parallel-size). Memory of activations is that
# of half the sequence; the losses are those of one process. Edit the paths and sizes here, or set them in the environment.
# On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 LENGTH=256 STEPS=20 bash examples/long_context.sh
set -euo pipefail

DATA=${DATA:-my-gpt2_text_document}      # PREFIX of PREFIX.bin and PREFIX.idx (tools/preprocess_data.py makes them)
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/long-context}

RANKS=${RANKS:-2}                        # processes that share a sequence; its length divides by 2 x RANKS
LAYERS=${LAYERS:-12} HIDDEN=${HIDDEN:-768} HEADS=${HEADS:-12} GROUPS_OF_HEADS=${GROUPS_OF_HEADS:-4}
LENGTH=${LENGTH:-16384} STEPS=${STEPS:-1000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
    --group-query-attention --num-query-groups "$GROUPS_OF_HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH"
    --use-rotary-position-embeddings --rotary-base 500000
    --hidden-dropout 0 --attention-dropout 0
)
PARALLEL_ARGS=(
    --context-parallel-size "$RANKS"
    --cp-comm-type p2p          # keys and values go around a ring; a2a exchanges heads (Ulysses): heads divide by RANKS
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 8 --train-iters "$STEPS"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .01
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
DATA_ARGS=(--data-path "$DATA" --vocab-file "$VOCAB" --merge-file "$MERGES" --split 949,50,1)
LOG_ARGS=(--log-interval 10 --eval-interval 100 --eval-iters 5 --save-interval 100 --save "$CHECKPOINTS" --load "$CHECKPOINTS")

torchrun --nproc_per_node "$RANKS" "$HERE/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
