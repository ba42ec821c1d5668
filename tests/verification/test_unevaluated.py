"""Boxing the question: an answer that leaves to be done what the problem asks for."""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TypedDict

import pytest

from megatron_rl.config.tree import PromptSource
from megatron_rl.data.example_tasks import Sizes, compact, make_chain_sum, make_sort
from megatron_rl.data.sources import load_reasoning_gym
from megatron_rl.protocol.types import ChatMessage, Prompt
from tests.verification.copied_problems import TEMPLATES, make_problems
from tests.verification.math.golden_pairs import load_golden_pairs
from tests.verification.requests import boxed, make_request, make_rules
from verification.math.unevaluated import is_unevaluated
from verification.rules import RewardRules
from verification.score import score, screen

ROOT = Path(__file__).resolve().parents[2]
RULES = {rule: make_rules(unevaluated=rule) for rule in ("refuse_copied", "refuse", "accept")}


class CopiedCase(TypedDict):
    """One line of golden/copied.jsonl."""

    problem: str
    reference: str
    answer: str
    paid: bool
    note: str


GOLDEN: list[CopiedCase] = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden" / "copied.jsonl").read_text().splitlines()
]


def _is_paid(answer: str, reference: str, problem: str, rules: RewardRules) -> bool:
    request = make_request(boxed(answer), answer=reference, problem=problem)
    return score(request, rules).parts["correct"] > 0


def test_golden_set_is_large_and_mixed() -> None:
    assert len(GOLDEN) >= 300
    assert sum(not case["paid"] for case in GOLDEN) >= 150
    assert len({(case["problem"], case["answer"]) for case in GOLDEN}) == len(GOLDEN)


@pytest.mark.parametrize(
    "answer",
    ["**19+23**", "`19+23`", "19+23 only", "19+23 (since it is)", "19+23, the only answer"],
)
def test_styling_and_remarks_do_not_hide_a_copy(answer: str) -> None:
    assert is_unevaluated(answer, "42", "Compute 19+23.", "refuse_copied")
    assert not is_unevaluated(answer.replace("19+23", "42"), "42", "Compute 19+23.", "refuse")


@pytest.mark.parametrize("answer", ["cos(pi/3)", "\\\\cos\\\\frac{\\\\pi}{3}", "cos(π/3)"])
def test_a_typed_copy_is_a_copy(answer: str) -> None:
    problems = ("Find cos(pi/3).", "Find $\\cos\\frac{\\pi}{3}$.")
    assert all(is_unevaluated(answer, "1/2", text, "refuse_copied") for text in problems)


def test_golden_cases_pay_as_a_teacher_would() -> None:
    rules = RULES["refuse_copied"]
    wrong = [
        case
        for case in GOLDEN
        if _is_paid(case["answer"], case["reference"], case["problem"], rules) != case["paid"]
    ]
    assert wrong == []


@pytest.mark.parametrize("seed", [1, 2])
def test_copied_expression_earns_nothing_and_every_right_answer_pays(seed: int) -> None:
    copied, unpaid, payable = [], [], 0
    for problem in make_problems(320, seed):
        given = (problem.reference, problem.text)
        copied += [
            (copy, *given)
            for copy in problem.copied
            if _is_paid(copy, *given, RULES["refuse_copied"])
        ]
        unpaid += [
            (answer, *given)
            for answer in problem.honest
            if not _is_paid(answer, *given, RULES["refuse_copied"])
        ]
        payable += _is_paid(problem.copied[0], *given, RULES["accept"])
    assert (copied, unpaid) == ([], [])
    # Without the rule nearly all of these problems pay for their own text.
    assert payable >= 0.9 * 320
    assert len(TEMPLATES) >= 30


@pytest.mark.parametrize(
    ("answer", "reference", "is_open"),
    [
        ("\\cos 60^\\circ", "\\frac12", True), ("2^{10}", "1024", True),
        ("\\sqrt{12}", "2\\sqrt3", True),
        ("5!", "120", True), ("6/12", "\\frac12", True), ("3\\cdot 4", "12", True),
        ("(x+1)(x+2)", "x^2+3x+2", True), ("x^2+3x+2", "(x+1)(x+2)", True),
        ("\\frac{x^2-1}{x-1}", "x+1", True), ("3x+2x", "5x", True), ("-(-3)", "3", True),
        ("2\\sqrt3", "\\sqrt{12}", False), ("\\frac{1}{\\sqrt2}", "\\frac{\\sqrt2}{2}", False),
        ("\\frac{\\sqrt2}{2}", "\\frac{1}{\\sqrt2}", False), ("\\frac{x}{2}", "0.5x", False),
        ("0.5", "\\frac12", False), ("\\frac{3\\pi}{4}", "\\frac34\\pi", False),
        ("50\\%", "0.5", False), ("x=7", "7", False), ("1.5\\times10^3", "1500", False),
        ("4^{50}", "2^{100}", False), ("\\ln 8", "3\\ln 2", False), ("1+x", "x+1", False),
        ("2^2\\cdot 3", "3\\cdot 2^2", False), ("(-\\infty,4)", "x<4", False),
    ],
)  # fmt: skip
def test_strict_rule_needs_no_problem(answer: str, reference: str, is_open: bool) -> None:
    assert is_unevaluated(answer, reference, "", "refuse") == is_open
    assert not is_unevaluated(answer, reference, "", "refuse_copied")
    assert not is_unevaluated(answer, reference, f"Compute ${answer}$.", "accept")


@pytest.mark.parametrize(
    ("answer", "reference", "problem"),
    [("6/12", "1/2", "Simplify 6/12."), ("100 cm", "1\\text{ m}", "How many metres are 100 cm?"),
     ("14:10", "7:5", "Write 14:10 in lowest terms."), ("45%", "0.45", "Write 45% as a decimal.")],
)  # fmt: skip
def test_verdict_of_the_quick_half_is_refused_too(
    answer: str, reference: str, problem: str
) -> None:
    request = make_request(boxed(answer), answer=reference, problem=problem)
    screened = screen(request, RULES["refuse_copied"])
    assert screened == score(request, RULES["refuse_copied"])
    assert (screened.reason, screened.parts["correct"]) == ("unevaluated", 0)
    assert score(request, RULES["accept"]).reason == "correct"


def test_only_the_last_question_of_the_user_is_the_problem() -> None:
    # Thus what a system prompt or a demonstration shows may be an answer.
    messages = [
        ChatMessage("system", "Answer like \\boxed{2^{10}}."),
        ChatMessage("user", "Compute $2^{10}$."),
        ChatMessage("assistant", "\\boxed{1024}"),
        ChatMessage("user", "How many subsets has a set of ten elements?"),
    ]
    prompt = Prompt(id="p", task="math", messages=messages, answer="1024", split="train")
    assert _is_paid("2^{10}", prompt.answer, prompt.question, RULES["refuse_copied"])
    first = "\n".join(message.content for message in messages)
    assert not _is_paid("2^{10}", prompt.answer, first, RULES["refuse_copied"])


def test_reference_itself_always_pays() -> None:
    for pair in load_golden_pairs():
        text = pair["reference"]
        for rule in ("refuse_copied", "refuse"):
            assert not is_unevaluated(text, text, f"Find ${text}$.", rule)
            assert not is_unevaluated(f" ${text}$. ", text, f"Find ${text}$.", rule)


def test_rule_is_quick_and_raises_nothing_on_any_text() -> None:
    draw = random.Random(13)
    texts = [pair[side] for pair in load_golden_pairs() for side in ("answer", "reference")]
    texts += [piece * 300 for piece in ("(", "x^", "\\sin", "2^{", "\\frac{", "-", "|", "1,", "^2")]
    problem = "".join(draw.sample(texts, 400))
    for _ in range(1000):
        first, second = draw.choice(texts), draw.choice(texts)
        cut = draw.randint(0, len(first))
        mixed = (first[:cut] + draw.choice(texts) + first[cut:])[:990]
        start = time.process_time()
        for rule in ("refuse_copied", "refuse"):
            is_unevaluated(mixed, second, problem, rule)
        assert time.process_time() - start < 0.5, (mixed, second)


def test_rule_loads_no_heavy_library() -> None:
    program = (
        "import sys; from verification.math.unevaluated import is_unevaluated;"
        "is_unevaluated('\\\\cos 60^\\\\circ', '1/2', 'Find \\\\cos 60^\\\\circ', 'refuse_copied');"
        "print(*({'mpmath', 'sympy', 'math_verify'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


# --- data sets whose every answer is a whole number: a run compares them as mathematics -----------

UNIVERSAL = ["nan", "inf", "", " ", "x", "_", "None", "null", "true", "yes", "[]", "()", "\\{\\}",
             "0 or 1", "1e999", "?", "\\text{the question}", "any", "\\infty"]  # fmt: skip


def _copies(question: str) -> set[str]:
    """The question, its expressions, and all its numbers under each operation."""
    numbers = re.findall(r"\d+", question)
    expressions = [piece.strip(" .=") for piece in re.findall(r"[-+*/()\d ]{3,}", question)]
    joined = {mark.join(numbers) for mark in ("+", "-", "*", "/", ", ", " ", "")}
    calls = set()
    if "ommon" in question:
        calls = {f"{name}({','.join(numbers)})" for name in ("\\gcd", "\\text{lcm}", "lcm")}
    return {question, *expressions, *joined, *calls, *(f"({piece})+0" for piece in expressions)}


def _paid_of(prompt: Prompt, *, answers: set[str]) -> list[tuple[str, str]]:
    made = {"task": prompt.task, "answer": prompt.answer, "entry": prompt.entry}
    paid = []
    for answer in answers:
        bare = re.sub(r"[()]|\+0$", "", answer).strip()
        # Of a question with one number, or whose last one is right, that is an answer.
        if re.fullmatch(r"-?[\d,]+", bare) and int(bare.replace(",", "")) == int(prompt.answer):
            continue
        request = make_request(boxed(answer), problem=prompt.question, **made)
        if score(request, RULES["refuse_copied"]).parts["correct"] > 0:
            paid.append((answer, prompt.question))
    return paid


@pytest.mark.parametrize(
    "name", ["gcd", "lcm", "chain_sum", "products", "basic_arithmetic", "simple_equations",
             "leg_counting", "count_bits", "gsm_symbolic"],
)  # fmt: skip
def test_copied_question_earns_nothing_where_a_run_compares_whole_numbers(name: str) -> None:
    source = PromptSource(kind="reasoning_gym", name=name, train_size=8, held_out_size=0)
    for prompt in load_reasoning_gym(source, seed=3):
        assert prompt.task == "math"
        assert _paid_of(prompt, answers={*UNIVERSAL, *_copies(prompt.question)}) == []


def test_copied_question_earns_nothing_on_the_example_tasks() -> None:
    sizes = Sizes(train=20, held_out=5, sft_examples=5, wrong_share=0, seed=1)
    options = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    source = PromptSource(
        kind="reasoning_gym",
        name="chain_sum",
        options=options,
        template="Compute: {question}",
        strip_prefix="State the final answer to the following arithmetic problem: ",
    )
    sums, _ = make_chain_sum(sizes, source, teaching_options=options)
    for prompt in [*sums, *compact(sums), *make_sort(sizes)[0]]:
        assert _paid_of(prompt, answers={*UNIVERSAL, *_copies(prompt.question)}) == []
