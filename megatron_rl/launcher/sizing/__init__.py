"""What a run will need, from sizes alone: memory, FLOPs, seconds, bytes. No torch, no device."""
