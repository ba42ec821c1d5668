"""A start parses the file of SFT examples once, whatever it looks for in it."""

import ctypes
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.data.prompts import material_of_run
from megatron_rl.launcher import nodes
from megatron_rl.trainer import sft_dataset
from megatron_rl.trainer.sft_dataset import forget_sft_dataset, keep_sft_dataset
from tests.launcher.test_preflight import overrides

__all__ = ["overrides"]
_IN_CLOSE_NOWRITE, _IN_OPEN = 0x10, 0x20
_HEADER = struct.Struct("iIII")


@contextmanager
def openings(path: Path) -> Iterator[list[int]]:
    """The kernel's count of the openings of a file, by any process and by whatever call.

    The list has the count at the end of the block.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert watch >= 0, os.strerror(ctypes.get_errno())
    found: list[int] = []
    try:
        # With the closings: the kernel joins equal events that follow each other.
        mask = _IN_OPEN | _IN_CLOSE_NOWRITE
        assert libc.inotify_add_watch(watch, os.fsencode(path), mask) >= 0
        yield found
        events = os.read(watch, 1 << 16)
        place = 0
        while place < len(events):
            _, mask, _, name_bytes = _HEADER.unpack_from(events, place)
            found.append(mask)
            place += _HEADER.size + name_bytes
        found[:] = [sum(bool(mask & _IN_OPEN) for mask in found)]
    finally:
        os.close(watch)


def test_the_count_counts_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a")
    with openings(path) as count:
        path.read_text()
        os.close(os.open(path, os.O_RDONLY))
        os.spawnlp(os.P_WAIT, "cat", "cat", str(path))
    assert count == [3]


def test_a_dry_run_opens_the_file_once(tmp_path: Path, overrides: list[str]) -> None:
    """For think tags, which neither template nor vocabulary has, faults, answers and forms."""
    forget_sft_dataset()
    with openings(tmp_path / "sft.jsonl") as count:
        words = ["expert.render.form_known=true", "sampling.max_new_tokens=8"]
        assert (
            main(["run", "--config", str(tmp_path / "c.toml"), "--dry-run", *overrides, *words]) < 2
        )
    assert count == [1]


@pytest.mark.parametrize("command", ["run", "sft"])
def test_a_dry_run_names_the_sft_line_that_is_too_long(
    tmp_path: Path, overrides: list[str], command: str, caplog: pytest.LogCaptureFixture
) -> None:
    question = [{"role": "user", "content": "1" * 3000}]
    with (tmp_path / "sft.jsonl").open("a") as file:
        file.write(json.dumps({"messages": question, "response": "2"}) + "\n")
    forget_sft_dataset()
    assert main([command, "--config", str(tmp_path / "c.toml"), "--dry-run", *overrides]) == 2
    # The tokenizer knows each digit.
    text = r"sft\.jsonl:4: the prompt has 3001 tokens; allowed are 1 to 2048 = generator"
    assert re.search(text, caplog.text), caplog.text


def test_a_dry_run_names_the_sft_line_of_an_unknown_task(
    tmp_path: Path, overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    question = [{"role": "user", "content": "1+1="}]
    with (tmp_path / "sft.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"messages": question, "response": "2", "task": "maths"}))
    forget_sft_dataset()
    assert main(["sft", "--config", str(tmp_path / "c.toml"), "--dry-run", *overrides]) == 2
    assert re.search(r"sft\.jsonl:5: unknown task 'maths': known are \['code', ", caplog.text)


def test_a_dry_run_shows_what_sft_examples_without_a_system_message_begin_with(
    tmp_path: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}]
    with (tmp_path / "sft.jsonl").open("a") as file:
        file.write(json.dumps({"messages": own, "response": "2"}) + "\n")
    for words, opening in (
        ([], "none"),
        (["render.system_prompt=Think first."], '"Think first."'),
    ):
        forget_sft_dataset()
        given = [*overrides, "eval.prompts=0", *words]
        assert main(["sft", "--config", str(tmp_path / "c.toml"), "--dry-run", *given]) == 0
        lines = [one for one in capsys.readouterr().out.splitlines() if "SFT examples" in one]
        assert lines == [
            "SFT examples without a system message (3 of 4) begin with the run's system prompt "
            f"(math): {opening}"
        ]


def test_a_cold_start_alone_needs_no_prompts(
    tmp_path: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text('[render]\nsystem_prompt = ""\n')
    words = [*overrides, "eval.prompts=0"]
    assert main(["sft", "--config", str(tmp_path / "c.toml"), "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    assert "prompts: none for training, 0 held out" in said
    assert "would do: cold start of 1 steps" in said
    with pytest.raises(InputError, match="no prompts are configured"):
        material_of_run(load_config(tmp_path / "c.toml", [*words, "train.steps=1"]))


def test_preparing_a_run_opens_the_file_once_and_keeps_nothing(
    tmp_path: Path, overrides: list[str]
) -> None:
    forget_sft_dataset()
    with openings(tmp_path / "sft.jsonl") as count:
        nodes.prepare(load_config(tmp_path / "c.toml", overrides), Console(quiet=True))
    assert count == [1]
    assert sft_dataset._read_version.cache_info().currsize == 0


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    line = {"messages": [{"role": "user", "content": "1+1="}], "response": "2"}
    path.write_text(json.dumps(line) + "\n")
    try:
        first = keep_sft_dataset(path)
        assert keep_sft_dataset(path) is first
        path.write_text(json.dumps(line | {"response": "3"}) + "\n")
        os.utime(path, ns=(0, 0))
        assert [one.response for one in keep_sft_dataset(path)] == ["3"]
    finally:
        forget_sft_dataset()
