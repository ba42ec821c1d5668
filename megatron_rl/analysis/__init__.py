"""Analyses a trained model: its path through weight space, and its reward against length.

Used by `megatron-rl analyse`. May import config, protocol, weights.layout and weights.folders.
"""
