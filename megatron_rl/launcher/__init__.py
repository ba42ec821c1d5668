"""Starts, watches and ends the processes of a run; runs once on every node.

May import every package of ours except tools; only the commands import it.
"""
