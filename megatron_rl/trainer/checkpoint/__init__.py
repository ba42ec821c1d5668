"""Checkpoints of trainer ranks: when they are written, what they hold, and how.

May import what the trainer may.
"""
