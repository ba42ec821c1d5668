#!/usr/bin/env bash
# Installs, makes a model of 1.3M parameters with prompts, trains it in an environment, evaluates:
#
#   bash examples/agents/run.sh NAME [--run-dir DIR] [section.key=value ...]
#
# NAME: guess (number guessing), lookup (a tool in two turns), search (in a corpus), calculate (with
# Python in the sandbox), repair (programs and failed tests) or debate (before a judge, trained first),
# 2 to 8 minutes each on two cores.
# The environment is examples/agents/NAME.py. Overrides go to the run, for example run.seed=1.
# Exit status: that of the run.
set -euo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "examples/agents/run.sh" >&2
    exit 2
}

[ $# -ge 1 ] && [ -e "examples/agents/$1.toml" ] || usage
NAME=$1
shift
RUN_DIR=
SEED=0
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --run-dir)
            [ $# -ge 2 ] || usage
            shift
            RUN_DIR=$(realpath -m "$CALLED_FROM/$1")
            [[ $1 != /* ]] || RUN_DIR=$1
            ;;
        run.seed=*) SEED=${1#run.seed=} ;;
        ?*.?*=*) OVERRIDES+=("$1") ;;
        *) usage ;;
    esac
    shift
done
RUN_DIR=${RUN_DIR:-$PWD/runs/$NAME-$(date +%Y%m%d-%H%M%S)}
TASKS=$RUN_DIR/tasks

[ -e "$RUN_DIR" ] || mkdir -p -m 700 "$RUN_DIR"
bash tools/install.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore::SyntaxWarning
export PYTHONPATH=$PWD:$PWD/examples/agents
[ -e "$TASKS/sft.jsonl" ] || .venv/bin/python examples/agents/make_inputs.py "$NAME" "$TASKS" "$SEED"

# A task with a judge: it learns from examples of its own, in a run without reinforcement learning.
if [ -e "$TASKS/judge.jsonl" ]; then
    JUDGE=$RUN_DIR/judge/hf/cold_start
    [ -e "$JUDGE" ] || .venv/bin/python -m megatron_rl.cli.main run \
        --config "examples/agents/$NAME.toml" --run-dir "$RUN_DIR/judge" "run.seed=$SEED" \
        "model.path=$TASKS/model" "prompts.0.path=$TASKS/prompts.jsonl" \
        "sft.dataset=$TASKS/judge.jsonl" sft.steps=250 train.steps=0 eval.prompts=0 \
        render.chat_template= \
        "reward.tasks.$NAME.environment=" "reward.tasks.$NAME.compare=exact"
    OVERRIDES=("expert.scorer.judge=$JUDGE" "${OVERRIDES[@]}")
fi

exec .venv/bin/python -m megatron_rl.cli.main run --config "examples/agents/$NAME.toml" \
    --run-dir "$RUN_DIR" "run.seed=$SEED" "model.path=$TASKS/model" \
    "prompts.0.path=$TASKS/prompts.jsonl" "sft.dataset=$TASKS/sft.jsonl" "${OVERRIDES[@]}"
