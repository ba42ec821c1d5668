"""`megatron-rl eval`: evaluates model folders without a trainer, and compares two evaluations.

Used by the launcher. May import anything of ours.
"""
