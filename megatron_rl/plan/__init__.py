"""Predicts memory, FLOPs, seconds and bytes of a run from its sizes. No torch, no device.

Run by `megatron-rl plan`, before anything starts.
"""
