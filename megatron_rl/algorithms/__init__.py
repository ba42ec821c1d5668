"""Objectives, as pure functions; one part a file.

The rollout queue computes advantage estimator, normalization and aggregation; trainer ranks
shaping, policy loss, correction, KL and entropy. `objective.py` puts the latter together. May
import config alone, and torch for types only: the launcher looks names up, and does without.
"""
