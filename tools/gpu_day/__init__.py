"""Runs the checks of docs/gpu-evidence.md on a host with GPUs: `python -m tools.gpu_day`."""
