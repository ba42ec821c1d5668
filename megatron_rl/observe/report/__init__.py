"""`megatron-rl report`: one self-contained HTML file about one run or several.

Runs in the launcher.
"""
