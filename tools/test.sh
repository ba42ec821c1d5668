#!/usr/bin/env bash
# Runs the checks:  bash tools/test.sh [pytest arguments]
#
# Without arguments: installs if needed, lints, and runs every test that needs no GPU and is not
# `exhaustive` (hostile programs as every user, all of HumanEval, every layout and fault of a
# weight sync), file by file on as many cores as there are, up to four. `--share 0.02` alone adds 2 %
# of the exhaustive ones (of the slow ones by their seconds) to the same run. Other arguments go to
# pytest (and skip the lint), e.g. `bash tools/test.sh tests/tools -k convert`, `-m gpu` or
# `-m exhaustive`.
# MEGATRON_RL_MODE=cpu or gpu changes the mode of the installation.
# Matrices are sampled by the commit; the first lines show the option to repeat a sample.
#
# Tests share the cores of the machine with other tests. If at most two fail, they run once more,
# alone, and the last line names those that passed then. A test that fails alone too has failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/install.sh ${MEGATRON_RL_MODE:+"$MEGATRON_RL_MODE"}

export TOKENIZERS_PARALLELISM=false
if [ "$(cat .venv/.mode)" = cpu ]; then
    # Several processes share the cores: one thread each is faster than any other count.
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
    # Megatron-Core's fusions are torch.compile, which costs minutes on CPU.
    export TORCHDYNAMO_DISABLE=1
else
    # SGLang and FlashInfer call ninja by name when they compile a kernel.
    export PATH=$PWD/.venv/bin:$PATH
fi
# Tests must not use a hub.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
export PYTHONUNBUFFERED=1

lint=0 most_again=0
[ $# -gt 0 ] || set -- --share 0
if [ $# -eq 2 ] && [ "$1" = --share ]; then
    # Files in the order of tests/conftest.py: the longest come first.
    set -- "$@" -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --cache-clear
    most_again=2
    .venv/bin/ruff check --quiet --output-format concise . && .venv/bin/ruff format --quiet --check . || lint=$?
    [ "$lint" -eq 0 ] || echo "[test] lint failed: run .venv/bin/ruff check --fix . and .venv/bin/ruff format ." >&2
fi
run() { .venv/bin/python -m pytest --durations=20 --durations-min=1 -ra "$@"; }
status=0
run "$@" || status=$?
if [ "$status" -eq 1 ] && [ "$most_again" -gt 0 ]; then
    mapfile -t again < \
        <(.venv/bin/python -c 'import json; print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")')
    if [ "${#again[@]}" -gt 0 ] && [ "${#again[@]}" -le "$most_again" ]; then
        echo "[test] again, alone: ${again[*]}"
        # The later of two options holds.
        run "${@/#--cache-clear/--last-failed}" -n 0 && status=0 && echo "[test] passed only alone: ${again[*]}"
    fi
fi
[ "$lint" -eq 0 ] || echo "[test] lint failed: see above" >&2
[ "$status" -ne 0 ] || status=$lint
exit "$status"
