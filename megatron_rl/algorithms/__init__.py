"""Objectives, as pure functions.

Advantages are computed by the rollout queue, losses by trainer ranks. May import config alone.
"""
