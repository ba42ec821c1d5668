"""Whether a boxed answer equals a mathematical reference.

`compare_quickly` is pure string and number code and runs in the verifier; `compute` decides the
rest and calls SymPy, which may hang or eat memory on hostile text: it runs only in a grading
process. Only audits call math-verify: it compares the part of a text that it can parse.
docs/verification.md has the rules.
"""

import itertools
import re

from verification.math.choices import Choice, is_lettered, read_choice, text_of_choice
from verification.math.constants import is_renamed
from verification.math.forms import are_numerals_in_two_cases, is_in_named_base
from verification.math.magnitude import is_explosive
from verification.math.notation import with_bold_sets
from verification.math.one_notation import in_one_notation, with_ordinal
from verification.math.plain import compare_plain
from verification.math.remarks import forms_of, without_remarks, without_shared_domain
from verification.math.text import MAX_CHARS, normalise, refusal, without_marks
from verification.math.typed import (
    as_functions,
    as_reference_writes,
    typed,
    with_rows,
)
from verification.verdict import CORRECT, UNDECIDED, WRONG, Verdict

# Most answers hold nothing that is typed, styled or a remark.
_BARE = re.compile(r"(?:[-0-9/{}^ %]++|\.(?!\.)|\\d?frac(?![a-z]))*+")


def compare_quickly(
    answer: str, reference: str, *, accept_missing_unit: bool = True, problem: str = ""
) -> Verdict | None:
    """Verdict if plain text decides: equal text, numbers, units, words; else None.

    A base that only the problem names, and letters that it does not contain, count if it is given.

    Time linear in the texts, and no exception on any text. Reasons of refusal: answer_too_long,
    too_many_digits, answer_too_deep, explosive_answer, and reference_too_long.
    """
    answer, reference = trimmed(answer), trimmed(reference)
    if answer == reference:
        return CORRECT
    if len(answer) > MAX_CHARS:
        return Verdict(False, "answer_too_long")
    if len(reference) > MAX_CHARS:
        return Verdict(False, "reference_too_long")
    first, second = spelled(answer, reference)
    if not first or not second:
        return WRONG
    if first == second or without_marks(first) == without_marks(second):
        return CORRECT
    if problem and is_in_named_base(first, second, problem):
        return CORRECT
    if (problem or "constant" in answer) and is_renamed(answer, reference, problem):
        return CORRECT
    if "_" in second and are_numerals_in_two_cases(first, second):
        return CORRECT
    if problem and len(first) == 1 and first.upper() == second and is_lettered(problem):
        return CORRECT
    if problem and (_is_listed(first, second, problem) or _is_listed(second, first, problem)):
        return CORRECT
    # Both sides are checked, so that a swapped pair is refused too.
    reason = refusal(first) or refusal(second)
    if reason:
        return Verdict(False, reason)
    if is_explosive(first) != is_explosive(second):
        return Verdict(False, "explosive_answer")
    return compare_plain(first, second, accept_missing_unit=accept_missing_unit)


def _is_listed(chosen: str, text: str, problem: str) -> bool:
    """Whether a text is what the problem lists behind the letter of a choice."""
    choice = read_choice(chosen)
    if not isinstance(choice, Choice) or choice.text or read_choice(text) is not None:
        return False
    listed = text_of_choice(choice.letter, problem)
    if not listed or len(text) > MAX_CHARS:
        return False
    verdict = compare_quickly(listed, text, accept_missing_unit=False)
    return verdict is not None and verdict.is_correct


def compare(answer: str, reference: str, *, accept_missing_unit: bool = True) -> Verdict:
    """Verdict of the first parser that can tell: text, number, structure, calculus.

    Unbounded in time and memory: call it only in a grading process.
    """
    quick = compare_quickly(answer, reference, accept_missing_unit=accept_missing_unit)
    if quick is not None:
        return quick
    return compute(answer, reference, accept_missing_unit=accept_missing_unit)


def compute(answer: str, reference: str, *, accept_missing_unit: bool = True) -> Verdict:
    """The rest of `compare`: the verdict on a pair that `compare_quickly` leaves undecided.

    Call it only for such a pair: it does not repeat the refusals that bound time and memory. An
    undecided pair is wrong for the reason "undecided".
    """
    first, second = spelled(answer, reference)
    verdict = _compute(first, second, accept_missing_unit=accept_missing_unit)
    if verdict.is_correct:
        return verdict
    # Forms that only a grading process can compare: 1/\\sqrt2 or \\sqrt2/2.
    for text, other in ((answer, second), (reference, first)):
        forms = [normalise(form) for form in forms_of(typed(text))]
        pairs = [*itertools.pairwise(forms), (forms[0], other)] if forms else []
        if pairs and all(_compute(*pair, accept_missing_unit=False).is_correct for pair in pairs):
            return CORRECT
    return verdict


def _compute(first: str, second: str, *, accept_missing_unit: bool) -> Verdict:
    # Imported here, as everywhere below: the verifier's own process needs no mpmath and no SymPy.
    from verification.math.calculus import has_operation, same_calculus
    from verification.math.readings import without_names
    from verification.math.structure import same_structure

    is_same = None
    if has_operation(first) or has_operation(second):
        # The operation may occur only in a label: \lim_{x\to0}\frac{\sin x}{x}=1.
        first, second = without_names(first, second)
    # To the grammar of expressions d/dx is a fraction of products.
    if not has_operation(first) and not has_operation(second):
        is_same = same_structure(first, second, accept_missing_unit=accept_missing_unit)
    if is_same is None:
        is_same = same_calculus(first, second, accept_missing_unit=accept_missing_unit)
    if is_same is None:
        return UNDECIDED
    return CORRECT if is_same else WRONG


def opinions(answer: str, reference: str) -> dict[str, bool | None]:
    """Verdict of each parser alone; None if it cannot tell. For audits of disagreement.

    "text" is equality after normalisation, "number" plain readings, "structure" our grammar,
    "math_verify" the library. Refused pairs get only the verdict of "text". As unbounded as
    `compare`.
    """
    if max(len(answer), len(reference)) > MAX_CHARS:
        return {"text": answer == reference, "number": None, "structure": None, "math_verify": None}
    first, second = spelled(answer, reference)
    said: dict[str, bool | None] = {
        "text": bool(first) and without_marks(first) == without_marks(second)
    }
    said |= dict.fromkeys(("number", "structure", "math_verify"))
    is_refused = refusal(first) or refusal(second) or is_explosive(first) != is_explosive(second)
    if is_refused or not first or not second:
        return said
    plain = compare_plain(first, second, accept_missing_unit=True)
    said["number"] = None if plain is None else plain.is_correct
    from verification.math.library import same_by_library
    from verification.math.structure import same_structure

    said["structure"] = same_structure(first, second)
    said["math_verify"] = same_by_library(first, second)
    return said


def why_illegible(answer: str) -> str:
    """Why no comparison can rely on the answer; empty if a parser reads it.

    An answer in words alone is read, as words.
    """
    from verification.math.readings import read

    text = answer.strip()
    if not text:
        return "it is empty"
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters, over the {MAX_CHARS} that are compared"
    plain = normalise(text)
    if not plain:
        return "nothing is left of it without its layout"
    refused = refusal(plain)
    if refused:
        return f"it is refused ({refused})"
    return "" if read(plain) else "our grammar does not read it: only equal text is surely right"


def find_illegible(answers: list[str]) -> dict[int, str]:
    """Why answers are not read, by index in the list."""
    return {place: why for place, answer in enumerate(answers) if (why := why_illegible(answer))}


def prepare() -> None:
    """Load what comparisons need, so that no completion pays for it."""
    from verification.math import symbolic

    symbolic.prepare()
    compare("\\sqrt{2}+x", "x+\\frac{2}{\\sqrt{2}}")


def spelled(answer: str, reference: str) -> tuple[str, str]:
    """Both texts normalised, without remarks, with bold letters for sets of numbers as sets."""
    answer, reference = trimmed(answer), trimmed(reference)
    is_long = max(len(answer), len(reference)) > MAX_CHARS
    is_bare = is_long or (_BARE.fullmatch(answer) and _BARE.fullmatch(reference))
    if not is_bare:
        answer, reference = trimmed(typed(answer)), trimmed(typed(reference))
        answer, reference = without_shared_domain(answer, reference)
        answer, reference = (
            without_remarks(answer, reference),
            without_remarks(reference, answer),
        )
        answer, reference = as_functions(_one_form(answer), _one_form(reference))
        answer, reference = with_rows(answer, reference), with_rows(reference, answer)
        answer = as_reference_writes(answer, reference)
        answer, reference = with_ordinal(answer, reference), with_ordinal(reference, answer)
    first = normalise(with_bold_sets(answer, reference))
    second = normalise(with_bold_sets(reference, answer))
    return (first, second) if is_bare else in_one_notation(first, second)


def _one_form(text: str) -> str:
    """The first of several forms of one number, `1/2 or 0.5`."""
    forms = forms_of(text)
    return forms[0] if forms and all(_are_one(forms[0], form) for form in forms[1:]) else text


def _are_one(form: str, other: str) -> bool:
    first, second = normalise(form), normalise(other)
    verdict = compare_plain(first, second, accept_missing_unit=False)
    return verdict is not None and verdict.is_correct


def trimmed(text: str) -> str:
    """Text without math delimiters, surrounding space and a final full stop."""
    text = text.strip()
    if text.startswith("$") and text.endswith("$") and text.count("$") == 2:
        text = text[1:-1].strip()
    return text if text.endswith("..") else text.removesuffix(".").rstrip()
