"""Errors that the user can fix. Imported by every process."""


class InputError(ValueError):
    """Bad input; the text has the given value, the expected values and the fix."""


class ConfigError(ValueError):
    """Wrong configuration; the text has the given value and the fix."""


def printable_lines(text: str) -> str:
    """The lines of a text that may quote a file, with blanks for what could control a terminal."""
    lines = text.split("\n")
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)
