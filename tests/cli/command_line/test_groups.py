"""The table of commands: complete, light, and helpful where a word is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup

from megatron_rl.cli import main as cli
from megatron_rl.cli.command_line.command import Entry, load
from megatron_rl.cli.data_tools import TOOLS

ROOT = Path(__file__).resolve().parents[3]
WANTED = (
    "run eval sft convert plan plan-weights simulate data sweep verify analyse audit status report "
    "view doctor config algorithms metrics prepare node join init replay rehearse"
)
HEAVY = {"torch", "numpy", "transformers", "megatron", "sglang", "zmq", "matplotlib", "plotly",
         "pandas", "scipy", "aiohttp", "msgspec"}  # fmt: skip


def test_every_command_is_there() -> None:
    assert {entry.name for entry in cli.COMMANDS} == set(WANTED.split())


@pytest.mark.parametrize("entry", [*cli.COMMANDS, *TOOLS], ids=lambda entry: entry.name)
def test_a_line_of_the_table_names_its_command(entry: Entry) -> None:
    found = load(entry)
    assert isinstance(found, TyperGroup) == entry.is_group
    assert entry.is_group or found.name == entry.name
    assert found.help and len(entry.help) < 60
    commands = found.commands.values() if isinstance(found, TyperGroup) else [found]
    flags = [option for command in commands for p in command.params for option in p.secondary_opts]
    assert flags == [], "a flag that does not name itself"


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["sft", "--help"], ["node", "--help"], ["config",
              "--help"]], ids=" ".join,
)  # fmt: skip
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys\nfrom megatron_rl.cli.main import main\n"
        f"assert main({words}) == 0\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    loaded = set(done.stderr.split())
    assert done.returncode == 0 and "typer" in loaded, done.stderr
    assert {name for name in loaded if name.partition(".")[0] in HEAVY} == set()
    # The tree of keys takes twice as long as everything else.
    assert words[0] == "config" or "megatron_rl.config.tree" not in loaded


def test_the_help_of_a_run_says_where_all_keys_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "All keys, with meaning, unit and default: megatron-rl config." in text
    assert "megatron-rl config explain train.group_size" in text
    assert "megatron-rl run --config tiny run.dir=runs/first" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rn"], "Did you mean 'run'?"),
        (["data", "dedup"], "Did you mean 'dedupe'?"),
        (["run", "--confg", "tiny"], "--config"),
        (["run"], "Missing option '--config'"),
        (["convert", "a", "b", "--to", "gguf"], "gguf"),
        (["node", "runs/x", "--node", "first", "--nodes", "2"], "--node"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_word_is_bad_input_with_the_nearest_right_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and "Usage: megatron-rl" in error and "error: " in error
