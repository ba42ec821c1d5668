"""Errors that a person can fix. Imported by every process."""


class InputError(ValueError):
    """Bad input: the text says what was given, what was expected and what to do."""


class ConfigError(ValueError):
    """The configuration is wrong; the text says what was given and what to do."""
