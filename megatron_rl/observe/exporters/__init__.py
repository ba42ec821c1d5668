"""Exports metrics to TensorBoard, Weights & Biases and Prometheus.

A run starts `exporter.py` as a process if `[metrics]` asks for it; `megatron-rl metrics export`
exports a finished run. May import config and protocol.
"""
