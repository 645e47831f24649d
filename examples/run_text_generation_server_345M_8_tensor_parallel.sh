#!/usr/bin/env bash
# The server of run_text_generation_server_345M.sh over eight processes that share each layer; the paths are set there, or
# in the environment.
set -euo pipefail

TENSOR=${TENSOR:-8} exec bash "$(dirname "$0")/run_text_generation_server_345M.sh" "$@"
