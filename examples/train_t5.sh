#!/usr/bin/env bash
# T5 Base: 12 layers of 768 that read, 12 that write. Its text is split into sentences first, once
# (with nltk's punkt_tab data; where they are missing, a message says how to bring them):
#   python tools/preprocess_data.py --input text.jsonl --output-prefix my-t5 --split-sentences \
#       --tokenizer-type BertWordPieceCase --vocab-file vocab.txt
# Edit the paths and sizes here, or set them in the environment. On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 LENGTH=64 DECODER_LENGTH=32 STEPS=20 bash examples/train_t5.sh
# on two processes that divide each layer:
#   PROCESSES=2 TP=2 bash examples/train_t5.sh
set -euo pipefail

DATA=${DATA:-my-t5_text_sentence}        # PREFIX of PREFIX.bin and PREFIX.idx
VOCAB=${VOCAB:-vocab.txt}                # of bert-large-cased, one word piece a line
CHECKPOINTS=${CHECKPOINTS:-checkpoints/t5}

PROCESSES=${PROCESSES:-1} TP=${TP:-1} MICRO_BATCH=${MICRO_BATCH:-4}
LAYERS=${LAYERS:-12} HIDDEN=${HIDDEN:-768} HEADS=${HEADS:-12} STEPS=${STEPS:-1000}
LENGTH=${LENGTH:-512} DECODER_LENGTH=${DECODER_LENGTH:-128}

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --encoder-num-layers "$LAYERS" --decoder-num-layers "$LAYERS" --hidden-size "$HIDDEN"
    --num-attention-heads "$HEADS" --max-position-embeddings "$LENGTH"
    --encoder-seq-length "$LENGTH" --decoder-seq-length "$DECODER_LENGTH" --init-method-std 0.015
)
TRAINING_ARGS=(
    --tensor-model-parallel-size "$TP" --micro-batch-size "$MICRO_BATCH" --global-batch-size 32
    --train-iters "$STEPS" --lr 0.0001 --min-lr 0.00001 --lr-decay-style linear --lr-warmup-fraction .01
    --weight-decay 1e-2 --clip-grad 1.0 --bf16
)
DATA_ARGS=(
    --data-path "$DATA" --vocab-file "$VOCAB" --tokenizer-type BertWordPieceCase --vocab-extra-ids 100
    --split 949,50,1
)
LOG_ARGS=(
    --log-interval 10 --eval-interval 100 --eval-iters 5
    --save-interval 100 --save "$CHECKPOINTS" --load "$CHECKPOINTS"
)

torchrun --nproc_per_node "$PROCESSES" --master_port "${MASTER_PORT:-6000}" "$HERE/pretrain_t5.py" \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
