#!/usr/bin/env bash
# A model of about 1.5B parameters on one GPU of 80 GB, shared by trainer and engine:
#
#   bash examples/one_gpu.sh --model DIR --prompts FILE [--run-dir DIR] [section.key=value ...]
#
# For example Qwen2.5-1.5B-Instruct.
set -euo pipefail
HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
exec bash "$HERE/launch.sh" "$HERE/one_gpu.toml" "$@"
