#!/usr/bin/env bash
#SBATCH --job-name=magistral-stages
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --output=%x-%j.log
# The staged schedule of the paper for a 24B model on 16 nodes of 8 H100 (docs/stages.md). Submit it
# from the root of the repository, which all nodes must see:
#
#   sbatch examples/magistral_stages.sh --model DIR --prompts FILE --run-dir DIR [section.key=value ...]
#
# Nodes 0 to 4 train, nodes 5 to 15 run 44 engines of 2 GPUs each; see docs/simulator.md.
set -euo pipefail
# Slurm runs a copy of this file in another folder.
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
exec bash examples/launch.sh examples/magistral_stages.toml "$@"
