"""Compares variants of a run over seeds: plans and runs them, and computes figures with errors.

Used by `megatron-rl sweep`. Every run is an ordinary run in its own process.
"""
