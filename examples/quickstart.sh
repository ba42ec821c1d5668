#!/usr/bin/env bash
# Installs, makes a model and tasks, then trains, evaluates and exports on this machine's CPU:
#
#   bash examples/quickstart.sh [--tiny] [--sft-baseline] [--run-dir DIR] [section.key=value ...]
#
# Without --tiny: SmolLM2-135M-Instruct on sums, 10 to 15 minutes. With --tiny: a model of 1.3M
# parameters on sorting digits, about 2 minutes. --sft-baseline also continues the cold start with
# the compute of reinforcement learning, and evaluates it, which takes half as long again. Overrides
# go to the run, for example run.seed=1 or train.steps=10. Repeating the command with the same
# --run-dir resumes an interrupted run. Exit status: that of the run; 2 when it has ended.
set -euo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    sed -n '2,11s/^# \{0,1\}//p' "examples/quickstart.sh" >&2
    exit 2
}

EXAMPLE=quickstart
RUN_DIR=
SEED=0
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --tiny) EXAMPLE=tiny ;;
        --sft-baseline) OVERRIDES+=(sft.baseline=true) ;;
        --run-dir)
            [ $# -ge 2 ] || usage
            shift
            RUN_DIR=$(realpath -m "$CALLED_FROM/$1")
            [[ $1 != /* ]] || RUN_DIR=$1
            ;;
        run.seed=*)
            SEED=${1#run.seed=}
            [[ $SEED =~ ^[0-9]+$ ]] || { echo "quickstart: run.seed=$SEED is not a number" >&2; exit 2; }
            ;;
        ?*.?*=*) OVERRIDES+=("$1") ;;
        *) usage ;;
    esac
    shift
done
RUN_DIR=${RUN_DIR:-$PWD/runs/$EXAMPLE-$(date +%Y%m%d-%H%M%S)}
TASKS=$RUN_DIR/tasks
if [ -e "$RUN_DIR" ] && [ -n "$(ls -A "$RUN_DIR")" ] && [ ! -e "$TASKS" ] &&
    [ ! -e "$RUN_DIR/start_model" ]; then
    echo "quickstart: $RUN_DIR holds other files: name another folder with --run-dir DIR" >&2
    exit 2
fi

# As the run makes its folder: closed to other users.
[ -e "$RUN_DIR" ] || mkdir -p -m 700 "$RUN_DIR"
bash tools/install.sh
PYTHON=.venv/bin/python
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The first import of a dependency prints a SyntaxWarning.
export PYTHONWARNINGS=ignore::SyntaxWarning

# Keeps the model and tasks of an earlier call, because its run resumes with them.
has_tasks() { [ -e "$TASKS/sft.jsonl" ]; } # written last
if [ "$EXAMPLE" = tiny ]; then
    MODEL=$RUN_DIR/start_model
    [ -e "$MODEL" ] || "$PYTHON" -m tools.make_tiny_model "$MODEL" --seed "$SEED"
    has_tasks || "$PYTHON" -m tools.make_tasks sort "$TASKS" --seed "$SEED" --sft-examples 500 --wrong-share 0.6
else
    # Padded with heads of zeros, because 2 tensor-parallel ranks do not divide 9 heads.
    MODEL=$PWD/.cache/smollm2-135m-instruct-tp2
    "$PYTHON" -m tools.convert_smollm2 "$PWD/.cache/smollm2-135m-instruct"
    "$PYTHON" -m tools.pad_heads "$PWD/.cache/smollm2-135m-instruct" "$MODEL" --multiple 2
    # A processor without instructions for bfloat16 takes ten times as long with it.
    if [ "$(cat .venv/.mode)" = cpu ] && ! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo &&
        [[ " ${OVERRIDES[*]} " != *" model.dtype="* ]]; then
        OVERRIDES+=(model.dtype=float32)
    fi
    has_tasks || "$PYTHON" -m tools.make_tasks chain_sum "$TASKS" --seed "$SEED" --terms 3 3 --digits 1 1 \
        --template "{question}" --compact --train 800 --held-out 512 --sft-examples 1200 \
        --wrong-share 0.75 --mistake drop_last
fi

exec "$PYTHON" -m megatron_rl.cli.main run --config "examples/$EXAMPLE.toml" --run-dir "$RUN_DIR" \
    "run.seed=$SEED" "model.path=$MODEL" "prompts.0.path=$TASKS/prompts.jsonl" \
    "sft.dataset=$TASKS/sft.jsonl" "${OVERRIDES[@]}"
