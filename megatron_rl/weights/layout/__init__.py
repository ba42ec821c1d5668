"""Which part of a Hugging Face tensor lies where, on trainer ranks and on engine ranks.

Used by trainer ranks, engine ranks, conversions and the launcher. May import config alone.
"""
