#!/usr/bin/env bash
# LAMBADA: does a trained model find the last word of a passage? Edit the paths here, or set them in the environment.
# docs/evaluation.md says where lambada_test.jsonl comes from; without it, `megalith evaluate C --task cloze` needs none.
# On two processes that share each layer, whatever layout the checkpoint was written in:
#   PROCESSES=2 TENSOR=2 bash examples/eval_gpt2_lambada.sh
# Perplexity of WikiText instead:
#   TASK=WIKITEXT103 DATA=wiki.test.tokens bash examples/eval_gpt2_lambada.sh --overlapping-eval 32
set -euo pipefail

CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt3-345m}
DATA=${DATA:-lambada_test.jsonl}
VOCAB=${VOCAB:-gpt2-vocab.json}
MERGES=${MERGES:-gpt2-merges.txt}

TASK=${TASK:-LAMBADA}
PROCESSES=${PROCESSES:-1} TENSOR=${TENSOR:-1}

HERE=$(cd "$(dirname "$0")/.." && pwd)

# The architecture is that of the checkpoint; flags that say another one are an error.
TASK_ARGS=(--task "$TASK" --valid-data "$DATA" --load "$CHECKPOINTS" --micro-batch-size 8 --log-interval 10)
if [ "$TASK" = LAMBADA ]; then TASK_ARGS+=(--strict-lambada); fi
TOKENIZER_ARGS=(--tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB" --merge-file "$MERGES")

torchrun --nproc_per_node "$PROCESSES" --master_port "${MASTER_PORT:-6000}" \
    "$HERE/tasks/main.py" "${TASK_ARGS[@]}" "${TOKENIZER_ARGS[@]}" --tensor-model-parallel-size "$TENSOR" "$@"
