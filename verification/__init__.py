"""The verifier: turns the text of a completion into a score.

One process per host, and the grading processes of its fork server. May import config and
protocol; loads no torch.
"""
