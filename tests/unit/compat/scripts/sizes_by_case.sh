#!/usr/bin/env bash
# The size of the model is an argument; a function starts it; the words of the run are one text behind `eval`.
set -euo pipefail
MODEL_SIZE=${1:-7B}
PR=${2:-bf16}
AC=sel

case $MODEL_SIZE in
  0.5B)
    NUM_LAYERS=24 HIDDEN_SIZE=896
    ;;
  7B|7b)
    NUM_LAYERS=28
    HIDDEN_SIZE=3584
    NUM_ATTN_HEADS=28
    INTERMEDIATE_SIZE=18944
    NUM_KEY_VALUE_HEADS=4
    gqa_options=" --group-query-attention --num-query-groups ${NUM_KEY_VALUE_HEADS}"
    ;;
  *)
    echo "unknown size $MODEL_SIZE"
    exit 1
    ;;
esac

if [ $PR = fp16 ]; then
    pr_options=" --fp16"
elif [ $PR = bf16 ]; then
    pr_options=" --bf16"
fi
if [ $AC = full ]; then
    activation_checkpoint_options=" --recompute-method uniform --recompute-granularity full"
elif [ $AC = sel ]; then
    activation_checkpoint_options=" --recompute-activations"
fi

LR=1e-5
TRAIN_TOKENS=$(( 10 * 1000 * 1000 ))
SEQ=2048
TRAIN_ITERS=$(( ${TRAIN_TOKENS} / 8 / ${SEQ} ))
NAME="qwen-${MODEL_SIZE}-lr-${LR}-it-${TRAIN_ITERS}"

megatron_options="  \
        --save out/${NAME} \
        --lr ${LR} --min-lr 1e-6 --lr-decay-style cosine --clip-grad 1.0 \
        --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --init-method-std 0.008 \
        --micro-batch-size 1 --global-batch-size 8 --train-iters ${TRAIN_ITERS} \
        --num-layers ${NUM_LAYERS} --hidden-size ${HIDDEN_SIZE} --num-attention-heads ${NUM_ATTN_HEADS} \
        --ffn-hidden-size ${INTERMEDIATE_SIZE} --seq-length ${SEQ} --max-position-embeddings 32768 \
        --swiglu --normalization RMSNorm --use-rotary-position-embeddings --rotary-base 1000000 \
        --add-qkv-bias --disable-bias-linear --untie-embeddings-and-output-weights \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model qwen --data-path text_document \
        --tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0.0 --hidden-dropout 0.0"

launch() {
  local where=$1
  run_cmd="torchrun --nproc_per_node 4 --nnodes 1 ${where}/pretrain_gpt.py
 ${megatron_options} ${pr_options} ${activation_checkpoint_options} ${gqa_options}"
  echo ${run_cmd}
  eval ${run_cmd}
}
launch megatron
