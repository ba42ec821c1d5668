#!/usr/bin/env bash
#SBATCH --job-name=magistral-medium-like
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --output=%x-%j.log
# A dense model of 123B (Mistral Large 2's shape), only RL, on 64 nodes of 8 H100. Submit it
# from the root of the repository, which all nodes must see:
#
#   sbatch examples/magistral_medium_like.sh --model DIR --prompts FILE --run-dir DIR [section.key=value ...]
#
# Nodes 0 to 31 train, nodes 32 to 63 run 32 engines of 8 GPUs each; see docs/nodes.md.
set -euo pipefail
# Slurm runs a copy of this file in another folder.
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
exec bash examples/launch.sh examples/magistral_medium_like.toml "$@"
