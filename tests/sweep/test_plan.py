"""Which runs a sweep consists of, and that all errors are found before one starts."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from tests.sweep.places import SWEEP, plan_of

GRID = (
    SWEEP
    + '[grid]\n"queue.max_staleness" = [0, 2]\n"optimizer.lr_schedule" = ["constant", "linear"]\n'
)


def test_every_variant_runs_with_every_seed_in_a_folder_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert [(run.variant, run.seed) for run in plan.runs] == [
        ("low", 0), ("high", 0), ("low", 1), ("high", 1),
    ]  # fmt: skip
    last = plan.runs[-1]
    assert last.run_dir == tmp_path / "sweep" / "high" / "seed-1"
    assert last.arguments == [
        "run", "--config", str(tmp_path / "base.toml"), "--run-dir", str(last.run_dir),
        "optimizer.lr=0.5", "run.seed=1",
    ]  # fmt: skip
    assert (last.config.optimizer.lr, last.config.run.seed, last.config.train.steps) == (0.5, 1, 3)
    assert last.config.run.dir == last.run_dir and plan.baseline == "low"


def test_the_grid_multiplies_the_variants(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, GRID)
    assert list(plan.variants) == [
        f"{name},max_staleness={bound},lr_schedule={shape}"
        for name in ("low", "high") for bound in (0, 2) for shape in ("constant", "linear")
    ]  # fmt: skip
    config = plan.runs[7].config
    assert (config.optimizer.lr, config.queue.max_staleness) == (0.5, 2)
    assert config.optimizer.lr_schedule == "linear" and len(plan.runs) == 16


def test_a_grid_alone_is_a_sweep_and_keeps_the_types_of_values(tmp_path: Path) -> None:
    head = 'name = "g"\nbase = "base.toml"\nseeds = [4]\n'
    values = '[grid]\n"queue.strict_staleness" = [true, false]\n"model.path" = ["a/b", "7"]\n'
    plan = plan_of(tmp_path, head + values)
    assert list(plan.variants)[:2] == [
        "strict_staleness=true,path=a-b", "strict_staleness=true,path=7",
    ]  # fmt: skip
    assert [run.config.queue.strict_staleness for run in plan.runs] == [True, True, False, False]
    assert [str(run.config.model.path) for run in plan.runs] == [
        "a/b", f"{Path.cwd()}/7", "a/b", f"{Path.cwd()}/7"
    ]  # fmt: skip
    alike = values.replace('"a/b", "7"', '"a/b", "a:b"')
    with pytest.raises(InputError, match="two variants are named strict_staleness=true,path=a-b"):
        plan_of(tmp_path, head + alike)


def test_folders_of_variants_stay_in_that_of_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "prompts.toml").write_text("[[prompts]]\n")
    head = 'name = "g"\nbase = "prompts.toml"\nseeds = [4]\n[grid]\n'
    plan = plan_of(tmp_path, head + '"prompts.0.options./tmp/x" = ["/../y"]\n')
    assert list(plan.variants) == ["-tmp-x=-..-y"]
    assert plan.runs[0].run_dir.parent.parent == plan.sweep_dir
    with pytest.raises(InputError, match="the name of variant path=x+ is longer than 255 bytes"):
        plan_of(tmp_path, head + f'"model.path" = ["{"x" * 251}"]\n')


def test_keys_of_one_last_part_are_named_in_full(tmp_path: Path) -> None:
    grid = '[grid]\n"optimizer.lr" = [0.5]\n"sft.optimizer.lr" = [0.25]\n'
    plan = plan_of(tmp_path, 'name = "g"\nbase = "base.toml"\n' + grid)
    assert list(plan.variants) == ["optimizer.lr=0.5,sft.optimizer.lr=0.25"]


def test_overrides_come_from_the_file_then_the_command_line_then_the_variant(
    tmp_path: Path,
) -> None:
    text = SWEEP.replace("[[", 'overrides = ["train.steps=5", "train.group_size=2"]\n[[', 1)
    plan = plan_of(tmp_path, text, "train.steps=7", "optimizer.lr=0.75")
    config = plan.runs[0].config
    assert (config.train.steps, config.train.group_size, config.optimizer.lr) == (7, 2, 0.25)


def test_errors_of_all_variants_are_shown_together(tmp_path: Path) -> None:
    text = SWEEP.replace("optimizer.lr=0.25", "optimizer.rate=1").replace("lr=0.5", "lr=-1")
    with pytest.raises(InputError) as caught:
        plan_of(tmp_path, text.replace("seeds", 'baseline = "middle"\nseeds'), "run.seed=3")
    message = str(caught.value)
    assert "variant low: the configuration is wrong:\n  unknown key 'optimizer.rate'" in message
    assert "variant high: the configuration is wrong:\n  optimizer.lr: " in message
    assert "baseline 'middle' is none of the variants, which are: low, high" in message
    assert "run.seed is set by the sweep" in message
    # Once, not once a seed.
    assert message.count("variant low") == 1
    assert not (tmp_path / "sweep" / "low").exists()


def test_variants_of_the_same_configuration_are_found(tmp_path: Path) -> None:
    assert plan_of(tmp_path).same_configurations == []
    text = SWEEP.replace("optimizer.lr=0.5", "optimizer.lr=0.250")
    assert plan_of(tmp_path, text).same_configurations == [("low", "high")]
