"""Checks of the options of data tools: InputError says which, and what was expected."""

from megatron_rl.config.errors import InputError


def check_share(name: str, value: float, *, low: float = 0.0, high: float = 1.0) -> None:
    """Raise InputError unless low <= value <= high; NaN is refused too."""
    if not low <= value <= high:
        raise InputError(f"{name}={value:g}: expected a share from {low:g} to {high:g}")


def check_at_least(name: str, value: float, low: float) -> None:
    """Raise InputError unless value >= low."""
    if not value >= low:
        raise InputError(f"{name}={value:g}: expected at least {low:g}")
