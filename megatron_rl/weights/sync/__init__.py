"""The trainer's side of a weight sync: its members, its methods and its failures.

Used by trainer ranks, and by the launcher, which asks `relays.py` for each generator's source. May
import config, protocol, weights.layout and weights.exchange.
"""
