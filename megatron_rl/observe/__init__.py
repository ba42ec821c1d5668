"""What a run says of itself: metrics table, summary, run state, report, viewer, audit, exporters.

Used by the launcher and by commands that read a run folder. Nothing here starts a process.
"""
