"""Parts of all commands of `megatron-rl`: groups, options, completion, progress bars.

Runs in the process of the command. Imports nothing heavy, because a shell waits for completions.
"""
