"""Words of a command line and what a command is given for them."""

from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.cli.command_line.command import spread
from megatron_rl.cli.eval import EvalOptions
from tests.cli.command_line.parsed import parse

SEVERAL, OPTIONAL = ("--against", "--languages"), ("--languages",)


@pytest.mark.parametrize(
    ("words", "spread_out"),
    [
        ("a --against b c --out d", "a --against b --against c --out d"),
        ("--against b --languages", "--against b --languages|"),
        ("--languages --out d", "--languages| --out d"),
        ("--out d e", "--out d e"),
        # What has no word at all is refused by the parser.
        ("--against --out d", "--against --out d"),
        ("--against b --against c d", "--against b --against c --against d"),
    ],
)
def test_an_option_takes_all_words_up_to_the_next(words: str, spread_out: str) -> None:
    wanted = [part for word in spread_out.split() for part in word.split("|")]
    assert spread(words.split(), SEVERAL, OPTIONAL) == wanted


def test_overrides_may_stand_anywhere() -> None:
    given = parse(
        ["run", "train.steps=3", "--config", "a", "run.seed=1", "--config", "b", "optimizer.lr=-1"]
    )
    assert given.config == ["a", "b"] and not given.dry_run and given.run_dir is None
    assert given.overrides == ["train.steps=3", "run.seed=1", "optimizer.lr=-1"]


def test_an_evaluation_is_given_a_model_or_two_folders() -> None:
    given = parse(["eval", "m", "--config", "tiny", "eval.prompts=4", "--run-dir", "r", "--json"])
    assert given == EvalOptions(["m", "eval.prompts=4"], ["tiny"], Path("r"), json=True)
    pair = parse(["eval", "--compare", "a", "b"])
    assert pair.compare == (Path("a"), Path("b")) and pair.overrides == []


def test_tools_take_lists_of_words() -> None:
    common = ["data", "code-tests", "p", "--out", "o", "--solutions", "s"]
    assert parse(common).languages == ["python", "cpp"]
    assert parse([*common, "--languages"]).languages == []
    assert parse([*common, "--languages", "python", "--min-tests", "2"]).languages == ["python"]
    given = parse(["data", "decontaminate", "p", "--against", "a", "b", "--out", "o"])
    assert given.against == [Path("a"), Path("b")] and given.task == "math"


@pytest.mark.parametrize(
    "words",
    [
        ["data", "translate", "p", "--out", "o"],
        ["data", "translate", "p", "--out", "o", "--requests", "--translations", "t"],
        ["analyse", "plane", "--out", "nowhere"],
        ["analyse", "plane", "--out", "nowhere", "--write", "a", "--read", "b"],
        ["sweep", "nowhere.toml", "--report", "--dry-run"],
    ],
    ids=" ".join,
)
def test_options_that_exclude_each_other_are_bad_input(
    words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main(words) == 2
    assert "give" in caplog.text
