#!/bin/bash
# A job that is written and submitted at once; arrays that are built anew, a profiler before python.
export NCCL_IB_SL=1
MEGATRON_PATH=${MEGATRON_PATH:-"/opt/megatron"}
OUTPUT_PATH=${OUTPUT_PATH:-"out"}
PROFILE=${PROFILE:-0}
FSDP=${FSDP:-1}
TP=${TP:-1}
EP=${EP:-8}
PRETRAIN_ARGS=(
    --tensor-model-parallel-size ${TP}
    --expert-model-parallel-size ${EP}
    --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0 --qk-layernorm
    --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --num-experts 64 --moe-layer-freq [0]*1+[1]*26 --moe-ffn-hidden-size 1408
    --moe-shared-expert-intermediate-size 2816 --moe-router-topk 6 --moe-router-pre-softmax
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
    --micro-batch-size 1 --global-batch-size 1024 --train-samples 5859375 --lr-warmup-samples 15360
    --lr 4.2e-4 --min-lr 4.2e-5 --lr-decay-style cosine --bf16
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek --data-path text_document --split 99,1,0
    --load ${OUTPUT_PATH}/checkpoints --save ${OUTPUT_PATH}/checkpoints --save-interval 500
)
if [ "${FSDP}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    PRETRAIN_ARGS=(
        "${PRETRAIN_ARGS[@]}"
        --use-distributed-optimizer
        --overlap-grad-reduce
    )
fi
if [ "${PROFILE}" = 1 ]; then
    PROFILE_CMD="nsys profile --trace=cuda,nvtx \
        -o ${OUTPUT_PATH}/nsys/run-TP${TP}EP${EP}"
    PRETRAIN_ARGS=("${PRETRAIN_ARGS[@]}" --profile --profile-step-start 10)
else
    PROFILE_CMD=""
fi
TRAINING_CMD="
cd ${MEGATRON_PATH};
git rev-parse HEAD;
export PYTHONPATH=${MEGATRON_PATH}:${PYTHONPATH};
${PROFILE_CMD} python ${MEGATRON_PATH}/pretrain_gpt.py ${PRETRAIN_ARGS[@]}"
SLURM_LOGS="${OUTPUT_PATH}/slurm_logs"
mkdir -p ${SLURM_LOGS} || {
    echo "no folder ${SLURM_LOGS}"
    exit 1
}
set +e
sbatch <<EOT
#!/bin/bash

#SBATCH --job-name=deepseek
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8

srun \
    --mpi=pmix -l \
    --container-workdir=${MEGATRON_PATH} \
    bash -x -c "${TRAINING_CMD}" 2>&1 | tee ${SLURM_LOGS}/\${SLURM_JOB_ID}.log

EOT
set -e
