"""Killable grading processes, and which of them grades what."""
