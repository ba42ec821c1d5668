"""Hand-written problems, and what the rules make of each."""

import json
from pathlib import Path

import pytest

from megatron_rl.curation.format_filter import filter_format, find_choices, judge_format
from megatron_rl.curation.rows import read_rows

AMC = (
    "What is $1+1$? $\\textbf{(A)}\\ 1 \\qquad \\textbf{(B)}\\ 2 \\qquad"
    "\\textbf{(C)}\\ \\frac{5}{2} \\qquad \\textbf{(D)}\\ 4$"
)
LISTED = "How many legs has a spider?\nA. 6\nB. 8\nC. 10\nD. 12"

OPENED = [
    (AMC, "B", "What is $1+1$?", "2"),
    (AMC, "\\textbf{(C)}\\ \\frac{5}{2}", "What is $1+1$?", "\\frac{5}{2}"),
    (AMC, "4", "What is $1+1$?", "4"),
    (LISTED, "B", "How many legs has a spider?", "8"),
    (LISTED, "(C)", "How many legs has a spider?", "10"),
    (LISTED, "b", "How many legs has a spider?", "8"),
    ("Compute $2^3$. (A) $6$ (B) $8$ (C) $9$", "(B) 8", "Compute $2^3$.", "8"),
    ("Solve $x+1=3$.\nA) 1  B) 2  C) 3  D) 4", "B)", "Solve $x+1=3$.", "2"),
    ("Find the median. (A) 3. (B) 4. (C) 5.5", "C", "Find the median.", "5.5"),
    ("On what day?\n(A) Monday\n(B) Tuesday", "(B)", "On what day?", "Tuesday"),
    ("Find $x$. (a) 3 (b) 4 (c) 5", "b", "Find $x$.", "4"),
    ("Find $x$.\na) 3\nb) 4\nc) 5", "(C)", "Find $x$.", "5"),
    ("Find $x$.\n$\\mathrm{(A) \\ } 3 \\qquad \\mathrm{(B) \\ } 4 \\qquad \\mathrm{(C) \\ } 5$",
     "A", "Find $x$.", "3"),
    # Units are no sentence behind the choices, and neither are names.
    ("Find it. (A) 1 m (B) 10 m (C) 0.1 km", "C", "Find it.", "0.1 km"),
    ("Find it. (A) 1 Newton (B) 2 Newtons (C) 3 Newtons", "C", "Find it.", "3 Newtons"),
    ("Where? (A) Rome (B) Paris (C) New York", "C", "Where?", "New York"),
    ("When? (A) 3 May (B) 4 May (C) 5 June", "C", "When?", "5 June"),
    ("Find $x$.\n$\\mathrm{(A)}\\ 3$\n$\\mathrm{(B)}\\ 4$\n$\\mathrm{(C)}\\ 5$", "A",
     "Find $x$.", "3"),
    ("Find $x$. $(\\text{A})\\ 3 \\quad (\\text{B})\\ 4 \\quad (\\text{C})~5$", "\\text{(C)}",
     "Find $x$.", "5"),
    (
        "Find the area.\n\\begin{tabular}{ll}\n(A) $3\\pi$ & (B) $4\\pi$ \\\\\n"
        "(C) $5\\pi$ & (D) $6\\pi$\n\\end{tabular}",
        "D", "Find the area.", "6\\pi",
    ),
]  # fmt: skip

DROPPED = [
    ("Prove that $n^2$ is even if $n$ is.", "proof", "proof"),
    ("Let $a>0$. Show that $a+1/a \\ge 2$.", "a+1/a\\ge2", "proof"),
    ("Let $f$ be linear with $f(1)=2$. Find $f(2)$ and prove that it is unique.", "4", "proof"),
    ("Is $n^2+n$ even?", "Proof: n(n+1) is even.", "proof_as_answer"),
    ("What is the least prime?", "", "no_answer"),
    ("What is the least prime?", "N/A", "no_answer"),
    ("Let $x=2$. (a) Find $x^2$. (b) Find $x^3$.", "4", "several_parts"),
    ("A train.\n1. How fast is it?\n2. How far does it go?", "60", "several_parts"),
    ("(i) Compute $2+2$. (ii) Compute $3+3$.", "4", "several_parts"),
    ("**Part A** What is 1? **Part B** What is 2?", "1", "several_parts"),
    ("Find both roots.", "(a) 3 (b) 4", "several_answers"),
    ("How many cats are there? How many dogs are there?", "3", "several_questions"),
    ("Which of the following is prime?\n(A) 4\n(B) 6\n(C) 7", "C", "question_needs_choices"),
    ("The sum is closest to\n(A) 4\n(B) 6\n(C) 7", "C", "question_needs_choices"),
    ("What could be the value of $x$? (A) 4 (B) 6 (C) 7", "C", "question_needs_choices"),
    ("Find $x$. (A) 1 (B) 2 (C) none of these", "A", "choice_about_choices"),
    ("Find $x$. (A) 1 (B) 2 (C) cannot be determined", "A", "choice_about_choices"),
    ("Why?\n(A) It rains a lot there\n(B) It is cold up there\n(C) 3", "A", "choice_is_prose"),
    ("Is it even?\n(A) Yes\n(B) No", "A", "choice_of_two"),
    (LISTED, "E", "answer_is_no_choice"),
    (LISTED, "9", "answer_is_no_choice"),
    (LISTED, "(B) 10", "answer_contradicts_choice"),
    ("Find $x$. (A) 1 (B) 1 (C) 2", "C", "choices_unclear"),
    ("Find $x$. (A) 1 (B) 2 (C) 3\nHint: it is odd.", "C", "choices_unclear"),
    ("(A) 1 (B) 2 (C) 3", "C", "choices_unclear"),
    ("Which of the following is prime?", "B", "choices_missing"),
    ("What is 2+2?", "(D)", "choices_missing"),
    ("Which option is the capital city of France?", "A", "choices_missing"),
    ("Pick: what is 5 among the options below?", "D", "choices_missing"),
    ("Which of these is the largest prime below 100?", "C.", "choices_missing"),
    ("A train has 5 cars. A car has 4 wheels. How many wheels?", "A", "choices_missing"),
    (
        "In triangle $ABC$, angle $A$ is right. What is the sum of the others?",
        "E",
        "choices_missing",
    ),
    ("What is 2+3? A. 3 B. 11 C. 4 D. 5 Explain.", "D", "choices_unclear"),
    ("What is 3+3? (A) 3 (B) 11 (C) 4 (D) 6 Choose one.", "D", "choices_unclear"),
    ("What is 2+9? A. 3 B. 11 C. 4 D. 5 Choose one and explain.", "B", "choices_unclear"),
    ("What is 3+3? (A) $3$ (B) $11$ (C) $6$ Explain.", "C", "choices_unclear"),
    ("What is 3+3? (A) 3 (B) 11 (C) 6. The first is too small", "C", "choices_unclear"),
    ("What colour has grass? (A) red (B) blue (C) green Choose one.", "C", "choices_unclear"),
]

KEPT = [
    ("Let (a) be even, (b) odd, (c) prime. What is c?", "7"),
    ("What is the least prime?", "2"),
    ("Points (A) and (B) are 3 apart. How far is the midpoint from each?", "1.5"),
    ("In triangle ABC, angle A. B is right. Find angle C.", "30"),
    ("Equations (1) and (2) have one common root. Find it.", "5"),
    ("If f(a) = 3 and f(b) = 4, find f(a) + f(b).", "7"),
    ("How many ways are there to show three cards?", "6"),
    ("A show that lasts 3 hours begins at noon. When does it end?", "3"),
    ("Which vertex is nearest, A or B?", "A"),
    ("A and B run a race of 5 km, and B is last. Who wins?", "A"),
    ("Find the vertex of square ABCD that is opposite to A.", "C"),
    ("The points on the line are named A to E. Which one is in the middle?", "C"),
    ("Simplify $A \\cap (A \\cup B)$ for sets.", "A"),
    ("Let $I$ be the identity and $B$ a matrix. What is $IB$?", "$B$"),
    ("The matrix A satisfies A^2 = A. What is A^3?", "A"),
    ("Let \\overline{CD} be a diameter. At which end is the angle?", "D"),
    ("Which digit stands for twelve in hexadecimal?", "C"),
    ("Which letter comes third?", "C"),
    ("Facts: (a) $x>1$, (b) $x$ is even, and (c) $x<4$. Find $x$.", "2"),
    ("Solve for $x$: $x^2=4$", "x=2 or x=-2"),
]


@pytest.mark.parametrize(("question", "answer", "opened", "new"), OPENED)
def test_choices_are_opened(question: str, answer: str, opened: str, new: str) -> None:
    assert judge_format(question, answer) == ("", opened, new)


@pytest.mark.parametrize(("question", "answer", "rule"), DROPPED)
def test_each_rule_drops_its_cases(question: str, answer: str, rule: str) -> None:
    assert judge_format(question, answer).rule == rule


@pytest.mark.parametrize(("question", "answer"), KEPT)
def test_open_questions_are_left_as_they_are(question: str, answer: str) -> None:
    assert judge_format(question, answer) == ("", question, answer)


def test_a_letter_out_of_order_is_no_choice() -> None:
    assert find_choices("Triangle (A) 1 (C) 2 (B) 3") is None


def test_rows_keep_the_shape_of_their_question(tmp_path: Path) -> None:
    lines = [
        {"question": LISTED, "answer": "B", "source": "s"},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": LISTED}],
         "answer": "A"},
        {"question": "Prove that 1=1.", "answer": "-1", "id": "gone"},
        {"question": "Prove it by a program?", "answer": "", "task": "code"},
    ]  # fmt: skip
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = filter_format(read_rows(path))
    stem = "How many legs has a spider?"
    first, second, third = outcome.rows
    assert first.fields["question"] == stem and first.prompt.answer == "8"
    assert first.fields["original_answer"] == "B" and bytes(first.fields["source"]) == b'"s"'
    assert second.fields["messages"] == [
        {"role": "system", "content": "x"}, {"role": "user", "content": stem},
    ]  # fmt: skip
    assert third.prompt.task == "code"
    assert outcome.report.dropped == {"proof": 1}
    assert outcome.report.changed == {"choices_opened": 2}
    assert [drop.id for drop in outcome.report.drops] == ["gone"]
