"""Whether a program passes its tests. Runs in grading processes of the worker pool `code`."""
