import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.evaluation.runs.comparing import compare, compare_folders
from megatron_rl.evaluation.runs.tables import print_comparison
from tests.evaluation.makers import make_problem
from tests.evaluation.runs.folders import write_results


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "a", tmp_path / "b"
    common = {f"p{n}": [0, 1] for n in range(4)}
    write_results(first, {"aime": common | {"gone": [1, 1]}, "old": {"x": [1]}})
    better = {f"p{n}": [1, 1] for n in range(4)}
    write_results(second, {"aime": better | {"new": [0, 0], "newer": [0, 0]}, "code": {"x": [1]}},
                  label="other", temperature=0.5)  # fmt: skip
    return first, second


def test_problems_are_paired_and_tested_by_set(folders: tuple[Path, Path]) -> None:
    found = compare_folders(*folders)
    assert (found["only_first"], found["only_second"]) == (["old"], ["code"])
    aime = found["sets"]["aime"]
    # Four differences of 1/2: of the 16 choices of signs, two are as far from 0.
    assert (aime["difference"], aime["se"], aime["p"]) == (0.5, 0.0, pytest.approx(2 / 16))
    assert (aime["first_accuracy"], aime["second_accuracy"]) == (0.5, 1.0)
    assert (aime["problems"], aime["higher"], aime["lower"]) == (4, 4, 0)
    assert (aime["only_first"], aime["only_second"]) == (1, 2)
    assert aime["other_settings"] == {"temperature": [1.0, 0.5]}


def test_the_other_way_round_the_signs_turn(folders: tuple[Path, Path]) -> None:
    aime = compare_folders(*reversed(folders))["sets"]["aime"]
    assert (aime["difference"], aime["p"], aime["lower"]) == (-0.5, pytest.approx(2 / 16), 4)


def test_the_table_says_what_is_not_common(folders: tuple[Path, Path]) -> None:
    console = Console(record=True, width=100)
    print_comparison(compare_folders(*folders), console)
    text = console.export_text()
    for part in ("+0.500 +- 0.000", "0.125", "4, 0", "1, 2", "only A has the sets old",
                 "only B has the sets code", "temperature is 1.0 in A, 0.5 in B"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_number_is_cut_in_a_narrow_table(tmp_path: Path, is_terminal: bool) -> None:
    problems = range(19)
    write_results(tmp_path / "a", {"aime": {f"p{n}": [0] for n in problems}})
    write_results(tmp_path / "b", {"aime": {f"p{n}": [1] for n in problems}})
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=is_terminal, color_system=None)
    print_comparison(compare_folders(tmp_path / "a", tmp_path / "b"), console)
    # Two of the 2**19 choices of signs are as far from 0: 2 / 524288.
    assert "3.81e-06" in out.getvalue() and "+1.000" in out.getvalue()


def test_one_problem_has_no_error_in_the_table(tmp_path: Path) -> None:
    write_results(tmp_path / "a", {"aime": {"p": [1, 0]}})
    write_results(tmp_path / "b", {"aime": {"p": [1, 1]}}, label="other")
    console = Console(record=True, width=100)
    print_comparison(compare_folders(tmp_path / "a", tmp_path / "b"), console)
    text = console.export_text()
    assert "+0.500" in text and "+-" not in text


def test_evaluations_without_a_common_set_are_refused(tmp_path: Path) -> None:
    write_results(tmp_path / "a", {"aime": {"p": [1, 1]}})
    write_results(tmp_path / "b", {"": {"p": [1, 1]}})
    with pytest.raises(InputError, match="no set is in both .* aime; .* held_out"):
        compare_folders(tmp_path / "a", tmp_path / "b")


def test_completions_that_are_gone_are_named(folders: tuple[Path, Path]) -> None:
    (folders[1] / "rollouts" / "eval_other.aime.jsonl").unlink()
    with pytest.raises(InputError, match="eval_other.aime.jsonl does not exist"):
        compare_folders(*folders)


def test_lost_lines_are_told_with_numbers(folders: tuple[Path, Path]) -> None:
    assert compare_folders(*folders)["sets"]["aime"]["lost"] == [{}, {}]
    path = folders[1] / "rollouts" / "eval_other.aime.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # Six problems with two completions each: one problem and a completion of another are lost.
    assert len(lines) == 12
    path.write_text("".join(lines[3:]))
    found = compare_folders(*folders)
    lost = {"problems": 5, "completions": 9, "told_problems": 6, "told_completions": 12}
    assert found["sets"]["aime"]["lost"] == [{}, lost]
    console = Console(record=True, width=100)
    print_comparison(found, console)
    text = " ".join(console.export_text().split())
    assert "warning: aime: B has 5 of 6 problems and 9 of 12 completions of its eval.json" in text


def test_a_set_without_a_common_problem_has_no_p(tmp_path: Path) -> None:
    write_results(tmp_path / "a", {"aime": {"p": [1, 1]}})
    write_results(tmp_path / "b", {"aime": {"q": [1, 1]}})
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    assert found["sets"]["aime"]["p"] is None and found["sets"]["aime"]["only_first"] == 1
    print_comparison(found, Console(quiet=True))


def test_the_command_prints_json_and_refuses_other_arguments(
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = map(str, folders)
    assert main(["eval", "--compare", first, second, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sets"]["aime"]["problems"] == 4
    assert main(["eval", "--compare", first, second, "run.seed=1"]) == 2
    assert main(["eval", "--compare", first, str(folders[0] / "none")]) == 2
    assert "holds no results" in caplog.text
    assert main(["eval", "somewhere"]) == 2
    assert "needs --config FILE, or --compare A B" in caplog.text


def test_problems_are_paired_by_question_and_the_others_are_counted() -> None:
    first = [
        make_problem([1, 1], name="a"), make_problem([0, 1], name="b"),
        make_problem([1, 1], name="c"), make_problem([0, 0], name="relabelled", answer="1"),
    ]  # fmt: skip
    second = [
        make_problem([1, 0, 1, 0], name="b"), make_problem([0, 1], name="a"),
        make_problem([1, 1], name="relabelled", answer="2"),
    ]  # fmt: skip
    found = compare(first, second)
    # a: 1/2 - 1, b: 1/2 - 1/2.
    assert (found["difference"], found["problems"], found["lower"]) == (-0.25, 2, 1)
    assert (found["first_accuracy"], found["second_accuracy"]) == (0.75, 0.5)
    assert (found["only_first"], found["only_second"], found["other_samples"]) == (2, 1, 1)
    nothing = compare(first[:1], second[2:])
    assert (nothing["p"], nothing["first_accuracy"], nothing["only_first"]) == (None, None, 1)


def test_a_repeated_question_is_paired_with_its_own_repetition() -> None:
    def twice(verdicts: list[list[int]]) -> list:
        problems = [make_problem(v, name="same") for v in verdicts]
        return [
            type(p)(**{**p.__dict__, "prompt_id": f"id {place}"})
            for place, p in enumerate(problems)
        ]

    found = compare(twice([[0], [1]]), list(reversed(twice([[0], [1]]))))
    assert (found["problems"], found["higher"], found["lower"]) == (2, 0, 0)
