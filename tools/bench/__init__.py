"""Benchmarks that put this project beside others; run by hand, never by a run."""
