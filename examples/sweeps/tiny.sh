#!/usr/bin/env bash
# A sweep of the tiny example on this machine's CPU; all runs share one cold start:
#
#   bash examples/sweeps/tiny.sh examples/sweeps/FILE.toml [--report | --dry-run]
#        [--sweep-dir DIR] [section.key=value ...]
#
# The first call makes the model of 1.3M parameters, its tasks and its cold start in
# runs/sweep-start; for sweeps on tiny_skills.toml also a run that gives SFT examples. A run takes
# one to five minutes. Repeating the command resumes an interrupted sweep. Exit status: 0; 1 when a
# run failed; 2 for bad input; 128 + signal.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -ge 1 ] && [ -f "$1" ] || { sed -n '2,10s/^# \{0,1\}//p' examples/sweeps/tiny.sh >&2; exit 2; }

START=$PWD/runs/sweep-start
bash tools/install.sh
PYTHON=.venv/bin/python
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The first import of a dependency prints a SyntaxWarning.
export PYTHONWARNINGS=ignore::SyntaxWarning

cli() { "$PYTHON" -m megatron_rl.cli.main "$@"; }

# The sorting task, and a cold start with about half its answers right.
start_of_tiny() {
    local tasks=$START/tasks
    [ -e "$START/model" ] || "$PYTHON" -m tools.make_tiny_model "$START/model" --seed 0
    # The SFT examples are written last.
    [ -e "$tasks/sft.jsonl" ] ||
        "$PYTHON" -m tools.make_tasks sort "$tasks" --seed 0 --sft-examples 500 --wrong-share 0.6
    [ -e "$START/cold_start/summary.json" ] ||
        cli run --config examples/tiny.toml --run-dir "$START/cold_start" \
            "model.path=$START/model" "sft.dataset=$tasks/sft.jsonl" \
            "prompts.0.path=$tasks/prompts.jsonl" train.steps=0 eval.prompts=0
}

# The same, programs and instructions; and SFT examples of a model that was trained on from there.
start_of_skills() {
    local skills=$START/skills config=examples/tiny_skills.toml
    [ -e "$START/model_with_programs" ] ||
        "$PYTHON" -m tools.make_tiny_model "$START/model_with_programs" --seed 0 --programs
    # Written last.
    [ -e "$skills/instruction_examples.jsonl" ] || "$PYTHON" -m tools.make_skills "$skills" --seed 0
    [ -e "$START/skills_start/summary.json" ] ||
        cli run --config "$config" --run-dir "$START/skills_start" \
            "model.path=$START/model_with_programs" "sft.dataset=$skills/sft.jsonl" \
            sft.steps=300 train.steps=0
    [ -e "$START/skills_teacher/summary.json" ] ||
        cli run --config "$config" --run-dir "$START/skills_teacher" run.seed=100 sft.steps=0 \
            "model.path=$START/skills_start/hf/cold_start" prompts.1.weight=0 train.steps=32
    [ -e "$skills/mined.jsonl" ] ||
        cli data sft "$START/skills_teacher" --out "$skills/mined.jsonl" --first-step 16 \
            --instructions "$skills/instruction_examples.jsonl" --batch-size 32
}

if grep -q '^base = .*tiny_skills' "$1"; then
    start_of_skills
    exec "$PYTHON" -m megatron_rl.cli.main sweep "$@" \
        "model.path=$START/skills_start/hf/cold_start"
fi
start_of_tiny
exec "$PYTHON" -m megatron_rl.cli.main sweep "$@" \
    "model.path=$START/cold_start/hf/cold_start" sft.steps=0 \
    "prompts.0.path=$START/tasks/prompts.jsonl"
