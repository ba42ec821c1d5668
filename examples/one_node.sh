#!/usr/bin/env bash
# A model of about 7B parameters on one node with 8 GPUs of 80 GB:
#
#   bash examples/one_node.sh --model DIR --prompts FILE [--run-dir DIR] [section.key=value ...]
#
# For example Qwen2.5-7B-Instruct. The trainer takes GPUs 0 to 3, four engines one GPU each.
set -euo pipefail
HERE=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
exec bash "$HERE/launch.sh" "$HERE/one_node.toml" "$@"
