"""`data filter-format`: keeps problems with one answer that can be compared, and opens choices.

A multiple-choice problem becomes an open question whose answer is the text of the right choice.
Each rule has a name; what it drops is counted under it. Pure string code.

Source: Magistral (arXiv 2506.10910), section 4.1: proofs and multi-part problems are removed,
multiple choice is reformulated. The rules are ours.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.curation.choices import Asked, find_choices
from megatron_rl.curation.report import Report, Tally
from megatron_rl.curation.rows import Row
from verification.math.choices import Choice, read_choice
from verification.math.text import normalise

MAX_WORDS = 3
"""Words of a choice from which it is prose: a judge of mathematics cannot compare that."""
_SENTENCE = r"(?:^|[.!?:;]\s+|\n\s*|\b(?:and|then|also)\s+|\)\s+)"
_ASKED = r"(?:\s+(?:that|why|whether|the|this|these|your|it|if)\b|\s*[:,$\\])"
_PROOF = re.compile(
    rf"{_SENTENCE}(?:please\s+)?(?:prove|disprove|show|demonstrate|verify|justify|deduce)\b{_ASKED}",
    re.IGNORECASE,
)
_PROOF_ANSWER = re.compile(
    r"\b(?:proof|proven?|q\.?e\.?d|see (?:the )?(?:solution|proof|above)|shown)\b|\\blacksquare",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(r"(?:n/?a|none given|unknown|-+|\?+|\.+)?", re.IGNORECASE)
_AROUND = r"[\s.;:,?!*]"
_PARTS = [
    re.compile(rf"(?:^|{_AROUND}){first}\s*(?=\S)(.*?){_AROUND}{second}\s*(?=\S)(.*)", re.DOTALL)
    for first, second in (
        (r"\(a\)(?!\s*[.,;)])", r"\(b\)(?!\s*[.,;)])"),
        (r"\(i\)(?!\s*[.,;)])", r"\(ii\)(?!\s*[.,;)])"),
        (r"\(1\)(?!\s*[.,;)])", r"\(2\)(?!\s*[.,;)])"),
        (r"\*{0,2}Part (?:A|I|1)\b", r"\*{0,2}Part (?:B|II|2)\b"),
    )
] + [
    re.compile(rf"^\s*{first}\s+(.*?)\n\s*{second}\s+(.*)", re.DOTALL | re.MULTILINE)
    for first, second in (
        (r"a[.)]", r"b[.)]"), (r"i[.)]", r"ii[.)]"), (r"1[.)]", r"2[.)]")
    )
]  # fmt: skip
_TASK_WORD = re.compile(
    r"\b(?:find|determine|calculate|compute|evaluate|what|how|which|solve|prove|show|give|state"
    r"|write|express|simplify|factor|sketch|draw|explain|is|are|does|do|can|when|where|who|why"
    r"|for|if|estimate|verify|deduce|list|name|describe)\b|\?",
    re.IGNORECASE,
)
_SEVERAL_ANSWERS = re.compile(
    r"(?:^|[\s,;])\(?(?:a|i|1)\)\s*\S.*?[\s,;]\(?(?:b|ii|2)\)\s*\S", re.DOTALL | re.IGNORECASE
)
_NEEDS_CHOICES = re.compile(
    r"\bof the (?:following|above|choices|options|given|listed)\b"
    r"|\b(?:the|these) (?:choices|options)\b"
    r"|\b(?:which|what) (?:choice|option|one is|statement)\b|\bstatements?\b"
    r"|\b(?:closest|nearest) (?:to|integer value|approximation)\b"
    r"|\bbest (?:approximat|describ|estimat)"
    r"|\b(?:could|can|might|may) (?:\w+ )?(?:be|equal)\b|\bpossible (?:value|answer)s?\b|\bbelow\b"
    r"|\bmust (?:\w+ )?be true\b|\bis (?:true|false|correct|incorrect)\b|\bfollowing\b|\bexcept\b",
    re.IGNORECASE,
)
_OF_CHOICES = re.compile(
    r"\b(?:all|none|both|neither|any|either|more than one) (?:of )?"
    r"(?:the |these|those|them|above|a\b|b\b)"
    r"|\bnone\b|\b(?:cannot|can't|not) (?:be )?(?:determin|enough|possible|sufficient)"
    r"|\binsufficient\b|\b(?:only )?I{1,3}(?: and |,? ?only\b)|\bother\b|\bno correct\b",
    re.IGNORECASE,
)
_LETTER = re.compile(r"\(?[a-jA-J][).]?")
_LATEX = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\(?:text|textrm|mathrm|mbox)\s*\{|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_TWO_WAYS = {"true", "false", "yes", "no", "correct", "incorrect"}
_SPACES = re.compile(r"\s+")


class Verdict(NamedTuple):
    """What becomes of a problem."""

    rule: str = ""
    """That drops it; empty: it is kept."""
    question: str = ""
    answer: str = ""
    """As they are to be; only where it is kept."""


class Outcome(NamedTuple):
    """What the tool makes of rows."""

    rows: list[Row]
    report: Report


def filter_format(rows: Sequence[Row], *, tasks: Sequence[str] = ("math",)) -> Outcome:
    """The rows that are kept, opened where they were multiple choice; other tasks as they are."""
    tally = Tally("filter-format", {"tasks": list(tasks)}, read=len(rows))
    kept, others = [], 0
    for row in rows:
        prompt = row.prompt
        if prompt.task not in tasks:
            others += 1
            kept.append(row)
            continue
        verdict = judge_format(prompt.question, prompt.answer)
        if verdict.rule:
            tally.drop(prompt, verdict.rule)
            continue
        if verdict.question != prompt.question:
            tally.changed["choices_opened"] += 1
            row = row.with_question(verdict.question)
        if verdict.answer != prompt.answer:
            row = row.with_answer(verdict.answer).with_fields(original_answer=prompt.answer)
        kept.append(row)
    tally.figures = {"of_other_tasks": others}
    return Outcome(kept, tally.report(written=len(kept)))


def judge_format(question: str, answer: str) -> Verdict:
    """Whether a problem has one answer that can be compared; choices opened."""
    if _NO_ANSWER.fullmatch(answer.strip()):
        return Verdict("no_answer")
    asked = find_choices(question)
    if asked is None and _LETTER.fullmatch(answer.strip()):
        asked = find_choices(question, is_lower=True)
    if asked is not None:
        opened = _open_choices(asked, answer)
        if opened.rule:
            return opened
        question, answer = opened.question, opened.answer
    elif _names_choice(question, answer):
        return Verdict("choices_missing")
    return Verdict(_rule_of(question, answer), question, answer)


def _rule_of(question: str, answer: str) -> str:
    """The rule that drops an open question; empty for none."""
    if _PROOF.search(question):
        return "proof"
    if _PROOF_ANSWER.search(answer):
        return "proof_as_answer"
    if any(_is_list_of_tasks(found) for p in _PARTS for found in p.finditer(question)):
        return "several_parts"
    if _SEVERAL_ANSWERS.search(answer):
        return "several_answers"
    if question.count("?") > 1:
        return "several_questions"
    return ""


def _is_list_of_tasks(found: re.Match[str]) -> bool:
    """Whether both parts ask for something: "(a) ... (b)" may also number facts."""
    return all(_TASK_WORD.search(part) for part in found.groups())


def _names_choice(question: str, answer: str) -> bool:
    """Whether the answer is a letter of choices that the question no longer has."""
    chosen = read_choice(normalise(answer))
    if not isinstance(chosen, Choice) or chosen.text:
        return False
    return "(" in answer or bool(re.search(r"\bof the following\b", question, re.IGNORECASE))


def _open_choices(asked: Asked, answer: str) -> Verdict:
    """The open question and the text of the right choice, or why that is impossible."""
    letter = _letter_of(asked, answer)
    if letter not in asked.choices:
        return Verdict(letter)
    text = asked.choices[letter]
    if not asked.stem or not all(asked.choices.values()):
        return Verdict("choices_unclear")
    texts = [_compact(choice) for choice in asked.choices.values()]
    if len(set(texts)) < len(texts):
        return Verdict("choices_unclear")
    if _NEEDS_CHOICES.search(asked.stem):
        return Verdict("question_needs_choices")
    if any(_OF_CHOICES.search(choice) for choice in asked.choices.values()):
        return Verdict("choice_about_choices")
    if _compact(text).strip(".") in _TWO_WAYS:
        return Verdict("choice_of_two")
    if len(_WORD.findall(_LATEX.sub(" ", text))) > MAX_WORDS:
        return Verdict("choice_is_prose")
    return Verdict("", asked.stem, text)


def _letter_of(asked: Asked, answer: str) -> str:
    """The letter of the right choice, or the rule that drops the problem."""
    chosen = read_choice(normalise(answer))
    if answer.strip() in (letter.lower() for letter in asked.choices):
        return answer.strip().upper()
    if isinstance(chosen, Choice) and chosen.letter in asked.choices:
        said, written = _compact(chosen.text), _compact(asked.choices[chosen.letter])
        is_same = not said or said == _compact(normalise(written))
        return chosen.letter if is_same else "answer_contradicts_choice"
    if isinstance(chosen, Choice):
        return "answer_is_no_choice"
    wanted = _compact(normalise(answer))
    same = [name for name, text in asked.choices.items() if _compact(normalise(text)) == wanted]
    return same[0] if len(same) == 1 else "answer_is_no_choice"


def _compact(text: str) -> str:
    return _SPACES.sub("", text).casefold()
