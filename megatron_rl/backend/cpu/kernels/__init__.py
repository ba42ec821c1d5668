"""Loops in C++ for the CPU, where torch has none as fast. Runs in trainer ranks and engine ranks.

Each source is compiled once a machine and loaded by ctypes. May import nothing of ours.
"""
