#!/usr/bin/env bash
# BERT Base: 12 layers of 768. Its text is split into sentences first, once
# (with nltk's punkt_tab data; where they are missing, a message says how to bring them):
#   python tools/preprocess_data.py --input text.jsonl --output-prefix my-bert --split-sentences \
#       --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt
# Edit the paths and sizes here, or set them in the environment. On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 LENGTH=64 STEPS=20 bash examples/train_bert.sh
# on four processes, two that divide each layer in a pipeline of two stages:
#   PROCESSES=4 TP=2 PP=2 bash examples/train_bert.sh
set -euo pipefail

DATA=${DATA:-my-bert_text_sentence}      # PREFIX of PREFIX.bin and PREFIX.idx
VOCAB=${VOCAB:-vocab.txt}                # of bert-base-uncased, one word piece a line
CHECKPOINTS=${CHECKPOINTS:-checkpoints/bert}

PROCESSES=${PROCESSES:-1} TP=${TP:-1} PP=${PP:-1} MICRO_BATCH=${MICRO_BATCH:-4}
LAYERS=${LAYERS:-12} HIDDEN=${HIDDEN:-768} HEADS=${HEADS:-12} LENGTH=${LENGTH:-512} STEPS=${STEPS:-1000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH"
)
TRAINING_ARGS=(
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
    --micro-batch-size "$MICRO_BATCH" --global-batch-size 32 --train-iters "$STEPS"
    --lr 0.0001 --min-lr 0.00001 --lr-decay-style linear --lr-warmup-fraction .01
    --weight-decay 1e-2 --clip-grad 1.0 --fp16
)
DATA_ARGS=(--data-path "$DATA" --vocab-file "$VOCAB" --tokenizer-type BertWordPieceLowerCase --split 949,50,1)
LOG_ARGS=(
    --log-interval 10 --eval-interval 100 --eval-iters 5
    --save-interval 100 --save "$CHECKPOINTS" --load "$CHECKPOINTS"
)

torchrun --nproc_per_node "$PROCESSES" --master_port "${MASTER_PORT:-6000}" "$HERE/pretrain_bert.py" \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
