"""Generators: an engine that samples completions, fed by the queue and updated by the trainer."""
