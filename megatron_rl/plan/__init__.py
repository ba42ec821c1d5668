"""What a run will need, from sizes alone: memory, FLOPs, seconds, bytes. No torch, no device.

Run by `megatron-rl plan`, before anything is started.
"""
