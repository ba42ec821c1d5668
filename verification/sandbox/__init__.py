"""Runs untrusted programs behind walls and limits."""
