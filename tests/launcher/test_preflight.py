"""Every kind of bad input ends in one clear error, exit code 2, before anything starts."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, dump_toml, load_config
from megatron_rl.config.tree import Config
from megatron_rl.data.tiny_model import write_tokenizer
from megatron_rl.launcher import preflight
from megatron_rl.launcher.ports import listed_ports, resolve_ports
from tests.weights.made_up import write_zeros

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")
DEMONSTRATION = "<think>\n2 + 3 is 5.\n</think>\nThe answer is \\boxed{5}."
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 384, "vocab_size": 100,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip


def write_lines(path: Path, items: list[dict | str]) -> Path:
    texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
    path.write_text("\n".join(texts) + "\n")
    return path


def prompt_line(number: int, split: str) -> dict:
    messages = [{"role": "user", "content": f"{number}+1="}]
    return {"task": "math", "messages": messages, "answer": str(number + 1), "split": split}


def trace_line(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"{number}+1="}], "response": str(number + 1)}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Overrides of a config that passes every check."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    write_tokenizer(model)
    write_zeros(model)
    prompts = [prompt_line(n, "held_out" if n < 3 else "train") for n in range(6)]
    write_lines(tmp_path / "prompts.jsonl", prompts)
    write_lines(tmp_path / "sft.jsonl", [trace_line(n) for n in range(3)])
    (tmp_path / "c.toml").write_text(
        f'[[prompts]]\npath = "{tmp_path}/prompts.jsonl"\n[render]\nsystem_prompt = ""\n'
    )
    return [
        f'model.path="{model}"', f'run.dir="{tmp_path}/run"', "eval.prompts=3", "sft.steps=1",
        f'sft.dataset="{tmp_path}/sft.jsonl"', "parallel.tensor=2", "parallel.pipeline=2",
    ]  # fmt: skip


def check(tmp_path: Path, overrides: list[str]) -> preflight.PromptReport:
    return preflight.check(load_config(tmp_path / "c.toml", overrides))


def message_of(tmp_path: Path, overrides: list[str]) -> str:
    with pytest.raises((InputError, ConfigError)) as caught:
        check(tmp_path, overrides)
    return str(caught.value)


def test_a_reference_in_a_folder_has_the_tokens_of_the_policy(
    tmp_path: Path, overrides: list[str]
) -> None:
    teacher = tmp_path / "teacher"
    given = [*overrides, "algorithm.preset=distill", f'algorithm.reference.policy="{teacher}"']
    assert "no folder of a Hugging Face model" in message_of(tmp_path, given)
    shutil.copytree(tmp_path / "model", teacher)
    larger = SHAPE | {"hidden_size": 384, "num_hidden_layers": 8, "vocab_size": 103}
    (teacher / "config.json").write_text(json.dumps(larger))
    write_zeros(teacher)
    assert "estimator='exact' compares all tokens" in message_of(tmp_path, given)
    given += ["algorithm.kl.placement=reward", "algorithm.kl.estimator=k1"]
    check(tmp_path, given)
    (teacher / "config.json").write_text(json.dumps(larger | {"num_hidden_layers": 7}))
    assert "pipeline" in message_of(tmp_path, given)
    (teacher / "config.json").write_text(json.dumps(larger | {"vocab_size": 150}))
    assert "a vocabulary of 150, and the policy one of 100" in message_of(tmp_path, given)
    (teacher / "config.json").write_text(json.dumps(larger))
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has other tokens than" in message_of(tmp_path, given)


def test_megatron_folder_is_for_reinforcement_learning_alone(
    tmp_path: Path, overrides: list[str]
) -> None:
    given = [*overrides, f'model.megatron_path="{tmp_path}/nowhere"', "sft.steps=0"]
    assert "nowhere: there is no such folder" in message_of(tmp_path, given)
    given = [*overrides, f'model.megatron_path="{tmp_path}"']
    assert "make a HF folder of it with `megatron-rl convert`" in message_of(tmp_path, given)
    check(tmp_path, [*given, "sft.steps=0"])
    message = message_of(tmp_path, [*given, "sft.steps=0", "train.steps=0"])
    assert "without sft.steps and with train.steps" in message


def test_good_input_passes(tmp_path: Path, overrides: list[str]) -> None:
    check(tmp_path, overrides)


def test_a_dense_model_has_no_choices_to_replay(tmp_path: Path, overrides: list[str]) -> None:
    message = message_of(tmp_path, [*overrides, "train.router_replay=true"])
    assert "train.router_replay = true, but" in message and "has no experts" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "algorithm.policy_loss.name=cliped",
            "algorithm.policy_loss.name='cliped' is neither one of ['cispo', 'clipped', "
            "'reinforce', 'supervised'] nor package.module:function; did you mean 'clipped'?",
        ),
        (
            "algorithm.advantage_estimator.name=grpo",
            "algorithm.advantage_estimator.name='grpo' is neither one of ['group_mean', ",
        ),
        ("generator.engine=x", "generator.engine='x' is neither one of ['hf', 'sglang', 'vllm']"),
        ("reward.tasks.mine.compare=maths", "reward.tasks.mine.compare='maths' is neither one of"),
        (
            "algorithm.shaping.name=nowhere.at_all:f",
            "algorithm.shaping.name='nowhere.at_all:f': cannot import nowhere",
        ),
        (
            "algorithm.advantage_estimator.name=json:mean",
            "algorithm.advantage_estimator.name='json:mean': json has no function 'mean'",
        ),
    ],
)
def test_a_name_that_nothing_has_is_refused_with_those_there_are(
    tmp_path: Path, overrides: list[str], override: str, expected: str
) -> None:
    assert expected in message_of(tmp_path, [*overrides, override])


def test_functions_of_other_modules_pass(tmp_path: Path, overrides: list[str]) -> None:
    for part, name in (("policy_loss", "json:dumps"), ("advantage_estimator", "json:loads")):
        overrides = [*overrides, f"algorithm.{part}.name={name}"]
    check(tmp_path, [*overrides, "generator.engine=json:JSONDecoder"])


def test_looking_up_a_loss_loads_no_torch() -> None:
    program = "import sys, megatron_rl.launcher.preflight; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=200)
    assert done.stdout == b"False\n"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"vocab_size": None}, "lacks the key 'vocab_size'"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"head_dim": 33}, "33 is odd"),
    ],
)
def test_a_model_that_the_trainer_does_not_know_is_refused(
    tmp_path: Path, overrides: list[str], changed: dict, expected: str
) -> None:
    values = {key: value for key, value in (SHAPE | changed).items() if value is not None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    assert expected in message_of(tmp_path, overrides)


def test_an_evaluation_leaves_the_architecture_to_the_engine(
    tmp_path: Path, overrides: list[str]
) -> None:
    values = SHAPE | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    check(tmp_path, [*overrides, "train.steps=0", "sft.steps=0"])


def test_unknown_key_names_the_nearest(tmp_path: Path, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="train.grop_size.*did you mean 'train.group_size'"):
        check(tmp_path, [*overrides, "train.grop_size=4"])


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        ("", "there is no such folder"),
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no *.safetensors"),
    ],
)
def test_incomplete_model_folder(
    tmp_path: Path, overrides: list[str], removed: str, expected: str
) -> None:
    if removed:
        (tmp_path / "model" / "tokenizer_config.json").unlink()
        (tmp_path / "model" / removed).unlink()
    else:
        (tmp_path / "model").rename(tmp_path / "elsewhere")
    message = message_of(tmp_path, overrides)
    assert expected in message
    assert str(tmp_path / "model") in message


@pytest.mark.parametrize("tensor", [3, 4])
def test_tensor_parallel_that_does_not_divide_the_heads(
    tmp_path: Path, overrides: list[str], tensor: int
) -> None:
    message = message_of(tmp_path, [*overrides, f"parallel.tensor={tensor}"])
    assert f"parallel.tensor = {tensor}" in message
    assert "6 attention heads and 2 key-value heads" in message
    assert message.endswith("nearest possible: 2")


def test_pipeline_that_does_not_divide_the_layers(tmp_path: Path, overrides: list[str]) -> None:
    message = message_of(tmp_path, [*overrides, "parallel.pipeline=3"])
    assert "does not divide the model's 4 layers" in message
    assert message.endswith("nearest possible: 2")


def test_expert_ranks_without_experts(tmp_path: Path, overrides: list[str]) -> None:
    message = message_of(tmp_path, [*overrides, "parallel.data=2", "parallel.expert=2"])
    assert "the model has no experts" in message


def test_malformed_prompt_names_file_and_line(tmp_path: Path, overrides: list[str]) -> None:
    write_lines(tmp_path / "prompts.jsonl", [prompt_line(0, "held_out"), '{"task": "math"'])
    assert f"{tmp_path}/prompts.jsonl:2" in message_of(tmp_path, overrides)


def test_held_out_set_that_is_too_small(tmp_path: Path, overrides: list[str]) -> None:
    message = message_of(tmp_path, [*overrides, "eval.prompts=4"])
    assert "eval.prompts=4" in message
    assert "3 held-out" in message


def test_no_train_prompts(tmp_path: Path, overrides: list[str]) -> None:
    write_lines(tmp_path / "prompts.jsonl", [prompt_line(n, "held_out") for n in range(4)])
    assert "no train prompts" in message_of(tmp_path, overrides)


def long_line(number: int, split: str) -> dict:
    """A prompt of 99 characters, one token each in the tiny tokenizer."""
    return {
        **prompt_line(number, split),
        "messages": [{"role": "user", "content": str(number) * 99}],
    }


# <bos> and 99 characters: one token too many.
ROOM = ["generator.context_tokens=139", "sampling.max_new_tokens=40"]


def test_prompts_without_room_are_left_out_and_the_first_is_named(
    tmp_path: Path, overrides: list[str]
) -> None:
    lines = [prompt_line(n, "held_out" if n < 3 else "train") for n in range(6)]
    lines[4:4] = [long_line(4, "train"), long_line(5, "held_out")]
    path = write_lines(tmp_path / "prompts.jsonl", lines)
    report = check(tmp_path, [*overrides, *ROOM])
    assert [(prompt.id, prompt.place) for prompt in report.dropped] == [
        ("prompts:5", f"{path}:5"), ("prompts:6", f"{path}:6"),
    ]  # fmt: skip
    assert report.notes[0].startswith("prompts: 3 for training, 3 held out; 2 left out")
    expected = f"2 prompts are left out, .* the first is {path}:5: the prompt has 100 tokens; .* 99"
    assert re.search(expected, report.notes[3])


def test_a_run_without_a_prompt_that_has_room_is_refused(
    tmp_path: Path, overrides: list[str]
) -> None:
    held_out = [prompt_line(n, "held_out") for n in range(3)]
    write_lines(tmp_path / "prompts.jsonl", [long_line(0, "train"), *held_out])
    message = message_of(tmp_path, [*overrides, *ROOM])
    assert re.fullmatch(r"no train prompt can be .*s.jsonl:1: .* max_new_tokens 40", message)
    lines = [prompt_line(9, "train"), *held_out[:2], long_line(3, "held_out")]
    write_lines(tmp_path / "prompts.jsonl", lines)
    message = message_of(tmp_path, [*overrides, *ROOM])
    assert "only 2 held-out" in message and f"the first is {tmp_path}/prompts.jsonl:4" in message


def test_the_system_prompts_of_the_tasks_in_use_are_shown(
    tmp_path: Path, overrides: list[str]
) -> None:
    lines = [{**prompt_line(n, ""), "task": ("math", "exact", "plain")[n % 3]} for n in range(30)]
    own = [{"role": "system", "content": "s"}, *prompt_line(99, "")["messages"]]
    lines.append({"messages": own, "answer": "1", "task": "boxed", "split": "train"})  # gets none
    write_lines(tmp_path / "prompts.jsonl", lines)
    (tmp_path / "c.toml").write_text(
        f'[[prompts]]\npath = "{tmp_path}/prompts.jsonl"\n'
        '[reward.tasks]\nplain = {format_check = "none", compare = "exact"}\n'
        'boxed = {format_check = "box", compare = "exact"}\n'
    )
    report = check(tmp_path, [o for o in overrides if "eval.prompts" not in o])
    counts = re.match(r"prompts: (\d+) for training, (\d+) held out", report.notes[0])
    assert counts and int(counts[1]) + int(counts[2]) == 31 and int(counts[2]) > 0
    shown, none = [note for note in report.notes if note.startswith("system prompt")]
    assert shown.startswith("system prompt (exact, math): ") and "\\n<think>" in shown
    assert shown.endswith(f"shown before each prompt: {json.dumps(DEMONSTRATION)}")
    assert none == "system prompt (plain): none" and report.dropped == []
    assert not any("no prompt has" in note for note in report.notes)


def test_what_is_configured_without_effect_is_named(tmp_path: Path, overrides: list[str]) -> None:
    own = "reward.tasks.mine={compare='exact', format_check='none'}"
    told = "warning: no prompt has the task mine of [reward.tasks]: set prompts.task, or "
    assert any(note.startswith(told) for note in check(tmp_path, [*overrides, own]).notes)
    notes = check(tmp_path, [*overrides, "sft.steps=0"]).notes
    assert "warning: sft.dataset is not used, because sft.steps = 0: no cold start" in notes


def test_malformed_trace_names_file_and_line(tmp_path: Path, overrides: list[str]) -> None:
    write_lines(tmp_path / "sft.jsonl", [trace_line(0), {"messages": "hello", "response": "x"}])
    assert f"{tmp_path}/sft.jsonl:2" in message_of(tmp_path, overrides)


def test_missing_examples(tmp_path: Path, overrides: list[str]) -> None:
    message = message_of(tmp_path, [*overrides, 'sft.dataset="/nowhere/sft.jsonl"'])
    assert "/nowhere/sft.jsonl" in message
    assert "sft.dataset" in message_of(tmp_path, [o for o in overrides if "sft.dataset" not in o])


def test_port_in_use_names_port_and_holder(tmp_path: Path, overrides: list[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        message = message_of(tmp_path, [*overrides, f"expert.ports.verify={port}"])
    assert f"expert.ports.verify = {port}" in message
    assert f"(pid {os.getpid()})" in message


def test_one_port_for_two_sockets(tmp_path: Path, overrides: list[str]) -> None:
    given = ["expert.ports.verify=23456", "expert.ports.batches=23456"]
    message = message_of(tmp_path, [*overrides, *given])
    assert "expert.ports.batches and expert.ports.verify are both port 23456" in message


def test_resolved_ports_are_distinct_and_leave_room_for_every_engine() -> None:
    given = ["generator.replicas=3", "expert.ports.prompts=23456"]
    config = resolve_ports(load_config(None, given))
    ports = dict(listed_ports(config))
    engines = [port for key, port in listed_ports(config) if key == "expert.ports.engine"]
    others = [port for key, port in ports.items() if key != "expert.ports.engine"]
    assert ports["expert.ports.prompts"] == 23456
    assert engines == list(range(engines[0], engines[0] + 6))
    assert len({*engines, *others}) == 6 + 7


def test_no_compiler_names_the_debian_package(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "apt-get install g++" in message_of(tmp_path, overrides)


def test_folder_of_another_run_is_never_overwritten(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "run").mkdir()
    config_path = tmp_path / "run" / "config.toml"
    config_path.write_text(dump_toml(Config()))
    assert "--run-dir" in message_of(tmp_path, overrides)
    assert config_path.read_text() == dump_toml(Config())


def test_command_line_prints_one_error_and_exits_2_without_starting(
    tmp_path: Path, overrides: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli.main", "run", "--config", str(tmp_path / "c.toml"),
         *overrides, "--run-dir", str(tmp_path / "other"), "parallel.tensor=3"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("megatron-rl: parallel.tensor = 3 does not divide")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "other").exists()
