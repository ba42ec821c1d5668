"""`megatron-rl data`: tools on files of prompts and SFT examples; the work is in
`megatron_rl/data/`.

One file a group of tools, each with an `app`; `command.py` has the table. May import anything.
"""
