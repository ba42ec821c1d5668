r"""The domain behind a formula: `3n-1, n \ge 2`, `2n+1 \text{ where } n \text{ is an integer}`.

Pure string code on raw texts; runs in the verifier and its grading processes. Two texts lose their
domains only where both state the same one: equal formulas on different domains are different.
"""

import re
from typing import NamedTuple

from verification.math.phrasing import bare_words

_MAY_STATE = re.compile(
    r"(?:where|for|with)(?![a-z])|an integer"
    r"|[,(] ?[A-Za-z] ?(?:\\(?:geq?|leq?|neq?|in)(?![a-z])|[<>=!≥≤≠∈])"
)
_FORMULA = re.compile(
    r"(?P<formula>[^,;<>≤≥∈]{1,300}?)"
    r"(?:, ?(?:(?:for|where|with) )?| (?:for|where|with) "
    r"|(?P<open> ?\( ?(?=[A-Za-z] ?[\\<>=!≥≤≠∈]|[A-Za-z] (?:is )?(?:an? |any ))))"
    r"(?P<all>(?:all|any|every|each) )?(?P<tail>.{1,200})",
    re.DOTALL,
)
# The formula states one thing.
_STATES_MORE = re.compile(r"\\(?:geq?|leq?|neq?|in|pm)(?![a-z])|(?<![a-z])(?:or|and|not)(?![a-z])")
_SIGN = r"\\(?:geq?|leq?|neq?)(?![a-z])|[<>!]=|[<>≥≤≠]"
_NAME = r"(?P<name>[A-Za-z])"
_BOUND = re.compile(rf"{_NAME} ?(?P<sign>{_SIGN}) ?(?P<number>-?[0-9]{{1,9}})")
_MEMBER = re.compile(
    rf"{_NAME} ?(?:\\in(?![a-z])|∈) ?"
    r"(?:\\(?:mathbb|Bbb) ?\{? ?(?P<letter>[NZQR]) ?\}?|(?P<sign>[ℕℤℚℝ]))"
    r"(?: ?(?:\^ ?\{? ?(?P<power>[+-]) ?\}?|(?P<raised>[⁺⁻])"
    r"|(?P<index>_ ?\{? ?(?P<below>>|<|\\geq?|≥)? ?0 ?\}?)))?"
)
_WORDS = r"(?P<words>(?:[a-z-]{4,11} ){0,2}(?:integer|number|constant)s?)"
_IS = re.compile(rf"{_NAME} (?:(?:is|being) (?:an? |any |some )?|an? |any |some ){_WORDS}")
_OF = re.compile(
    rf"(?:an? |any |some )?{_WORDS} {_NAME}(?: ?(?P<sign>{_SIGN}) ?(?P<number>-?[0-9]{{1,9}}))?",
    re.IGNORECASE,
)
_COUNTED = re.compile(
    rf"{_NAME} ?= ?(?P<first>[0-9]{{1,3}}), ?(?P<second>[0-9]{{1,3}})"
    r"(?:, ?(?P<third>[0-9]{1,3}))?, ?(?:\\[lc]?dots|\.\.\.|…)"
)
_PERIOD = re.compile(r"\\(?:pi|circ|deg)|[°π]")
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_COUNTERS = frozenset("nmk")
_FIXED = "v"
"""A letter that no comparison takes for any integer."""
_AND = re.compile(r" ?, ?(?:and )?| and ")
_SIGNS = {
    "\\ge": ">=", "\\geq": ">=", "≥": ">=", "\\le": "<=", "\\leq": "<=", "≤": "<=",
    "\\ne": "!=", "\\neq": "!=", "≠": "!=",
}  # fmt: skip
_HALVES = {
    "": "", "+": ">0", "-": "<0", "⁺": ">0", "⁻": "<0", ">": ">0", "<": "<0", "\\ge": ">=0",
    "\\geq": ">=0", "≥": ">=0", "positive": ">0", "negative": "<0", "nonnegative": ">=0",
    "non-negative": ">=0",
}  # fmt: skip
_SETS = {
    "Z": "integers", "N": "naturals", "R": "reals", "Q": "rationals", "ℤ": "integers",
    "ℕ": "naturals", "ℝ": "reals", "ℚ": "rationals", "integer": "integers",
    "natural number": "naturals", "real number": "reals", "rational number": "rationals",
    "number": "reals", "constant": "reals", "real constant": "reals",
}  # fmt: skip


class Domain(NamedTuple):
    """What a text says of one letter."""

    name: str
    numbers: str
    """integers, naturals, reals or rationals; empty where the text says none."""
    bounds: frozenset[str]
    """Each a sign and a number; of integers without strict ones."""

    def is_free_in(self, formula: str) -> bool:
        """Whether it only says what the formula's letter counts, or that it is any real number."""
        is_counter = self.numbers in ("integers", "naturals") or self.name in _COUNTERS
        is_any = self.numbers in ("", "reals") and not self.bounds
        return (is_counter or is_any) and self.name in _TOKEN.findall(formula)


def may_state_domain(text: str) -> bool:
    """Whether a text has the marks of a domain; false for certain without one."""
    return _MAY_STATE.search(text) is not None


def without_shared_domain(first: str, second: str) -> tuple[str, str]:
    """Both texts without the domains behind their formulas, if the domains are the same."""
    if not may_state_domain(first) or not may_state_domain(second):
        return first, second
    formula, domain = split_domain(first)
    other_formula, other = split_domain(second)
    if domain is None or other is None or not _are_same(domain, other):
        return first, second
    if domain.numbers == "integers" and not domain.bounds:
        return formula, other_formula
    if not _PERIOD.search(formula + other_formula):
        return formula, other_formula
    # 2n\pi alone would stand for all integers n.
    letters = {*_TOKEN.findall(formula), *_TOKEN.findall(other_formula)}
    if _FIXED in letters:
        return first, second
    return _renamed(formula, domain.name), _renamed(other_formula, domain.name)


def split_domain(text: str) -> tuple[str, Domain | None]:
    """The formula of a text and the domain behind it; the text and None where it has none."""
    bare = " ".join(bare_words(text).replace("\\,", " ").split())
    match = _FORMULA.fullmatch(bare.rstrip(" ."))
    if match is None or _STATES_MORE.search(match["formula"]):
        return text, None
    tail = match["tail"]
    if match["open"]:
        if not tail.endswith(")"):
            return text, None
        tail = tail[:-1].rstrip()
    is_any = bool(match["all"]) and re.fullmatch("[A-Za-z]", tail) is not None
    domain = Domain(tail, "", frozenset()) if is_any else _read(tail)
    return (text, None) if domain is None else (match["formula"].strip(), domain)


def _read(tail: str) -> Domain | None:
    counted = _COUNTED.fullmatch(tail)
    if counted:
        first, second, third = (int(counted[key] or 0) for key in ("first", "second", "third"))
        is_next = second == first + 1 and third in (0, first + 2)
        bounds = frozenset({f">={first}"})
        return Domain(counted["name"], "integers", bounds) if is_next else None
    conditions = [_condition(part) for part in _AND.split(tail)]
    known = [condition for condition in conditions if condition is not None]
    names = {condition.name for condition in known}
    numbers = {condition.numbers for condition in known if condition.numbers}
    if len(known) < len(conditions) or len(names) != 1 or len(numbers) > 1:
        return None
    bounds = frozenset[str]().union(*(condition.bounds for condition in known))
    return _settled(Domain(names.pop(), "".join(numbers), bounds))


def _condition(text: str) -> Domain | None:
    text = text.strip()
    member = _MEMBER.fullmatch(text)
    if member:
        from_zero = "≥" if member["index"] else ""
        half = _HALVES[member["power"] or member["raised"] or member["below"] or from_zero]
        numbers = (
            "integers"
            if from_zero and member["letter"] == "N"
            else _SETS[member["letter"] or member["sign"]]
        )
        return Domain(member["name"], numbers, frozenset({half} if half else ()))
    bound = _BOUND.fullmatch(text)
    if bound:
        return Domain(bound["name"], "", frozenset({_bound_of(bound)}))
    words = _IS.fullmatch(text) or _OF.fullmatch(text)
    if words is None:
        return None
    adjective, _, noun = _noun_of(words).partition(" ")
    if adjective not in _HALVES:
        adjective, noun = "", _noun_of(words)
    if noun not in _SETS:
        return None
    half = _HALVES[adjective]
    bounds = {half} if half else set()
    if words.re is _OF and words["sign"]:
        bounds.add(_bound_of(words))
    return Domain(words["name"], _SETS[noun], frozenset(bounds))


def _noun_of(words: re.Match[str]) -> str:
    return words["words"].lower().removesuffix("s").removeprefix("arbitrary ")


def _bound_of(match: re.Match[str]) -> str:
    return _SIGNS.get(match["sign"], match["sign"]) + str(int(match["number"]))


def _settled(domain: Domain) -> Domain:
    """A domain of integers with `>=1` for `>0`, and of several lower bounds the largest."""
    if domain.numbers != "integers":
        return domain
    bounds = set()
    for bound in domain.bounds:
        sign, number = bound.rstrip("-0123456789"), bound.lstrip("<>!=")
        step = {">": 1, "<": -1}.get(sign, 0)
        bounds.add(f"{sign}=" * bool(step) + f"{int(number) + step}" if step else bound)
    lower = sorted((int(bound[2:]), bound) for bound in bounds if bound.startswith(">="))
    bounds -= {bound for _, bound in lower[:-1]}
    return domain._replace(bounds=frozenset(bounds))


def _are_same(first: Domain, second: Domain) -> bool:
    if first.name == "n" and {first.numbers, second.numbers} == {"", "integers"}:
        # n counts where the other text says so.
        first, second = (_settled(one._replace(numbers="integers")) for one in (first, second))
    return first == second


def _renamed(formula: str, name: str) -> str:
    """A formula with its letter as one that has a value."""
    return _TOKEN.sub(lambda token: _FIXED if token[0] == name else token[0], formula)
