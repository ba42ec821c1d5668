"""Figures of evaluations as pure functions: accuracy, pass@k, maj@k, errors, comparisons.

Used by the rollout queue and the launcher. May import config, protocol and algorithms.
"""
