"""Runs untrusted programs in isolation and under limits.

`sandbox.py` runs in a grading process. `isolation.SERVER_MODULES` run inside the sandbox; they
import nothing of ours from outside this package.
"""
