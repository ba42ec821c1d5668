"""Trainer ranks: the loop, an optimizer step, batches from the queue, the guard of updates.

Run by torchrun. May import config, protocol, algorithms, backend and weights.
"""
