#!/usr/bin/env bash
# Four processes: two that divide each layer, in a pipeline of two stages (TP2 x PP2), with TensorBoard. 24 layers of 1024
# are about 355 million parameters; their authors call it 857M. Edit the paths and sizes here, or set them in the
# environment. On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 LENGTH=64 STEPS=20 bash examples/train_gpt3_857m_distributed.sh
# The curve: tensorboard --logdir checkpoints/gpt3-857m/tensorboard
set -euo pipefail

DATA=${DATA:-my-gpt2_text_document}      # PREFIX of PREFIX.bin and PREFIX.idx (tools/preprocess_data.py makes them)
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt3-857m}
TENSORBOARD=${TENSORBOARD:-$CHECKPOINTS/tensorboard}

LAYERS=${LAYERS:-24} HIDDEN=${HIDDEN:-1024} HEADS=${HEADS:-16} LENGTH=${LENGTH:-1024} STEPS=${STEPS:-10000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH"
)
PARALLEL_ARGS=(--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2)
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size 16 --train-iters "$STEPS"
    --lr 0.0001 --min-lr 0.00001 --lr-decay-style cosine --lr-warmup-fraction .01
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
)
DATA_ARGS=(--data-path "$DATA" --vocab-file "$VOCAB" --merge-file "$MERGES" --split 949,50,1)
LOG_ARGS=(
    --log-interval 10 --eval-interval 100 --eval-iters 10 --tensorboard-dir "$TENSORBOARD"
    --save-interval 1000 --save "$CHECKPOINTS" --load "$CHECKPOINTS"
)

torchrun --nproc_per_node 4 --master_port "${MASTER_PORT:-6000}" "$HERE/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
