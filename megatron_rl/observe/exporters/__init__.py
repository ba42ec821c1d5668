"""Metrics for others to read: what each means, and TensorBoard, Weights & Biases and Prometheus.

`worker.py` is a process that a run starts when `[metrics]` asks for one; `megatron-rl metrics` uses
the same on a finished run. May import config and protocol.
"""
