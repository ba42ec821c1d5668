"""One wording for a line of a file that cannot be read. Imported by every process."""

from pathlib import Path

from megatron_rl.config.errors import InputError


def line_error(path: Path, number: int, error: Exception, *, expected: str) -> InputError:
    """The error for line `number`, from 1, of a JSONL file. expected: what a line holds."""
    return InputError(f"{path}:{number}: {error}; expected {expected}")
