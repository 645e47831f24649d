#!/usr/bin/env bash
# A Llama-style model with Megatron's flags. Edit the paths and sizes here, or set them in the environment. On a laptop:
#   LAYERS=2 HIDDEN=64 HEADS=4 GROUPS_OF_HEADS=2 FFN=128 LENGTH=64 STEPS=20 bash examples/train_llama.sh
# with Llama's own tokenizer, whose data are made with --tokenizer-type Llama2Tokenizer --tokenizer-model FILE:
#   TOKENIZER=tokenizer.model DATA=my-llama_text_document bash examples/train_llama.sh
set -euo pipefail

DATA=${DATA:-my-gpt2_text_document}      # PREFIX of PREFIX.bin and PREFIX.idx (tools/preprocess_data.py makes them)
TOKENIZER=${TOKENIZER:-}                 # a tokenizer.model; without it GPT-2's:
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/llama}

PROCESSES=${PROCESSES:-1}
TP=${TP:-1}
LAYERS=${LAYERS:-12} HIDDEN=${HIDDEN:-768} HEADS=${HEADS:-12} GROUPS_OF_HEADS=${GROUPS_OF_HEADS:-4}
FFN=${FFN:-2048} LENGTH=${LENGTH:-512} STEPS=${STEPS:-1000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" --ffn-hidden-size "$FFN"
    --group-query-attention --num-query-groups "$GROUPS_OF_HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH" --use-rotary-position-embeddings
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
)
TRAINING_ARGS=(
    --tensor-model-parallel-size "$TP" --micro-batch-size 2 --global-batch-size 16 --train-iters "$STEPS"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .01
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --bf16
)
TOKENIZER_ARGS=(--vocab-file "$VOCAB" --merge-file "$MERGES")
if [ -n "$TOKENIZER" ]; then
    TOKENIZER_ARGS=(--tokenizer-type Llama2Tokenizer --tokenizer-model "$TOKENIZER")
fi
DATA_ARGS=(--data-path "$DATA" "${TOKENIZER_ARGS[@]}" --split 949,50,1)
LOG_ARGS=(--log-interval 10 --eval-interval 100 --eval-iters 5 --save-interval 100 --save "$CHECKPOINTS" --load "$CHECKPOINTS")

torchrun --nproc_per_node "$PROCESSES" "$HERE/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
