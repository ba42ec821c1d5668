"""Starts, watches and ends the processes of a run: the command `megatron-rl`.

Runs on every node of a run, once. May import anything of ours but tools; nothing imports it.
"""
