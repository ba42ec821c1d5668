#!/usr/bin/env bash
# Checks that a configuration fits and can earn a reward, then runs it on this node or on all nodes
# of the Slurm job:
#
#   bash examples/launch.sh CONFIG.toml [--config MORE.toml ...] [--model DIR] [--prompts FILE]
#        [--run-dir DIR] [--gpu NAME] [--gpu-memory GIB] [--gpus-per-node N] [section.key=value ...]
#
# --config: more files; later files take precedence. --model: a Hugging Face folder or the name of a
# model on the Hub (model.path). --prompts: a JSONL file or a data set of the Hub (prompts.0.path);
# default: the configuration's. --run-dir: on several nodes a folder that all share.
# --gpu, --gpu-memory: of the plan (megatron-rl plan --help); default: the GPUs of this node.
# Environment:
#   HEAD_ADDRESS  address of the first node; default: its address on the route to the last node
#   CONTAINER     words before each of our commands, such as "apptainer exec --nv IMAGE"
#   SRUN_OPTIONS  of every srun, such as "--container-image=IMAGE"; all commands then run under srun
#   PYTHON        interpreter; default: that of .venv; in an image /opt/megatron-rl/bin/python
# In a Slurm job a first TERM, INT or HUP stops the run after a checkpoint; USR1 also requeues the job.
# Exit status: 0; 1 when it does not fit or a role died; 2 for bad input; 128 + signal.
set -euo pipefail

usage() {
    [ $# -eq 0 ] || echo "launch.sh: $1" >&2
    sed -n '2,18s/^# \{0,1\}//p' "$SELF" >&2
    exit 2
}

# Leaves names of the Hub unchanged.
as_path() {
    if [ -e "$1" ]; then realpath "$1"; else printf '%s\n' "$1"; fi
}

SELF=$(realpath "${BASH_SOURCE[0]}")
[ $# -ge 1 ] && [ -f "$1" ] || usage
CONFIGS=("$(realpath "$1")")
shift
RUN_DIR=
GPU=()
GPUS_PER_NODE=()
PLACES=()
OVERRIDES=()
while [ $# -gt 0 ]; do
    case $1 in
        --config | --model | --prompts | --run-dir | --gpu | --gpu-memory | --gpus-per-node)
            [ $# -ge 2 ] || usage "$1 needs a value"
            case $1 in
                --config)
                    [ -f "$2" ] || usage "no file $2"
                    CONFIGS+=("$(realpath "$2")")
                    ;;
                --model) PLACES+=("model.path=$(as_path "$2")") ;;
                --prompts) PLACES+=("prompts.0.path=$(as_path "$2")") ;;
                --run-dir) RUN_DIR=$(realpath -m "$2") ;;
                --gpu | --gpu-memory) GPU+=("$1" "$2") ;;
                --gpus-per-node) GPUS_PER_NODE=(--gpus-per-node "$2") ;;
            esac
            shift
            ;;
        ?*.?*=*) OVERRIDES+=("$1") ;;
        *) usage "unknown option $1" ;;
    esac
    shift
done
cd "$(dirname "$SELF")/.."
RUN_DIR=${RUN_DIR:-$PWD/runs/$(basename "${CONFIGS[0]}" .toml)-${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}}
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
read -ra WORDS <<<"${CONTAINER:-}"
read -ra SRUN <<<"${SRUN_OPTIONS:-}"
ROLE=("${WORDS[@]}" "$PYTHON" -m megatron_rl.cli.main)
# Only srun starts what its options ask for, such as pyxis' containers.
FIRST=()
[ ${#SRUN[@]} -eq 0 ] || FIRST=(srun --nodes=1 --ntasks=1 --relative=0 "${SRUN[@]}")
NODES=${SLURM_JOB_NUM_NODES:-1}
OVERRIDES=("${PLACES[@]}" "${OVERRIDES[@]}")
FILES=()
for file in "${CONFIGS[@]}"; do FILES+=(--config "$file"); done

cli() {
    "${FIRST[@]}" "${ROLE[@]}" "$@"
}

# On many nodes `hostname -I` begins with Docker's network or a slow one.
head_address() {
    local last
    last=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n 1)
    "${FIRST[@]}" "${WORDS[@]}" "$PYTHON" -c 'import sys
from megatron_rl.backend.environment import address_towards
from megatron_rl.config.errors import InputError
try:
    print(address_towards(sys.argv[1]))
except InputError as error:
    why = error.__cause__ or "its name leads to loopback"
    sys.stderr.write(f"launch.sh: found no way from the first node to {sys.argv[1]} ({why}): set "
                     "HEAD_ADDRESS to the address by which the other nodes reach the first one\n")
    sys.exit(2)' "$last"
}

# The first signal stops the run after a checkpoint, a second one at once. srun would pass the first
# one to every process of the job, so a file takes its place.
stop() {
    REQUEUE=$([ "$1" != USR1 ] || echo yes)
    if [ -z "$IS_STOPPING" ] && touch "$RUN_DIR/stop" 2>/dev/null; then
        IS_STOPPING=by-file
    else
        kill -TERM "$!" 2>/dev/null || true
        # The launcher of one node has had no signal so far, and only notes its first.
        if [ "$NODES" -eq 1 ] && [ "$IS_STOPPING" = by-file ]; then
            sleep 1
            kill -TERM "$!" 2>/dev/null || true
        fi
        IS_STOPPING=by-signal
    fi
}

# To be called just before the run starts: a signal before that ends the script.
catch_signals() {
    # The request of an earlier start stays for `run` and `prepare`, which see it and remove it: the
    # folder may be that of another job.
    REQUEUE= IS_STOPPING=
    for signal in TERM INT HUP USR1; do
        # shellcheck disable=SC2064
        trap "stop $signal" "$signal"
    done
}

cli plan "${CONFIGS[0]}" "${FILES[@]:2}" "${GPU[@]}" "${OVERRIDES[@]}"
if [ "$NODES" -eq 1 ]; then
    RUN=("${FILES[@]}" --run-dir "$RUN_DIR" "${OVERRIDES[@]}")
    cli run --dry-run "${RUN[@]}"
    # Without Slurm the launcher has the terminal, and its signals.
    [ -n "${SLURM_JOB_ID:-}" ] || exec "${ROLE[@]}" run "${RUN[@]}"
    catch_signals
    "${FIRST[@]}" "${ROLE[@]}" run "${RUN[@]}" &
else
    HEAD_ADDRESS=${HEAD_ADDRESS:-$(head_address)}
    PREPARE=(prepare "${FILES[@]}" --run-dir "$RUN_DIR" --nodes "$NODES" "${GPUS_PER_NODE[@]}"
        "ports.host=$HEAD_ADDRESS" "${OVERRIDES[@]}")
    cli "${PREPARE[@]}" --dry-run
    cli "${PREPARE[@]}"
    # One task per node, on all its cores, runs the roles of the node. The launchers of the other
    # nodes decide whether the run can wait for a lost node, and end by themselves if it cannot. A
    # launcher that was killed starts again after 5 s of silence. The first node's needs `prepare`.
    catch_signals
    # shellcheck disable=SC2016  # the variables are those of each task
    srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --no-kill --wait=0 "${SRUN[@]}" bash -c '
        trap : TERM INT HUP
        while true; do
            "$@" --node "$SLURM_NODEID" --nodes "$SLURM_NNODES"
            status=$?
            [ "$status" -eq 137 ] && [ "$SLURM_NODEID" -gt 0 ] || exit "$status"
            sleep 6
        done' task "${ROLE[@]}" node "$RUN_DIR" "${GPUS_PER_NODE[@]}" &
fi
while true; do
    # A signal ends `wait`, but not the process.
    wait "$!" || true
    kill -0 "$!" 2>/dev/null || break
    # A launcher that starts removes an earlier request, so this one is repeated.
    while [ -n "$IS_STOPPING" ] && kill -0 "$!" 2>/dev/null; do
        touch "$RUN_DIR/stop" 2>/dev/null || true
        sleep 1
    done
done
# Of the process, which may have ended while a signal was handled.
status=0
wait "$!" || status=$?
# 143: the run was stopped, and neither ended nor failed.
if [ -n "$REQUEUE" ] && [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
