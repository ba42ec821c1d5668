"""The policy on a trainer rank: built, fed with packed sequences, asked for logprobs.

May import what the trainer may, but no other part of the trainer.
"""
