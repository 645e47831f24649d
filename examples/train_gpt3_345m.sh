#!/usr/bin/env bash
# GPT-3 345M with recomputation: 24 layers of 1024, under torch.distributed.launch as older scripts start it. Edit the
# paths and sizes here, or set them in the environment. On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 LENGTH=64 STEPS=20 bash examples/train_gpt3_345m.sh
# On four processes, each with a quarter of the batch:
#   PROCESSES=4 MICRO_BATCH=4 GLOBAL_BATCH=32 STEPS=3000 bash examples/train_gpt3_345m.sh
set -euo pipefail

DATA=${DATA:-my-gpt2_text_document}      # PREFIX of PREFIX.bin and PREFIX.idx (tools/preprocess_data.py makes them)
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt3-345m}

PROCESSES=${PROCESSES:-1}
MICRO_BATCH=${MICRO_BATCH:-4} GLOBAL_BATCH=${GLOBAL_BATCH:-8}
LAYERS=${LAYERS:-24} HIDDEN=${HIDDEN:-1024} HEADS=${HEADS:-16} LENGTH=${LENGTH:-1024} STEPS=${STEPS:-1000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH" --attention-softmax-in-fp32
    --recompute-activations     # selective, which needs nothing here; for whole layers, the least memory:
    # --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH" --train-iters "$STEPS"
    --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --lr-decay-iters 320000 --lr-warmup-fraction .01
    --weight-decay 1e-2 --clip-grad 1.0 --fp16 --distributed-backend nccl
)
DATA_ARGS=(--data-path "$DATA" --vocab-file "$VOCAB" --merge-file "$MERGES" --split 949,50,1)
LOG_ARGS=(
    --log-interval 1 --eval-interval 100 --eval-iters 10
    --save-interval 500 --save "$CHECKPOINTS" --load "$CHECKPOINTS"
)

python -m torch.distributed.launch --nproc_per_node "$PROCESSES" --master_port "${MASTER_PORT:-6000}" \
    "$HERE/pretrain_gpt.py" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
