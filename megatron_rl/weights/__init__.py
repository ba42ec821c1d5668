"""Weights: where they lie, in which folders, and how they reach the generators.

Each folder in here says who uses it and what it may import.
"""
