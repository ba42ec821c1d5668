"""`data filter-format`: keeps problems with one comparable answer, and opens multiple choice.

A multiple-choice problem becomes an open question; its answer is the text of the right choice.
Dropped problems are counted by the name of the rule. Pure string code.

Choices are three or more in alphabetical order from A with the same kind of mark: `(A)` (also in
\\textbf, \\text and the like), or `A)`, `A.`, `A:` after a space. Two suffice if both begin lines.

Source: Magistral (arXiv 2506.10910), section 4.1: proofs and multi-part problems are removed,
multiple choice is reformulated. The rules are ours.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.curation.rows import Row
from megatron_rl.curation.tool import Drop, Outcome, Report
from megatron_rl.data.tables.rows import RowFault
from verification.math.choices import Choice, read_choice
from verification.math.text import normalise

MAX_WORDS = 3
"""A choice of more words is prose, which the math comparison cannot judge."""
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
_SYMBOLS = re.compile(r"(?<![A-Za-z\\])[A-Z]{1,6}(?![a-z])")
_ARTICLE = re.compile(
    r"(?:^|[.!?:]\s|\n)\s*A\s+(?!(?:or|and|to|through|is|has|was|does|can)\b)(?=[a-z])"
)
_ASKS_FOR_LETTER = re.compile(r"\bletters?\b|\bhexadecimal\b|\bbase\b|\broman\b", re.IGNORECASE)
_SENTENCE_BEHIND = re.compile(
    r"[\d$})%.!?]\s+[A-Z][a-z]{2,}"
    r"|\S\s+(?:Answer|Choose|Circle|Explain|Give|Justify|Please|Select|Write)\b"
)
"""Behind a value another sentence begins with a capital, as in "5 Explain." """
_LATEX = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\(?:text|textrm|mathrm|mbox)\s*\{|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_TWO_WAYS = {"true", "false", "yes", "no", "correct", "incorrect"}
_SPACES = re.compile(r"\s+")

_STYLE = r"(?:\\(?:textbf|textrm|text|mathbf|mathrm|bf|rm)\s*\{\s*)"


def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """(marks in parentheses, marks of a list); one group of each match is the letter."""
    marked = (
        rf"{_STYLE}\(({letters})\)\s*\.?(?:\\\s|~|\s)*\}}|\{{\s*\\bf\s*\(({letters})\)\s*\}}"
        rf"|\({_STYLE}({letters})\}}\)|(?<![\w)])\(({letters})\)(?!\w)"
    )
    listed = (
        rf"(?:(?<=\s)|(?<=^)|(?<=\$))(?:{_STYLE}({letters})[.):]\s*\}}|({letters})[.):](?=\s|\$))"
    )
    return re.compile(marked), re.compile(listed, re.MULTILINE)


_UPPER, _LOWER = _patterns("[A-J]"), _patterns("[a-j]")
_GAP = r"(?:\\(?:q?quad|hfill|hspace\*?\{[^{}]*\}|newline|item|[ ,;:!])|\\\\|[~&;,]|\s)+"
_GAP_BEFORE = re.compile(rf"^{_GAP}")
_GAP_BEHIND = re.compile(rf"{_GAP}$")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:enumerate|itemize|tabular|array|choices)\}\S*")
_DOLLAR = re.compile(r"(?<!\\)\$")


class Verdict(NamedTuple):
    """Result for a problem."""

    rule: str = ""
    """The rule that drops it; empty: kept."""
    question: str = ""
    """The question to write."""
    answer: str = ""


class Asked(NamedTuple):
    """A question, apart from its choices."""

    stem: str
    choices: dict[str, str]
    """By letter."""


def filter_format(
    rows: Sequence[Row], *, tasks: Sequence[str] = ("math",), faulty: Sequence[RowFault] = ()
) -> Outcome:
    """The kept rows, with multiple choice opened; rows of other tasks stay unchanged.

    faulty: rows without an answer, which are no prompts; counted as dropped.
    """
    report = Report("filter-format", {"tasks": list(tasks)}, read=len(rows) + len(faulty))
    report.drops += [Drop("", fault.place, fault.reason) for fault in faulty]
    kept, others = [], 0
    for row in rows:
        prompt = row.prompt
        if prompt.task not in tasks:
            others += 1
            kept.append(row)
            continue
        verdict = judge_format(prompt.question, prompt.answer)
        if verdict.rule:
            report.drop(prompt, verdict.rule)
            continue
        if verdict.question != prompt.question:
            report.changed["choices_opened"] += 1
            row = row.with_question(verdict.question)
        if verdict.answer != prompt.answer:
            row = row.replace(answer=verdict.answer).with_fields(original_answer=prompt.answer)
        kept.append(row)
    report.figures = {"of_other_tasks": others}
    return report.outcome(kept)


def judge_format(question: str, answer: str) -> Verdict:
    """The verdict on a problem; choices are opened."""
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
    """Whether both parts ask for something; "(a) ... (b)" may also number facts."""
    return all(_TASK_WORD.search(part) for part in found.groups())


def _names_choice(question: str, answer: str) -> bool:
    """Whether the answer is the letter of a choice that the question does not list."""
    chosen = read_choice(normalise(answer))
    if not isinstance(chosen, Choice) or chosen.text:
        return False
    if "(" in answer or re.search(r"\bof the following\b", question, re.IGNORECASE):
        return True
    return not _is_symbol(chosen.letter, question)


def _is_symbol(letter: str, question: str) -> bool:
    """Whether a question uses a letter as a name, as in "point A", "$AB$" or "from A to E"."""
    if _ASKS_FOR_LETTER.search(question):
        return True
    found = {name for run in _SYMBOLS.findall(_ARTICLE.sub(" ", question)) for name in run}
    # Between two names: the question may list all by its first and last.
    return letter in found or (any(n < letter for n in found) and any(n > letter for n in found))


def _open_choices(asked: Asked, answer: str) -> Verdict:
    """The open question and the text of the right choice, or the rule that drops the problem."""
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


# --- choices --------------------------------------------------------------------------------------


def find_choices(question: str, *, is_lower: bool = False) -> Asked | None:
    """The question and its choices; None without choices.

    is_lower: marks are small letters, which may also number the parts of a problem. A choice that
    cannot be separated from other text is empty.
    """
    for pattern in _LOWER if is_lower else _UPPER:
        marks = _last_sequence(question, pattern)
        begins_lines = all(_begins_line(question, mark) for mark in marks)
        if len(marks) >= 3 or (len(marks) == 2 and begins_lines):
            return _take_apart(question, marks)
    return None


def _last_sequence(question: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The marks A, B, ... from the last A that a B follows."""
    marks = list(pattern.finditer(question))
    letters = [next(letter for letter in mark.groups() if letter).upper() for mark in marks]
    found: list[re.Match[str]] = []
    for start in [place for place, letter in enumerate(letters) if letter == "A"]:
        count = 0
        while start + count < len(marks) and letters[start + count] == "ABCDEFGHIJ"[count]:
            count += 1
        # A later letter out of order only mentions a choice: the texts are unclear.
        if count >= 2 and start + count == len(marks):
            found = marks[start:]
    return found


def _begins_line(question: str, mark: re.Match[str]) -> bool:
    return not question[question.rfind("\n", 0, mark.start()) + 1 : mark.start()].strip(" $")


def _take_apart(question: str, marks: list[re.Match[str]]) -> Asked:
    stem = question[: marks[0].start()]
    # After an odd number of dollars the choices are inside a formula.
    in_formula = len(_DOLLAR.findall(stem)) % 2 == 1
    if in_formula:
        opening = list(_DOLLAR.finditer(stem))[-1].start()
        is_clean = not _trimmed(stem[opening + 1 :])
        stem = stem[:opening] if is_clean else ""
    ends = [mark.start() for mark in marks[1:]] + [len(question)]
    choices = {}
    for letter, mark, end in zip("ABCDEFGHIJ", marks, ends, strict=False):
        text = question[mark.end() : end]
        is_last = end == len(question)
        choices[letter] = _text_of(text, is_last=is_last, in_formula=in_formula)
    *others, last = choices
    # Units such as "3 Newtons" stand behind other choices, too.
    if _SENTENCE_BEHIND.search(choices[last]) and not any(
        _SENTENCE_BEHIND.search(choices[letter]) for letter in others
    ):
        choices[last] = ""
    return Asked(_trimmed(_ENVIRONMENT.sub(" ", stem)).strip(), choices)


def _text_of(text: str, *, is_last: bool, in_formula: bool) -> str:
    """The text of a choice; empty if other text follows it."""
    text = _trimmed(_ENVIRONMENT.sub(" ", text))
    if is_last and "\n" in text.strip():
        return ""
    if in_formula:
        parts = [_trimmed(part) for part in _DOLLAR.split(text)]
        return parts[0] if not any(parts[1:]) else ""
    if len(_DOLLAR.findall(text)) == 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = text.removesuffix(".") if not text.endswith("..") else text
    return text if len(_DOLLAR.findall(text)) % 2 == 0 else ""


def _trimmed(text: str) -> str:
    return _GAP_BEHIND.sub("", _GAP_BEFORE.sub("", text.strip())).strip()
