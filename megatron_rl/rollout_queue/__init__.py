"""The rollout queue: one CPU process between prompts, generators, verifiers and trainer ranks."""
