#!/usr/bin/env bash
#SBATCH --job-name=magistral-24b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
#SBATCH --output=%x-%j.log
# Magistral Small (24B; the text model of Mistral-Small-3.1-24B) on 16 nodes of 8 H100. Submit it
# from the root of the repository, which all nodes must see:
#
#   sbatch examples/magistral_24b.sh --model DIR --prompts FILE --run-dir DIR [section.key=value ...]
#
# Nodes 0 to 4 train, nodes 5 to 15 run 44 engines of 2 GPUs each; see docs/simulator.md.
set -euo pipefail
# Slurm runs a copy of this file in another folder.
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
exec bash examples/launch.sh examples/magistral_24b.toml "$@"
