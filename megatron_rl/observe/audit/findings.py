"""What an audit found: how often each rule was looked at, and where it does not hold."""

from dataclasses import dataclass, field

SHOWN = 5
"""Faults of a rule that are kept; all are counted."""


@dataclass
class Rule:
    """One thing that has to hold."""

    looked_at: int = 0
    broken: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """All rules of an audit."""

    rules: dict[str, Rule] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""

    def check(self, rule: str, holds: bool, place: str) -> bool:
        """Count one look at a rule; place: where, and what was seen instead."""
        found = self.rules.setdefault(rule, Rule())
        found.looked_at += 1
        if not holds:
            found.broken += 1
            if len(found.examples) < SHOWN:
                found.examples.append(place)
        return holds

    @property
    def is_sound(self) -> bool:
        """Whether every rule held wherever it was looked at."""
        return not any(rule.broken for rule in self.rules.values())
