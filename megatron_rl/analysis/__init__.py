"""What training did to a model: its path through weight space, and reward against length.

Used by `megatron-rl analyse`. May import config, protocol, weights.layout and weights.folders.
"""
