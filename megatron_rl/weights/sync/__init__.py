"""The trainer's side of a weight sync: its members, its methods and its failures.

Used by trainer ranks. May import config, protocol, weights.layout and weights.exchange.
"""
