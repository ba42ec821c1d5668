"""Errors that the user can fix. Imported by every process."""


class InputError(ValueError):
    """Bad input; the text has the given value, the expected values and the fix."""


class ConfigError(ValueError):
    """Wrong configuration; the text has the given value and the fix."""
