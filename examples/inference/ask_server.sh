#!/usr/bin/env bash
# Ask a server of run_text_generation_server_345M.sh or `megalith serve`:
#   bash examples/inference/ask_server.sh "Once upon a time" 32
# by Megatron's API, and the same by OpenAI's. KEY=... where the server has a key.
set -euo pipefail

SERVER=${SERVER:-http://localhost:5000}
PROMPT=${1:-Hello world}
TOKENS=${2:-16}

HEADERS=(-H 'Content-Type: application/json; charset=UTF-8')
if [ -n "${KEY:-}" ]; then HEADERS+=(-H "Authorization: Bearer $KEY"); fi
# JSON of the prompt, whatever quotes and line ends are in it.
QUOTED=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$PROMPT")

curl --silent --show-error --fail-with-body "$SERVER/api" -X PUT "${HEADERS[@]}" \
    -d "{\"prompts\": [$QUOTED], \"tokens_to_generate\": $TOKENS}"
echo
curl --silent --show-error --fail-with-body "$SERVER/v1/completions" -X POST "${HEADERS[@]}" \
    -d "{\"prompt\": $QUOTED, \"max_tokens\": $TOKENS, \"temperature\": 0}"
echo
