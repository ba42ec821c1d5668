"""Finds why a run learns nothing: the likely cause and fix, from the scores so far. Pure.

Used by the rollout queue. Learning needs groups whose rewards differ. As long as there is none,
`diagnose` looks at the reasons of the scores.

A run that can learn gets a wrong diagnosis with a probability below 1/100 (`_ERROR_RATE`), if its
share of exceptions is at least:

| diagnosis                             | exceptions                                       |
|---------------------------------------|--------------------------------------------------|
| no completion passes the format check | 1 completion in 10; after 15 s of scores, 1 in 4 |
| the judge refuses every conversation  | the same                                         |
| every completion is wrong (or right)  | 1 completion in 20, and 1 prompt in 4            |
| every group has equal rewards         | 1 group in 4                                     |

Repeated looks add no error: "none of the first n is an exception" can only become false.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.reward import TaskConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import judge_context
from megatron_rl.protocol.types import Prompt

UNFINISHED = "unfinished"
_NO_THOUGHTS = frozenset({"no_think_start", "several_think_tags", "no_think_end"})
_NO_BOX = frozenset({"no_boxed", "box_before_think_end", "unclosed_box", "empty_box"})
_NO_CODE = frozenset(
    {
        "no_code_block", "code_before_think_end", "no_language_tag", "unclosed_code_block",
        "empty_code_block",
    }
)  # fmt: skip
REFUSALS = _NO_THOUGHTS | _NO_BOX | _NO_CODE | {UNFINISHED, "empty_response"}
"""Score reasons that mean a failed format check, so a reward of 0."""

_JUDGE_REFUSED, _GRADED = "judge_refused", "graded"
"""Score reasons of `verification.environments.judging:rubric`, which also has "correct"."""

_FORMS = {
    "think_box": "{open}...{close}, then an answer in \\boxed{}",
    "think_code": "{open}...{close}, then a fenced code block with a language tag",
    "box": "an answer in \\boxed{}",
    "code": "a fenced code block with a language tag",
    "none": "any text that is not blank",
}
_LOOSER_CHECKS = {"think_box": ("box", "none"), "think_code": ("code",), "box": ("none",)}
_MISSING = {"no_think_start": "begins with {open}", "no_think_end": "contains {close}"}
"""Format failure -> what the completion lacks."""
_ERROR_RATE = 0.01
_MOSTLY = 0.9
_SHOWN_REASONS = 4


def least_evidence(share: float) -> int:
    """Least n so that n trials with this success rate all fail with probability <= _ERROR_RATE."""
    return math.ceil(math.log(_ERROR_RATE) / math.log(1 - share))


_MIN_FORMAT_FAILURE, _MIN_FORMAT_FAILURE_LATE = least_evidence(1 / 10), least_evidence(1 / 4)
_MIN_COMPLETIONS = least_evidence(1 / 20)
_MIN_PROMPTS = _MIN_GROUPS = least_evidence(1 / 4)


class Finding(NamedTuple):
    """Why nothing is learned."""

    kind: str
    text: str
    """What was seen, the likely cause, and the fix."""


@dataclasses.dataclass
class Evidence:
    """Counts of scores since the run began."""

    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Reasons of all scores, including evaluations."""
    training: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Reasons of the scores of training completions."""
    prompts: set[str] = dataclasses.field(default_factory=set)
    """Ids of prompts with a scored training completion, at most _MIN_PROMPTS."""
    truncated: int = 0
    """Training completions that were cut at the length limit."""
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    """By format failure: the beginning of its first completion that is not blank."""
    groups: int = 0
    """Complete training groups."""
    zero_variance_groups: int = 0
    outcomes: set[float] = dataclasses.field(default_factory=set)
    """Rewards that environments gave to training completions, at most two."""

    def add_prompt(self, prompt_id: str) -> None:
        """A training completion of this prompt was scored."""
        if len(self.prompts) < _MIN_PROMPTS:
            self.prompts.add(prompt_id)

    def add_outcome(self, reward: float) -> None:
        """An environment gave this reward to a training completion."""
        if len(self.outcomes) < 2:
            self.outcomes.add(reward)

    @property
    def is_graded(self) -> bool:
        """Whether an environment rewards by degrees: all right, or all wrong, is not all equal."""
        is_paid = not self.training["correct"] and max(self.outcomes, default=0) > 0
        return is_paid or len(self.outcomes) > 1 or self.training[_GRADED] > 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """The configuration, for advice."""

    config: Config
    tasks: dict[str, TaskConfig]
    """Tasks that the prompts name."""
    judge_room: int = 0
    """Tokens of a judge's messages and reply together; 0: the run has no judge."""

    @classmethod
    def of(cls, config: Config, prompts: Iterable[Prompt]) -> "Setting":
        """The setting of a run with these prompts."""
        names = sorted({prompt.task for prompt in prompts})
        known = config.reward.all_tasks
        tasks = {name: known[name] for name in names if name in known}
        return cls(config, tasks, judge_context(config) if config.judge_folder else 0)


def diagnose(
    evidence: Evidence, setting: Setting, *, is_late: bool = False, records: Path | None = None
) -> Finding | None:
    """The likely fault; None when a group had different rewards, or too few scores are known.

    is_late: the user has waited, so fewer format failures are enough. records: file with the
    rollouts of dropped groups, if any.
    """
    if evidence.groups > evidence.zero_variance_groups:
        return None
    total, training = evidence.reasons.total(), evidence.training.total()
    all_zero_variance = evidence.groups >= _MIN_GROUPS
    refused = _only(evidence.reasons, REFUSALS)
    least = _MIN_FORMAT_FAILURE_LATE if is_late else _MIN_FORMAT_FAILURE
    is_refused = refused.total() == total >= least
    if is_refused or (all_zero_variance and refused.total() >= _MOSTLY * total):
        return _format_failure(evidence, refused, setting)
    unjudged = evidence.reasons[_JUDGE_REFUSED]
    is_unjudged = unjudged == total >= least
    if setting.judge_room and (is_unjudged or (all_zero_variance and unjudged >= _MOSTLY * total)):
        return _judge_refuses(unjudged, total, setting)
    correct = evidence.training["correct"]
    wrong = training - correct - _only(evidence.training, REFUSALS).total()
    if not all_zero_variance:
        # Such groups will have zero variance, unless an environment rewards by degrees.
        is_uniform = training in (correct, wrong) and not evidence.is_graded
        is_enough = training >= _MIN_COMPLETIONS and len(evidence.prompts) >= _MIN_PROMPTS
        if not (is_uniform and is_enough):
            return None
    if evidence.is_graded and (not correct or evidence.training[_GRADED]):
        return _equal_outcomes(evidence, records)
    if not correct:
        return _never_correct(evidence, setting, records)
    if correct >= _MOSTLY * training:
        return _too_easy(evidence)
    return _equal_though_mixed(evidence, setting, records)


def reasons_text(reasons: collections.Counter[str]) -> str:
    """The most frequent reasons with their counts."""
    shown = [f"{reason} {count}" for reason, count in reasons.most_common(_SHOWN_REASONS)]
    return ", ".join(shown + ["..."] * (len(reasons) > _SHOWN_REASONS))


def _only(reasons: collections.Counter[str], names: frozenset[str]) -> collections.Counter[str]:
    return collections.Counter({name: n for name, n in reasons.items() if name in names and n})


def _format_failure(
    evidence: Evidence, refused: collections.Counter[str], setting: Setting
) -> Finding:
    head = (
        f"{refused.total()} of {evidence.reasons.total()} completions fail the format check and "
        f"earn 0 ({reasons_text(refused)})."
    )
    worst = refused.most_common(1)[0][0]
    if worst == UNFINISHED:
        cause = "Cause: they are cut at the length limit. Fix:"
        looser = [f"; or, if they do not think, {text}" for text in _looser(setting, "think")]
        return Finding("length_limit", f"{head} {cause} {_longer(setting)}{''.join(looser)}.")
    if worst == "empty_response":
        fix = (
            "Cause: the model ends at once. Fix: look at render.chat_template, and at the end "
            "tokens in generation_config.json of the model's folder."
        )
        return Finding("ends_at_once", f"{head} {fix}")
    example = evidence.examples.get(worst, "")
    shown = f" One begins: {example!r}." if example else ""
    if set(refused) == {worst} and worst in _MISSING:
        lacks = setting.config.render.tags.fill(_MISSING[worst])
        return Finding(
            "format_failure", f"{head} None {lacks}.{shown} {_wrong_form(setting, lacks_tags=True)}"
        )
    return Finding("format_failure", f"{head}{shown} {_wrong_form(setting)}")


def _longer(setting: Setting) -> str:
    return (
        f"raise sampling.max_new_tokens = {setting.config.sampling.max_new_tokens} and, as it "
        "holds the prompt too, generator.context_tokens"
    )


def _looser(setting: Setting, prefix: str = "") -> list[str]:
    """Keys that let each task accept another form, if its format check has this prefix."""
    return [
        f"set reward.tasks.{name}.format_check = "
        + " or ".join(map(json.dumps, _LOOSER_CHECKS[task.format_check]))
        for name, task in setting.tasks.items()
        if task.format_check in _LOOSER_CHECKS and task.format_check.startswith(prefix)
    ]


def _wrong_form(setting: Setting, *, lacks_tags: bool = False) -> str:
    """lacks_tags: every completion lacks a think tag, so the model may be one without thoughts."""
    fill = setting.config.render.tags.fill
    wanted = "; ".join(
        f"format check {task.format_check!r} of task {name!r} wants "
        f"{fill(_FORMS[task.format_check])}"
        for name, task in setting.tasks.items()
    )
    asked = "say so in render.system_prompt"
    if setting.config.render.system_prompt != "":
        asked = "say it more plainly in render.system_prompt"
    taught = "teach it by a cold start (sft.dataset and sft.steps)"
    if setting.config.sft.steps:
        taught = "give the cold start more steps (sft.steps) or SFT examples of that form"
    if lacks_tags:
        fixes = [f"for a model that does not think, {text}" for text in _looser(setting, "think")]
        fixes += [asked, taught]
    else:
        fixes = [asked, taught, *(f"accept another form, {text}" for text in _looser(setting))]
    return (
        f"Cause: the model does not answer in the form that is graded ({wanted}). "
        f"Fix: {'; or '.join(fixes)}."
    )


def _judge_refuses(refused: int, total: int, setting: Setting) -> Finding:
    config, room = setting.config, setting.judge_room
    fix = "take a judge with more positions"
    if room == config.scorer.kv_tokens:
        fix = f"raise expert.scorer.kv_tokens = {room}"
    return Finding(
        "judge_refuses",
        f"The judge {config.judge_folder} refuses {refused} of {total} conversations, which earn 0 "
        f"(judge_refused). Likely cause: its messages and its reply together may have {room} "
        "tokens, and rubric, question and answer need more; logs/scorer-0.log has each refusal. "
        f"Fix: {fix}; or shorten the rubric, or sampling.max_new_tokens = "
        f"{config.sampling.max_new_tokens}.",
    )


def _never_correct(evidence: Evidence, setting: Setting, records: Path | None) -> Finding:
    training = evidence.training
    text = (
        f"None of {training.total()} training completions is right ({reasons_text(training)}). "
        "Cause: the prompts are too hard for this model, or it writes answers in another form than "
        "the references. Fix: "
    )
    if records is not None:
        text += f"compare 'text' and 'answer' in {records}; "
    if evidence.truncated >= training.total() / 2:
        text += f"{evidence.truncated} were cut at the length limit, {_longer(setting)}; "
    if setting.config.reward.format == 0:
        text += "let the form alone earn something by reward.format; "
    return Finding("never_correct", text + "give easier prompts.")


def _too_easy(evidence: Evidence) -> Finding:
    training = evidence.training
    return Finding(
        "too_easy",
        f"{training['correct']} of {training.total()} training completions are right, and no group "
        "has different rewards. Cause: the prompts are too easy. Fix: give harder ones.",
    )


def _equal_outcomes(evidence: Evidence, records: Path | None) -> Finding:
    text = (
        f"All {evidence.groups} complete groups have equal rewards inside "
        f"({reasons_text(evidence.training)}). Cause: the environment, or the judge that it asks, "
        "gives all replies to a prompt the same reward. Fix: a rubric or an environment that tells "
        "replies apart, a higher sampling.temperature"
    )
    return Finding("equal_rewards", f"{text}; see {records}." if records else f"{text}.")


def _equal_though_mixed(evidence: Evidence, setting: Setting, records: Path | None) -> Finding:
    reward = setting.config.reward
    text = (
        f"All {evidence.groups} complete groups have equal rewards inside, though completions "
        f"differ ({reasons_text(evidence.training)}). Cause: each prompt is solved always or "
        f"never, or what differs does not count (reward.correct = {reward.correct:g}, "
        f"reward.format = {reward.format:g}). Fix: prompts of middling difficulty, a larger "
        "train.group_size, a higher sampling.temperature"
    )
    return Finding("equal_rewards", f"{text}; see {records}." if records else f"{text}.")
