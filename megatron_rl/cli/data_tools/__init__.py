"""`megatron-rl data`: tools on files of prompts and SFT examples; `megatron_rl/curation/` does the
work.

One file per group of tools, each with an `app`; `cli/data.py` has the table. May import anything.
"""
