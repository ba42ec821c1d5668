"""Commands for people: installation, conversion, data, benchmarks."""
