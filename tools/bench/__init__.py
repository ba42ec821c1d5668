"""Benchmarks of this project and its peers; run by hand, in no process of a run."""
