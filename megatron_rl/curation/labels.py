"""Whether the reference answer of a problem is right, by what a model answers again and again.

Pure. A label is doubted when one other answer has at least `label_share` of a problem's n samples
and the label at most `max_label_share` of them. How often that happens, for n = 16 and the
defaults (at least 10 samples of one other answer, at most 1 of the label):

- A wrong label of a problem that the model solves with probability p is doubted with probability
  at least P(B(n, p) >= 10) - P(B(n, q) >= 2), q being how often the model gives the wrong label.
  For p = 0.8 the first is 0.973, and grows with p; the second is 0.011 for q = 0.01. So at least
  96 % of such labels are found, and 90 % as long as q <= 0.027. (The worst case, in which all wrong
  samples give the wrong label, q = 1 - p = 0.2, leaves 11 %: a label that a model itself gives
  notably often is no evidence against it.)
- A right label of a problem that is solved with probability p is doubted with probability at most
  min(P(B(n, p) <= 1), sum over wrong answers P(B(n, r_j) >= 10)), r_j being how often the model
  gives wrong answer j. The first is below 0.8 % from p = 0.36 on; the second below 0.2 % for each
  answer with r_j <= 0.25, so below 0.8 % for all. So false drops are at most 0.8 % of the
  problems, plus a part of those on which the model makes one and the same mistake in more than a
  quarter of its samples and is right in less than 36 %. Where it does so nearly always, no vote
  can tell that from a wrong label.

Source: Magistral (arXiv 2506.10910), section 4.1: problems whose majority answer disagrees with the
label are dropped. The two shares are ours.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.curation.options import check_share
from megatron_rl.protocol.class_messages import NO_ANSWER

Action = Literal["keep", "drop", "relabel"]
_ROUNDING = 1e-9


@dataclass(frozen=True)
class LabelRules:
    """When a label is doubted, and what becomes of it."""

    action: Action = "keep"
    """keep: labels are not looked at; drop: doubted ones are dropped; relabel: the majority's
    answer takes their place where its share is large enough, else they are dropped."""
    label_share: float = 0.6
    """Share of a problem's samples from which one answer can speak against the label."""
    max_label_share: float = 0.1
    """Share of samples with the label up to which that is possible."""
    relabel_share: float = 0.8
    """Share of samples from which the majority's answer becomes the label."""

    def __post_init__(self) -> None:
        check_share("--label-share", self.label_share)
        check_share("--max-label-share", self.max_label_share)
        check_share("--relabel-share", self.relabel_share)
        if self.max_label_share >= self.label_share:
            raise InputError(
                f"--max-label-share={self.max_label_share:g} must be below "
                f"--label-share={self.label_share:g}: else label and majority are no rivals"
            )


class Vote(NamedTuple):
    """What the samples of a problem say beside the label."""

    produced: int
    """Samples that give the label, worked out or not."""
    majority: int
    """Samples of the most frequent other answer."""
    answer: str
    """That answer in its most frequent form."""


class Judgement(NamedTuple):
    """What becomes of a label."""

    action: Action
    answer: str = ""
    """The new label."""


def least(share: float, samples: int) -> int:
    """The fewest of so many samples that are at least this share of them."""
    return math.ceil(share * samples - _ROUNDING)


def most(share: float, samples: int) -> int:
    """The most of so many samples that are at most this share of them."""
    return math.floor(share * samples + _ROUNDING)


def may_be_doubted(answers: Sequence[str | None], *, correct: int, rules: LabelRules) -> bool:
    """Whether any grouping of the wrong answers can speak against the label.

    answers: of the samples that are not right. Spares the comparisons of most problems.
    """
    samples = len(answers) + correct
    given = sum(answer is not None for answer in answers)
    enough = given >= max(1, least(rules.label_share, samples))
    return enough and correct <= most(rules.max_label_share, samples)


def count_votes(answers: Sequence[str | None], classes: Sequence[int], *, correct: int) -> Vote:
    """The vote of the wrong answers. classes: of the label, then of each answer."""
    label, *others = classes
    same_as_label = sum(found == label != NO_ANSWER for found in others)
    sizes = Counter(found for found in others if found not in (label, NO_ANSWER))
    if not sizes:
        return Vote(correct + same_as_label, 0, "")
    majority, size = sizes.most_common(1)[0]
    texts = Counter(
        answer.strip()
        for answer, found in zip(answers, others, strict=True)
        if found == majority and answer is not None
    )
    return Vote(correct + same_as_label, size, texts.most_common(1)[0][0])


def judge(vote: Vote, *, samples: int, rules: LabelRules) -> Judgement:
    """What becomes of the label after a vote of so many samples."""
    speaks = vote.majority >= max(1, least(rules.label_share, samples))
    if not speaks or vote.produced > most(rules.max_label_share, samples):
        return Judgement("keep")
    if rules.action == "relabel" and vote.majority >= least(rules.relabel_share, samples):
        return Judgement("relabel", vote.answer)
    return Judgement("drop")
