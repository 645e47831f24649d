#!/bin/bash
# The fork for DeepSpeed: flags that it alone has, texts that grow, a file of settings from a template.
DIR=`pwd`
SEQ_LEN=2048
TRAIN_TOKENS=300000000
GLOBAL_BATCH_SIZE=512
TRAIN_ITERS=$(( ${TRAIN_TOKENS} * 3 / ${GLOBAL_BATCH_SIZE} / ${SEQ_LEN} ))
EP_SIZE=128
NUM_GPUS=64
if [[ $EP_SIZE -gt $NUM_GPUS ]]; then
    EP_PARALLEL_SIZE=$NUM_GPUS
else
    EP_PARALLEL_SIZE=$EP_SIZE
fi
ACTIVATION_CHECKPOINT="true"
NAME="gpt-gpus-${NUM_GPUS}"
if [[ $EP_SIZE -gt 1 ]]; then
    NAME="${NAME}-ep-${EP_SIZE}"
fi
megatron_options=" \
        --adam-beta1 0.9 \
        --moe-expert-parallel-size ${EP_PARALLEL_SIZE} \
        --num-experts ${EP_SIZE} \
        --train-iters ${TRAIN_ITERS} --train-tokens ${TRAIN_TOKENS} \
        --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length ${SEQ_LEN} \
        --max-position-embeddings ${SEQ_LEN} --micro-batch-size 8 --global-batch-size ${GLOBAL_BATCH_SIZE} \
        --lr 1.2e-4 --data-path text_document --vocab-file v.json --merge-file m.txt --fp16"
if [ "${ACTIVATION_CHECKPOINT}" = "true" ]; then
megatron_options="${megatron_options} \
        --checkpoint-activations"
fi
config_json="ds_config_${NAME}.json"
sed "s/CONFIG_BATCH_SIZE/${GLOBAL_BATCH_SIZE}/" template.json \
    | sed "s/CONFIG_MBSIZE/8/" \
	  > ${config_json}
deepspeed_options=" --deepspeed --deepspeed_config ${config_json} --no-pipeline-parallel --zero-stage 1"
run_cmd="deepspeed --num_gpus 8 --num_nodes 8 pretrain_gpt.py ${megatron_options} ${deepspeed_options} &> ${NAME}.log"
echo ${run_cmd}
eval ${run_cmd}
set +x
