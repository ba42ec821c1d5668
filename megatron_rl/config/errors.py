"""Errors that the user can fix. Imported by every process."""


class InputError(ValueError):
    """Bad input; the text has the given value, the expected values and the fix."""


class ConfigError(ValueError):
    """Wrong configuration; the text has the given value and the fix."""


def printable(text: str) -> str:
    """The text with blanks for characters that could move the cursor or change colors."""
    return "".join(char if char.isprintable() else " " for char in text)


def printable_lines(text: str) -> str:
    """As `printable`, with the line breaks of the text."""
    return "\n".join(map(printable, text.split("\n")))
