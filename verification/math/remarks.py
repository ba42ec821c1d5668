r"""What people write behind an answer: a domain, a reason, `only`, a second form.

Pure string code on raw texts; runs in the verifier and its grading processes. A domain, as in
`3n-1, n \ge 2` and `2n+1 \text{ where } n \text{ is an integer}`, is a remark only where the other
text has none. Two texts lose their domains only where both state the same one: equal formulas on
different domains are different.
"""

import re
from typing import NamedTuple

from verification.math.phrasing import TEXT, bare_words

# --- domains --------------------------------------------------------------------------------------

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


# --- other remarks --------------------------------------------------------------------------------

_SET_WORDS = (
    r"(?:a|an|any|some|arbitrary|positive|nonnegative|non-negative|natural|real|whole|integers?"
    r"|numbers?|constants?)"
)
_NAMES = r"[A-Za-z](?:_[0-9])?(?:(?:, ?| and )[A-Za-z](?:_[0-9])?){0,3}"
_DOMAIN = re.compile(
    rf" ?,? ?(?:(?:where|with) {_NAMES} (?:is|are|being)(?: {_SET_WORDS}){{1,5}}"
    rf"|(?:where|for)(?: all| any| every)?(?: {_SET_WORDS}){{1,4}} [A-Za-z]"
    r"|(?:, ?|,? ?(?:where|for)(?: all| any| every)? )(?P<name>[nmk]) ?"
    r"(?:(?:\\geq?(?![a-z])|>=?|≥) ?[0-9]{1,9}"
    r"|(?:\\in|∈) ?(?:\\(?:mathbb|Bbb) ?\{? ?[NZ] ?\}?|[ℕℤ])"
    r"(?: ?(?:\^\{?\+\}?|⁺))?)"
    r"|(?:, ?|,? ?(?:where|for) )(?P<other>[A-Za-z]) ?(?:\\neq?(?![a-z])|!=|≠) ?-?[0-9]{1,3})\.?$"
)
# Each branch begins with a known letter, so that a search skips to those.
_ANY_REMARK = re.compile(
    r"where|for|with|since|because|, \\text\{ ?as |, as |ing |reject|discard|ignor|extraneous"
    r"|only|unique|just|exact|total|in all|altogether|integer"
    r"|[,(] ?[a-z] ?[\\>≥≠∈!=]|\\text ?\{ ?[ynft][eora]"
)
_ANY_WORD = re.compile(r"\W{0,3}[ynft][eora]")
_REASON = re.compile(
    r"(?: ?,? (?:since|because) | ?, as (?=[A-Za-z] ?[<>=\\])"
    r"| ?\(? ?(?:reject|discard|ignor)(?:ing|ed)? | ?\( ?(?:since|because|as) )"
    r"(?P<why>[^()]{1,300})\)?$"
    r"| ?\((?P<other>[^()]{1,80}) is (?:extraneous|rejected|discarded|invalid|not valid"
    r"|inadmissible) ?\)$"
)
_ONLY = re.compile(
    r" ?\(?,? ?(?:the )?(?:only|unique)(?: (?:solution|answer|value))?\)?$"
    r"|^(?:only|just|exactly) (?=[-0-9\\({]|[A-Za-z](?![A-Za-z]))"
    r"|^(?:a )?total of (?=[0-9])|(?<=[0-9}a-z]) (?:in total|in all|altogether)$"
    r"|(?<=[0-9}]) exactly$|(?: is the only (?:solution|answer|value))$"
)
_ONE_VALUE = re.compile(r"[^,;<>]{1,300}")
_ANY_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|mathbf|mbox) ?\{([^{}]*)\}")
_SAID = re.compile(
    r"(yes|no|true|false)(?: ?[,.;:!] ?| [-–—] | (?=it (?:is|does|can)(?![a-z])))(.{1,200})",
    re.IGNORECASE | re.DOTALL,
)
_DOUBT = re.compile(
    r"(?<![a-z])(?:yes|true|false|wrong|but|however|unless|except|if|only|or|maybe|perhaps|untrue"
    r"|incorrect|fails?|depends?|depending|sometimes|unlikely|unclear|unknown|otherwise|though"
    r"|although|contradiction|instead|sorry|actually|wait"
    r"|not (?:impossible|never|un[a-z]+))(?![a-z])"
)
_ANSWERS = frozenset({"yes", "no", "true", "false"})
_DENIAL = re.compile(r"(?<![a-z])(?:not|no|never|none|impossible|cannot|neither|nor)(?![a-z])|n't")
_HEDGE = re.compile(r"(?<![a-z])(?:or|maybe|perhaps|not|but)(?![a-z])", re.IGNORECASE)
_LINK = r"(?:or equivalently|equivalently|or|i\.e\.,?|that is,?)"
_FORMS = re.compile(rf",? {_LINK} |, {_LINK} ")
_BRACKETED = re.compile(
    rf"(?P<one>[^,;()]{{1,100}}?)(?:,? | ?\\[;,:] ?| ?\\q?quad ?)\( ?(?:{_LINK} )?"
    r"(?P<two>[^,;()]{1,100}?) ?\)"
)
_FORM = re.compile(r"[^,;]{1,100}")
MAX_FORMS = 4


def without_remarks(text: str, other: str) -> str:
    """The text without a domain, reason or `only` behind its value, if the other has none."""
    lower = text.lower()
    if not _ANY_REMARK.search(lower) and not _ANY_WORD.match(lower):
        return text
    said = _SAID.fullmatch(" ".join(_ANY_TEXT.sub(r" \1 ", text).replace("$", "").split()))
    if said and _ANY_TEXT.sub(r"\1", other).strip(" .$").lower() in _ANSWERS:
        return said[1] if _agrees(said[1].lower(), said[2].lower()) else text
    if may_state_domain(text) and not may_state_domain(other):
        formula, domain = split_domain(text)
        if domain is not None and domain.is_free_in(formula) and not _HEDGE.search(formula):
            return formula
    bare = bare_words(text)
    for pattern in (_DOMAIN, _REASON, _ONLY):
        match = pattern.search(bare)
        if match is None or pattern.search(" ".join(TEXT.sub(r" \1 ", other).split())):
            continue
        if pattern is _DOMAIN and may_state_domain(other):
            continue
        rest = (bare[: match.start()] + bare[match.end() :]).strip(" ,").removesuffix(" \\")
        if _may_stand(pattern, match, rest):
            return rest
    return text


def _may_stand(pattern: re.Pattern[str], match: re.Match[str], rest: str) -> bool:
    if pattern is not _DOMAIN:
        return bool(rest) and not _HEDGE.search(rest) or (pattern is _ONLY and " or " not in rest)
    name = match["name"] or match["other"]
    is_about = (
        name is None or re.search(rf"(?<![A-Za-z\\]){name}|(?<=[0-9]){name}", rest) is not None
    )
    return is_about and _ONE_VALUE.fullmatch(rest) is not None and not _HEDGE.search(rest)


def _agrees(word: str, rest: str) -> bool:
    if _DOUBT.search(rest):
        return False
    return bool(_DENIAL.search(rest)) == (word == "no") or rest.startswith(("since ", "because "))


_SPACE_COMMAND = re.compile(r"\\[ ,;:!]")


def forms_of(text: str) -> tuple[str, ...]:
    """The forms of `1/2 or 0.5` and `0.5 (1/2)`; none where the text has one form."""
    is_linked = "or" in text or "i.e." in text or "that is" in text or "equivalently" in text
    if not is_linked:
        place = text.rfind("(")
        # 2(3) is a product.
        if place < 1 or text[place - 1] not in " ,;:d{" or text[-1] not in ")}":
            return ()
    bare = bare_words(_SPACE_COMMAND.sub(" ", text))
    bracketed = _BRACKETED.fullmatch(bare)
    forms = (bracketed["one"], bracketed["two"]) if bracketed else tuple(_FORMS.split(bare))
    are_forms = 1 < len(forms) <= MAX_FORMS and all(map(_FORM.fullmatch, forms))
    return forms if are_forms and len(set(forms)) == len(forms) else ()
