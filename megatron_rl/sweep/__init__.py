"""Compares variants of a run over seeds: which runs, running them, figures and their errors.

Run by `megatron-rl sweep`. Every run is an ordinary one, in a process of its own.
"""
