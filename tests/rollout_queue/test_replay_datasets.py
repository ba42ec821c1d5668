"""Examples with rewards: read, put into tokens, and drawn like recorded rollouts."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.data.tiny_model import write_tokenizer
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.rollout_files import write_thinned
from megatron_rl.protocol.types import ChatMessage
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.replay import open_replay
from megatron_rl.rollout_queue.replay_datasets import (
    check_sources,
    check_tokens,
    prepare_datasets,
    read_examples,
)
from tests.rollout_queue.makers import make_group

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")

SFT_EXAMPLES = [
    {"prompt": "1+1=", "response": "2", "reward": 1},
    {"prompt": "2+2=", "response": "5", "reward": -0.5},
    {"prompt": [{"role": "user", "content": "1+1="}], "response": "3", "reward": 0.25},
    {"prompt": "1+1=", "response": "2" * 90, "reward": 1.0},
    {"prompt": "3+3=" * 30, "response": "6", "reward": 1.0},
]


def config_of(folder: Path, lines: list, **sections: dict) -> Config:
    folder.mkdir(exist_ok=True)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    write_tokenizer(model)
    path = folder / "sft.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    replay = {"share": 1.0, "datasets": [path]} | sections.pop("replay", {})
    return Config.model_validate(
        {
            "run": {"dir": folder / "run"},
            "model": {"path": model},
            "render": {"system_prompt": ""},
            "train": {"prompts_per_batch": 2, "group_size": 4, "steps": 1},
            "generator": {"context_tokens": 64},
            "sampling": {"max_new_tokens": 32},
            "reward": {"length_margin_tokens": 8},
            "algorithm": {"preset": "agro", "zero_variance_groups": "keep"},
            "replay": replay,
            **sections,
        }
    )


def test_examples_are_grouped_by_prompt_and_tokenised_as_the_trainer_would(tmp_path: Path) -> None:
    config = config_of(tmp_path, SFT_EXAMPLES)
    notes = prepare_datasets(config)
    assert notes[0].startswith("3 SFT examples are put into tokens")
    assert notes[1].startswith(
        "warning: 2 of 5 SFT examples are left out; the first: prompt and response have"
    )
    drawn = open_replay(config, []).draw(0, []).load()
    by_size = {len(group.scored): group for group in drawn}
    assert [scored.score.reward for scored in by_size[2].ordered] == [1.0, 0.25]
    assert by_size[1].rewards == [-0.5]
    renderer = Renderer(
        config.render, config.model.path, 64, format_checks=config.reward.format_checks
    )
    for scored, text in zip(by_size[2].ordered, ("2", "3"), strict=True):
        rollout = scored.rollout
        expected = renderer.render([ChatMessage("user", "1+1=")], 2, task="math")
        assert rollout.prompt_ids.tolist() == expected
        assert rollout.token_ids.tolist() == renderer.render_response(text)
        assert np.array_equal(rollout.logprobs, [0.0, 0.0])
        assert [span.version for span in rollout.spans] == [-1]


def test_a_prompt_with_many_responses_fills_groups_of_the_usual_size(tmp_path: Path) -> None:
    lines = [{"prompt": "1+1=", "response": str(n), "reward": n} for n in range(9)]
    config = config_of(tmp_path, lines)
    prepare_datasets(config)
    replay = open_replay(config, [])
    drawn = [group for step in range(3) for group in replay.draw(step, []).load()]
    assert sorted(len(group.scored) for group in drawn[:3]) == [1, 4, 4]
    # Prepared anew for a run that goes on: nothing is there twice.
    prepare_datasets(config)
    assert len(open_replay(config, []).draw(0, []).of_source) == 1
    assert open_replay(config, []).draw(0, []).of_source[0].value == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a", "response": "b"}, r"sft.jsonl:2: .*`reward`"),
        ({"prompt": "a", "response": "b", "reward": "good"}, r"sft.jsonl:2: .*reward"),
        ({"prompt": "", "response": " ", "reward": 1}, "an empty prompt or response"),
        ("{", "sft.jsonl:2: "),
        ({"prompt": "a", "response": "b", "reward": 1, "task": "maths"}, "the task 'maths'"),
    ],
)
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_sources(config_of(tmp_path, [SFT_EXAMPLES[0], line]))


def test_a_file_that_is_empty_or_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no SFT examples"):
        check_sources(config_of(tmp_path, []))
    config = config_of(tmp_path, [])
    (tmp_path / "sft.jsonl").unlink()
    with pytest.raises(InputError, match="cannot read the SFT examples"):
        check_sources(config)


def test_examples_none_of_which_fits_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no SFT example of replay.datasets can be used: prompt and response have"
    ):
        prepare_datasets(config_of(tmp_path, SFT_EXAMPLES[3:]))


def record(folder: Path, config: Config, text: str) -> Path:
    """A run with one group whose text does or does not belong to its tokens."""
    renderer = Renderer(
        config.render, config.model.path, 64, format_checks=config.reward.format_checks
    )
    group = make_group(0, [1.0, 0.0])
    for index, scored in group.scored.items():
        ids = np.array(renderer.render_response("12"), np.int32)
        rollout = replace(scored.rollout, token_ids=ids, text=text)
        group.scored[index] = replace(scored, rollout=rollout)
    Recorder(folder).write_step(0, [group], now=1.0)
    return folder


def test_a_runs_tokenizer_is_known_by_the_steps_that_are_not_thinned(tmp_path: Path) -> None:
    config = config_of(tmp_path, SFT_EXAMPLES)
    rollouts = record(tmp_path / "old", config, "12") / "rollouts"
    for suffix in (".jsonl", ".int32"):
        content = (rollouts / f"step_000000{suffix}").read_bytes()
        (rollouts / f"step_000001{suffix}").write_bytes(content)
    write_thinned(rollouts, 1)
    (rollouts / "step_000000.int32").unlink()
    config = config_of(tmp_path, SFT_EXAMPLES, replay={"runs": [tmp_path / "old"]})
    check_tokens(config)
    write_thinned(rollouts, 2)
    (rollouts / "step_000001.int32").unlink()
    with pytest.raises(InputError, match="tokens thinned"):
        check_tokens(config)


def test_runs_with_other_tokens_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, SFT_EXAMPLES)
    good = record(tmp_path / "good", config, "12")
    bad = record(tmp_path / "bad", config, "21")
    check_sources(config_of(tmp_path, SFT_EXAMPLES, replay={"runs": [good]}))
    with pytest.raises(
        InputError, match=r"step_000000.jsonl:1 was recorded with another tokenizer"
    ):
        check_sources(config_of(tmp_path, SFT_EXAMPLES, replay={"runs": [good, bad]}))
    with pytest.raises(InputError, match="the folder of this run"):
        check_sources(config_of(tmp_path, SFT_EXAMPLES, replay={"runs": [tmp_path / "run"]}))
    with pytest.raises(InputError, match="holds no rollouts"):
        check_sources(config_of(tmp_path, SFT_EXAMPLES, replay={"runs": [tmp_path / "model"]}))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "calls"),
        ({"prompt": "2+3?", "tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_tools_and_calls_are_refused_and_not_left_out(
    tmp_path: Path, keys: dict[str, object], text: str
) -> None:
    path = tmp_path / "replay.jsonl"
    fine = {"prompt": [{"role": "user", "content": "q", "tool_calls": None}], "tools": []}
    rows = [{**one, "response": "5", "reward": 1.0} for one in (fine, keys)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=rf"replay\.jsonl:2: `(tool_)?{text}` are not read here"):
        list(read_examples(path))
