"""Tools that make prompts and SFT examples from files: `megatron-rl data`; see docs/data.md.

Run by the launcher's command, in no process of a run. A tool a file: functions from rows to rows
and a `Report`. They may start grading processes, and import what the table in docs/architecture.md
allows.
"""
