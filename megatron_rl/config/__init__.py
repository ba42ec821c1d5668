"""The configuration tree of a run, and its file format.

Every process loads it once, from the file that the launcher resolved. Imports nothing else of ours.
"""
