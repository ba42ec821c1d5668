"""What all commands of `megatron-rl` are made with: groups, options, completion, progress bars.

Runs in the process of the command. Imports nothing heavy: a shell waits for completions.
"""
