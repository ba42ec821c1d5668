"""`megatron-rl audit`: whether what a run recorded agrees with itself, and with its model.

Runs in the launcher; may import anything. Starts no process and changes nothing.
"""
