#!/usr/bin/env bash
# A sweep of the tiny example on this machine's CPU, from one cold start that all runs share:
#
#   bash examples/sweeps/tiny.sh examples/sweeps/FILE.toml [--report | --dry-run]
#        [--sweep-dir DIR] [section.key=value ...]
#
# The model of 1.3M parameters, its tasks and its cold start are made once, in runs/sweep-start. A
# run takes about a minute. The same command goes on with a sweep that was interrupted. Exit status:
# 0; 1 when a run failed; 2 for bad input; 128 + signal.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -ge 1 ] && [ -f "$1" ] || { sed -n '2,9s/^# \{0,1\}//p' examples/sweeps/tiny.sh >&2; exit 2; }

START=$PWD/runs/sweep-start
TASKS=$START/tasks
COLD_START=$START/cold_start/hf/cold_start
bash tools/install.sh
PYTHON=.venv/bin/python
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# A dependency compiles with a SyntaxWarning at its first import.
export PYTHONWARNINGS=ignore::SyntaxWarning

[ -e "$START/model" ] || "$PYTHON" -m tools.make_tiny_model "$START/model" --seed 0
# The traces are written last.
[ -e "$TASKS/traces.jsonl" ] ||
    "$PYTHON" -m tools.make_tasks sort "$TASKS" --seed 0 --traces 500 --wrong-share 0.6
[ -e "$START/cold_start/summary.json" ] ||
    "$PYTHON" -m megatron_rl.launcher.cli run --config examples/tiny.toml \
        --run-dir "$START/cold_start" "model.path=$START/model" "sft.traces=$TASKS/traces.jsonl" \
        "prompts.0.path=$TASKS/prompts.jsonl" train.steps=0 eval.prompts=0

exec "$PYTHON" -m megatron_rl.launcher.cli sweep "$@" "model.path=$COLD_START" sft.steps=0 \
    "prompts.0.path=$TASKS/prompts.jsonl"
