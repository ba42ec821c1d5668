"""Killable grading processes, and which grades what. Run by the verifier and its fork server."""
