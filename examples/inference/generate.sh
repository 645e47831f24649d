#!/usr/bin/env bash
# Continue texts without a server: one text, or each line of a file. Edit the path here, or set it in the environment.
#   bash examples/inference/generate.sh "Once upon a time"
#   bash examples/inference/generate.sh --file prompts.txt --greedy
# Architecture and tokenizer come from the checkpoint; `megalith generate --help` lists what else can be said.
set -euo pipefail

CHECKPOINT=${CHECKPOINT:-checkpoints/gpt3-345m}

if [ "${1:-}" = --file ]; then
    PROMPTS=$2
    shift 2
    megalith generate "$CHECKPOINT" --max-new-tokens 64 "$@" < "$PROMPTS"
else
    PROMPT=${1:-Hello world}
    megalith generate "$CHECKPOINT" --max-new-tokens 64 --prompt "$PROMPT" "${@:2}"
fi
