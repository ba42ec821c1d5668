"""`megatron-rl eval`: evaluates model folders without a trainer, and compares two evaluations.

Runs in the launcher's process. May import any of our packages.
"""
