"""Evaluation of one policy version on the held-out prompts, by the generators.

Used by the rollout queue.
"""

import hashlib
import math

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import EvalConfig, SamplingConfig
from megatron_rl.protocol.metrics import PASS_AT
from megatron_rl.protocol.types import Prompt, Sampling, ScoredRollout
from megatron_rl.rollout_queue.groups import Group

FINAL_LABEL = "after"
AUTO_PROMPTS = 256
"""Most prompts that eval.prompts = "auto" evaluates on."""


def select_held_out(held_out: list[Prompt], config: EvalConfig) -> list[Prompt]:
    """The prompts to evaluate on; InputError when there are too few."""
    is_auto = config.prompts == "auto"
    wanted = 1 if is_auto else config.prompts
    if len(held_out) < wanted:
        raise InputError(
            f"eval.prompts={config.prompts}, but the prompt sources have only {len(held_out)} "
            'held-out prompts that can be used: add lines with "split": "held_out", raise '
            "prompts.held_out_share (jsonl) or prompts.held_out_size (reasoning_gym), or lower "
            "eval.prompts; 0 skips evaluation"
        )
    return held_out[: AUTO_PROMPTS if is_auto else wanted]


def label_at(version: int, *, is_final: bool, every_steps: int) -> list[str]:
    """Labels of the evaluations that a published version asks for."""
    labels = ["before"] if version == 0 else []
    if is_final:
        labels.append(FINAL_LABEL)
    elif version > 0 and every_steps and version % every_steps == 0:
        labels.append(f"step_{version}")
    return labels


class Evaluation:
    """A running evaluation: groups to lease, and those complete."""

    def __init__(
        self,
        label: str,
        prompts: list[Prompt],
        *,
        config: EvalConfig,
        sampling: SamplingConfig,
        version: int,
        now: float,
    ) -> None:
        self.label = label
        self.version = version
        self.started_at = now
        self._config = config
        self._max_new_tokens = sampling.max_new_tokens
        self._unopened = list(reversed(prompts))
        self._left = len(prompts)
        self.complete: list[Group] = []
        """Groups whose rollouts are all scored."""
        self.lost = 0
        """Groups that failed: the evaluation ends without them."""
        self.not_graded = 0
        """Completions without a verdict, which count neither as right nor as wrong."""
        self.lost_ungraded = 0
        """Lost groups of which no completion could be graded."""

    @property
    def has_unopened(self) -> bool:
        """Whether prompts wait to be leased."""
        return bool(self._unopened)

    @property
    def is_complete(self) -> bool:
        """Whether every group is complete or lost."""
        return self._left == 0

    @property
    def group_size(self) -> int:
        """Completions of one prompt."""
        return self._config.samples

    def open_group(self, number: int) -> Group:
        """The group of the next prompt."""
        prompt = self._unopened.pop()
        sampling = Sampling(
            max_new_tokens=self._max_new_tokens,
            temperature=self._config.temperature,
            seed=_seed_of(prompt),
        )
        return Group(
            number,
            prompt,
            sampling,
            self._config.samples,
            self.version,
            evaluation=self.label,
        )

    def close(self, group: Group) -> None:
        """Note that a group is complete."""
        self.complete.append(group)
        self._left -= 1

    def lose(self, group: Group) -> None:
        """Note that a group failed."""
        self.lost += 1
        self.lost_ungraded += bool(group.lost)
        self._left -= 1

    def lose_unopened(self) -> None:
        """Note that nobody will open the other prompts."""
        self.lost += len(self._unopened)
        self._left -= len(self._unopened)
        self._unopened.clear()

    def describe(self, now: float) -> str:
        """One line on what is missing."""
        return (
            f"evaluation {self.label!r} of version {self.version}: {self._left} prompts unfinished "
            f"({len(self._unopened)} not leased) after {now - self.started_at:.0f} s"
        )


def summarize(groups: list[Group], seconds: float) -> dict[str, float]:
    """Results of an evaluation by metric name.

    The standard error is over prompts, of each prompt's share of correct completions:
    sqrt(p (1 - p) / n) for one completion a prompt.
    """
    of_groups = [[scored.score.is_correct for scored in group.ordered] for group in groups]
    shares = [_mean(verdicts) for verdicts in of_groups]
    rollouts: list[ScoredRollout] = [scored for group in groups for scored in group.ordered]
    accuracy = _mean(shares)
    variance = _mean([(share - accuracy) ** 2 for share in shares])
    return {
        "eval/accuracy": accuracy,
        "eval/accuracy_se": math.sqrt(variance / len(shares)),
        "eval/format": _mean([scored.score.is_well_formed for scored in rollouts]),
        "eval/length_tokens": _mean([len(scored.rollout.token_ids) for scored in rollouts]),
        "eval/reward": _mean([scored.score.reward for scored in rollouts]),
        "eval/n": len(groups),
        "eval/seconds": seconds,
        **_pass_at(of_groups),
    }


def _pass_at(of_groups: list[list[bool]]) -> dict[str, float]:
    """pass@k for k = 2, 4, 8 ... and all samples: the chance that one of k is right.

    Unbiased for each prompt: 1 - (n - c choose k) / (n choose k) with c of n right. Over prompts of
    which so many could be graded. Source: arXiv 2107.03374, eq. 1.
    """
    most = max(map(len, of_groups))
    results = {}
    for k in sorted({most, *(2**power for power in range(1, most.bit_length()))} - {1}):
        chances = [
            1 - math.comb(len(verdicts) - sum(verdicts), k) / math.comb(len(verdicts), k)
            for verdicts in of_groups
            if len(verdicts) >= k
        ]
        results[f"{PASS_AT}{k}"] = _mean(chances)
        variance = _mean([(chance - results[f"{PASS_AT}{k}"]) ** 2 for chance in chances])
        results[f"{PASS_AT}{k}_se"] = math.sqrt(variance / len(chances))
    return results


def _seed_of(prompt: Prompt) -> int:
    """Seed of a prompt's group, below 2**31: the same in every evaluation.

    Tests of a program are drawn by it; by another, two evaluations would measure different things.
    """
    digest = hashlib.sha256(prompt.id.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
