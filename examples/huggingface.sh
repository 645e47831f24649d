#!/usr/bin/env bash
# A model of Hugging Face into Megatron's layout, and a checkpoint back into a Hugging Face folder. Where transformers is
# installed, each conversion ends with a comparison of logits. Edit the paths here, or set them in the environment.
#   MODEL=~/.cache/huggingface/hub/models--openai-community--gpt2/snapshots/HASH bash examples/huggingface.sh import
#   CHECKPOINTS=checkpoints/my-run bash examples/huggingface.sh export
# Training, evaluation and serving take such a folder itself: --load "$MODEL", megalith serve "$MODEL".
set -euo pipefail

WHAT=${1:?import or export}; shift
MODEL=${MODEL:-gpt2}                       # a folder with config.json, safetensors and the files of the tokenizer
CHECKPOINTS=${CHECKPOINTS:-checkpoints/from-huggingface}
EXPORTED=${EXPORTED:-exported}

case "$WHAT" in
    import) megalith checkpoint import "$MODEL" "$CHECKPOINTS" "$@" ;;
    export) megalith checkpoint export "$CHECKPOINTS" "$EXPORTED" "$@" ;;
    *) echo "$0: $WHAT is neither import nor export" >&2; exit 2 ;;
esac
