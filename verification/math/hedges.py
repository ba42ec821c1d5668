"""Words that take back or blur what an answer says.

Pure string code; runs in the verifier and its grading processes.
"""

import re

_PHRASE = re.compile(
    r"(?<![\\A-Za-z])(?P<word>approximately|approx|roughly|nearly|almost|circa|maybe|perhaps"
    r"|possibly|probably|likely|presumably|guess|unsure|uncertain|more|less|fewer|at least"
    r"|at most|not|never|cannot|except|other than|anything but|or so|ish|wrong|incorrect)"
    r"(?![A-Za-z])"
    r"|(?P<negation>[A-Za-z]n't)(?![A-Za-z])"
    r"|(?<![\\A-Za-z])(?P<relation>over|under|above|below|beyond|around|about|between|up to"
    r"|within)[ }]{1,3}[$\\(-]{0,3}[0-9.]",
    re.IGNORECASE,
)
HEDGES = frozenset(
    "more less fewer remaining left so approximately approx about ish maybe perhaps possibly "
    "probably likely roughly nearly almost around circa guess plus minus at most least many few "
    "too lower higher longer shorter taller older younger greater smaller bigger larger faster "
    "slower extra additional below above under over beyond short wrong incorrect ago within "
    "between except unless because since as false true yes neither either max "
    "maximum minimum tops past upward upwards downward downwards".split()
)
"""Words that make a text behind a number something else than a unit."""


def hedges_in(text: str) -> frozenset[str]:
    """The words of doubt, denial and estimation in a normalised text."""
    return frozenset(
        (match["word"] or match["negation"] or match["relation"]).lower()
        for match in _PHRASE.finditer(text)
    )
