"""Reads prompts: files, folders, data sets of the Hub, columns, splits, checks. See docs/data.md.

Used by the rollout queue, which draws prompts, by the launcher before a run, and by commands.
"""
