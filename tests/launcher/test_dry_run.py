"""A dry run tells configurations that can pay an answer from those that pay nothing."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import read_prompts
from megatron_rl.launcher.dry_run import PROMPTS_PER_TASK, choose_prompts, grade_made_up
from megatron_rl.launcher.thinking import decide_thinking
from megatron_rl.protocol.types import ChatMessage, Prompt
from tests.protocol.real_templates import open_model
from tests.weights.made_up import write_zeros
from tools.make_skills import Counts, make

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}<s>assistant\n"
)
CASES = [{"stdin": "1 2\n", "stdout": "3\n"}]
# Long enough that their language is known.
QUESTIONS = (
    "A farmer has one apple and buys two more of them. How many apples does he have now?",
    "Un marchand avait six pommes et il en a vendu deux. Combien de pommes lui reste-t-il ?",
    "Write a program that reads two numbers from a line and prints their sum.",
    "A shepherd has one sheep and five lambs. How many animals are there in all?",
)
LINES = [
    {"task": task, "messages": [{"role": "user", "content": question}], "answer": answer, **more}
    for question, task, answer, more in zip(
        QUESTIONS,
        ("math", "math", "code", "math"),
        ("3", "4", "", "6"),
        ({}, {}, {"entry": json.dumps({"cases": CASES})}, {"split": "held_out"}),
        strict=True,
    )
]


def write_byte_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """A tokenizer that knows every byte, as those of published models do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate(alphabet)} | {"</s>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def load(name: str, model: Path, prompts: Path, *overrides: str) -> Config:
    given = [f'model.path="{model}"', f'prompts.0.path="{prompts}"', *overrides]
    return load_config(EXAMPLES / f"{name}.toml", given)


def problems_of(config: Config) -> dict[str, list[str]]:
    sets = read_prompts(config.prompts, config.run.seed).divide()
    return {r.task: r.problems for r in grade_made_up(choose_prompts(sets.all), config)}


def test_a_model_that_thinks_in_a_channel_is_paid_without_being_told_to(
    tmp_path: Path, prompts: Path
) -> None:
    open_model(tmp_path / "model", "gpt_oss")
    config = decide_thinking(load("one_node", tmp_path / "model", prompts))
    assert config.reward.format_checks["math"] == "think_box"
    assert problems_of(config) == {"math": [], "code": []}


SHIPPED = sorted(
    path.stem for path in EXAMPLES.glob("*.toml")
    if path.stem not in ("quickstart", "tiny", "tiny_skills", "miniature", "own_prompts")
)  # fmt: skip


# On every commit tests/launcher/test_dry_runs.py has each one pay for mathematics, not for code.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_examples_pay_a_right_answer_of_every_task(
    name: str, model: Path, prompts: Path
) -> None:
    config = load(name, model, prompts)
    sets = read_prompts(config.prompts, config.run.seed).divide()
    reports = grade_made_up(choose_prompts(sets.all), config)
    assert {r.task: (r.prompts, r.problems, r.warnings) for r in reports} == {
        "math": (3, [], []), "code": (1, [], []),
    }  # fmt: skip
    reward = config.reward
    for report in reports:
        assert report.earned == pytest.approx(reward.format + reward.correct + reward.language)
        assert report.earned_wrong == pytest.approx(reward.format + reward.language)


def test_the_skills_of_the_studies_can_earn_a_reward(model: Path, tmp_path: Path) -> None:
    made = make(Counts(train=20, held_out=5, sft_examples=10, followed=10), seed=0)
    for name, lines in made.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    code = f'prompts.1.path="{tmp_path / "code.jsonl"}"'
    room = ["sampling.max_new_tokens=256", "generator.context_tokens=512"]
    config = load("tiny_skills", model, tmp_path / "math.jsonl", code, *room)
    found = problems_of(config)
    assert len(found) == 2 and not any(found.values())


def test_the_quickstart_teaches_its_form(model: Path, prompts: Path, tmp_path: Path) -> None:
    examples = tmp_path / "sft.jsonl"
    message = {"role": "user", "content": "1+1="}
    good = {"messages": [message], "response": "<think>2</think>\\boxed{2}"}
    bad = {"messages": [message], "response": "It is 2."}
    room = ["sampling.max_new_tokens=32", "generator.context_tokens=512"]
    only_math = tmp_path / "math.jsonl"
    only_math.write_text("".join(json.dumps(line) + "\n" for line in LINES if line["answer"]))
    for responses, is_fine in (([good, good, bad], True), ([good, bad, bad], False)):
        examples.write_text("".join(json.dumps(line) + "\n" for line in responses))
        config = load("quickstart", model, only_math, f'sft.dataset="{examples}"', *room)
        assert (problems_of(config)["math"] == []) == is_fine


def test_a_format_check_that_nothing_asks_for_is_found(model: Path, prompts: Path) -> None:
    silent = load("one_node", model, prompts, 'render.system_prompt=""')
    found = problems_of(silent)
    assert "the format check 'think_box' refuses (no_think_start)" in found["math"][0]
    assert "no thoughts, in 3 of 3 prompts" in found["math"][0]
    assert "the format check 'think_code' refuses" in found["code"][0]
    for fix in ('render.system_prompt="Think in <think></think>, answer in \\\\boxed{} or in ```"',
                 "expert.render.form_known=true"):  # fmt: skip
        assert problems_of(load("one_node", model, prompts, fix)) == {"math": [], "code": []}


def test_a_prompt_that_asks_for_thoughts_under_a_plain_format_check_is_found(
    model: Path, prompts: Path
) -> None:
    rule = 'reward.tasks={math={format_check="none", compare="exact"}}'
    think = 'render.system_prompt="Use <think></think> and ```"'
    found = problems_of(load("one_node", model, prompts, rule, think))
    # Thoughts and answer together are no exact answer.
    assert found["code"] == []
    assert found["math"][0].startswith("the reference answer itself is graded wrong")


def test_templates_that_open_the_thoughts_are_understood(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    write_byte_tokenizer(model, TEMPLATE + "<think>\n")
    asked = 'render.system_prompt="Answer in \\\\boxed{} or in a block like ```python"'
    assert problems_of(load("one_node", model, prompts, asked)) == {"math": [], "code": []}


def test_bad_labels_are_warnings_unless_all_are(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    # Braces that do not close leave no box around the label.
    lines = [LINES[0], dict(LINES[3], answer="\\frac{")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load("one_node", model, path)
    (report,) = grade_made_up(read_prompts(config.prompts, 0).divide().all, config)
    assert report.problems == [] and len(report.warnings) == 1
    assert "in 1 of 2 prompts" in report.warnings[0] and "labels.jsonl:2" in report.warnings[0]
    assert "unclosed_box" in report.warnings[0]


def test_a_right_answer_to_a_list_of_labels_earns_the_reward(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "lists.jsonl"
    labels = (["\\frac{7}{2}", "3.5"], "['7/2', '3.5']")
    lines = [dict(LINES[n], answer=label) for n, label in zip((0, 3), labels, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load("one_node", model, path)
    (report,) = grade_made_up(read_prompts(config.prompts, 0).divide().all, config)
    assert (report.prompts, report.problems, report.warnings) == (2, [], [])
    assert report.earned == pytest.approx(1.0) and report.earned_wrong == pytest.approx(0.1)


def test_rows_of_eurus_earn_rewards_once_ours_replaces_their_system_message(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "eurus.jsonl"
    system = {"role": "system", "content": "Use the actions [ASSESS] and [ADVANCE]."}
    rows = [
        {"prompt": [system, {"role": "user", "content": question}], "ability": ability,
         "reward_model": {"ground_truth": truth, "style": "rule"}}
        for question, ability, truth in (
            (QUESTIONS[0], "math", "3"),
            (QUESTIONS[2], "code", json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})),
        )
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = problems_of(load("one_node", model, path, "prompts.0.system=replace"))
    assert found == {"math": [], "code": []}


def test_a_comparison_is_called_once_for_each_completion(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "dry_compare.py").write_text(
        f"def same(answer, request):\n    open({str(calls)!r}, 'a').write(answer + chr(10))\n"
        "    return answer == request.answer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8,
             "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
             "vocab_size": 257, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}  # fmt: skip
    (model / "config.json").write_text(json.dumps(shape))
    write_zeros(model)
    path = tmp_path / "own.jsonl"
    lines = [{"question": f"What is {n} + 3?", "answer": str(n + 3)} for n in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [f'model.path="{model}"', "prompts.0.kind=files", f'prompts.0.path="{path}"',
             "sampling.max_new_tokens=64"]  # fmt: skip
    given += ["reward.tasks.math.compare=dry_compare:same", "prompts.0.held_out_share=0.5"]
    given += ["generator.context_tokens=2048", "reward.tasks.math.format_check=box"]
    assert main(["run", "--dry-run", "--config", str(EXAMPLES / "own_prompts.toml"), *given]) == 0
    assert "right answer earns" in capsys.readouterr().out
    called = calls.read_text().splitlines()
    assert [called.count(str(n + 3)) for n in range(4)] == [1] * 4 and len(called) == 8


def test_equal_rewards_are_found(model: Path, prompts: Path) -> None:
    found = problems_of(load("one_node", model, prompts, "reward.correct=0"))
    assert "right and wrong answers earn the same" in found["math"][0]


def test_a_task_is_represented_by_prompts_from_all_over() -> None:
    message = [ChatMessage(role="user", content="?")]
    many = [Prompt(str(n), "math", message, "1") for n in range(100)]
    chosen = [int(p.id) for p in choose_prompts([*many, Prompt("x", "exact", message, "1")])[:-1]]
    assert len(chosen) <= PROMPTS_PER_TASK and chosen[0] == 0 and chosen[-1] >= 90


def test_the_command_starts_nothing_and_says_what_it_found(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(shape))
    write_zeros(model)
    run_dir = tmp_path / "run"
    command = [
        "run", "--dry-run", "--config", str(EXAMPLES / "one_node.toml"), "--run-dir", str(run_dir),
        f'model.path="{model}"', f'prompts.0.path="{prompts}"',
    ]  # fmt: skip
    assert main(command) == 0
    assert "right answer earns" in capsys.readouterr().out
    assert main([*command, 'render.system_prompt=""']) == 1
    assert "problem: math: no reward possible" in capsys.readouterr().out
    # An exception in a reward is said once for all prompts, with the user's line.
    (tmp_path / "dry_rewards.py").write_text("def f(answer, request):\n    return float('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main([*command, 'reward.extra=[{name="own", function="dry_rewards:f"}]']) == 2
    shown = capsys.readouterr().out + caplog.text
    assert shown.count(f"ValueError: could not convert string to float: 'x' ({tmp_path}") == 1
    assert shown.count("dry_rewards.py, line 2, in f") == 1 and "Traceback" not in shown
    assert not run_dir.exists()


def test_the_toml_of_the_readme_is_the_shipped_example_and_can_earn_a_reward(
    model: Path, tmp_path: Path
) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    [pasted] = [
        b for b in re.findall(r"```toml\n(.*?)```", readme, re.DOTALL) if "[[prompts]]" in b
    ]
    headline, _, shipped = (EXAMPLES / "own_prompts.toml").read_text().partition("\n")
    assert headline.startswith("# ") and pasted == shipped
    folder = tomllib.loads(pasted)["model"]["path"]
    assert f".venv/bin/python -m tools.convert_smollm2 {folder}\n" in readme
    (tmp_path / "my.toml").write_text(pasted)
    config = load_config(tmp_path / "my.toml", [f'model.path="{model}"'])
    assert problems_of(config) == {"math": []}
    sets = read_prompts(config.prompts, config.run.seed).divide()
    assert (len(sets.train[0]), len(sets.held_out)) == (2000, 500)
