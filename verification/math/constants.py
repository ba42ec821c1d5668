r"""Answers that are the same but for the names of arbitrary constants: `f(x)=cx` and `ax`.

Pure string code; runs in the verifier and its grading processes.
"""

import re

from verification.math.phrasing import bare_words

_NAMES = r"[A-Za-z](?:(?:, ?| and )[A-Za-z]){0,2}"
_NUMBER = r"(?:arbitrary |real |fixed ){0,2}(?:constants?|numbers?)"
_SAYS_CONSTANT = re.compile(
    rf",? ?(?:where|with|for) (?:(?P<names>{_NAMES}) (?:is|are) (?:(?:an|a|any|some) )?{_NUMBER}"
    rf"|(?:some|any|every|all|an?) {_NUMBER} (?P<after>{_NAMES}))\.?$"
    r"|(?:, ?(?:where |with |for )?| (?:where|with|for) )(?:some |any |every |all )?"
    rf"(?P<members>{_NAMES}) ?(?:\\in|∈) ?"
    r"(?:\\(?:mathbb|Bbb) ?\{? ?R ?\}?|ℝ)\.?$"
)
_LONE_LETTER = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_HEAD = re.compile(r"^(?:[A-Za-z]\([xtyz]\)|y) ?= ?")
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
_PARAMETERS = frozenset("abcdkmpqrsABCDK")
_VARIABLES = frozenset("xtyz")
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
    asks_for_all = _ASKS_FOR_ALL.search(problem) is not None
    if len(problem) > _MAX_PROBLEM_CHARS or not (asks_for_all or "constant" in answer):
        return False
    (first, names), (second, others) = _constants_of(answer), _constants_of(reference)
    if not asks_for_all and not (names and others):
        return False
    known = _letters_in(problem)
    if _HEAD.match(first) is None or _HEAD.match(second) is None:
        first, second = _HEAD.sub("", first), _HEAD.sub("", second)
    return _is_same_but_for(first, second, (names or _PARAMETERS) - known,
                            (others or _PARAMETERS) - known)  # fmt: skip


def _constants_of(text: str) -> tuple[str, frozenset[str]]:
    """A text without the remark that names its constants, and those; none where it says none."""
    bare = bare_words(text)
    said = _SAYS_CONSTANT.search(bare)
    names = (
        frozenset(_LONE_LETTER.findall(said["after"] or said["names"] or said["members"]))
        if said
        else frozenset()
    )
    if not said or names <= _VARIABLES:
        return bare, frozenset()
    return bare[: said.start()], names


def _is_same_but_for(
    first: str, second: str, names: frozenset[str], others: frozenset[str]
) -> bool:
    """Whether a one-to-one renaming of some letters turns one text into the other."""
    if _MAY_BE_CHOICE.search(first) or _VARIABLES.isdisjoint(first):
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
