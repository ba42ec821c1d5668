"""Grades programs by their tests. Runs in grading processes of the worker pool `code`."""
