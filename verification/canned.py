"""Made-up completions: a right and a wrong one in the form that a prompt asks for.

The dry run of a configuration grades them, to find out whether any completion could earn the
reward. The form is read from the prompt as the model sees it, never from the format check.
"""

from typing import NamedTuple

from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from megatron_rl.protocol.types import Prompt
from verification.code.languages import find_language
from verification.code.problem import Case, CodeTests, draw_cases, is_called, parse_tests
from verification.format import has_box

_FENCE = "```"
_WRONG_NUMBER = "-987654321/13"


class Form(NamedTuple):
    """Format that a text asks for, or that a response has."""

    has_thoughts: bool
    """Thoughts between tags come first."""
    has_box: bool
    """The answer is in \\boxed{}."""
    has_fence: bool
    """A program is in a fenced block."""

    def describe(self, tags: ThinkTags) -> str:
        """For messages."""
        parts = [
            tags.around("...") if self.has_thoughts else "no thoughts",
            *(["\\boxed{}"] if self.has_box else []),
            *(["a fenced code block"] if self.has_fence else []),
        ]
        return " and ".join(parts)


class Canned(NamedTuple):
    """Two completions of a prompt."""

    right: str
    wrong: str


def find_form(text: str, tags: ThinkTags = HOUSE_TAGS) -> Form:
    """The form that a rendered prompt asks for or shows, or that a response has.

    The marks in the text decide: a question that shows a fenced block counts as asking for one.
    """
    return Form(tags.open in text, has_box(text) or "\\boxed" in text, _FENCE in text)


def form_of_check(format_check: str) -> Form:
    """The form that a format check demands."""
    return Form(
        format_check.startswith("think"),
        format_check.endswith("box"),
        format_check.endswith("code"),
    )


def make_canned(
    prompt: Prompt,
    compare: str,
    form: Form,
    *,
    tail: str,
    count: int,
    tags: ThinkTags = HOUSE_TAGS,
) -> Canned | None:
    """A right and a wrong completion in this form; None if no right answer is known.

    compare: the comparison of the prompt's task. tail: the end of the rendered prompt, which may
    open the thoughts. count: cases that are drawn to grade a program. GradingError for tests that
    cannot be used.
    """
    if compare == "code":
        programs = _programs(parse_tests(prompt.entry), count)
        if programs is None:
            return None
        language, *answers = programs
        start, end = f"{_FENCE}{language}\n", f"\n{_FENCE}"
        is_framed = form.has_fence
    else:
        answers = [prompt.answer, _WRONG_NUMBER if compare == "math" else f"not {prompt.answer}"]
        start, end = "\\boxed{", "}"
        is_framed = form.has_box
    if is_framed:
        start = _sentences(prompt.question, tags) + start
        answers = [start + answer + end for answer in answers]
    opening = _thoughts(prompt.question, form, tags, tail)
    return Canned(opening + answers[0], opening + answers[1])


def _sentences(question: str, tags: ThinkTags) -> str:
    """Words before the answer, in the question's language; none if they could be an answer."""
    return "" if "\\boxed" in question or _FENCE in question else f"{tags.removed_from(question)}\n"


def _thoughts(question: str, form: Form, tags: ThinkTags, tail: str) -> str:
    """Thoughts in the language of the question: its words."""
    is_opened = tags.is_opened_by(tail)
    if not (form.has_thoughts or is_opened):
        return ""
    thoughts = tags.around(f"\n{tags.removed_from(question)}\n") + "\n"
    return thoughts.removeprefix(tags.open) if is_opened else thoughts


def _programs(tests: CodeTests, count: int) -> tuple[str, str, str] | None:
    """(language, right program, wrong program); the right one looks answers up in the cases.

    Only the cases that seed 0 draws; None for unit tests, whose answers only a program knows.
    """
    if tests.unit_tests:
        return None
    cases = draw_cases(tests, seed=0, count=count)
    if is_called(tests):
        return "python", _look_up_calls(tests.entry_point, cases), _call("return 'none'", tests)
    if find_language(tests.language) == "cpp":
        return "cpp", _look_up_in_cpp(cases), _look_up_in_cpp([])
    table = {case.stdin: case.stdout for case in cases}
    read = "import sys\n"
    return (
        "python",
        f"{read}print({table!r}[sys.stdin.read()], end='')",
        f"{read}print('none of ' + str(len(sys.stdin.read())))",
    )


def _look_up_calls(entry_point: str, cases: list[Case]) -> str:
    rows = [([line for line in case.stdin.splitlines() if line.strip()], case.stdout)
            for case in cases]  # fmt: skip
    body = _call("return TABLE[json.dumps(list(given))]", CodeTests(entry_point=entry_point))
    return (
        f"import json\nROWS = {rows!r}\n"
        # The program reads the JSON, since only the sandbox reads integers of any size.
        "TABLE = {json.dumps(list(map(json.loads, given))): json.loads(wanted)"
        f" for given, wanted in ROWS}}\n{body}"
    )


def _call(body: str, tests: CodeTests) -> str:
    """A definition of the entry point: `name`, `Class.method` or `Class().method`."""
    holder, _, name = tests.entry_point.rpartition(".")
    if not holder:
        return f"def {name}(*given):\n    {body}\n"
    if holder.endswith("()"):
        return f"class {holder[:-2]}:\n    def {name}(self, *given):\n        {body}\n"
    return f"class {holder}:\n    @staticmethod\n    def {name}(*given):\n        {body}\n"


def _look_up_in_cpp(cases: list[Case]) -> str:
    rows = "".join(f"    {{{_cpp(case.stdin)}, {_cpp(case.stdout)}}},\n" for case in cases)
    return (
        "#include <bits/stdc++.h>\nint main() {\n"
        "  std::string text((std::istreambuf_iterator<char>(std::cin)), {});\n"
        f"  std::map<std::string, std::string> table = {{\n{rows}  }};\n"
        '  auto found = table.find(text);\n  std::cout << (found == table.end() ? "none" : '
        "found->second);\n}"
    )


def _cpp(text: str) -> str:
    """A string literal; octal escapes end after three digits, whatever follows."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode()) + '"'
