"""Data sets that a YAML of TRL or open-r1 names become sources of prompts."""

from pathlib import Path

import pytest

from tests.config.foreign.imported import accounted, imported, written

MODEL = "model_name_or_path: m/m\nnum_generations: 4\nper_device_train_batch_size: 8\n"


def test_a_mixture_of_trl(tmp_path: Path) -> None:
    text = (
        MODEL
        + """
dataset_name: left/out
datasets:
  - path: a/b
    name: algebra
    columns: [prompt, solution, difficulty]
  - path: json
    data_files: {train: rows.jsonl, test: other.jsonl}
  - path: c/d
    split: train[:10%]
    columns: [prompt, text, note]
  - path: e/f
    split: validation
streaming: false
test_split_size: 0.25
"""
    )
    found, ours = imported(written(tmp_path, "grpo.yaml", text))
    assert [(str(p.path), p.subset, p.dataset_split) for p in ours.prompts] == [
        ("a/b", "algebra", "train"),
        (str(tmp_path / "rows.jsonl"), "", ""),
        ("c/d", "", ""),
        ("e/f", "", "validation"),
    ]
    assert (ours.prompts[0].columns.question, ours.prompts[0].columns.answer) == (
        "prompt", "solution",
    )  # fmt: skip
    assert [p.held_out_share for p in ours.prompts] == [0.25] * 4
    assert "parts of splits" in found.no_counterpart["datasets.2.split"]
    # Two columns may be the answer.
    assert "prompts.2.columns" in found.no_counterpart["datasets.2.columns"]
    assert "no effect" in found.no_counterpart["dataset_name"]
    # Theirs are as large as their rows, ours as their weights.
    assert any(line.startswith("prompts.weight") for line in found.to_check)


def test_a_mixture_of_open_r1(tmp_path: Path) -> None:
    text = (
        MODEL
        + """
dataset_prompt_column: problem
dataset_mixture:
  datasets:
    - {id: a/b, config: x, weight: 1.0, columns: [problem, answer]}
    - {id: c/d, weight: 0.5}
  seed: 7
  test_split_size: 100
"""
    )
    found, ours = imported(written(tmp_path, "grpo.yaml", text))
    assert [(str(p.path), p.subset, p.columns.question) for p in ours.prompts] == [
        ("a/b", "x", "problem"),
        ("c/d", "", "problem"),
    ]
    assert ours.prompts[0].columns.answer == "answer"
    # A weight there says how many rows are kept; 100 is a number of rows.
    assert "share of the rows" in found.no_counterpart["dataset_mixture.datasets.1.weight"]
    assert [p.weight for p in ours.prompts] == [1.0, 1.0]
    assert "number of rows" in found.no_counterpart["dataset_mixture.test_split_size"]


def test_one_data_set_with_its_splits(tmp_path: Path) -> None:
    text = MODEL + "dataset_name: a/b\ndataset_config: x\ndataset_test_split: held\n"
    found, ours = imported(written(tmp_path, "a.yaml", text))
    # TRL takes the split train without being told.
    assert [(str(p.path), p.subset, p.dataset_split) for p in ours.prompts] == [
        ("a/b", "x", "train")
    ]
    assert ours.eval.sets == [] and "dataset_test_split" in found.no_counterpart
    text += "eval_strategy: steps\neval_steps: 5\n"
    _, ours = imported(written(tmp_path, "b.yaml", text))
    [held] = ours.eval.sets
    assert (str(held.prompts.path), held.prompts.subset, held.prompts.dataset_split) == (
        "a/b", "x", "held",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("lr_scheduler_type: cosine\n", ("cosine", 0.0)),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.2}\n",
         ("cosine", 0.2)),
        ("lr_scheduler_kwargs: {min_lr: 1e-6}\nlearning_rate: 4e-6\n", ("linear", 0.25)),
    ],
)  # fmt: skip
def test_schedules_end_where_trl_ends_them(
    tmp_path: Path, schedule: str, expected: tuple[str, float]
) -> None:
    _, ours = imported(written(tmp_path, "a.yaml", MODEL + "dataset_name: a/b\n" + schedule))
    optimizer = ours.optimizer
    assert (optimizer.lr_schedule, optimizer.min_lr_ratio) == pytest.approx(expected)


def test_a_system_prompt_of_another_form_is_named(tmp_path: Path) -> None:
    text = MODEL + "dataset_name: a/b\ndataset_configs: [all]\nsystem_prompt: Answer in TAGS.\n"
    found, ours = imported(written(tmp_path, "a.yaml", text))
    assert "format check" in found.no_counterpart["system_prompt"]
    assert ours.prompts[0].subset == "all"
    boxed = written(tmp_path, "b.yaml", text.replace("TAGS", r"\boxed{}"))
    assert imported(boxed)[1].render.system_prompt == r"Answer in \boxed{}."


def test_processes_and_shares_of_a_yaml(tmp_path: Path) -> None:
    text = "model_name_or_path: m/m\ndataset_name: a/b\nnum_generations: 7\nnum_processes: 7\n"
    text += "per_device_train_batch_size: 16\ngradient_accumulation_steps: 16\nsave_steps: 0.1\n"
    text += "reward_funcs: [accuracy, soft_overlong_punishment]\nsoft_punish_cache: 96\n"
    text += "vllm_importance_sampling_mode: sequence_mask\n"
    found, ours = imported(written(tmp_path, "a.yaml", text))
    # 16 completions * 16 * 7 processes in groups of 7.
    assert (ours.train.prompts_per_batch, ours.parallel.data) == (256, 7)
    assert "a share of all steps" in found.no_counterpart["save_steps"]
    assert ours.reward.length_margin_tokens == 96
    assert "product" in found.no_counterpart["vllm_importance_sampling_mode"]
    text = text.replace("sequence_mask", "token_mask\nvllm_importance_sampling_cap: 4.0")
    _, ours = imported(written(tmp_path, "b.yaml", text))
    correction = ours.algorithm.correction
    assert (correction.name, correction.low, correction.high) == ("masked", 0.0, 4.0)
    assert accounted(written(tmp_path, "c.yaml", "beta: 0.1\n")).values


@pytest.mark.parametrize(
    ("processes", "minibatches", "steps", "every"), [(1, 32, 25, 2), (4, 8, 100, 5)]
)
def test_a_whole_batch_has_its_optimizer_steps(
    tmp_path: Path, processes: int, minibatches: int, steps: int, every: int
) -> None:
    # 8 completions * 2 on each process are an optimizer step; 512 in groups of 4 are a batch.
    text = MODEL + "dataset_name: a/b\nmax_steps: 800\n"
    text += "gradient_accumulation_steps: 2\ngeneration_batch_size: 512\nsave_steps: 40\n"
    text += "eval_strategy: steps\neval_steps: 40\n"
    launched = text + (f"num_processes: {processes}\n" if processes > 1 else "")
    found, ours = imported(written(tmp_path, "a.yaml", launched))
    train = ours.train
    assert (train.prompts_per_batch, train.minibatches, train.steps) == (128, minibatches, steps)
    assert (ours.checkpoint.every_steps, ours.eval.every_steps) == (every, every)
    told = [line for line in found.to_check if line.startswith("train.minibatches: on one process")]
    assert len(told) == (processes == 1)
    uneven = written(tmp_path, "b.yaml", text.replace("512", "520"))
    found = accounted(uneven)
    assert "train.minibatches = 520 / 16" in found.no_counterpart["generation_batch_size"]
    assert found.values["train.prompts_per_batch"] == 130


def test_the_command_that_starts_a_script_has_its_settings(tmp_path: Path) -> None:
    script = (
        "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer, TrlParser\n"
    )
    script += "args, model_args = TrlParser((GRPOConfig, Model)).parse_args_and_config()\n"
    script += 'data = load_dataset("a/b", split="train")\n'
    script += "GRPOTrainer(model=model_args.name, args=args, train_dataset=data)\n"
    python = written(tmp_path, "gspo.py", script)
    alone = accounted(python)
    assert "name the script that starts it" in alone.no_counterpart["args"]
    shell = "SIZE=${SIZE:-8}\naccelerate launch --num_processes 4 examples/gspo.py \\\n"
    shell += "    --model_name_or_path m/m --num-generations $SIZE \\\n"
    shell += "    --per_device_train_batch_size 2 \\\n"
    shell += "    --gradient_accumulation_steps=2 --steps_per_generation 8 --log_completions \\\n"
    shell += "    --importance_sampling_level sequence --epsilon 3e-4 --output_dir runs/x\n"
    found, ours = imported(written(tmp_path, "run.sh", shell), python)
    # 2 completions * 8 * 4 processes in groups of 8; 8 of 2 accumulated are 4 optimizer steps.
    assert (ours.train.prompts_per_batch, ours.train.group_size, ours.train.minibatches) == (
        8, 8, 4,
    )  # fmt: skip
    assert (ours.algorithm.policy_loss.level, ours.algorithm.policy_loss.eps_high) == (
        "sequence", 3e-4,
    )  # fmt: skip
    assert (str(ours.model.path), str(ours.prompts[0].path)) == ("m/m", "a/b")
    assert (ours.parallel.data, ours.prompts[0].dataset_split) == (4, "train")
    assert "args" not in found.given and found.given["log_completions"] == "True"
    yaml = written(tmp_path, "grpo.yaml", "dataset_name: c/d\nnum_generations: 2\n")
    shell = (
        "trl grpo --config grpo.yaml --model_name_or_path m/m --max_steps 9 --output_dir runs/x\n"
    )
    _, ours = imported(written(tmp_path, "trl.sh", shell), yaml)
    assert (ours.train.steps, ours.train.group_size, str(ours.prompts[0].path)) == (9, 2, "c/d")
