"""Small files in the exact form of data sets of code: a right program passes, a wrong one fails."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.curation.rows import read_rows
from megatron_rl.data.tables.plain_values import BadTests
from megatron_rl.data.tables.source import Reading, read_files
from megatron_rl.data.tables.test_forms import entry_of
from megatron_rl.data.tables.test_forms import tests_in_answer as read_answer
from megatron_rl.protocol.types import Prompt
from verification.code.grading import CodeLimits, grade, prepare
from verification.code.problem import parse_tests

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ADD = "print(sum(map(int, input().split())))"
TOTAL = "def total(xs): return sum(xs)"
LONG, ZEROS = "9" * 5000, "0" * 5000


def read(path: Path, rows: list[dict[str, Any]], **source: Any) -> Reading:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_files(PromptSource(path=path, **source))


def reason(prompt: Prompt, program: str) -> str:
    limits = prepare(CodeLimits(test_s=2.0))
    return grade(program, "python", parse_tests(prompt.entry), seed=0, limits=limits).reason


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Form(NamedTuple):
    """A row of a data set, programs, and what its prompt must say."""

    name: str
    row: dict[str, Any]
    right: list[str]
    wrong: list[str]
    asks: str = ""
    read_as: str = ""
    suffixes: tuple[str, ...] = ("parquet", "jsonl")


def live(**more: Any) -> dict[str, Any]:
    stdin = {"input": "3 4\n", "output": "7\n", "testtype": "stdin"}
    private = [{**stdin, "input": "1 1\n", "output": "2\n"}]
    return {
        "question_title": "t", "question_content": "Add.", "platform": "atcoder",
        "question_id": "abc301_a", "starter_code": "", "public_test_cases": json.dumps([stdin]),
        "private_test_cases": packed(json.dumps(private)), "metadata": "{}",
    } | more  # fmt: skip


FUNCTIONAL = [
    {"input": "[1, 2]\n3", "output": "[6]", "testtype": "functional"},
    {"input": "[]\n0", "output": "[0]", "testtype": "functional"},
]
SOLUTION = "class Solution:\n    def addUp(self, xs: List[int], n: int):\n        return "
CONTEST = {
    "name": "1_A", "description": "Add.", "time_limit": {"seconds": 2, "nanos": 500_000_000},
    "memory_limit_bytes": 256_000_000, "input_file": "", "output_file": "", "cf_rating": 800,
    "public_tests": {"input": ["3 4\n"], "output": ["7\n"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": {"input": ["1 1\n", "5 6\n"], "output": ["2\n", "11\n"]},
}  # fmt: skip
PYTEST = (
    "from solution import total\n\ndef test_some():\n    assert total([1, 2]) == 3\n\n"
    "def test_none():\n    assert total([]) == 0\n"
)
VERIFY = {
    "language": "python",
    "test_cases": [
        {"type": "stdin_stdout", "input": "3 4\n", "output": "7\n", "fn_name": None},
        {"type": "stdin_stdout", "input": "1 1\n", "output": "2\n", "fn_name": None},
    ],
}
CALLS = {
    "language": "python",
    "test_cases": [
        {"type": "function_call", "fn_name": "total", "input": [[1, 2]], "output": 3},
        {"type": "function_call", "fn_name": "total", "input": [[]], "output": 0},
    ],
}
TACO = {"question": "Add.", "starter_code": "", "difficulty": "EASY", "name": None,
        "time_limit": "2.0 seconds", "memory_limit": "256.0 megabytes",
        "solutions": "[]"}  # fmt: skip


def apps(tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"problem_id": 7, "question": "Add.", "solutions": "", "difficulty": "intro",
            "starter_code": "", "input_output": json.dumps(tests), **more}  # fmt: skip


FORMS = [
    Form("apps", apps({"inputs": ["3 4\n", "1 1\n"], "outputs": ["7\n", "2\n"]}), [ADD],
         ["print(7)"], read_as="APPS, TACO"),
    Form("apps lines in lists, null as fn_name",
         apps({"fn_name": None, "inputs": [["3 4"]], "outputs": [["7"]]}), [ADD], ["print(8)"]),
    Form("apps numbers", apps({"inputs": ["1\n"], "outputs": ["0.5 1000000\n"]}),
         ["print('0.50 1000000')", "print(0.5000001, 1000000)"],
         ["print('0.51 1000000')", "print('0.5 1000001')"]),
    Form("apps function, outputs in lists of one",
         apps({"fn_name": "add", "inputs": [[2, [7]], [0, [1]]], "outputs": [[[9]], [[1]]]},
              starter_code="def add(n, xs):\n\t"),
         ["def add(n, xs): return [xs[0] + n]", "def add(n, xs): return [[xs[0] + n]]",
          "class Solution:\n    def add(self, n, xs): return [xs[0] + n]",
          "import numpy\ndef add(n, xs): return numpy.array(xs) + n"],
         ["def add(n, xs): return xs[0] + n", "def add(n, xs): return [0]"],
         asks="```python\ndef add(n, xs):\n```"),
    Form("apps function, outputs with and without a list of one",
         apps({"fn_name": "even", "inputs": [[[1, 2]], [[2, 4]]], "outputs": [[2], [2, 4]]}),
         ["def even(xs): return [x for x in xs if x % 2 == 0]"],
         ["def even(xs): return xs[-1] if len(xs) == 2 and xs[0] == 1 else xs"], asks="`even`"),
    Form("apps function, arguments as lines",
         apps({"fn_name": "addUp", "inputs": ["[1, 2]\n3", "[4]\n0"], "outputs": ["[6]", "[4]"]}),
         ["def addUp(xs, n): return [sum(xs) + n]"], ["def addUp(xs, n): return sum(xs) + n"]),
    Form("apps function, numbers",
         apps({"fn_name": "half", "inputs": [[0.6], [3]], "outputs": [0.3, 1.5]}),
         ["def half(x): return 0.1 + 0.2 if x == 0.6 else x / 2"], ["def half(x): return 0.3"]),
    Form("apps function, long integers",
         apps({}, input_output='{"fn_name": "inc", "inputs": [[' + LONG + ', "x"]], "outputs": [[1'
              + ZEROS + "]]}"),
         ["def inc(n, s): return n + 1"], ["def inc(n, s): return n + 2"]),
    Form("apps program, long integers",
         apps({}, input_output=f'{{"inputs": [[{LONG}]], "outputs": [[1{ZEROS}]]}}'),
         ["print(int(input()) + 1)"], ["print(int(input()))"]),
    Form("taco", TACO | {"input_output": json.dumps({"inputs": ["3 4\n"], "outputs": ["7\n"]})},
         [ADD], ["print(8)"]),
    Form("codecontests", CONTEST, [ADD], ["print(7)"], read_as="CodeContests"),
    Form("codecontests, lists of structures",
         CONTEST | {"public_tests": [{"input": "a\n", "output": "YES 0.25\n"}],
                    "private_tests": [{"input": "b\n", "output": "NO 100000\n"}],
                    "generated_tests": []},
         ["print('Yes 0.250001' if input() == 'a' else 'no 100000')"],
         ["print('Yes 0.2501' if input() == 'a' else 'no 100000')",
          "print('Yes 0.25' if input() == 'a' else 'no 100001')"]),
    Form("codecontests, public tests alone",
         {"description": "Add.", "public_tests": {"input": ["3 4", "1 1"], "output": ["7", "2"]}},
         [ADD], ["print(7)"]),
    Form("livecodebench", live(), [ADD], ["print(7)", "print(2)"], read_as="LiveCodeBench"),
    Form("livecodebench, plain private tests, exact numbers",
         live(private_test_cases=json.dumps(
             [{"input": "5 5\n", "output": "10.50\n", "testtype": "stdin"}])),
         ["print({'3': '7.00', '5': 10.5}[input()[0]])"],
         ["print({'3': '7', '5': 10.500000000000001}[input()[0]])"]),
    Form("livecodebench functions",
         live(public_test_cases=json.dumps(FUNCTIONAL[:1]),
              private_test_cases=packed(FUNCTIONAL[1:]), metadata='{"func_name": "addUp"}',
              starter_code=f"{SOLUTION[:-15]}"),
         [SOLUTION + "[sum(xs) + n]"], [SOLUTION + "sum(xs) + n", SOLUTION + "[6]"],
         asks="```python\nclass Solution:\n    def addUp(self, xs: List[int], n: int):\n```"),
    Form("deepcoder columns",
         {"problem": "Add.", "tests": json.dumps(
             {"fn_name": "total", "inputs": [[[1, 2]], [[]]], "outputs": [[3], [0]]})},
         [TOTAL], ["def total(xs): return 3"], asks="The tests call `total`.", read_as="DeepCoder"),
    Form("deepcoder functions of livecodebench",
         {"problem": "Add.", "metadata": {"func_name": "addUp"}, "starter_code": "",
          "tests": json.dumps(FUNCTIONAL)},
         [SOLUTION + "[sum(xs) + n]"], [SOLUTION + "sum(xs) + n"], asks="`addUp`"),
    Form("deepcoder list of cases",
         {"problem": "Add.", "tests": json.dumps(
             [{"type": "function_call", "fn_name": "total", "input": [[1, 2]], "output": [3]}])},
         [TOTAL], ["def total(xs): return 4"]),
    Form("synthetic-1", {"problem_id": "vfc_1", "task_type": "verifiable_code", "prompt": "Add.",
                         "verification_info": json.dumps(VERIFY), "metadata": "{}"},
         [ADD], ["print(7)", "print('7.0')"]),
    Form("synthetic-1 calls", {"problem_id": "vfc_2", "task_type": "verifiable_code",
                               "prompt": "Sum up.", "verification_info": json.dumps(CALLS)},
         [TOTAL], ["def total(xs): return 3", "def total(xs): return [sum(xs)]"], asks="`total`"),
    Form("open-r1 calls", {"problem_id": "vfc_4", "task_type": "verifiable_code",
                           "problem_statement": "Spell.", "verification_info": {
                               "language": "python", "test_cases": [
                                   {"type": "function_call", "fn_name": "spell", "input": given,
                                    "output": wanted} for given, wanted in (
                                        ("[[1, 2], true]", "[1]"), ("[['a'], None]", "['x']"),
                                        ("[[], 1]", "plain text"))]}},
         ["def spell(a, b): return 'plain text' if not a else [1] if b else ['x']"],
         ["def spell(a, b): return 'plain' if not a else [1] if b else ['x']",
          "def spell(a, b): return 'plain text' if not a else 1 if b else ['x']"]),
    Form("open-r1", {"problem_id": "vfc_3", "task_type": "verifiable_code",
                     "problem_statement": "Add.", "verification_info": VERIFY,
                     "metadata": {"time_limit": "3 seconds", "memory_limit_bytes": 300_000_000}},
         [ADD], ["print(7)"], read_as="open-r1 verifiable coding"),
    Form("kodcode", {"question_id": "Algorithm_1_I", "question": "Sum a list.", "test": PYTEST,
                     "test_info": [{"function_name": "total", "parameter_list": "(xs)"}],
                     "gpt_pass_percentage": 0.4},
         [TOTAL, "import numpy\ndef total(xs): return int(numpy.sum(xs))"],
         ["def total(xs): return 3", "def sum_up(xs): return sum(xs)"],
         asks="The tests call `total`.", read_as="KodCode"),
    Form("kodcode, info as text",
         {"question": "Sum a list.", "test_code": PYTEST.replace("from solution import total", ""),
          "test_info": '[{"function_name": "total"}]', "gpt_pass_percentage": 0.4},
         [TOTAL], ["def total(xs): return 3"]),
    Form("kodcode, signature as the question",
         {"question": 'def total(xs):\n    """Sum."""', "test": PYTEST, "test_info": []},
         [TOTAL], ["def total(xs): return 3"], asks="Complete the Python function total."),
    Form("deepcoder, text of Python",
         {"problem": "Read:\ndef total(xs):\nand do it.", "tests": repr(
             [{"type": "function_call", "fn_name": "total", "input": [[1]], "output": [1]}])},
         [TOTAL], ["def total(xs): return 3"], asks="and do it."),
    Form("acecode", {"id": "oss_1", "question": "Sum a list.", "inferences": [{"pass_rate": 0.5}],
                     "test_cases": ["assert total([1, 2]) == 3", "assert total([]) == 0"]},
         [TOTAL], ["def total(xs): return 3"], asks="as in `assert total([1, 2]) == 3`."),
    Form("acecode, text", {"question": "Sum a list by total().", "test_cases": json.dumps(
             ["assert total([1, 2]) == 3", "assert sorted([total([])]) == [0]"])},
         [TOTAL], ["def total(xs): return 3"]),
    Form("humaneval",
         {"task_id": "HumanEval/0", "entry_point": "total",
          "prompt": 'def zero(): return 0\n\ndef total(xs):\n    """Sum."""\n',
          "canonical_solution": "    return sum(xs)\n",
          "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
                  "    assert candidate([]) == zero()\n"},
         [TOTAL], ["def total(xs): return 3"], asks="Complete the Python function total.",
         read_as="HumanEval"),
    Form("mbpp", {"task_id": 2, "text": "Write a function to sum a list.", "code": TOTAL,
                  "test_list": ["assert total([1, 2]) == ZERO + 3", "assert total([]) == ZERO"],
                  "test_setup_code": "ZERO = 0", "challenge_test_list": []},
         [TOTAL], ["def total(xs): return 3"], read_as="MBPP"),
    Form("mbpp sanitized",
         {"task_id": 2, "prompt": "Write a function to sum a list.", "code": TOTAL,
          "test_imports": ["import math"], "test": "assertion(total(*inp), exp, 0)",
          "test_list": ["assert math.isclose(total([1, 2]), 3)", "assert total([]) == 0"]},
         [TOTAL], ["def total(xs): return 3"]),
    Form("eurus-2", {"prompt": [{"role": "user", "content": "Add."}], "ability": "code",
                     "data_source": "apps", "reward_model": {"style": "rule", "ground_truth":
                     json.dumps({"inputs": ["3 4\n"], "outputs": ["7\n"]})}},
         [ADD], ["print(8)"]),
    Form("skywork", {"prompt": [{"role": "user", "content": "Add up."}], "ability": "code",
                     "reward_model": {"ground_truth": json.dumps(
                         {"entry_point": "Solution().addUp", "import_prefix": "",
                          "test_code": "def check(f):\n    assert f([1], 2) == 3"})}},
         [SOLUTION + "sum(xs) + n"], [SOLUTION + "4"], asks="`Solution().addUp`"),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_programs_are_graded_by_the_tests_of_each_form(tmp_path: Path, form: Form) -> None:
    for suffix in form.suffixes:
        reading = read(tmp_path / f"rows.{suffix}", [form.row])
        [prompt] = reading.prompts
        assert prompt.task == "code"
        assert form.asks in prompt.question
        if form.read_as:
            assert f"read as {form.read_as}" in reading.notes[0]
            named = read(tmp_path / f"a.{suffix}", [form.row], kind=form.read_as.split(", ")[0])
            assert named.prompts[0].entry == prompt.entry
        assert prompt.is_program == (not parse_tests(prompt.entry).entry_point)
    assert [reason(prompt, program) for program in form.right] == ["correct"] * len(form.right)
    assert "correct" not in [reason(prompt, program) for program in form.wrong]


def test_lines_that_tools_write_hold_the_same_prompts(tmp_path: Path) -> None:
    for form in FORMS:
        for suffix in form.suffixes:
            [prompt] = read(tmp_path / f"rows.{suffix}", [form.row]).prompts
            [row] = read_rows(tmp_path / f"rows.{suffix}", task="math")
            [again] = read(tmp_path / "written.jsonl", [row.fields]).prompts
            same = ("entry", "task", "messages", "id")
            if not form.row.keys() & {"id", "question_id", "problem_id", "task_id"}:
                same = same[:-1]
            found = [(getattr(prompt, key), getattr(again, key)) for key in same]
            assert [one for one, other in found if one != other] == [], form.name


def test_limits_of_a_problem_are_kept(tmp_path: Path) -> None:
    found = {
        name: parse_tests(read(tmp_path / "a.parquet", [BY_NAME[name]]).prompts[0].entry)
        for name in ("codecontests", "taco", "open-r1", "livecodebench")
    }
    limits = {name: (tests.time_s, tests.memory_bytes) for name, tests in found.items()}
    assert limits == {
        "codecontests": (2.5, 256_000_000),
        "taco": (2.0, 256 << 20),
        "open-r1": (3.0, 300_000_000),
        "livecodebench": (None, None),
    }


def test_long_integers_that_are_no_text_are_read_from_json(tmp_path: Path) -> None:
    row = apps({}, input_output={"fn_name": "f", "inputs": [["LONG"]], "outputs": [["LONG"]]})
    for name, form in (("a.jsonl", "{}\n"), ("a.json", "[{}]")):
        text = form.replace("{}", json.dumps(row)).replace('"LONG"', LONG)
        (tmp_path / name).write_text(text)
        [prompt] = read_files(PromptSource(path=tmp_path / name)).prompts
        assert json.loads(prompt.entry)["cases"] == [{"stdin": LONG, "stdout": f"[{LONG}]"}]
    (tmp_path / "a.jsonl").write_text(text[1:-1].replace(LONG, LONG * 30))
    with pytest.raises(InputError, match="150,000 digits, allowed are 100,000"):
        read_files(PromptSource(path=tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [(None, None), ("", None), ("unknown", None), (0, None), (-1, None), ("1500 ms", 1.5),
     ({"seconds": 1, "nanos": None}, 1.0), ({"seconds": "2", "nanos": 5e8}, 2.5), (True, None)],
)  # fmt: skip
def test_limits_of_other_writing(limit: Any, seconds: float | None) -> None:
    beside = {"time_limit": limit, "private_tests": [{"input": "1", "output": "1"}]}
    assert json.loads(entry_of([], beside)).get("time_s") == seconds


def test_pass_rate_of_kodcode(tmp_path: Path) -> None:
    [prompt] = read(tmp_path / "a.parquet", [BY_NAME["kodcode"]]).prompts
    assert (prompt.pass_rate, prompt.id) == (0.4, "Algorithm_1_I")


BY_NAME = {form.name: form.row for form in FORMS}
ODD = [
    (live(private_test_cases=packed(print)), "opcode STACK_GLOBAL"),
    (live(private_test_cases="[{"), "no JSON"),
    (live(private_test_cases="not base64!"), "neither a list"),
    (live(metadata="{}", public_test_cases=json.dumps(FUNCTIONAL)), "neither fn_name nor metadata"),
    (CONTEST | {"input_file": "in.txt"}, "input_file = 'in.txt'"),
    (CONTEST | {"time_limit": {"seconds": 240, "nanos": 0}}, "time_s = 240"),
    (apps({"inputs": [], "outputs": []}), "neither cases nor unit_tests"),
    (apps({}, input_output=""), "no tests|empty"),
    (apps({"inputs": ["1"], "outputs": []}), "1 inputs but 0 outputs"),
    (apps({}, input_output=f'{{"fn_name": "f", "inputs": [[{"1" * 100_001}]], "outputs": [1]}}'),
     "integer has 100,001 digits, allowed are 100,000"),
    (apps({}, input_output='{"inputs": ' + "[" * 5000), "too deeply|no JSON"),
    (apps({"fn_name": "f", "inputs": [3], "outputs": [1]}), "arguments are 3, expected a list"),
    (BY_NAME["acecode"] | {"test_cases": ["assert True"]}, "call no function"),
    (BY_NAME["kodcode"] | {"test": "import pandas\n" + PYTEST}, "import pandas"),
    (BY_NAME["kodcode"] | {"test": "assert ("}, "no Python"),
    (BY_NAME["synthetic-1"] | {"verification_info": json.dumps(VERIFY | {"language": "rust"})},
     "'rust', expected"),
    (BY_NAME["deepcoder columns"] | {"tests": None}, "no tests"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "why"), ODD)
def test_a_row_with_unusable_tests_is_named_and_can_be_dropped(
    tmp_path: Path, row: dict[str, Any], why: str
) -> None:
    usual = next(one for one in BY_NAME.values() if one.keys() == row.keys())
    path = tmp_path / "rows.jsonl"
    with pytest.raises(InputError, match=rf"1 of 2 rows .*1 bad_tests.*rows\.jsonl:2: .*({why})"):
        read(path, [usual, row])
    reading = read(path, [usual, row], faulty="drop")
    assert len(reading.prompts) == 1
    assert f"rows left out: 1 bad_tests (first {path}:2)" in reading.notes[0]


@pytest.mark.parametrize(
    "answer",
    ["7", "[1, 2]", "{1, 2}", "[", "(1, 2)", 7, ["7", "8"], [], "[]", "\\frac{1}{2}", None],
)
def test_an_answer_to_a_problem_is_no_tests(answer: Any) -> None:
    assert read_answer(answer) is None


def test_an_object_in_place_of_an_answer_is_tests_or_named() -> None:
    tests = {"inputs": ["1"], "outputs": ["1"]}
    # Some scripts encode twice.
    assert entry_of(json.dumps(json.dumps(tests))) == entry_of(tests)
    assert read_answer(json.dumps(tests)) == read_answer(tests) == entry_of(tests)
    long = f'{{"fn_name": "f", "inputs": [[{LONG}]], "outputs": [{LONG}]}}'
    assert json.loads(read_answer(long) or "")["cases"] == [{"stdin": LONG, "stdout": LONG}]
    for text in (PYTEST, "assert total([1]) == 1\nassert total([]) == 0"):
        assert json.loads(read_answer(text) or "")["entry_point"] == "total"
    with pytest.raises(BadTests, match="no form that is known"):
        read_answer('{"foo": 1}')
