"""Settings of verl, TRL, prime-rl and slime: their files and keys. Used by `importing.py`."""
