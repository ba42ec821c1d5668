"""The rollout queue: one process on a CPU between prompts, generators, verifiers, trainer ranks.

May import config, protocol and algorithms; loads no torch.
"""
