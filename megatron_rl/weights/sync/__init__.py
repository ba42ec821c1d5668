"""The trainer's side of a weight sync: who takes part, by which method, and what may fail.

Used by trainer ranks; by the launcher, which asks `relays.py` who would serve whom. May import
config, protocol, weights.layout and weights.exchange.
"""
