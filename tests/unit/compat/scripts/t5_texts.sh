#!/bin/bash
# T5 Base: texts over several lines, with and without backslashes, and a backslash at the very end.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CKPT=$1
VOCAB=$2
DATA=$3

DISTRIBUTED="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NUM_NODES \
    --node_rank 0 \
    --master_addr localhost \
    --master_port 6000
"
T5="
    --encoder-num-layers 12 \
    --decoder-num-layers 12 \
    --hidden-size 768 \
    --num-attention-heads 12 \
    --kv-channels 64 \
    --ffn-hidden-size 3072 \
    --encoder-seq-length 512 \
    --decoder-seq-length 128 \
    --max-position-embeddings 512 \
    --micro-batch-size 32 \
    --global-batch-size 512 \
    --lr 0.0001 \
    --train-iters 1000000 \
    --lr-decay-style linear \
    --min-lr 0.00001 \
    --weight-decay 1e-2 \
    --lr-warmup-fraction .01 \
    --clip-grad 1.0 \
    --bf16 \
    --vocab-extra-ids 100 \
    --init-method-std 0.015 \
    --transformer-impl transformer_engine \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 1 \
"
DATA_ARGS="
    --data-path $DATA \
    --vocab-file $VOCAB \
    --tokenizer-type BertWordPieceCase \
    --split 99982,9,9 \
"
torchrun $DISTRIBUTED pretrain_t5.py \
    $T5 \
    $DATA_ARGS \
    --log-interval 100 --save-interval 500 --eval-interval 1000 --eval-iters 10 \
    --distributed-backend nccl \
    --save $CKPT \
    --load $CKPT \
