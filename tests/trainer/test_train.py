"""What the trainer's entry decides from the configuration, and what it leaves at its end."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml
from megatron_rl.config.generator import WeightsConfig, refuse_overlap
from megatron_rl.config.tree import Config
from megatron_rl.protocol.failure import FAILURE_VARIABLE, first_failure
from megatron_rl.protocol.process import run_rank
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.weights.folders.conversion import Request, convert
from tests.distributed import run_ranks
from tests.protocol.template_families import FAMILIES, write_family
from tests.tiny_models import write_model


def test_an_engine_that_does_not_quantise_refuses_to() -> None:
    with pytest.raises(ValueError, match="generator.quantization='fp8' needs an engine"):
        Config.model_validate({"generator": {"engine": "hf", "quantization": "fp8"}})


def export_twice(cfg: Config, names: list[str]) -> None:
    """As a run does at its end, and again when it is made longer, or was killed just after."""
    with open_policy(cfg) as policy:
        for name in names:
            policy.export(cfg, name)
            with torch.no_grad():
                for parameter in policy.chunks[0].parameters():
                    parameter.mul_(2.0)
            # What a kill in the midst of the second export of an earlier attempt leaves. By the
            # rank that writes: the other is done while the first export is still being renamed.
            if dist.get_rank() == 0:
                (cfg.run.dir / "hf" / f"{name}.partial").mkdir()
            policy.export(cfg, name)


def convert_checkpoint(run: Path, weights: Path, target: Path, **options: Any) -> Path:
    """Convert a checkpoint of the run that has the weights of a model folder."""
    made, step = run / "made", run / "checkpoints" / "step_000001"
    convert(Request(weights, made, to="megatron"), lambda done, total: None)
    step.parent.mkdir(exist_ok=True)
    (made / "release").rename(step)
    shutil.rmtree(made)
    try:
        convert(Request(step, target, **options), lambda done, total: None)
    finally:
        shutil.rmtree(step)
    return target


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_that_goes_on_replaces_what_it_exported_before(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model)
    values = json.loads((model / "config.json").read_text())
    ids = write_family(model, "qwen2.5-base", **(values | {"eos_token_id": None}))
    ends = {"eos_token_id": ids["<|endoftext|>"], "temperature": 0.5}
    (model / "generation_config.json").write_text(json.dumps(ends))
    cfg = Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "model": {"path": tmp_path / "model", "dtype": "float32"},
            "parallel": {"tensor": 2},
            "render": {"chat_template": FAMILIES["qwen2.5"].template + "{# mine #}\n"},
        }
    )
    run_ranks(export_twice, 2, cfg, ["final", "control"])
    given = load_file(tmp_path / "model" / "model.safetensors")
    for name, factor in (("final", 2.0), ("control", 4.0)):
        found = load_file(tmp_path / "run" / "hf" / name / "model.safetensors")
        assert found.keys() == given.keys()
        assert all(torch.equal(found[key], factor * given[key]) for key in given)
        # The template ends an answer with another token than the base model.
        written = json.loads(
            (tmp_path / "run" / "hf" / name / "generation_config.json").read_text()
        )
        both = sorted([ids["<|im_end|>"], ids["<|endoftext|>"]])
        assert written == {"eos_token_id": both, "temperature": 0.5}
    run = tmp_path / "run"
    assert {path.name for path in (run / "hf").iterdir()} == {"final", "control"}
    exported = files_of(run / "hf" / "final")
    assert exported["chat_template.jinja"].endswith(b"{# mine #}\n")
    # A checkpoint of the run becomes the same folder.
    (run / "config.toml").write_text(dump_toml(cfg))
    converted = convert_checkpoint(run, run / "hf" / "final", tmp_path / "converted")
    assert files_of(converted) == exported
    model.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="model.path .*/model, which does not exist: name a "):
        convert_checkpoint(run, run / "hf" / "final", tmp_path / "refused")
    again = convert_checkpoint(
        run, run / "hf" / "final", tmp_path / "again", files_from=tmp_path / "moved"
    )
    assert files_of(again) == exported


def end_of_rank(cfg: Config, fails_on: int, notes: Path) -> tuple[int, float]:
    """Exit code of a rank that is a process of its own, and the seconds that it took.

    Destroying a group waits forever, as over NCCL for a peer that is not there.
    """
    rank = int(os.environ["RANK"])
    started = time.monotonic()
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), time.monotonic() - started
    os.environ[FAILURE_VARIABLE] = str(notes / "trainer")
    dist.destroy_process_group = lambda group=None: time.sleep(600)

    def work() -> None:
        with open_policy(cfg):
            if rank == fails_on:
                raise RuntimeError("the first error")
            dist.all_reduce(torch.ones(1))

    os._exit(run_rank(f"trainer-{rank}", work))


def test_a_rank_that_fails_ends_at_once_and_the_others_with_it(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    cfg = Config.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "model": {"path": tmp_path / "model", "dtype": "float32"},
            "parallel": {"tensor": 2, "pipeline": 2},
        }
    )
    notes = tmp_path / "failures"
    endings = run_ranks(end_of_rank, 4, cfg, 2, notes)
    assert [code for code, _ in endings] == [1] * 4
    assert max(seconds for _, seconds in endings) < 100
    first = first_failure(notes, 0.0)
    assert first is not None and first.who == "trainer, rank 2"
    assert "RuntimeError: the first error" in first.text


def test_overlap_is_refused_where_it_is_not_known_to_be_safe() -> None:
    for method in ("reshard", "folder", "ipc"):
        refuse_overlap(WeightsConfig(method=method), gpus=False)
    with pytest.raises(
        InputError, match="=reshard needs .* without GPUs.*give weights.method=folder"
    ):
        refuse_overlap(WeightsConfig(method="reshard"), gpus=True)
    # None of their kernels waits for another process.
    for method in ("folder", "ipc"):
        refuse_overlap(WeightsConfig(method=method), gpus=True)
