"""What computing a value may cost, and the ways in which it ends without one."""

# Costs a second or two: functions of 100,000 bits cost about 25 ms each.
MAX_WORK = 5_000_000


class Undefined(ArithmeticError):
    """The expression has no value there, such as a division by zero."""


class Unbounded(ArithmeticError):
    """The value is too large, or costs too much, to compute with."""


class Exhausted(Unbounded):
    """The comparison has had all the time it may take."""


class Unsure(ArithmeticError):
    """More bits are needed to tell on which side of a jump a value lies."""


class Work:
    """What is left of the time that one comparison may take."""

    def __init__(self, units: int = MAX_WORK) -> None:
        self._left = units

    def spend(self, units: int) -> None:
        """Take units away. Exhausted when none are left."""
        self._left -= units
        if self._left < 0:
            raise Exhausted
