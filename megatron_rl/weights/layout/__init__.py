"""Maps parts of Hugging Face tensors to parameters of trainer ranks and engine ranks.

Used by trainer ranks, engine ranks, conversions and the launcher. May import config alone.
"""
