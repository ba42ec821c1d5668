"""The binomial tree in which generators of one copy of the model pass weights on. Pure.

    copy ── 1 ── 3 ── 7
     │      └─── 5
     ├───── 2 ── 6
     └───── 4

Place n gets its weights from the place that is n without its highest bit. Where each place serves
its own one after the other, in their order, those that hold a version double with every transfer:
place n has it after `turns_before(n)` of them, where the copy alone would need n.
"""


def source_of(place: int) -> int:
    """The place that serves this one (from 1 on); 0 is the copy."""
    return place - (1 << (place.bit_length() - 1))


def turns_before(place: int) -> int:
    """Transfers, one after the other, after which the place has a version."""
    return place.bit_length()


def turns_busy(place: int, places: int) -> int:
    """Transfers after which the place has also passed the version on, among so many places."""
    own = turns_before(place)
    later = range(own, places.bit_length())
    return max((turn + 1 for turn in later if place + (1 << turn) <= places), default=own)
