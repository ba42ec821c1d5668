r"""Answers as people type them, and what they write around an answer.

Pure string code; runs in the verifier and its grading processes. `typed` works on one text:
escaped LaTeX, Markdown, names of letters. `without_remarks` works on a pair, because a domain is a
remark only where the other text has none.
"""

import functools
import re

from verification.math.domains import may_state_domain
from verification.math.phrasing import TEXT, bare_words

# --- one text -------------------------------------------------------------------------------------

_RUN = re.compile(r"\\+")
_ESCAPED = re.compile(
    r"\\\\(?:[{}$%]|\(.{0,1000}\\\\\)|\[.{0,1000}\\\\\]|(?:[dt]?frac|sqrt|pi|text|left|le|leq|ge|geq"
    r"|ne|neq|infty|boxed|begin|pm|mp|angle|triangle|mathbb|mathrm|cos|sin|tan|ln|log|cdot|times|cup"
    r"|cap|in|theta|alpha|beta|gamma|lambda|omega|phi|circ|binom|overline|quad|det)(?![A-Za-z]))",
    re.DOTALL,
)
_STRONG = re.compile(
    r"(?<![0-9A-Za-z)}\]*])(\*\*|__)(?=[^\s*_])([^*_]{1,200}(?:[*_][^*_]{1,200}){0,9})\1"
    r"(?![0-9A-Za-z({\[\\*])"
)
_AROUND = ("```", "`", "**", "__", "*", "_")
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|rho|sigma|tau|upsilon|phi"
    "|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega"
)
_MARKED = re.compile(r"\\(?:text|mathrm|operatorname|mbox|textbf|mathbf)[a-z]*\*? ?\{[^{}]*\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_KNOWN = re.compile(
    rf"{_GREEK}|sqrt|cbrt|infinity|infty|union|degrees|radians|arcsin|arccos|arctan"
)
_LETTER = re.compile(rf"(?<![\\A-Za-z])({_GREEK}|pi|Pi)(?![A-Za-z])")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_INFINITY = re.compile(
    r"(?:(?<=[-+(\[,<=])|(?<=[-+(\[,<=] )|^)(?:infinity|infty|inf|oo)(?= ?[)\],]| ?$)"
)
_NAMES_TYPED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}|[)\]] ?[Uu] ?[(\[]")
_MEMBER_OF = re.compile(
    rf"^(\\?(?:{_GREEK})|[A-Za-z](?:_[0-9A-Za-z])?) in ?"
    r"(?:(?=[(\[]|\\\{|\\left|\\mathbb)|\{(?P<items>[^{}]{1,200})\}$)"
)
_LOG = re.compile(
    r"(?<![\\A-Za-z])([A-Za-z]?)log ?_ ?"
    r"(?:([0-9]{1,9})(?= ?\(| [0-9A-Za-z\\])|(?=\{|[A-Za-z](?![A-Za-z])))"
)
_UNION = re.compile(r"(?<=[)\]]) ?(?:U|u|union) ?(?=[(\[])")
_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt ?([0-9]{1,20})(?![0-9.])")
_CUBE_ROOT = re.compile(r"(?<![\\A-Za-z])cbrt ?\(([^()]{1,100})\)")
_ABSOLUTE = re.compile(r"(?<![\\A-Za-z])abs ?\(([^()]{1,100})\)")
_EITHER_SIGN = re.compile(r"\+ ?/ ?-|(?:^|(?<=[=,{(])|(?<=[=,] ))\+-(?=[0-9A-Za-z\\])")
_ANGLE = re.compile(r"(?<![\\A-Za-z])(angle|triangle) (?=[A-Z]{1,3}(?![A-Za-z]))")
_ANGLE_ENDS = re.compile(r"\\angle ?\{?([A-Z])([A-Z])([A-Z])(?![A-Za-z])\}?")


def unescaped(text: str) -> str:
    """The text with single backslashes, if all were doubled."""
    if "\\\\" not in text or not _ESCAPED.search(text):
        return text
    if any(len(run) % 2 for run in _RUN.findall(text)):
        return text
    return _RUN.sub(lambda run: "\\" * (len(run[0]) // 2), text)


def without_markdown(text: str) -> str:
    """The text without stars, underscores and backquotes that set it in bold or as code."""
    if not any(mark in text for mark in "*_`"):
        return text
    text = _STRONG.sub(r"\2", text.strip())
    for mark in _AROUND:
        inner = text[len(mark) : -len(mark)]
        is_whole = text.startswith(mark) and text.endswith(mark) and mark[0] not in inner
        if is_whole and inner.strip():
            return inner.strip()
    return text


@functools.lru_cache(maxsize=1024)
def typed(text: str) -> str:
    """The text with escapes, Markdown and typed names as LaTeX."""
    text = without_markdown(unescaped(text))
    if "∠" in text or "△" in text:
        text = text.replace("∠", "\\angle ").replace("△", "\\triangle ")
    if "angle" in text:
        text = _ANGLE.sub(r"\\\1 ", text)
        text = _ANGLE_ENDS.sub(_order_ends, text)
    if "+" in text:
        text = _EITHER_SIGN.sub(r"\\pm ", text)
    if any(mark in text for mark in ("Z", "R", "ℤ", "ℝ", "integers")):
        text = half_sets(text)
    if not _NAMES_TYPED.search(text):
        return text
    return _spell_names(text)


def with_letters(problem: str) -> str:
    """A problem with every typed name of a letter as LaTeX."""
    return _LETTER.sub(lambda match: f"\\{match[0]} ", problem)


def _order_ends(match: re.Match[str]) -> str:
    ends = sorted((match[1], match[3]))
    return f"\\angle {ends[0]}{match[2]}{ends[1]}"


def _spell_names(text: str) -> str:
    outside = _MARKED.sub(" ", text)
    is_prose = any(not _KNOWN.fullmatch(word) for word in _WORD.findall(outside))
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    text = _MARKED.sub(keep, text.replace("\0", ""))
    text = _MEMBER_OF.sub(_spell_member, text) if " in" in text else text
    if "log" in text:
        text = _LOG.sub(_spell_log, text)
    text = _UNION.sub(r"\\cup ", _INFINITY.sub(r"\\infty ", text))
    text = _ABSOLUTE.sub(r"|\1|", _CUBE_ROOT.sub(r"\\sqrt[3]{\1}", _ROOT.sub(r"\\sqrt{\1}", text)))
    letters = _PI if is_prose else _LETTER
    text = letters.sub(
        lambda match: f"\\{match[0].lower() if match[0] == 'Pi' else match[0]} ", text
    )
    return re.sub("\0([0-9]+)\0", lambda match: kept[int(match[1])], text)


def _spell_member(match: re.Match[str]) -> str:
    """`x in {1,2}` with LaTeX's sign and braces, where it begins the text."""
    items = match["items"]
    return f"{match[1]} \\in " + (f"\\{{{items}\\}}" if items else "")


def _spell_log(match: re.Match[str]) -> str:
    """`log_12 5` to base 12: who types no backslash types no braces."""
    base = f"{{{match[2]}}}" if match[2] else ""
    return f"{match[1]}\\log_{base}"


_POSITIVE = re.compile(
    r"(?:\\(?:mathbb|Bbb) ?\{? ?(?P<letter>[ZR]) ?\}?|(?P<sign>[ℤℝ])"
    r"|\\(?P<short>[ZR])(?![A-Za-z]))"
    r" ?(?:\^ ?\{? ?(?P<power>[+-]) ?\}?|(?P<raised>[⁺⁻])"
    r"|_ ?\{? ?(?:(?P<below>[<>]) ?0|(?P<index>[+-])) ?\}?)"
)
_POSITIVE_WORDS = re.compile(
    r"(?:\\text\{)?(?:the )?(?:set of )?(?:all )?(positive|negative) integers\}?", re.IGNORECASE
)
_MEMBER = re.compile(r"[A-Za-z] ?\\in ?")


def half_sets(text: str) -> str:
    """The text with one spelling for positive and negative integers and real numbers."""
    words = _POSITIVE_WORDS.fullmatch(text.strip())
    if words:
        return "\\integers^{+}" if words[1].lower() == "positive" else "\\integers^{-}"
    whole = _POSITIVE.fullmatch(_MEMBER.sub("", text.strip(), count=1))
    if whole is None:
        return text
    mark = whole["power"] or whole["below"] or whole["index"] or whole["raised"]
    is_positive = mark in "+>⁺"
    if (whole["letter"] or whole["sign"] or whole["short"]) in "Zℤ":
        return "\\integers^{+}" if is_positive else "\\integers^{-}"
    return "(0,\\infty)" if is_positive else "(-\\infty,0)"


# --- a pair ---------------------------------------------------------------------------------------

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
_ANY_REMARK = re.compile(
    r"where|for|with|since|because|ing |reject |only|, ?[a-z] ?[\\>≥≠∈!]"
    r"|^\W{0,3}[ynft][eora]|\\text ?\{ ?[ynft][eora]",
    re.IGNORECASE,
)
_REASON = re.compile(
    r"(?: ?,? (?:since|because) | ?\( ?(?:rejecting|reject|discarding|ignoring|since|because) )"
    r"(?P<why>[^()]{1,300})\)?$"
)
_ONLY = re.compile(
    r" ?\(?,? ?(?:the )?only(?: (?:solution|answer|value))?\)?$"
    r"|^only (?=[-0-9\\({]|[A-Za-z](?![A-Za-z]))|(?: is the only (?:solution|answer|value))$"
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
_FUNCTION = re.compile(r"\$?[A-Za-z]\(x\) ?= ?([^=]{1,500})")
_GRAPH = re.compile(r"\$?y ?= ?([^=y]{1,500})")
_SECOND = re.compile(
    r"(?P<one>[^,;()]{1,100}?),? ?\(?(?:or|i\.e\.,?|that is,?) (?P<two>[^,;()]{1,100}?)\)?"
)


def without_remarks(text: str, other: str) -> str:
    """The text without a domain, reason or `only` behind its value, if the other has none."""
    if not _ANY_REMARK.search(text):
        return text
    said = _SAID.fullmatch(" ".join(_ANY_TEXT.sub(r" \1 ", text).replace("$", "").split()))
    if said and _ANY_TEXT.sub(r"\1", other).strip(" .$").lower() in _ANSWERS:
        return said[1] if _agrees(said[1].lower(), said[2].lower()) else text
    bare = bare_words(text)
    for pattern in (_DOMAIN, _REASON, _ONLY):
        match = pattern.search(bare)
        if match is None or pattern.search(" ".join(TEXT.sub(r" \1 ", other).split())):
            continue
        if pattern is _DOMAIN and may_state_domain(other):
            continue
        rest = (bare[: match.start()] + bare[match.end() :]).strip(" ,")
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


def second_form(text: str) -> tuple[str, str] | None:
    """The two forms of `1/2 or 0.5`; None where the text has one form."""
    if "or" not in text and "i.e." not in text and "that is" not in text:
        return None
    match = _SECOND.fullmatch(bare_words(text))
    return None if match is None or match["one"] == match["two"] else (match["one"], match["two"])


def as_functions(first: str, second: str) -> tuple[str, str]:
    """The right-hand sides of `y=` and `f(x)=`; other pairs as they are."""
    for one, other in ((first, second), (second, first)):
        graph, function = _GRAPH.fullmatch(one), _FUNCTION.fullmatch(other)
        if graph and function:
            return graph[1], function[1]
    return first, second


_ROWS = re.compile(r"\[ ?(\[[^\[\]]{1,200}\](?: ?, ?\[[^\[\]]{1,200}\]){0,9}) ?\]")
_PAIR = re.compile(r"[-+0-9./]{1,40}, ?[-+0-9./]{1,40}")


def as_reference_writes(answer: str, reference: str) -> str:
    """The answer without brackets that the reference lacks: (3,12) for the list 3,12."""
    if answer[:1] != "(" or answer[-1:] != ")" or not _PAIR.fullmatch(reference):
        return answer
    is_same = answer[1:-1].replace(" ", "") == reference.replace(" ", "")
    return reference if is_same else answer


def with_rows(text: str, other: str) -> str:
    """A list of rows, `[[1,2],[3,4]]`, as a matrix, if the other text is one."""
    match = _ROWS.fullmatch(text) if "matrix" in other or "array" in other else None
    if match is None:
        return text
    rows = [row.strip("[], ").replace(",", "&") for row in match[1].split("]")[:-1]]
    return "\\begin{pmatrix}" + "\\\\".join(rows) + "\\end{pmatrix}"


# --- renamed constants ----------------------------------------------------------------------------

_SAYS_CONSTANT = re.compile(
    r",? ?(?:where|with|for) (?P<names>[A-Za-z](?:(?:, ?| and )[A-Za-z]){0,2}) "
    r"(?:is|are) (?:(?:an|a|any|some) )?(?:arbitrary )?constants?\.?$"
)
_ASKS_FOR_ALL = re.compile(
    r"(?<![a-z])(?:(?:find|determine|what are|describe) (?:all|every) (?:(?:the|real|such"
    r"|continuous|possible|real-valued) ){0,2}(?:functions?|polynomials?)"
    r"|general solution)(?![a-z])",
    re.IGNORECASE,
)
_MATHS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
_ARTICLE = re.compile(
    r"(?<![A-Za-z])(?<!constant )(?<!number )(?<!parameter )(?<!integer )(?<!real )(?<!given )"
    r"(?<!fixed )[aA] (?=(?!(?:is|are|and|be|not|for|of|in|to|at|on|as|with|by|from|that|which"
    r"|where|such|has|if|then|but|or|so|may|can|when|exists?|holds?|satisf[a-z]*)[ ,.])[a-z]{3})"
)
_WRITTEN_LETTERS = re.compile(
    r"[A-Za-z]+(?=[-=+*/^(_<>0-9])|(?<=[-=+*/^)(_<>0-9])[A-Za-z]+|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_PARAMETERS = frozenset("abckmpqrsCK")
_VARIABLE = re.compile("[xtyz]")
# The letter of a choice, `(a) cx`, is no constant.
_MAY_BE_CHOICE = re.compile(
    r"^\W*[A-Za-z] ?[).:]|[A-Za-z] [A-Za-z]|[^-A-Za-z0-9+*/^()=. ]|\.(?![0-9])"
)
_MAX_PROBLEM_CHARS = 4000


def is_renamed(answer: str, reference: str, problem: str) -> bool:
    """Whether two texts are the same but for the names of arbitrary constants.

    Both texts say which letters are constants; or the problem asks for all functions, all
    polynomials or a general solution, and does not contain those letters. The rest is the same.
    """
    if "constant" not in answer and not _ASKS_FOR_ALL.search(problem):
        return False
    texts = bare_words(answer), bare_words(reference)
    said = [_SAYS_CONSTANT.search(text) for text in texts]
    if len(problem) > _MAX_PROBLEM_CHARS:
        return False
    if said[0] and said[1]:
        names = [
            frozenset(re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", m["names"]))
            for m in said
            if m
        ]
        bare = [text[: m.start()] for text, m in zip(texts, said, strict=True) if m]
        return _is_same_but_for(bare[0], bare[1], *(one - _letters_in(problem) for one in names))
    if any(said):
        return False
    if not _ASKS_FOR_ALL.search(problem):
        return False
    free = _PARAMETERS - _letters_in(problem)
    return _is_same_but_for(*texts, free, free)


def _is_same_but_for(
    first: str, second: str, names: frozenset[str], others: frozenset[str]
) -> bool:
    """Whether a one-to-one renaming of some letters turns one text into the other."""
    if _MAY_BE_CHOICE.search(first) or not _VARIABLE.search(first):
        return False
    first, second = first.replace(" ", ""), second.replace(" ", "")
    if len(first) != len(second) or "\\" in first + second:
        return False
    forth: dict[str, str] = {}
    for one, other in zip(first, second, strict=True):
        is_free = one in names and other in others
        if (one != other and not is_free) or forth.setdefault(one, other) != other:
            return False
    return len(set(forth.values())) == len(forth) and not re.search("[A-Za-z]{3}", first)


def _letters_in(problem: str) -> frozenset[str]:
    """Letters that stand in a problem's formulas, with every letter of a doubtful run."""
    maths = "".join(_COMMAND.sub(" ", part) for part in _MATHS.findall(problem))
    words = _ARTICLE.sub(" ", _COMMAND.sub(" ", _MATHS.sub(" ", problem)))
    return frozenset(maths + "".join(_WRITTEN_LETTERS.findall(words)))
