"""Prompts of data sets: files of several formats, their columns, rows to keep, the Hub.

Used by the rollout queue at start, and by the launcher, which must see the same prompts.
"""
