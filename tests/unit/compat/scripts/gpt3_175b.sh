#!/bin/bash
# The 175B parameter model, as its authors start it: texts instead of arrays, a port in the environment.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS:-8}
MASTER_ADDR=${MASTER_ADDR:-first-host}
MASTER_PORT=6000
NNODES=16
NODE_RANK=${SLURM_NODEID:-0}
CHECKPOINT_PATH=$1
DATA_PATH="$2"

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK \
 --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

options=" \
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \
    --train-iters 500000 --lr-decay-iters 430000 --lr-warmup-fraction .001 --lr 6.0e-5 --min-lr 6.0e-6 --fp16 "
options="${options} --data-path ${DATA_PATH} --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"
options+=" --save ${CHECKPOINT_PATH%/} --save-interval 10000"

run_cmd="python -m torch.distributed.launch --use_env $DISTRIBUTED_ARGS pretrain_gpt.py ${options}"
eval ${run_cmd} > "$(date +%F).log" 2>&1
