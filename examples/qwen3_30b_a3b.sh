#!/usr/bin/env bash
#SBATCH --job-name=qwen3-30b-a3b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --output=%x-%j.log
# Qwen3-30B-A3B (a mixture of 128 experts) on 4 nodes of 8 H100. Submit it from the root of the
# repository, which all nodes must see:
#
#   sbatch examples/qwen3_30b_a3b.sh --model DIR --prompts FILE --run-dir DIR [section.key=value ...]
#
# Node 0 trains, each of 8 ranks with 16 experts of every layer; nodes 1 to 3 run 12 engines of 2
# GPUs each; see docs/simulator.md.
set -euo pipefail
# Slurm runs a copy of this file in another folder.
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
exec bash examples/launch.sh examples/qwen3_30b_a3b.toml "$@"
