r"""What people write behind an answer: a domain, a reason, `only`, a second form.

Pure string code on a pair of raw texts; runs in the verifier and its grading processes. A domain is
a remark only where the other text has none.
"""

import re

from verification.math.domains import may_state_domain, split_domain
from verification.math.phrasing import TEXT, bare_words

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
_FORMULA = re.compile(r"[^,;<>]{1,300}")
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
    return is_about and _FORMULA.fullmatch(rest) is not None and not _HEDGE.search(rest)


def _agrees(word: str, rest: str) -> bool:
    if _DOUBT.search(rest):
        return False
    return bool(_DENIAL.search(rest)) == (word == "no") or rest.startswith(("since ", "because "))


def forms_of(text: str) -> tuple[str, ...]:
    """The forms of `1/2 or 0.5` and `0.5 (1/2)`; none where the text has one form."""
    is_linked = "or" in text or "i.e." in text or "that is" in text or "equivalently" in text
    if not is_linked:
        place = text.rfind("(")
        # 2(3) is a product.
        if place < 1 or text[place - 1] not in " ,;:d" or text[-1] not in ")}":
            return ()
    bare = bare_words(text)
    bracketed = _BRACKETED.fullmatch(bare)
    forms = (bracketed["one"], bracketed["two"]) if bracketed else tuple(_FORMS.split(bare))
    are_forms = 1 < len(forms) <= MAX_FORMS and all(map(_FORM.fullmatch, forms))
    return forms if are_forms and len(set(forms)) == len(forms) else ()
