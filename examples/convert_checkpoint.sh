#!/usr/bin/env bash
# Merge or split a checkpoint: from whatever layout and format it has to TENSOR x PIPELINE places. Neither torchrun nor a
# GPU is needed, and one tensor is in memory at a time. Edit the paths here, or set them in the environment.
#   FROM=checkpoints/gpt3-345m TO=checkpoints/gpt3-345m-merged bash examples/convert_checkpoint.sh
#   TENSOR=2 PIPELINE=2 bash examples/convert_checkpoint.sh
# A run needs none of this: `--load` takes a checkpoint of any layout into its own. It is for files that others read.
set -euo pipefail

FROM=${FROM:-checkpoints/gpt3-345m}
TO=${TO:-checkpoints/gpt3-345m-converted}
TENSOR=${TENSOR:-1} PIPELINE=${PIPELINE:-1}
VOCAB=${VOCAB:-gpt2-vocab.json}          # its tokens are counted, so that the padding is that of the new layout

# What is made: `core` and `legacy` are weights in per-rank files, as Megatron's converters write them, under the names of
# Megatron-Core or those from before; `all` keeps the optimizer too, to go on training from it.
KIND=${KIND:-core}

HERE=$(cd "$(dirname "$0")/.." && pwd)

if [ "$KIND" = all ]; then
    megalith checkpoint convert "$FROM" "$TO" --tp "$TENSOR" --pp "$PIPELINE" "$@"
else
    python "$HERE/tools/checkpoint/convert.py" --model-type GPT --loader core --saver "$KIND" \
        --load-dir "$FROM" --save-dir "$TO" --vocab-file "$VOCAB" \
        --target-tensor-parallel-size "$TENSOR" --target-pipeline-parallel-size "$PIPELINE" "$@"
fi
megalith checkpoint inspect "$TO"
# Of GPT-2 the padding of the vocabulary may differ between two layouts; it is the only difference that there can be.
megalith checkpoint diff "$FROM" "$TO" --weights || echo "they differ: see above"
