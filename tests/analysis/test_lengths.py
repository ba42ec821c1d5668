"""Fits of reward against length: planted lines are found, errors cover the truth as they say."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats

from megatron_rl.analysis.lengths import LineFit, fit_lengths, fit_line, fit_line_clustered
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.rollout_files import RolloutRecord

SLOPE, INTERCEPT = 0.13, -0.4


def covers(fit: LineFit) -> tuple[bool, bool]:
    """Whether the 95 % intervals of slope and intercept hold the truth."""
    t = float(stats.t.ppf(0.975, fit.degrees_of_freedom))
    return (
        abs(fit.slope - SLOPE) <= t * fit.slope_se,
        abs(fit.intercept - INTERCEPT) <= t * fit.intercept_se,
    )


def test_a_fit_worked_by_hand() -> None:
    # Means 2 and 3; sums of (x-2)^2: 2, of (x-2)(y-3): 3; slope 1.5; residuals 0.5, -1, 0.5.
    fit = fit_line(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 5.0]))
    assert (fit.slope, fit.intercept) == pytest.approx((1.5, 0.0))
    assert fit.slope_se == pytest.approx((1.5 / 2) ** 0.5)
    assert fit.intercept_se == pytest.approx((1.5 * (1 / 3 + 4 / 2)) ** 0.5)
    assert fit.r_squared == pytest.approx(1 - 1.5 / 6)
    assert fit.residual_autocorrelation == pytest.approx(-1.0 / 1.5)
    assert (fit.points, fit.degrees_of_freedom) == (3, 1)


def test_a_fit_equals_that_of_scipy() -> None:
    generator = np.random.default_rng(4)
    x = generator.normal(3, 2, 50)
    y = generator.normal(size=50) + 0.3 * x
    fit, other = fit_line(x, y), stats.linregress(x, y)
    assert fit.slope == pytest.approx(other.slope)
    assert fit.slope_se == pytest.approx(other.stderr)
    assert fit.intercept == pytest.approx(other.intercept)
    assert fit.intercept_se == pytest.approx(other.intercept_stderr)
    assert fit.r_squared == pytest.approx(other.rvalue**2)


def test_clustered_errors_equal_the_sandwich_written_out() -> None:
    generator = np.random.default_rng(5)
    x, y = generator.normal(3, 2, 60), generator.normal(size=60)
    clusters = generator.integers(0, 12, 60)
    design = np.stack([np.ones(60), x], axis=1)
    bread = np.linalg.inv(design.T @ design)
    beta = bread @ design.T @ y
    meat = np.zeros((2, 2))
    for cluster in range(12):
        mine = clusters == cluster
        score = design[mine].T @ (y[mine] - design[mine] @ beta)
        meat += np.outer(score, score)
    covariance = 12 / 11 * 59 / 58 * bread @ meat @ bread
    fit = fit_line_clustered(x, y, clusters)
    assert (fit.intercept, fit.slope) == pytest.approx(tuple(beta))
    assert fit.slope_se == pytest.approx(covariance[1, 1] ** 0.5)
    assert fit.intercept_se == pytest.approx(covariance[0, 0] ** 0.5)
    assert fit.degrees_of_freedom == 11


def test_intervals_of_independent_points_cover_the_truth_as_often_as_they_say() -> None:
    hits = np.zeros(2)
    for seed in range(2000):
        generator = np.random.default_rng(seed)
        x = np.log(generator.uniform(200, 4000, 30))
        hits += covers(fit_line(x, SLOPE * x + INTERCEPT + generator.normal(0, 0.05, 30)))
    # Three standard errors of a share of 0.95 of 2000: 0.0146.
    assert np.abs(hits / 2000 - 0.95).max() < 0.0146


def test_intervals_of_clusters_cover_the_truth_where_plain_ones_do_not() -> None:
    clustered, plain = np.zeros(2), np.zeros(2)
    clusters = np.repeat(np.arange(80), 8)
    for seed in range(1000):
        generator = np.random.default_rng(seed)
        # A prompt has its own length and its own difficulty.
        x = np.log(500) + generator.normal(0, 0.6, 80)[clusters] + generator.normal(0, 0.2, 640)
        noise = generator.normal(0, 0.3, 80)[clusters] + generator.normal(0, 0.3, 640)
        y = SLOPE * x + INTERCEPT + noise
        clustered += covers(fit_line_clustered(x, y, clusters))
        plain += covers(fit_line(x, y))
    print(f"clustered {clustered / 1000}, plain {plain / 1000}")
    # Three standard errors: 0.021. With 80 clusters the sandwich is a little too small.
    assert (np.abs(clustered / 1000 - 0.95) < 0.03).all()
    assert (plain / 1000 < 0.75).all()


def record(prompt: int, index: int, tokens: int, reward: float | None, penalty: float) -> bytes:
    parts = {} if reward is None else {"correct": float(reward) - penalty, "length": penalty}
    return msgspec.json.encode(
        RolloutRecord(
            prompt_id=f"p/{prompt}",
            group=prompt,
            index=index,
            task="math",
            problem="",
            language="",
            text="",
            answer="",
            reward=None if reward is None else float(reward),
            parts=parts,
            reason="correct" if parts else "ungradable",
            tokens=tokens,
            versions=[0],
            finish_reason="stop",
            seed=0,
            prompt_tail="",
        )
    )


def write_run(run: Path, *, steps: int, noise: float) -> None:
    """Rollouts on the planted line, with a length penalty on top of long ones."""
    generator = np.random.default_rng(11)
    (run / "rollouts").mkdir(parents=True)
    for step in range(1, steps + 1):
        lines: dict[str, list[bytes]] = {"step": [], "dropped": []}
        for group in range(10):
            kind = "dropped" if group % 3 == 0 else "step"
            for index in range(8):
                tokens = int(generator.uniform(50, 400) * (1 + step / 5))
                penalty = -0.1 if tokens > 700 else 0.0
                raw = SLOPE * np.log(tokens) + INTERCEPT + generator.normal(0, noise)
                number = 10 * step + group
                lines[kind].append(record(number, index, tokens, raw + penalty, penalty))
        lines["dropped"].append(record(0, 0, 100, None, 0.0))
        for kind, written in lines.items():
            path = run / "rollouts" / f"{kind}_{step:06d}.jsonl"
            path.write_bytes(b"\n".join(written) + b"\n")
    (run / "rollouts" / "eval_after.jsonl").write_bytes(record(9, 9, 9999, 9.0, 0.0) + b"\n")


def test_the_planted_line_is_found_in_the_rollouts_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, steps=15, noise=0.1)
    with (tmp_path / "rollouts" / "step_000015.jsonl").open("ab") as file:
        file.write(b'{"prompt_id": "cut')
    found = fit_lengths(tmp_path)
    fit = found.by_rollout
    assert fit.points == 15 * 80 and found.prompts == 150
    assert fit.degrees_of_freedom == 149
    assert all(covers(fit))
    assert 0 < fit.slope_se < 0.01
    assert found.left_out == {"line cut short": 1, "not graded: ungradable": 15}
    assert sum(part.completions for part in found.bins) == 15 * 80
    assert [step.step for step in found.steps] == list(range(1, 16))
    assert found.by_step is not None and found.by_step.points == 15
    assert abs(found.by_step.slope - SLOPE) < 3 * found.by_step.slope_se


def test_without_noise_the_line_is_exact_whatever_the_penalty(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2, noise=0.0)
    found = fit_lengths(tmp_path)
    assert found.by_rollout.slope == pytest.approx(SLOPE, abs=1e-9)
    assert found.by_rollout.intercept == pytest.approx(INTERCEPT, abs=1e-9)
    assert found.by_rollout.r_squared == pytest.approx(1)
    # Two steps give no line with an error.
    assert found.by_step is None


def test_what_gives_no_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rollouts"):
        fit_lengths(tmp_path)
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(InputError, match="no graded rollouts"):
        fit_lengths(tmp_path)
    lines = b"\n".join(record(n, 0, 100, 0.5 + n, 0.0) for n in range(4)) + b"\n"
    (tmp_path / "rollouts" / "step_000001.jsonl").write_bytes(lines)
    with pytest.raises(InputError, match="all lengths are equal"):
        fit_lengths(tmp_path)
    lines = b"\n".join(record(0, n, 100 + n, 0.5 + n, 0.0) for n in range(4)) + b"\n"
    (tmp_path / "rollouts" / "step_000001.jsonl").write_bytes(lines)
    with pytest.raises(InputError, match="one prompt"):
        fit_lengths(tmp_path)
