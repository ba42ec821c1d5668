"""What the launcher finds wrong with stages, curriculum and environments before anything starts."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.launcher.preflight import check_replay
from tests.launcher.test_preflight import (
    check,
    long_line,
    message_of,
    prompt_line,
    write_lines,
)
from tests.launcher.test_preflight import overrides as overrides

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")


def write_run(tmp_path: Path, text: str, lines: list[dict]) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", lines)
    render = '[render]\nsystem_prompt = ""\n'
    (tmp_path / "c.toml").write_text(f'[[prompts]]\npath = "{path}"\n{text}{render}')


LINES = [prompt_line(n, "held_out" if n < 3 else "train") for n in range(6)]


def test_prompts_must_leave_room_for_the_longest_stage(
    tmp_path: Path, overrides: list[str]
) -> None:
    # A prompt of 100 tokens: there is room beside 30, and none beside 40.
    lines = [*LINES, long_line(6, "train")]
    room = ["generator.context_tokens=139", "sampling.max_new_tokens=30"]
    write_run(tmp_path, "", lines)
    assert check(tmp_path, [*overrides, *room]).dropped == []
    stage = "[[stages]]\nat_step = 1\nsampling = {max_new_tokens = %d}\n"
    write_run(tmp_path, stage % 35, lines)
    assert check(tmp_path, [*overrides, *room]).dropped == []
    write_run(tmp_path, stage % 40, lines)
    [dropped] = check(tmp_path, [*overrides, *room]).dropped
    assert dropped.id == "prompts:7" and "100 tokens" in dropped.reason
    # A shorter stage later on changes nothing: the longest one counts.
    write_run(tmp_path, stage % 40 + stage.replace("1", "2") % 20, lines)
    assert len(check(tmp_path, [*overrides, *room]).dropped) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[stages]]\nname = 'hard'\nat_step = 1\nweights = {0 = 0.0, 1 = 1.0}\n",
            "stage 1 (hard): no source with a weight above 0 has a train prompt",
        ),
        ("[curriculum]\nbands = [0.5, 0.0]\n", "no train prompt has one"),
    ],
)
def test_a_run_that_would_find_no_prompt_to_draw_is_refused(
    tmp_path: Path, overrides: list[str], text: str, message: str
) -> None:
    held_out = write_lines(tmp_path / "held.jsonl", [prompt_line(n, "held_out") for n in (7, 8)])
    write_run(tmp_path, f'[[prompts]]\npath = "{held_out}"\n{text}', LINES)
    assert message in message_of(tmp_path, overrides)


def test_the_majority_of_answers_needs_tasks_with_answers_to_compare(
    tmp_path: Path, overrides: list[str]
) -> None:
    decided = "[reward.tasks.game]\nenvironment = 'tests.generation.episode_games:count'\n"
    games = [line | {"task": "game"} for line in LINES]
    overrides = [*overrides, "expert.render.history=template"]
    majority = [*overrides, "algorithm.preset=majority"]
    write_run(tmp_path, decided, games)
    message = message_of(tmp_path, majority)
    assert "advantage_estimator.name='majority' compares answers" in message
    assert "reward.tasks.game.compare" in message
    check(tmp_path, overrides)
    # Where the verifier grades what the environment returns, there are answers.
    write_run(tmp_path, f"{decided}compare = 'exact'\n", games)
    check(tmp_path, majority)
    # Only held-out prompts have the task.
    write_run(tmp_path, decided, [*games[:3], *LINES[3:]])
    check(tmp_path, majority)


def test_the_majority_of_answers_excludes_replayed_groups() -> None:
    given = [
        "replay.share=0.5", "replay.buffer_groups=16", "algorithm.advantage_estimator.name=majority"
    ]  # fmt: skip
    said = r"replay.share=0.5 and .*'majority' exclude each other: which answers are the same"
    with pytest.raises(InputError, match=said):
        check_replay(load_config(None, given))
    check_replay(load_config(None, given[:2]))


def test_a_variable_that_environments_would_lack_is_named(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "c.toml").open("a") as file:
        file.write("[reward.tasks.game]\nenvironment = 'tests.generation.episode_games:count'\n")
    given = [
        *overrides, "expert.render.history=template",
        'expert.environments.variables=["JUDGE_URL", "PATH"]',
    ]  # fmt: skip
    monkeypatch.delenv("JUDGE_URL", raising=False)
    [note] = [note for note in check(tmp_path, given).notes if "variables" in note]
    assert "names JUDGE_URL, which" in note and "PATH" not in note
    monkeypatch.setenv("JUDGE_URL", "http://127.0.0.1:1")
    assert not any("variables" in note for note in check(tmp_path, given).notes)
