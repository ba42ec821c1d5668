"""A cold start that is killed goes on as if it had not been, and leaves what was asked for."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.data.tiny_model import make_folder
from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    SFT_CHECKPOINTS,
    complete_checkpoints,
    find_resume,
)
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.trainer import sft
from megatron_rl.trainer.step import Trainer
from tests.distributed import RanksFailed, run_ranks

pytestmark = [pytest.mark.slow(30), pytest.mark.timeout(300)]
STEPS = 7
DIGITS = ["1", "12", "123", "1234", "12345", "123456", "21", "321"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and SFT examples."""
    folder = tmp_path_factory.mktemp("sft")
    make_folder(folder / "model", seed=0)
    line = '{{"messages": [{{"role": "user", "content": "{0}="}}], "response": "{0}"}}\n'
    (folder / "sft.jsonl").write_text("".join(map(line.format, DIGITS)))
    return folder


def config(inputs: Path, run_dir: Path, *overrides: str) -> Config:
    return load_config(None, [
        f"run.dir={run_dir}", f"model.path={inputs}/model", f"sft.dataset={inputs}/sft.jsonl",
        "model.dtype=float32", "generator.context_tokens=64", "sampling.max_new_tokens=16",
        'render.system_prompt=""', "reward.length_margin_tokens=4", f"sft.steps={STEPS}",
        "sft.batch_size=3", "sft.checkpoint_every_steps=2", "sft.optimizer.lr=0.01",
        "sft.optimizer.lr_schedule=linear", "sft.optimizer.warmup_steps=3", *overrides,
    ])  # fmt: skip


def tune(cfg: Config, killed_at: int = 0) -> None:
    """The cold start; every rank is killed in its step number `killed_at`, if that is given."""
    update = Trainer.update

    def dying(self: Trainer, *arguments: object, **options: object) -> object:
        if self.steps_done + 1 == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, *arguments, **options)

    Trainer.update = dying
    sft.main(cfg, False)


def taken(run_dir: Path) -> list[tuple[float, ...]]:
    """(step, loss, gradient norm, learning rate) of each step that was written."""
    names = ("step", "train/loss", "train/grad_norm", "train/lr")
    return [tuple(row[name] for name in names) for row in read_jsonl(run_dir / "metrics.jsonl")]


def weights(run_dir: Path, name: str = "cold_start") -> dict[str, torch.Tensor]:
    return load_file(run_dir / "hf" / name / "model.safetensors")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("split", ["data", pytest.param("tensor", marks=pytest.mark.exhaustive)])
def test_a_killed_cold_start_goes_on_bit_for_bit(inputs: Path, tmp_path: Path, split: str) -> None:
    whole = config(inputs, tmp_path / "whole", f"parallel.{split}=2", "sft.profile_steps=[2, 3]")
    run_ranks(tune, 2, whole)
    [example] = (whole.run.dir / "profile").rglob("*.json")
    assert example.relative_to(whole.run.dir / "profile").as_posix() == "sft/stage_0.json"
    events = json.loads(example.read_text())["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert spans.count("update") == 2
    expected = taken(whole.run.dir)
    assert [step for step, *_ in expected] == list(range(1, STEPS + 1))
    cfg = config(inputs, tmp_path / "killed", f"parallel.{split}=2")
    folder = cfg.run.dir / SFT_CHECKPOINTS
    with pytest.raises(RanksFailed, match=f"wait status {signal.SIGKILL}"):
        run_ranks(tune, 2, cfg, 6)
    # That of step 4 may have been in flight.
    newest = max(complete_checkpoints(folder))
    assert newest in (2, 4) and not (cfg.run.dir / "hf").exists()
    written = len(taken(cfg.run.dir))
    assert written in (4, 5)
    run_ranks(tune, 2, cfg)
    assert taken(cfg.run.dir)[written:] == expected[newest:]
    assert are_equal(weights(cfg.run.dir), weights(whole.run.dir))
    assert list(complete_checkpoints(folder)) == [4, 6]
    # No reinforcement learning begins there.
    assert complete_checkpoints(cfg.run.dir / CHECKPOINTS) == {}
    assert find_resume(cfg.checkpoint, cfg.run.dir) is None
    named = cfg.checkpoint.model_copy(update={"resume": str(folder / "step_000004")})
    with pytest.raises(InputError, match="is a checkpoint of a cold start"):
        find_resume(named, cfg.run.dir)


def test_models_to_choose_from_are_those_of_their_steps(inputs: Path, tmp_path: Path) -> None:
    every = config(inputs, tmp_path / "all", "sft.export_every_steps=3")
    assert every.sft.candidates == [3, 6, 7]
    with pytest.raises(RanksFailed):
        run_ranks(tune, 1, every, 7)
    run_ranks(tune, 1, every)
    names = {f"cold_start_step_{step}" for step in (3, 6, 7)}
    assert {path.name for path in (every.run.dir / "hf").iterdir()} == names
    # The schedule is that of seven steps, so the last model is that of a run without a choice.
    plain = config(inputs, tmp_path / "plain", "sft.checkpoint_every_steps=0")
    run_ranks(tune, 1, plain)
    assert not (plain.run.dir / CHECKPOINTS).exists()
    assert are_equal(weights(every.run.dir, "cold_start_step_7"), weights(plain.run.dir))
    assert not are_equal(weights(every.run.dir, "cold_start_step_6"), weights(plain.run.dir))


def refused(cfg: Config) -> str:
    with pytest.raises(InputError) as error:
        sft.main(cfg, False)
    return str(error.value)


def test_other_examples_are_refused_by_a_checkpoint(inputs: Path, tmp_path: Path) -> None:
    cfg = config(inputs, tmp_path / "run")
    with pytest.raises(RanksFailed):
        run_ranks(tune, 1, cfg, 6)
    other = tmp_path / "other"
    shutil.copytree(inputs, other)
    text = (inputs / "sft.jsonl").read_text()
    (other / "sft.jsonl").write_text(text.replace('"321"}', '"312"}'))
    [message] = run_ranks(refused, 1, config(other, cfg.run.dir))
    assert "its digest was" in message
    [message] = run_ranks(refused, 1, config(inputs, cfg.run.dir, "run.seed=5"))
    assert "its seed was 0, now it is 5" in message


def test_a_example_that_no_padded_microbatch_holds_is_refused_before_the_model_is_built(
    inputs: Path, tmp_path: Path
) -> None:
    padded = ["train.steps=0", "expert.train.pad_microbatches=true", "train.microbatch_tokens=8"]
    # Without torchrun's variables no rank would get as far as to build a model.
    with pytest.raises(InputError, match="do not fit into the 8 positions .* raise train.microb"):
        sft.main(config(inputs, tmp_path, *padded), False)
