"""Pools of killable grading processes. Run by the verifier and its fork server."""
