#!/usr/bin/env bash
# A Llama-style model with Megatron's flags. Edit the paths; on a laptop make the sizes smaller.
set -euo pipefail

DATA=my-gpt2_text_document      # PREFIX of PREFIX.bin and PREFIX.idx (tools/preprocess_data.py makes them)
VOCAB=gpt2-vocab.json
MERGES=gpt2-merges.txt
CHECKPOINTS=checkpoints/llama

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 2048
    --group-query-attention --num-query-groups 4
    --seq-length 512 --max-position-embeddings 512 --use-rotary-position-embeddings
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
)
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size 16 --train-iters 1000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .01
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
DATA_ARGS=(--data-path "$DATA" --vocab-file "$VOCAB" --merge-file "$MERGES" --split 949,50,1)
LOG_ARGS=(--log-interval 10 --eval-interval 100 --eval-iters 5 --save-interval 100 --save "$CHECKPOINTS" --load "$CHECKPOINTS")

torchrun --nproc_per_node 1 "$HERE/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
