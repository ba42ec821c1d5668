"""Settings of verl, TRL and prime-rl: reading them, and their keys. Used by `importing.py`."""
