"""Keys of `[expert]`: their place in files, and deadlines by `run.patience`."""

import re
from pathlib import Path

import pytest

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.expert import is_expert, public_key, with_expert, without_expert
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.reference import tables

_SAME = (
    (r"^stages\.0\.(sampling|reward|train|queue)\.", r"\1."),
    (r"^eval\.sets\.0\.prompts\.", "prompts.0."),
    (r"^eval\.sets\.0\.(?=samples|temperature|top_|min_p|max_new)", "eval."),
    (r"^sft\.optimizer\.", "optimizer."),
    (r"^verifier\.(answers|language|code|custom)\.", "verifier.POOL."),
    (r"^render\.thinking\.\w+$", "render.thinking"),
    (r"^render\.demonstrations\.\w+\.", "render.demonstrations.CHECK."),
    (r"^algorithm\.\w+\.parameters$", "algorithm.PART.parameters"),
)
"""Places where a key is given again, and the key that it is."""


def test_at_most_200_distinct_keys_stand_outside_expert() -> None:
    distinct = set()
    for key in (entry.key for table in tables() for entry in table.entries):
        for place, same in _SAME:
            key = re.sub(place, same, key)
        if not key.startswith("expert."):
            distinct.add(key)
    assert 150 < len(distinct) <= 200


def test_a_saved_tree_holds_expert_keys_in_their_tables(tmp_path: Path) -> None:
    given = ["expert.queue.max_attempts=7", "expert.verifier.code.max_pending=9", "train.steps=3"]
    config = load_config(None, given)
    assert (config.queue.max_attempts, config.verifier.code.max_pending) == (7, 9)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config))
    assert "[expert.queue]" in path.read_text() and "[expert.verifier.code]" in path.read_text()
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("queue.max_attempts=7", "'queue.max_attempts' is named 'expert.queue.max_attempts'"),
        ("expert.train.steps=3", "has no key 'train.steps'"),
        ("expert.queue.max_attempt=7", "did you mean 'expert.queue.max_attempts'"),
        ("expert.expert.queue.max_attempts=7", "twice: name it 'expert.queue.max_attempts'"),
        ("expert.queue.max_attempts=x", "expert.queue.max_attempts: .* valid integer"),
    ],
)
def test_a_key_in_the_wrong_place_is_refused_with_the_right_one(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [given])


def test_expert_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("expert = 3\n")
    with pytest.raises(ConfigError, match=r"expert is a table, such as \[expert.queue\]; given: 3"):
        load_config(path)


def test_the_two_forms_of_a_tree_are_each_others_inverse() -> None:
    tree = {"queue": {"max_attempts": 7, "max_staleness": 1}, "prompts": [{"path": "x"}],
            "reward": {"tasks": {"a.b": {"compare": "exact"}}}}  # fmt: skip
    written = with_expert(tree)
    assert written == {
        "queue": {"max_staleness": 1}, "expert": {"queue": {"max_attempts": 7}},
        "prompts": [{"path": "x"}], "reward": {"tasks": {"a.b": {"compare": "exact"}}},
    }  # fmt: skip
    assert without_expert(written) == tree
    assert public_key("train.steps") == "train.steps" and is_expert("verifier.code.max_pending")


def test_patience_scales_every_deadline_that_nobody_gave() -> None:
    config = load_config(None, ["run.patience=2", "expert.weights.deadline_s=50"])
    assert (config.queue.heartbeat_timeout_s, config.weights.grace_s) == (60.0, 60.0)
    assert config.weights.deadline_s == 50.0
    assert (config.generator.request_timeout_s, config.queue.lease_timeout_s) == (600.0, 720.0)
    assert (config.train.batch_timeout_s, config.eval.timeout_s) == (2400.0, 1440.0)
    assert config.nodes.wait_s == 1200.0


def test_deadlines_follow_the_longest_completion() -> None:
    lengths = ["sampling.max_new_tokens=10000", "generator.context_tokens=60000"]
    config = load_config(None, [*lengths, "eval.max_new_tokens=50000"])
    # 0.12 s per token, 1.2 times that, then 1.5 and 2 times the lease.
    assert (config.generator.request_timeout_s, config.queue.lease_timeout_s) == (6000.0, 7200.0)
    assert (config.train.batch_timeout_s, config.eval.timeout_s) == (10800.0, 14400.0)
    given = load_config(None, [*lengths, "expert.generator.request_timeout_s=1000"])
    assert given.queue.lease_timeout_s == 1200.0 and given.train.batch_timeout_s == 1800.0


def test_a_node_is_waited_for_only_while_the_queue_waits_for_the_trainer() -> None:
    assert load_config(None, ["expert.train.batch_timeout_s=60"]).nodes.wait_s == 30.0
    given = ["expert.train.batch_timeout_s=60", "expert.nodes.wait_s=60"]
    assert load_config(None, given).nodes.wait_s == 60.0
    with pytest.raises(ConfigError, match=r"wait_s=60 is not below .*batch_timeout_s=60, when the"):
        load_config(None, [*given, "ports.host=10.0.0.1"])
