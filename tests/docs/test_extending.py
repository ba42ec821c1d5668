"""Every file of docs/extending.md does what the page says, started as the page says."""

import importlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.advantage_estimators import GroupView
from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.algorithms.tokens import Segments, Tokens
from megatron_rl.config.algorithm import AdvantageEstimatorConfig, PolicyLossConfig
from megatron_rl.config.files import load_config
from megatron_rl.data.prompts import read_prompts
from tests.launcher.test_dry_run import write_byte_tokenizer
from tests.tiny_models import write_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
_FILE = re.compile(r"^\*\*`([\w.]+)`\*\*\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULES = ("my_rewards", "try_rewards", "my_sources", "my_losses", "same_family")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files in a folder that Python and its children find, as the page asks."""
    folder = tmp_path_factory.mktemp("extending")
    for name, text in _FILE.findall(PAGE.read_text()):
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        patch.chdir(folder)
        yield folder
    for name in MODULES:
        sys.modules.pop(name, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_the_page_has_the_files_that_are_tested(folder: Path) -> None:
    configs = ["mine.jsonl", "my_run.toml", "my_source.toml", "my_loss.toml"]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == sorted(
        [*configs, *(f"{name}.py" for name in MODULES)]
    )


def test_a_dry_run_of_the_page_s_files_says_that_rewards_can_be_earned(
    folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_model(model, vocab_size=257, max_position_embeddings=2048)
    write_byte_tokenizer(model)
    done = subprocess.run(
        [
            sys.executable, "-m", "megatron_rl.cli.main", "run", "--dry-run",
            "--config", "my_run.toml", "--config", "my_loss.toml", f"model.path={model}",
            f"run.dir={tmp_path / 'run'}",
        ],
        cwd=folder, capture_output=True, text=True, timeout=200,
        env=os.environ | {"PYTHONPATH": f"{folder}:{PAGE.parents[1]}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "estimate" in done.stdout


def test_the_comparison_is_right_within_a_tenth(folder: Path) -> None:
    request = type("Request", (), {"answer": "330"})
    is_near = module("my_rewards").is_near
    given = ["330", "297", "363", "1,000", "296.9", "363.1", "tall", "nan"]
    assert [is_near(answer, request) for answer in given] == [True] * 3 + [False] * 5


def test_a_response_earns_the_sum_that_its_parts_make(folder: Path) -> None:
    reward_of = module("try_rewards").reward_of
    near, far = ("<think>It is tall.</think>\\boxed{320}", "<think>So?</think>\\boxed{200}")
    assert reward_of(near, "330") == pytest.approx(0.1 + 0.9 + 0.05 * (1 - len(near) / 2000))
    assert reward_of(far, "330") == pytest.approx(0.1 + 0.05 * (1 - len(far) / 2000))
    bare = "\\boxed{320}"
    assert reward_of(bare, "330") == pytest.approx(0.1 + 0.9 + 0.05 * (1 - len(bare) / 2000))
    assert reward_of("<think>It is tall.</think>320", "330") == 0.0


def test_the_source_makes_each_product_once_and_the_same_for_a_seed(folder: Path) -> None:
    sources = load_config(Path("my_source.toml"), []).prompts
    found = read_prompts(sources, 3).divide().all
    assert len(found) == 99 * 100 // 2
    assert len({prompt.question for prompt in found}) == len(found)
    for prompt in found:
        a, b = map(int, re.findall(r"\d+", prompt.question))
        assert int(prompt.answer) == a * b
    assert sum(prompt.split == "held_out" for prompt in found) == 495
    assert found == read_prompts(sources, 3).divide().all != read_prompts(sources, 4).divide().all


def test_the_loss_is_what_the_page_says_by_hand(folder: Path) -> None:
    losses = module("my_losses")
    # Ratios 1/2, 2, 1/2; the first two are to become less likely.
    logprobs = torch.tensor([-2.0, -1.0, -1.0], requires_grad=True)
    old = logprobs.detach() - torch.tensor([0.5, 2.0, 0.5]).log()
    advantages = torch.tensor([-1.0, -1.0, 3.0])
    segments = Segments(torch.tensor([0, 1, 2]), torch.arange(1, 4), *(torch.zeros(3).long(),) * 2)
    true, zeros = torch.ones(3).bool(), torch.zeros(3)
    tokens = Tokens(
        logprobs, old, advantages, zeros, zeros, true, zeros.long(), segments, ~true
    )  # fmt: skip
    found = losses.tapered(tokens, advantages, PolicyLossConfig())
    assert torch.allclose(found.values, torch.tensor([1.0, 1.0, -3.0]))
    assert found.sums["tapered"] == 1
    found.values.sum().backward()
    assert torch.allclose(logprobs.grad, torch.tensor([-0.5, -1.0, 3.0]))
    group = GroupView("p", np.array([1.0, 0.0, 0.0, 0.1]), *(np.zeros(4),) * 3)
    assert np.allclose(losses.median(group, AdvantageEstimatorConfig()), [0.95, -0.05, -0.05, 0.05])
    algorithm = load_config(Path("my_loss.toml"), []).algorithm
    assert find_advantage_functions(algorithm).estimator is losses.median
    assert losses.tapered in vars(find_objective(algorithm)).values()


def test_a_family_under_another_name_is_told_from_another_family(
    folder: Path, tmp_path: Path
) -> None:
    same_family = module("same_family")
    write_model(tmp_path / "mistral", family="Mistral", sliding_window=None, head_dim=16)
    write_model(tmp_path / "qwen", family="Qwen2")
    write_model(tmp_path / "gemma", family="Gemma", head_dim=16, hidden_act="gelu_pytorch_tanh")
    differing = same_family.differing_tensors
    assert differing(tmp_path / "mistral", "LlamaForCausalLM") == set()
    assert any(
        name.endswith("_proj.bias") for name in differing(tmp_path / "qwen", "LlamaForCausalLM")
    )
    given = (tmp_path / "as_llama", "LlamaForCausalLM", "llama")
    assert same_family.relabel(tmp_path / "mistral", *given) < 1e-4
    # Gemma's norms add 1 to their weights: the same tensors, another model.
    off = same_family.relabel(tmp_path / "gemma", tmp_path / "no_llama", *given[1:])
    assert off > 1e-2 and math.isfinite(off)
