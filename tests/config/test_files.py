import tomllib
from pathlib import Path

import pytest

from megatron_rl.config.files import ConfigError, dump_toml, load_config, override
from megatron_rl.config.tree import Config


def load_text(folder: Path, text: str, overrides: list[str] | None = None) -> Config:
    path = folder / "config.toml"
    path.write_text(text)
    return load_config(path, overrides)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[train]\ngroup_sise = 4", "train.group_sise", "train.group_size"),
        ("[optimiser]\nlr = 1e-5", "optimiser", "optimizer"),
        ("[sft.optimizer]\nlearning_rate = 1e-5\nwarmup_step = 1", "sft.optimizer.warmup_step",
         "sft.optimizer.warmup_steps"),
        ("[train]\nbatch_size = 8", "train.batch_size", "train.prompts_per_batch"),
        ("[rollout]\nn = 8", "rollout", "generator"),
        ("[algorithm]\nkl_coef = 0.1", "algorithm.kl_coef", "algorithm.kl.coefficient"),
        ("[sft.optimizer]\nlearning_rate = 1", "sft.optimizer.learning_rate", "sft.optimizer.lr"),
        ("[parallel]\ntp = 2", "parallel.tp", "parallel.tensor"),
        ("[train]\nlr = 1e-5", "train.lr", "optimizer.lr"),
        ('[[prompts]]\nkind = "jsonl"\npaht = "x"', "prompts.0.paht", "prompts.path"),
    ],
)  # fmt: skip
def test_unknown_key_names_the_nearest_one(
    tmp_path: Path, text: str, key: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert f"unknown key '{key}'; did you mean '{nearest}'?" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 'many'", r"train\.steps: .*given: 'many'"),
        ("[train]\ngroup_size = 1", r"train\.group_size: .*greater than or equal to 2.*given: 1"),
        (
            "[train]\nminibatches = 3\nprompts_per_batch = 2",
            "groups never split across minibatches",
        ),
        (
            "[expert]\ngenerator.request_timeout_s = 500\nqueue.lease_timeout_s = 400",
            r"set expert.queue.lease_timeout_s to 600, or lower",
        ),
        (
            "[expert]\ngenerator.request_timeout_s = 500\nqueue.lease_timeout_s = 500",
            r"request_timeout_s=500 is not below expert.queue.lease_timeout_s=500",
        ),
        ("[expert.queue]\nscore_timeout_s = 500", r"set expert.queue.score_timeout_s to 900"),
        ("[expert.verifier]\nanswer_within_s = 300", r"verifier\.code: .*raise the later ones"),
        (
            "[expert.verifier.answers]\ntimeout_s = 200",
            r"verifier\.answers: timeout_s=200, max_elapsed_s",
        ),
        ("[reward]\ntest_s = 10", r"expert.verifier.code.timeout_s=200 is less than the 425 s"),
        ("[train", r"is no valid TOML"),
        (
            '[algorithm]\nnormalization = "none"',
            r"algorithm.normalization is a section .*: set algorithm.normalization.name to 'none'",
        ),
        ('[algorithm]\nkl = "k1"', r"algorithm.kl is a section .*such as algorithm.kl.placement"),
        ('generator = "vllm"', r"generator is a section .*given: 'vllm'.*generator.engine"),
        (
            "[[stages]]\nat_step = 1\nsampling = 2",
            r"stages.0.sampling is a section .*such as stages.0.sampling.max_new_tokens",
        ),
    ],
)
def test_wrong_value_or_combination_says_what_was_given(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, text)


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration .*none.toml"):
        load_config(tmp_path / "none.toml")


def test_overrides_set_nested_values_and_items_of_lists(tmp_path: Path) -> None:
    text = '[[prompts]]\npath = "a.jsonl"\n'
    overrides = ["train.steps=7", "run.dir=some/where", "sft.optimizer.lr=2e-3",
                 "prompts.0.weight=2",
                 "parallel.sequence=true", "render.system_prompt=be brief"]  # fmt: skip
    config = load_text(tmp_path, text, overrides)
    assert config.train.steps == 7 and config.run.dir == Path("some/where")
    assert config.sft.optimizer.lr == 2e-3 and config.prompts[0].weight == 2.0
    assert config.parallel.sequence and config.render.system_prompt == "be brief"


@pytest.mark.parametrize(
    "override", ["steps=3", "train.steps", "prompts.4.weight=1", "run.dir.x=1"]
)
def test_malformed_override_is_named(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=f"override '{override}'"):
        load_text(tmp_path, '[[prompts]]\npath = "a.jsonl"\n', ["run.dir=x", override])


def test_toml_round_trip_is_the_identity(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": {"dir": "runs/ü \"quoted\" \\ back\tslash", "seed": 3},
            "render": {"system_prompt": "two\nlines \u2028 €", "chat_template": "{% if x %}"},
            "optimizer": {"lr": 3e-7, "eps": 1e-15, "clip_grad_norm": 1e20},
            "sft": {"dataset": "/t.jsonl", "optimizer": {"lr": 2e-3, "lr_schedule": "linear"}},
            "prompts": [
                {"path": "/a.jsonl", "weight": 0.25},
                {"kind": "reasoning_gym", "name": "chain_sum",
                 "template": "Say \\boxed{} {question}",
                 "options": {"min_terms": 2, "allow_negation": True, "rate": 0.5, "mode": "x y"}},
            ],
        }
    )  # fmt: skip
    assert load_text(tmp_path, dump_toml(config)) == config
    assert load_text(tmp_path, dump_toml(Config())) == Config()


HOSTILE = (
    "", "gsm8k/v1", "two words", "a.b", "a=b", '"quoted"', "it\'s", "back\\slash", "tab\t", "\r\n",
    "\x00\x1b\x7f", "\u2028 \u0085 \ufeff", "ü € 𝔸 😀", "[section]", "# no comment",
    "1e5", "true", '"""',
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_a_key_or_a_text_holds_comes_back(tmp_path: Path, text: str) -> None:
    config = Config.model_validate(
        {
            "run": {"dir": f"runs/{text}"},
            "render": {"system_prompt": text},
            "prompts": [
                {"kind": "reasoning_gym", "name": text, "options": {text: text, "other": 1}},
                {"path": "/data/a.jsonl"},
            ],
            "reward": {
                "tasks": {text: {"compare": "math"}, "plain": {"compare": text}},
                "extra": [{"name": "brief", "function": "a.b:c", "tasks": [text, "plain"]}],
            },
        }
    )
    assert load_text(tmp_path, dump_toml(config)) == config
    assert load_config(None, [override("render.system_prompt", text)]).render.system_prompt == text


def test_extreme_numbers_come_back(tmp_path: Path) -> None:
    options = {
        "up": float("inf"),
        "down": float("-inf"),
        "tiny": 5e-324,
        "whole": 2.0,
        "big": 2**62,
    }
    config = Config.model_validate(
        {
            "optimizer": {"lr": 1e-300, "clip_grad_norm": float("inf")},
            "prompts": [{"kind": "reasoning_gym", "name": "x", "options": options}],
        }
    )
    again = load_text(tmp_path, dump_toml(config))
    assert again == config
    types = {key: type(value) for key, value in again.prompts[0].options.items()}
    assert types == {key: type(value) for key, value in options.items()}


def test_the_resolved_file_holds_the_system_prompts_and_not_the_unset_one(tmp_path: Path) -> None:
    text = dump_toml(Config())
    assert "[render.system_prompts]" in text and "\nsystem_prompt =" not in text
    config = load_text(tmp_path, text)
    assert config.render.system_prompt is None
    assert (
        config.render.system_prompts.think_box
        in tomllib.loads(text)["render"]["system_prompts"].values()
    )


def test_a_file_of_own_prompts_needs_a_path_alone(tmp_path: Path) -> None:
    config = load_text(tmp_path, '[[prompts]]\npath = "mine.jsonl"\n')
    [source] = config.prompts
    assert (source.kind, source.task, source.held_out_share) == ("auto", "math", 0.1)
    assert config.eval.prompts == "auto"


def test_an_engine_that_has_no_nucleus_is_not_asked_for_one(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[[eval.sets]]\nname = "a"\nprompts = {path = "x"}\ntop_p = 0.9\n')
    assert load_config(path).eval.sets[0].top_p == 0.9
    with pytest.raises(ConfigError, match="generator.engine='hf' samples with top_p = 1 alone"):
        load_config(path, ["generator.engine=hf"])


def test_a_chat_template_is_a_text_or_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}\n"
    (tmp_path / "mine" / "chat.jinja").write_text(template, encoding="utf-8")
    text = (
        '[render]\nchat_template = "mine/chat.jinja"\n'
        "chat_template_kwargs = {enable_thinking = false, effort = 'low', deep = {a = [1, 2.5]}}\n"
    )
    config = load_text(tmp_path, text)
    assert config.render.chat_template == template
    assert config.render.chat_template_kwargs == {
        "enable_thinking": False, "effort": "low", "deep": {"a": [1, 2.5]},
    }  # fmt: skip
    # The saved tree holds the text, so a resumed run does not read the file.
    (tmp_path / "mine" / "chat.jinja").unlink()
    assert load_text(tmp_path, dump_toml(config)) == config
    given = load_config(None, [f"render.chat_template={template.strip()}"])
    assert given.render.chat_template == template.strip()
    thinks = load_config(None, ["render.chat_template_kwargs.enable_thinking=true"])
    assert thinks.render.chat_template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('chat_template = "none.jinja"', r"there is no file /.*/none.jinja; give a Jinja template"),
        ('chat_template = "plain.txt"', r"plain.txt holds no Jinja template"),
        ('chat_template = "binary"', r"render.chat_template: .*cannot read .*binary"),
        ("chat_template_kwargs = {tokenize = true}", "'tokenize' is set by the run itself"),
        ("chat_template_kwargs = {tools = []}", "'tools' is set by the run itself"),
        ("chat_template_kwargs = {messages = 'x'}", "'messages' is set by the run itself"),
        ("chat_template_kwargs = {'a-b' = 1}", "'a-b' can be no variable"),
        ("chat_template_kwargs = {day = 2026-05-01}", r"render.chat_template_kwargs"),
        ("enable_thinking = false", "did you mean 'render.chat_template_kwargs'"),
    ],
)
def test_an_unusable_template_or_variable_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "plain.txt").write_text("Hello")
    (tmp_path / "binary").write_bytes(b"{{ \xff\xfe }}")
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, f"[render]\n{text}\n")


def test_an_empty_text_unsets_a_path_that_may_be_missing(tmp_path: Path) -> None:
    base = '[model]\npath = "m"\nmegatron_path = ""\n[sft]\ndataset = "a.jsonl"\n'
    given = load_text(tmp_path, base)
    assert (given.sft.dataset, given.model.megatron_path) == (tmp_path / "a.jsonl", None)
    for text in ("sft.dataset=", "sft.dataset=''", 'sft.dataset=""'):
        config = load_text(tmp_path, base, [text])
        assert config.sft.dataset is None and config.model.path == tmp_path / "m"
        # The saved file leaves the key out, wherever it lies.
        assert "dataset" not in tomllib.loads(dump_toml(config))["sft"]
        (tmp_path / "run").mkdir(exist_ok=True)
        assert load_text(tmp_path / "run", dump_toml(config)) == config


@pytest.mark.parametrize(
    "text",
    [
        "model.path=", "run.dir=''", 'replay.datasets=["a", ""]', 'replay.runs=""',
        "checkpoint.resume=", "algorithm.reference.policy=",
    ],
)  # fmt: skip
def test_an_empty_text_for_a_path_that_has_to_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"wrong:\n  {text.partition('=')[0]}: "):
        load_config(None, [text])


@pytest.mark.parametrize("key", ["optimizer.lr", "reward.correct", "reward.extra.0.weight"])
def test_not_a_number_is_no_value(key: str) -> None:
    extra = ["reward.extra.0.name=a", "reward.extra.0.function=a.b:c"]
    with pytest.raises(ConfigError, match=rf"{key}.*\(given: nan\)"):
        load_config(None, [*extra, f"{key}=nan"])
    assert load_config(None, [*extra, f"{key}=0.5"]).reward.extra[0].name == "a"
