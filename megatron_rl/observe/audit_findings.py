"""Findings of an audit: rules with their checks, and records that were not looked at. Pure."""

from dataclasses import dataclass, field
from math import isclose, isfinite
from typing import Any

ROUNDING = 1e-6
"""Largest difference of equal figures; large ones may differ by _RELATIVE."""
_RELATIVE = 1e-9
"""Metrics have 12 digits, and sums differ in their order."""
SHOWN = 5
"""Most examples per rule; all faults are counted."""
WHOLE = "no record is missing"
"""The rule that lost files and lines break."""


@dataclass
class Rule:
    """One rule with its checks and faults."""

    looked_at: int = 0
    broken: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Findings:
    rules: dict[str, Rule] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """Records that could not be checked, and why."""

    def check(self, rule: str, holds: bool, place: str) -> bool:
        """Count one check of a rule; place: location and found value."""
        found = self.rules.setdefault(rule, Rule())
        found.looked_at += 1
        if not holds:
            found.broken += 1
            if len(found.examples) < SHOWN:
                found.examples.append(place)
        return holds

    @property
    def is_sound(self) -> bool:
        return not self._broken

    @property
    def verdict(self) -> str:
        if self.is_sound:
            return "all rules hold"
        if self._broken == {WHOLE}:
            return "records are missing; the others agree with each other"
        return "the records contradict each other"

    @property
    def _broken(self) -> set[str]:
        return {name for name, rule in self.rules.items() if rule.broken}


def is_number(value: Any) -> bool:
    """Whether a value can be added up."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def agree(one: Any, other: Any, *, within: float = ROUNDING) -> bool:
    """Whether two values of JSON are equal, numbers up to rounding."""
    if is_number(one) and is_number(other):
        return isclose(one, other, rel_tol=_RELATIVE, abs_tol=within)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            agree(one[name], other[name], within=within) for name in one
        )
    return bool(one == other)
