"""Runs untrusted programs behind walls and limits.

`sandbox.py` runs in a grading process. `server.py` and the modules that it needs run inside the
walls (`isolation.SERVER_MODULES`); they import nothing of ours from outside this package.
"""
