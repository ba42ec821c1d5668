"""Metrics for others to read: what each means, and TensorBoard, Weights & Biases and Prometheus.

A run starts `exporter.py` as a process when `[metrics]` asks for it; `megatron-rl metrics export`
does the same with a finished run. May import config and protocol.
"""
