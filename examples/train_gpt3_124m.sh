#!/usr/bin/env bash
# GPT-3 124M: 12 layers of 768. Edit the paths and sizes here, or set them in the environment. On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 LENGTH=64 STEPS=20 bash examples/train_gpt3_124m.sh
# on two processes that divide each layer (TP=2), or the batch between them (TP=1):
#   PROCESSES=2 TP=2 MICRO_BATCH=2 bash examples/train_gpt3_124m.sh
# on two hosts, which both reach the data and the checkpoints; on the second with NODE_RANK=1:
#   HOSTS=2 NODE_RANK=0 MASTER_ADDR=first-host bash examples/train_gpt3_124m.sh
set -euo pipefail

DATA=${DATA:-my-gpt2_text_document}      # PREFIX of PREFIX.bin and PREFIX.idx (tools/preprocess_data.py makes them)
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt3-124m}

PROCESSES=${PROCESSES:-1}                # on each host
HOSTS=${HOSTS:-1}
TP=${TP:-1}
MICRO_BATCH=${MICRO_BATCH:-1}
LAYERS=${LAYERS:-12} HIDDEN=${HIDDEN:-768} HEADS=${HEADS:-12} LENGTH=${LENGTH:-512} STEPS=${STEPS:-1000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

if [ "$HOSTS" -gt 1 ]; then                # torchrun waits without a word where these are missing
    : "${NODE_RANK:?is the number of this host: 0 on the first, 1 on the second}"
    : "${MASTER_ADDR:?is the name or address of the first host}"
fi

LAUNCH_ARGS=(
    --nproc_per_node "$PROCESSES" --nnodes "$HOSTS" --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-6000}"
)
MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH"
)
TRAINING_ARGS=(
    --tensor-model-parallel-size "$TP" --micro-batch-size "$MICRO_BATCH" --global-batch-size 16 --train-iters "$STEPS"
    --lr 0.0001 --min-lr 0.00001 --lr-decay-style cosine --lr-warmup-fraction .01
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
)
DATA_ARGS=(--data-path "$DATA" --vocab-file "$VOCAB" --merge-file "$MERGES" --split 949,50,1)
LOG_ARGS=(
    --log-interval 10 --eval-interval 50 --eval-iters 5
    --save-interval 100 --save "$CHECKPOINTS" --load "$CHECKPOINTS"
)

torchrun "${LAUNCH_ARGS[@]}" "$HERE/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
