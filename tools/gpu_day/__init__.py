"""Runs the checks of docs/gpu-evidence.md on a node with GPUs: `python -m tools.gpu_day`."""
