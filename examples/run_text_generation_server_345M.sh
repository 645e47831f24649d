#!/usr/bin/env bash
# A server for GPT-3 345M, or any other checkpoint: PUT /api as Megatron's clients ask it, OpenAI's API under /v1, a page
# at http://localhost:5000/. Edit the paths here, or set them in the environment. Ctrl-C stops it.
# The same checkpoint over four processes that share each layer, or two stages of two, whatever layout it was saved in:
#   TENSOR=4 bash examples/run_text_generation_server_345M.sh
#   TENSOR=2 PIPELINE=2 bash examples/run_text_generation_server_345M.sh
# Ask it from another terminal:
#   bash examples/inference/ask_server.sh "Hello world"
#   python tools/text_generation_cli.py localhost:5000
# Only this machine can reach it; for others: --host 0.0.0.0 --api-key-file FILE (docs/serving.md).
set -euo pipefail

CHECKPOINT=${CHECKPOINT:-checkpoints/gpt3-345m}
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}

TENSOR=${TENSOR:-1} PIPELINE=${PIPELINE:-1}
LAYERS=${LAYERS:-24} HIDDEN=${HIDDEN:-1024} HEADS=${HEADS:-16} LENGTH=${LENGTH:-1024}
PORT=${PORT:-5000}

HERE=$(cd "$(dirname "$0")/.." && pwd)

# The checkpoint knows its architecture and tokenizer: all of these may be left out, and one that contradicts it is an
# error.
MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
    --seq-length "$LENGTH" --max-position-embeddings "$LENGTH"
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB" --merge-file "$MERGES"
)
SERVER_ARGS=(
    --load "$CHECKPOINT" --fp16 --micro-batch-size 1 --seed 42 --port "$PORT"
    --tensor-model-parallel-size "$TENSOR" --pipeline-model-parallel-size "$PIPELINE"
)

exec torchrun --nproc_per_node "$((TENSOR * PIPELINE))" --master_port "${MASTER_PORT:-6000}" \
    "$HERE/tools/run_text_generation_server.py" "${MODEL_ARGS[@]}" "${SERVER_ARGS[@]}" "$@"
