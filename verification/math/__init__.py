"""Whether two answers are the same mathematics. Runs in verifiers and grading processes."""
