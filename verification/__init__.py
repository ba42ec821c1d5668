"""The verifier: turns the text of a completion into a score."""
