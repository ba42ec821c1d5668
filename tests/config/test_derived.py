"""Defaults that follow from other keys, and those that have to be given."""

import json
from pathlib import Path

import pytest

from megatron_rl.cli.run import load
from megatron_rl.config.derived import fill_in
from megatron_rl.config.errors import ConfigError
from megatron_rl.config.files import dump_toml, load_config, read_layers
from megatron_rl.config.generator import GeneratorConfig
from megatron_rl.config.prompts import RenderConfig
from megatron_rl.config.reference import commented_toml
from megatron_rl.config.reward import WorkerPoolConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import count_parameters


@pytest.mark.parametrize(
    ("overrides", "sequence", "sharded"),
    [
        ([], False, False),
        (["parallel.tensor=2"], True, False),
        (["parallel.data=2"], False, True),
        (["parallel.context=2"], False, False),
        (["parallel.tensor=2", "parallel.data=4", "parallel.sequence=auto"], True, True),
        (["parallel.tensor=2", "parallel.sequence=false"], False, False),
    ],
)
def test_ranks_that_share_data_or_tensors_divide_their_state(
    tmp_path: Path, overrides: list[str], sequence: bool, sharded: bool
) -> None:
    config = load_config(None, overrides)
    found = config.parallel
    assert (found.sequence, found.distributed_optimizer) == (sequence, sharded)
    assert found.overlap_gradients == sharded
    # What a run writes down holds whatever the rule is when it resumes.
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "config.toml") == config


def test_a_given_value_is_kept_and_a_wrong_one_refused() -> None:
    config = load_config(None, ["parallel.data=2", "parallel.overlap_gradients=false"])
    assert config.parallel.distributed_optimizer and not config.parallel.overlap_gradients
    tree = {"parallel": {"data": 2}}
    assert fill_in(tree)["parallel"]["distributed_optimizer"] is True
    assert tree == {"parallel": {"data": 2}}
    with pytest.raises(ConfigError, match=r"parallel\.data"):
        load_config(None, ["parallel.data=two"])
    with pytest.raises(ConfigError, match="parallel"):
        load_config(None, ["parallel.sequence=yes please"])


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "none"),  # the policy loss's own ratio is to the generator
        (["algorithm.policy_loss.old_logprobs=recompute"], "truncated"),
        (["algorithm.policy_loss.old_logprobs=recompute", "queue.max_staleness=0"], "none"),
        (["algorithm.preset=gspo"], "truncated"),
        (["algorithm.preset=gspo", "algorithm.correction.name=none"], "none"),
        (["algorithm.preset=gspo", "algorithm.correction.name=auto"], "truncated"),
        (["algorithm.preset=icepop"], "masked"),
    ],
)
def test_stale_tokens_are_corrected_where_no_ratio_does_it(overrides: list[str], name: str) -> None:
    correction = load_config(None, overrides).algorithm.correction
    assert correction.name == name
    assert name != "truncated" or correction.high == 2.0


@pytest.mark.parametrize(
    ("base", "stage", "name"),
    [("0", "{max_staleness=4}", "truncated"), ("0", "{}", "none"), ('"0"', "{}", "none"),
     ('"4"', "{}", "truncated"), ("0", '{max_staleness="0"}', "none"),
     ("4", "{max_staleness=0}", "truncated")],
)  # fmt: skip
def test_a_stale_stage_is_corrected_over_a_synchronous_start(
    tmp_path: Path, base: str, stage: str, name: str
) -> None:
    path = tmp_path / "staged.toml"
    path.write_text(f"""
[algorithm]
preset = "gspo"
[queue]
max_staleness = {base}
[[stages]]
at_step = 10
queue = {stage}
""")
    assert load_config(path).algorithm.correction.name == name


def test_a_number_in_quotes_counts_as_a_number() -> None:
    given = [
        "eval.temperature='0'", "parallel.data='2'", "parallel.tensor='2'", "run.patience='3'",
        "generator.context_tokens=70000", "sampling.max_new_tokens='60000'",
    ]  # fmt: skip
    plain = [one.replace("'", "") for one in given]
    found = load_config(None, given)
    assert found == load_config(None, plain)
    assert (found.eval.samples, found.parallel.sequence) == (1, True)
    # 0.12 s a token, three times.
    assert found.generator.request_timeout_s == pytest.approx(21_600)


def test_supervised_steps_have_their_own_rate_and_the_rest_of_the_defaults() -> None:
    config = load_config(None, ["sft.optimizer.warmup_steps=3"])
    assert (config.sft.optimizer.lr, config.optimizer.lr) == (1e-5, 1e-6)
    assert (config.checkpoint.every_steps, config.train.max_mismatch) == (20, 0.5)
    assert (config.eval.temperature, config.eval.samples) == (1.0, 4)
    assert load_config(None, ["eval.temperature=0"]).eval.samples == 1
    assert load_config(None, ["eval.temperature=0", "eval.samples=3"]).eval.samples == 3


@pytest.mark.parametrize(
    ("cores", "answers", "code"), [(1, 1, 1), (2, 1, 1), (16, 4, 8), (32, 8, 16), (192, 8, 96)]
)
def test_grading_processes_follow_the_cores(cores: int, answers: int, code: int) -> None:
    pool = WorkerPoolConfig()
    assert pool.with_workers("answers", cores).workers == answers
    assert pool.with_workers("custom", cores).workers == answers
    assert pool.with_workers("code", cores).workers == code
    assert WorkerPoolConfig(workers=3).with_workers("code", cores).workers == 3


def test_the_cache_fills_a_gpu_of_its_own_and_is_bounded_elsewhere() -> None:
    auto = GeneratorConfig()
    assert auto.takes_all_memory and auto.bounded_kv_tokens == 65_536
    assert not GeneratorConfig(kv_tokens=1000).takes_all_memory
    assert not GeneratorConfig(colocate=True).takes_all_memory
    assert not GeneratorConfig(engine="hf").takes_all_memory
    assert GeneratorConfig(context_tokens=100_000).bounded_kv_tokens == 100_000


@pytest.mark.parametrize(
    ("given", "millions", "shows"),
    [
        # HuggingFaceTB/SmolLM2-135M-Instruct and Qwen/Qwen2.5-7B-Instruct, by their cards.
        ({"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
          "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
          "tie_word_embeddings": True}, 135, True),
        ({"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
          "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}, 7620, False),
    ],
)  # fmt: skip
def test_only_tiny_models_are_shown_an_exchange(
    tmp_path: Path, given: dict[str, object], millions: int, shows: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = count_parameters(tmp_path)
    assert found / 1e6 == pytest.approx(millions, rel=0.01)
    assert (RenderConfig().for_model(found).demonstration_of("box") is not None) == shows
    always = RenderConfig(demonstrate=True).for_model(found)
    assert always.demonstration_of("box") is not None


def test_a_run_names_its_model_and_its_folder() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is not given: .*run\.dir is not given"):
        load([], [], None)
    with pytest.raises(ConfigError, match=r"^run\.dir is not given") as caught:
        load([], ["model.path=m"], None)
    assert "run.dir=runs/first" in str(caught.value)
    assert load([], ["model.path=m"], None, is_dry=True) == load_config(None, ["model.path=m"])
    assert load([], ["model.path=m"], Path("r")).run.dir == Path("r")


def test_derived_values_are_shown_as_such() -> None:
    text = commented_toml()
    assert '# sequence = "auto"' in text and '# path = "model"' in text
    layers = read_layers(None, ["parallel.tensor=2", "parallel.overlap_gradients=false"])
    assert layers.origin_of("parallel.sequence") == "derived"
    assert layers.origin_of("parallel.overlap_gradients") == "command line"
    found = load_config(None)
    assert found == Config().model_copy(update={"eval": found.eval})
