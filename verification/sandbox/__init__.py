"""Runs untrusted programs behind walls and limits.

`sandbox.py` runs in a grading process; `server.py`, `confinement.py`, and `call_proxy.py` with what
tests and solution need beside it, run inside the walls: these import nothing of ours.
"""
