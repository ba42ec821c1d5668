"""Tools that make prompts and SFT examples from files: `megatron-rl data`; see docs/data.md.

No process of a run imports this. Each tool is one file: a function from rows to rows and a Report.
"""
