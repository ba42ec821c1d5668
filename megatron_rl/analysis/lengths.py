"""Reward against length over a run's rollouts: reward = a * log(length) + b.

Used by `megatron-rl analyse lengths`. The reward is taken without its length penalty, which would
otherwise be found again. Source: Magistral (arXiv 2506.10910), section on analysis.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.analysis.line_fit import LineFit, fit_line, fit_line_clustered
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.rollout_files import read_records, rollout_files

LENGTH_PART = "length"
BINS = 12


class Means(msgspec.Struct, frozen=True):
    """Of a step, or of completions of about the same length."""

    step: int | None
    completions: int
    length_tokens: float
    reward: float
    """Without the length penalty."""


class LengthsResult(msgspec.Struct, frozen=True):
    """What `analyse lengths` found; a section of analysis.json."""

    run: str
    left_out: dict[str, int]
    """Rollouts in no figure, by reason."""
    by_step: LineFit | None
    """Mean reward of a step against the natural logarithm of its mean length; None for less than
    three steps, or equal lengths."""
    by_rollout: LineFit
    """Errors allow for completions of one prompt that resemble each other."""
    prompts: int
    steps: list[Means]
    bins: list[Means]
    """By length, short ones first, about equally many completions in each."""


@dataclass(frozen=True)
class Lengths:
    """Training completions of a run; arrays are [completions]."""

    steps: np.ndarray
    prompts: np.ndarray
    """Number of the prompt."""
    tokens: np.ndarray
    rewards: np.ndarray
    """Without the length penalty."""
    left_out: Counter[str]


def read_lengths(run_dir: Path) -> Lengths:
    """All graded completions that were sampled for training, dropped groups included.

    Those of a dropped group count for the step of the batch after them. Raises InputError.
    """
    torn: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    prompts: dict[str, int] = {}
    rows: list[tuple[int, int, int, float]] = []
    for file in rollout_files(run_dir):
        if file.step is None:
            continue
        for record in read_records(file.path, torn):
            if record.reward is None:
                left_out[f"not graded: {record.reason}"] += 1
            elif not record.tokens:
                left_out["no token"] += 1
            else:
                prompt = prompts.setdefault(record.prompt_id, len(prompts))
                reward = record.reward - record.parts.get(LENGTH_PART, 0.0)
                rows.append((file.step, prompt, record.tokens, reward))
    if torn:
        left_out["line cut short"] = torn.total()
    if not rows:
        raise InputError(f"{run_dir} has no graded rollouts of training steps")
    steps, numbers, tokens, rewards = (np.array(column) for column in zip(*rows, strict=True))
    return Lengths(steps, numbers, tokens.astype(float), rewards, left_out)


def fit_lengths(run_dir: Path) -> LengthsResult:
    """Fits over a run, by step and by completion. Raises InputError."""
    found = read_lengths(run_dir)
    steps = [_means(found, found.steps == step, int(step)) for step in np.unique(found.steps)]
    by_rollout = fit_line_clustered(np.log(found.tokens), found.rewards, found.prompts)
    mean_lengths = np.array([step.length_tokens for step in steps])
    by_step = None
    if len(steps) >= 3 and np.ptp(mean_lengths) > 0:
        by_step = fit_line(np.log(mean_lengths), np.array([step.reward for step in steps]))
    return LengthsResult(
        run=str(run_dir),
        left_out=dict(sorted(found.left_out.items())),
        by_step=by_step,
        by_rollout=by_rollout,
        prompts=len(np.unique(found.prompts)),
        steps=steps,
        bins=_bins(found),
    )


def _bins(found: Lengths) -> list[Means]:
    """Equal lengths stay together, so that bins may be fewer."""
    edges = np.unique(found.tokens)
    if len(edges) > BINS:
        edges = np.unique(np.quantile(found.tokens, np.arange(1, BINS) / BINS, method="lower"))
    numbers = np.searchsorted(edges, found.tokens, side="left")
    return [_means(found, numbers == number, None) for number in np.unique(numbers)]


def _means(found: Lengths, mine: np.ndarray, step: int | None) -> Means:
    return Means(
        step, int(mine.sum()), float(found.tokens[mine].mean()), float(found.rewards[mine].mean())
    )
