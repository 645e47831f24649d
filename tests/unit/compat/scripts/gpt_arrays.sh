#!/bin/bash

# Runs the "345M" parameter model
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
# Change for multinode config
MASTER_ADDR=localhost
MASTER_PORT=6000
NUM_NODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT_PATH=$1 #<Specify path>
TENSORBOARD_LOGS_PATH=$2 #<Specify path>
VOCAB_FILE=$3 #<Specify path to file>/gpt2-vocab.json
MERGE_FILE=$4 #<Specify path to file>/gpt2-merges.txt
DATA_PATH=$5 #<Specify path and file prefix>_text_document

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE 
    --nnodes $NUM_NODES 
    --master_addr $MASTER_ADDR 
    --master_port $MASTER_PORT
)

GPT_MODEL_ARGS=(
    --num-layers 12   # twelve
    --hidden-size 768
    --num-attention-heads 12 
    --seq-length 512 
    --max-position-embeddings 512 
    # --attention-backend auto # Can use (flash/fused/unfused/local)
)
# ENGINE_ARGS=(--transformer_impl transformer_engine)
TRAINING_ARGS=(
    --micro-batch-size 1 
    --global-batch-size 16 
    --train-iters 1000 
    --weight-decay 0.1 
    --fp16
    --init-method-std 0.006 
    --clip-grad 1.0 
    --lr 6.0e-5 
    --lr-decay-style cosine 
    --min-lr 6.0e-6
    --lr-warmup-fraction .001 
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 2
	--pipeline-model-parallel-size 2 
)
DATA_ARGS="
    --data-path $DATA_PATH \
    --vocab-file $VOCAB_FILE \
    --merge-file $MERGE_FILE \
    --split 949,50,1
"
EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000 
    --eval-interval 1000 
    --save $CHECKPOINT_PATH 
    --load $CHECKPOINT_PATH 
    --eval-iters 10
    --tensorboard-dir $TENSORBOARD_LOGS_PATH 
)

mkdir -p ${CHECKPOINT_PATH}
if [ "$NODE_RANK" == "0" ]; then
  MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi

torchrun ${DISTRIBUTED_ARGS[@]} ../../Git/megatron-lm/pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    $DATA_ARGS \
    ${EVAL_AND_LOGGING_ARGS[@]} \
    # ${ENGINE_ARGS[@]} 2>&1 | tee log
