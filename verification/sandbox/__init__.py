"""Runs untrusted programs behind walls and limits.

`sandbox.py` runs in a grading process, `server.py`, `confinement.py` and `call_proxy.py` inside the
walls: these import nothing of ours.
"""
