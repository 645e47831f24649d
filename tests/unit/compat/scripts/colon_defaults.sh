#!/bin/bash
#SBATCH --nodes=2
# Defaults by `:`, declared arrays, the first host by a command, rendezvous by name, srun before torchrun.
set -ex;
: "${TENSOR_PARALLEL:=4}"
: "${PIPELINE_PARALLEL:=2}"
: "${NUM_LAYERS:=36}" "${HIDDEN_SIZE:=4096}"
: ${GPUS_PER_NODE:=8}
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}

declare -a TORCHRUN_ARGS=(
    --nproc_per_node=${GPUS_PER_NODE} #number of GPUs
    --nnodes=${SLURM_JOB_NUM_NODES:-2}
    --rdzv_id=${SLURM_JOB_ID:-1}
    --rdzv_backend=c10d
    --rdzv_endpoint=$(hostname)
)
declare -a MEGATRON_ARGS=(
        --num-layers $NUM_LAYERS
        --hidden-size $HIDDEN_SIZE
        --num-attention-heads 32
        --seq-length 2048
        --max-position-embeddings 2048
        --micro-batch-size 1
        --global-batch-size 288
)
MEGATRON_ARGS+=(
        --train-samples 146484375
        --lr-decay-samples 126953125
        --lr-warmup-samples 183105
        --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
        --fp16 --log-interval 1
)
srun -l "${TORCH_BIN:-torchrun}" "${TORCHRUN_ARGS[@]}" /workspace/megatron/pretrain_gpt.py \
        --tensor-model-parallel-size "${TENSOR_PARALLEL}" \
        --pipeline-model-parallel-size $PIPELINE_PARALLEL \
        "${MEGATRON_ARGS[@]}" \
        --data-path "data/my-gpt2_text_document" \
        --vocab-file 'data/gpt2-vocab.json' --merge-file "data/gpt2-merges.txt" \
        --split 98,2,0 "$@"
