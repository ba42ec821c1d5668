"""Evaluation of one policy version on a set of prompts, by the generators.

Used by the rollout queue.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import AUTO_PROMPTS
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.tree import Config, EvalConfig
from megatron_rl.data.prompts import PromptSets
from megatron_rl.evaluation.figures import Figure, maj_figures, mean_figure, pass_figures
from megatron_rl.evaluation.samples import ProblemSamples
from megatron_rl.protocol.metrics import MAJ_AT, PASS_AT
from megatron_rl.protocol.types import Prompt, Sampling
from megatron_rl.rollout_queue.groups import Group

FINAL_LABEL = "after"
_FEW_PROMPTS = 30
"""Of fewer, the standard error of an accuracy may exceed 0.09."""
VOTED_SAMPLES = 128
"""Votes of more completions are left to eval.json: they take seconds, and peers would wait."""


@dataclass(frozen=True)
class EvaluationSet:
    """What is evaluated on, and how."""

    name: str
    """Empty: the held-out prompts."""
    prompts: list[Prompt]
    samples: int
    """Completions a prompt."""
    sampling: Sampling
    """Of all of them, but for the seed, which each prompt has for itself."""

    @property
    def completions(self) -> int:
        """Completions of all its prompts."""
        return len(self.prompts) * self.samples

    @property
    def described(self) -> str:
        """How many prompts of which kind."""
        count = len(self.prompts)
        return (
            f"{count} prompts of the set {self.name}" if self.name else f"{count} held-out prompts"
        )

    def label(self, label: str) -> str:
        """Name of an evaluation on this set, in metrics and files."""
        return f"{label}.{self.name}" if self.name else label


def evaluation_sets(config: Config, prompts: PromptSets) -> list[EvaluationSet]:
    """All sets that are evaluated on, the held-out prompts first. Raises InputError."""
    own = config.eval
    default = Sampling(
        _default_limit(config),
        own.temperature,
        own.top_p,
        own.top_k,
        own.min_p,
        tuple(config.sampling.stop),
    )
    sets = []
    if held_out := select_held_out(prompts.held_out, own):
        sets.append(EvaluationSet("", held_out, own.samples, default))
    for one in own.sets:
        given = one.model_dump(include={"temperature", "top_p", "top_k", "min_p", "max_new_tokens"})
        changed = {name: value for name, value in given.items() if value is not None}
        sampling = msgspec.structs.replace(default, **changed)
        if not prompts.eval_sets[one.name]:
            raise InputError(
                f"no prompt of the evaluation set {one.name!r} can be rendered: raise "
                "generator.context_tokens, or lower its max_new_tokens"
            )
        chosen = prompts.eval_sets[one.name]
        sets.append(EvaluationSet(one.name, chosen, one.samples or own.samples, sampling))
    return sets


def describe_evaluation(sets: Sequence[EvaluationSet]) -> list[str]:
    """Lines on what is evaluated on, and what is too small to tell anything."""
    if not sets:
        return []
    parts = [
        f"{one.described} ({one.samples} completion{'s' if one.samples > 1 else ''} each, "
        f"temperature {one.sampling.temperature:g})"
        for one in sets
    ]
    lines = [f"evaluated on: {', '.join(parts)}"]
    for one in sets:
        if len(one.prompts) < _FEW_PROMPTS:
            error = 0.5 / len(one.prompts) ** 0.5
            lines.append(
                f"warning: {one.described} are too few: the standard error of their accuracy is up "
                f"to {error:.2f}, so only a gain of {8**0.5 * error:.2f} would be beyond two "
                "standard errors. Give more prompts, raise prompts.held_out_share, or name a "
                "larger set in [[eval.sets]]"
            )
    return lines


def _default_limit(config: Config) -> int:
    """Tokens of a completion: the same in all stages of a run, so that they can be compared."""
    return config.eval.max_new_tokens or longest_stage(config).sampling.max_new_tokens


def completion_limits(config: Config, prompts: PromptSets) -> dict[str, int]:
    """Tokens that a completion of each prompt that may be evaluated on can have, by its id."""
    default = _default_limit(config)
    training = longest_stage(config).sampling.max_new_tokens
    # A spare one may be trained on too.
    limits = {p.id: max(default, training * p.is_spare) for p in prompts.held_out}
    for one in config.eval.sets:
        own = one.max_new_tokens or default
        limits |= {prompt.id: own for prompt in prompts.eval_sets[one.name]}
    return limits


def select_held_out(held_out: list[Prompt], config: EvalConfig) -> list[Prompt]:
    """The held-out prompts to evaluate on; InputError when there are too few."""
    is_auto = config.prompts == "auto"
    # With sets of their own there may be none held out.
    wanted = (0 if config.sets else 1) if is_auto else config.prompts
    if len(held_out) < wanted:
        raise InputError(
            f"eval.prompts={config.prompts}, but the prompt sources have only {len(held_out)} "
            'held-out prompts that can be used: add lines with "split": "held_out", raise '
            "prompts.held_out_share (jsonl) or prompts.held_out_size (reasoning_gym), or lower "
            "eval.prompts; 0 skips evaluation"
        )
    return held_out[: AUTO_PROMPTS if is_auto else wanted]


def label_at(version: int, *, is_final: bool, every_steps: int) -> list[str]:
    """Labels of the evaluations that a synced version asks for."""
    labels = ["before"] if version == 0 else []
    if is_final:
        labels.append(FINAL_LABEL)
    elif version > 0 and every_steps and version % every_steps == 0:
        labels.append(f"step_{version}")
    return labels


class Evaluation:
    """A running evaluation: groups to lease, and what is known of those complete."""

    def __init__(
        self,
        label: str,
        what: EvaluationSet,
        *,
        version: int,
        now: float,
        done: Mapping[str, ProblemSamples] | None = None,
    ) -> None:
        """label: of the whole, the set's name included. done: by id, prompts evaluated earlier."""
        self.label = label
        self.version = version
        self.started_at = now
        self._set = what
        self.complete: list[ProblemSamples] = list((done or {}).values())
        """Problems whose rollouts are all scored."""
        left = [prompt for prompt in what.prompts if prompt.id not in (done or {})]
        self._unopened = left[::-1]
        self._left = len(left)
        self._open: dict[int, Group] = {}
        """By number: groups that are leased and neither complete nor lost."""
        self.lost = 0
        """Groups that failed: the evaluation ends without them."""
        self.not_graded = 0
        """Completions without a verdict, which count neither as right nor as wrong."""
        self.is_late = False
        """Its time is over: it ends with what there is."""
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
    def completions(self) -> int:
        """Completions of all prompts, those of an earlier start included."""
        return self._set.completions

    @property
    def group_size(self) -> int:
        """Completions of one prompt."""
        return self._set.samples

    def open_group(self, number: int) -> Group:
        """The group of the next prompt."""
        prompt = self._unopened.pop()
        group = self._open[number] = Group(
            number,
            prompt,
            msgspec.structs.replace(self._set.sampling, seed=_seed_of(prompt)),
            self._set.samples,
            self.version,
            evaluation=self.label,
            # The vote of one completion is its verdict.
            needs_classes=self._set.samples > 1,
        )
        return group

    @property
    def completions_done(self) -> int:
        """Completions that are scored or will not be; those of an earlier start count."""
        in_open = sum(len(group.scored) + len(group.lost) for group in self._open.values())
        settled = len(self._set.prompts) - len(self._open) - len(self._unopened)
        return settled * self._set.samples + in_open

    def close(self, group: Group) -> None:
        """Note that a group is complete."""
        self.complete.append(problem_of(group))
        self._left -= 1
        del self._open[group.number]

    def lose(self, group: Group) -> None:
        """Note that a group failed."""
        self.lost += 1
        self.lost_ungraded += bool(group.lost)
        self._left -= 1
        del self._open[group.number]

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


def problem_of(group: Group) -> ProblemSamples:
    """What is known of a group whose rollouts are all scored, at least one."""
    prompt, scored = group.prompt, group.ordered
    # Of one completion nobody asks.
    is_known = group.size > 1 and len(group.classes) == len(scored)
    classes = [group.classes[index] for index in sorted(group.scored)] if is_known else None
    return ProblemSamples(
        prompt_id=prompt.id,
        question=prompt.question,
        answer=prompt.answer,
        task=prompt.task,
        language=prompt.language,
        is_correct=np.array([one.score.is_correct for one in scored]),
        is_well_formed=np.array([one.score.is_well_formed for one in scored]),
        is_cut=np.array([one.rollout.finish_reason == "length" for one in scored]),
        tokens=np.array([len(one.rollout.token_ids) for one in scored], np.int64),
        rewards=np.array(group.rewards, np.float64),
        classes=None if classes is None else np.array(classes, np.int64),
    )


def summarize(problems: Sequence[ProblemSamples], seconds: float) -> dict[str, float]:
    """Results of an evaluation by metric name; its errors are over problems."""
    accuracy = mean_figure([problem.accuracy for problem in problems])
    votes = maj_figures([problem for problem in problems if problem.n <= VOTED_SAMPLES])
    unknown = sum(problem.classes is None and problem.n > 1 for problem in problems)
    return {
        "eval/accuracy": accuracy.value,
        "eval/accuracy_se": accuracy.se,
        "eval/format": float(np.concatenate([p.is_well_formed for p in problems]).mean()),
        "eval/length_tokens": float(np.concatenate([p.tokens for p in problems]).mean()),
        "eval/reward": float(np.concatenate([p.rewards for p in problems]).mean()),
        "eval/n": len(problems),
        "eval/seconds": seconds,
        **_named(PASS_AT, pass_figures(problems)),
        **_named(MAJ_AT, votes),
        **({"eval/without_classes": unknown} if unknown else {}),
    }


def _named(prefix: str, figures: Mapping[int, Figure]) -> dict[str, float]:
    named = {}
    for k, figure in figures.items():
        named |= {f"{prefix}{k}": figure.value, f"{prefix}{k}_se": figure.se}
    return named


def _seed_of(prompt: Prompt) -> int:
    """Seed of a prompt's group, below 2**31: the same in every evaluation, in every run.

    Tests of a program are drawn by it; by another, two evaluations would measure different things.
    Of the question, as ids depend on the name and the place of a file.
    """
    digest = hashlib.sha256(prompt.normalized_question.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
