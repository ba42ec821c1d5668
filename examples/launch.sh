#!/usr/bin/env bash
# Checks that a configuration fits and can earn a reward, then runs it on this host or on all nodes of the Slurm job:
#
#   bash examples/launch.sh CONFIG.toml --model DIR --prompts FILE [--run-dir DIR]
#        [--gpu h100-80g] [--gpus-per-node N] [section.key=value ...]
#
# --model: a Hugging Face folder, or the name of a model on the Hub; --prompts: JSONL (README.md); --run-dir: on several nodes on a file
# system that all share. --gpu: what the plan is made for (megatron-rl plan --help). HEAD_ADDRESS:
# address of the first node in the network of the job, if `hostname -I` does not name it first.
# Exit status: 0; 1 when it does not fit or a role died; 2 for bad input; 128 + signal.
set -euo pipefail

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "$SELF" >&2
    exit 2
}

SELF=$(realpath "${BASH_SOURCE[0]}")
[ $# -ge 1 ] && [ -f "$1" ] || usage
CONFIG=$(realpath "$1")
shift
MODEL=
PROMPTS=
RUN_DIR=
GPU=h100-80g
GPUS_PER_NODE=()
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --model | --prompts | --run-dir | --gpu | --gpus-per-node)
            [ $# -ge 2 ] || usage
            case $1 in
                --model) if [ -e "$2" ]; then MODEL=$(realpath "$2"); else MODEL=$2; fi ;;
                --prompts) PROMPTS=$(realpath -m "$2") ;;
                --run-dir) RUN_DIR=$(realpath -m "$2") ;;
                --gpu) GPU=$2 ;;
                --gpus-per-node) GPUS_PER_NODE=(--gpus-per-host "$2") ;;
            esac
            shift
            ;;
        ?*.?*=*) OVERRIDES+=("$1") ;;
        *) usage ;;
    esac
    shift
done
[ -n "$MODEL" ] && [ -n "$PROMPTS" ] || usage
cd "$(dirname "$SELF")/.."
RUN_DIR=${RUN_DIR:-$PWD/runs/$(basename "$CONFIG" .toml)-$(date +%Y%m%d-%H%M%S)}
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
OVERRIDES=("model.path=$MODEL" "prompts.0.path=$PROMPTS" "${OVERRIDES[@]}")

cli() {
    "$PYTHON" -m megatron_rl.launcher.cli "$@"
}

cli plan "$CONFIG" --gpu "$GPU" "${OVERRIDES[@]}"
cli run --dry-run --config "$CONFIG" --run-dir "$RUN_DIR" "${OVERRIDES[@]}"
if [ "${SLURM_JOB_NUM_NODES:-1}" -eq 1 ]; then
    exec "$PYTHON" -m megatron_rl.launcher.cli run --config "$CONFIG" --run-dir "$RUN_DIR" "${OVERRIDES[@]}"
fi

HEAD_ADDRESS=${HEAD_ADDRESS:-$(hostname -I | awk '{print $1}')}
cli prepare --config "$CONFIG" --run-dir "$RUN_DIR" "ports.host=$HEAD_ADDRESS" "${OVERRIDES[@]}"
# One task a node, on all of its cores; it runs the roles of its node. One that fails ends all.
# shellcheck disable=SC2016  # the variables are those of each task
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 bash -c \
    'exec "$@" --host "$SLURM_NODEID" --hosts "$SLURM_NNODES"' task \
    "$PYTHON" -m megatron_rl.launcher.cli host "$RUN_DIR" "${GPUS_PER_NODE[@]}"
cli report "$RUN_DIR"
