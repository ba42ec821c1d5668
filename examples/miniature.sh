#!/usr/bin/env bash
# The whole recipe on a tiny model, on two cores: deduplicating, grading and filtering raw data with
# planted errors; reinforcement learning in stages; a cold start from its SFT examples; the paper's
# comparison in miniature. docs/recipe.md explains the steps.
#
#   bash examples/miniature.sh [--out DIR] [--seeds N]
#
# Repeating the command with the same DIR resumes it.
set -euo pipefail
CALLED_FROM=$PWD
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
OUT=
SEEDS=3
while [ $# -gt 0 ]; do
    case $1 in
        --out | --seeds)
            [ $# -ge 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
            if [ "$1" = --out ]; then OUT=$(realpath -m "$CALLED_FROM/$2"); else SEEDS=$2; fi
            [[ $2 != /* ]] || OUT=$2
            shift
            ;;
        *)
            sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
            exit 2
            ;;
    esac
    shift
done
OUT=${OUT:-$PWD/runs/miniature-$(date +%Y%m%d-%H%M%S)}

bash tools/install.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore::SyntaxWarning
exec .venv/bin/python -m tools.miniature "$OUT" --seeds "$SEEDS"
