"""Generators: an engine that samples completions, fed by the queue, updated by the trainer.

One process a replica. May import config, protocol, weights.layout and weights.exchange.
"""
