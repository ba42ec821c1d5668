"""The verifier: turns the text of a completion into a score.

One process a host, and the grading processes that its fork server makes. May import config and
protocol; loads no torch.
"""
