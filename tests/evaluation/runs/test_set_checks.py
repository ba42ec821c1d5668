"""Evaluation sets are checked before anything starts, as all prompts are."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.tiny_model import write_tokenizer
from megatron_rl.launcher import preflight
from megatron_rl.launcher.preflight import PromptReport


def check(folder: Path, lines: list[dict]) -> PromptReport:
    """Room for 12 tokens beside the set's completions, and for 20 beside those of training."""
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        write_tokenizer(model)
        (model / "config.json").write_text("{}")
        save_file({}, model / "model.safetensors")
    path = folder / "set.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    sets = [{"name": "aime", "max_new_tokens": 20, "prompts": {"path": path}}]
    config = {
        "run": {"dir": folder / "run"}, "model": {"path": model}, "train": {"steps": 0},
        "sampling": {"max_new_tokens": 12}, "generator": {"context_tokens": 32},
        "eval": {"prompts": 0, "sets": sets}, "render": {"system_prompt": ""},
        "reward": {"length_margin_tokens": 2},
    }  # fmt: skip
    return preflight.check(Config.model_validate(config))


def test_a_set_is_checked_by_its_own_limit(tmp_path: Path) -> None:
    report = check(tmp_path, [{"question": "1" * n, "answer": "1"} for n in (11, 12)])
    # <bos> makes them 12 and 13 tokens.
    [dropped] = report.dropped
    assert (dropped.id, dropped.place) == ("aime/set:2", f"{tmp_path}/set.jsonl:2")
    assert "1 of the evaluation set aime; 1 left out" in report.notes[0]


def test_a_set_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no prompt of the evaluation set 'aime' can be rendered"):
        check(tmp_path, [{"question": "1" * 12, "answer": "1"}])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"question": "1", "answer": "1", "task": "maths"}, "unknown task 'maths'"),
        ({"question": "1", "answer": "", "task": "code", "entry": "{}"}, "set.jsonl:1: prompt"),
        (
            {"question": "1", "answer": "1", "split": "train"},
            r"'aime' has 0 prompts .* one or more: add lines .* do not count\)$",
        ),
    ],
)
def test_lines_that_cannot_be_evaluated_are_named(
    tmp_path: Path, line: dict, expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        check(tmp_path, [line])


def test_an_id_that_a_set_repeats_is_named_with_its_set_and_lines(tmp_path: Path) -> None:
    lines = [{"id": "a", "question": question, "answer": "1"} for question in "12"]
    said = r"set 'aime': id 'a' occurs twice \(.*set.jsonl:1 and .*set.jsonl:2\)"
    with pytest.raises(InputError, match=said):
        check(tmp_path, lines)
