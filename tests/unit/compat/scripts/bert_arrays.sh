#!/bin/bash
# BERT Large on one machine: arrays with tabs, remarks behind values, words given twice.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=4
CKPT=$1
TB=$2
VOCAB=$3
DATA=$4

DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE 
    --nnodes 1 
    --master_addr localhost
)
MODEL=(
    --num-layers 24 
    --hidden-size 1024 
    --num-attention-heads 16 
    --seq-length 512 
    --max-position-embeddings 512 
    --attention-backend auto # or flash, fused, unfused, local
)
TRAINING=(
    --micro-batch-size 4 
    --global-batch-size 32 
    --train-iters 1000000 
    --weight-decay 1e-2 
    --clip-grad 1.0 
    --fp16
    --lr 0.0001
    --lr-decay-iters 990000 
    --lr-decay-style linear 
    --min-lr 1.0e-5 
    --weight-decay 1e-2 
    --lr-warmup-fraction .01 
)
LAYOUT=(
	--tensor-model-parallel-size 2 
	--pipeline-model-parallel-size 2 
)
DATA_ARGS=(--data-path $DATA --vocab-file $VOCAB --split 949,50,1)
LOGGING=(--log-interval 100 --save-interval 10000 --eval-interval 1000 --save $CKPT --load $CKPT --eval-iters 10
    --tensorboard-dir $TB)

torchrun ${DISTRIBUTED[@]} examples/classes/pretrain_bert.py \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    ${LAYOUT[@]} \
    ${DATA_ARGS[@]} \
    ${LOGGING[@]}
    
