"""Text that models, or programs that they wrote, may have had a hand in, made fit for a terminal.

Used by the launcher.
"""


def printable(text: str) -> str:
    """The text with a blank for each character that could move the cursor or change colors."""
    return "".join(char if char.isprintable() else " " for char in text)
