"""The trainer's side of a publish: who takes part, by which method, and what may fail.

Used by trainer ranks. May import config, protocol, weights.layout and weights.exchange.
"""
