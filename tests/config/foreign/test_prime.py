"""Files of prime-rl: its one file for a run, files that build on others, and its own defaults."""

from pathlib import Path

import pytest

from tests.config.foreign.imported import accounted, imported, written

BASE = """
max_steps = 100
seq_len = 8192
[model]
name = "a/model"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 1
num_infer_replicas = 2
[trainer.model]
seq_len = 16384
cp = 2
[trainer.model.ac]
[orchestrator]
group_size = 4
[orchestrator.optim]
lr = 1e-4
[inference.vllm]
tensor_parallel_size = 4
max_num_seqs = "None"
[monitors.wandb]
project = "p"
"""
TASKS = """
[orchestrator]
group_size = 8
[[orchestrator.train.source]]
name = "other"
env.taskset.id = "x"
[[orchestrator.train.source]]
name = "math"
ratio = 3
env.taskset = {id = "math-env", dataset_name = "a/b", dataset_subset = "s"}
[orchestrator.eval]
interval = 25
group_size = 2
[[orchestrator.eval.source]]
name = "held"
env.taskset.dataset_name = "c/d"
"""


def test_later_files_win_in_one_run(tmp_path: Path) -> None:
    base, tasks = written(tmp_path, "base.toml", BASE), written(tmp_path, "tasks.toml", TASKS)
    found, ours = imported(base, tasks)
    # 128 completions are prime-rl's own batch.
    assert (ours.train.group_size, ours.train.prompts_per_batch) == (8, 16)
    assert (ours.generator.context_tokens, ours.train.microbatch_tokens) == (8192, 16384)
    # 2 nodes of 8 GPUs over 2 context ranks; 2 * 1 node over engines of 4.
    assert (ours.parallel.data, ours.generator.replicas) == (8, 4)
    assert (ours.generator.tensor_parallel, ours.model.recompute) == (4, "full")
    [source] = ours.prompts
    assert (str(source.path), source.subset, source.weight) == ("a/b", "s", 3)
    [held] = ours.eval.sets
    assert (held.name, str(held.prompts.path), ours.eval.samples) == ("held", "c/d", 2)
    assert (ours.metrics.wandb, ours.metrics.wandb_project) == ("online", "p")
    # The orchestrator's learning rate is of several runs at once.
    assert ours.optimizer.lr == 1e-6
    assert "one run" in found.no_counterpart["orchestrator.optim.lr"]
    assert "inference.vllm.max_num_seqs" in found.default_here
    algorithm = ours.algorithm
    assert (algorithm.normalization.name, algorithm.aggregation.name) == ("none", "batch_tokens")
    assert ours.optimizer.warmup_steps == 0
    assert any("generates until seq_len" in line for line in found.to_check)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("", ("constant", 0, 0.1)),
        ('type = "cosine"', ("cosine", 10, 0.0)),
        ('type = "cosine"\nwarmup_steps = 4\nmin_lr = 2e-7', ("cosine", 4, 0.2)),
        ('type = "linear"\nwarmup_steps = 20\ndecay_steps = 80', ("linear", 20, 0.0)),
        # The fall at the end alone has no counterpart; the warm-up has.
        ('type = "linear"\nwarmup_steps = 20\ndecay_steps = 10', ("constant", 20, 0.1)),
    ],
)
def test_schedules(tmp_path: Path, scheduler: str, expected: tuple[str, int, float]) -> None:
    text = f"{BASE}[trainer.scheduler]\n{scheduler}\n"
    _, ours = imported(written(tmp_path, "rl.toml", text))
    optimizer = ours.optimizer
    assert (optimizer.lr_schedule, optimizer.warmup_steps) == expected[:2]
    assert optimizer.min_lr_ratio == pytest.approx(expected[2])


def test_a_late_fall_and_another_algorithm_are_named(tmp_path: Path) -> None:
    text = f'{BASE}[trainer.scheduler]\ntype = "linear"\n[[orchestrator.algorithms]]\nid = "opd"\n'
    found = accounted(written(tmp_path, "rl.toml", text))
    assert "last 10 steps" in found.no_counterpart["trainer.scheduler.type"]
    assert "icepop" in found.no_counterpart["orchestrator.algorithms.0.id"]
    assert "algorithm.normalization.name" not in found.values
    assert not any("{}" in line for line in found.to_check)
