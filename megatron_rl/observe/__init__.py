"""Reads and shows a run: metrics table, summary, state, report, viewer, audit, exporters.

Used by the launcher and by commands that read a run folder. Starts no process.
"""
