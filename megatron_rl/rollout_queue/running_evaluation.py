"""A running evaluation, its results, and the generators that hold the measured version.

Used by the rollout queue. An evaluator is a generator that holds its version on the queue's order;
the trainer skips it in weight syncs until its release. The queue builds no batch that would make
another version until all evaluators report that they hold theirs.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from megatron_rl.evaluation.figures import Figure, maj_figures, mean_figure, pass_figures
from megatron_rl.evaluation.samples import ProblemSamples
from megatron_rl.protocol.generator_messages import Hold
from megatron_rl.protocol.metrics import MAJ_AT, PASS_AT
from megatron_rl.protocol.types import Prompt
from megatron_rl.rollout_queue.evaluation import EvaluationSet
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.peers import Peer

log = logging.getLogger(__name__)

VOTED_SAMPLES = 128
"""Problems with more completions get votes only in eval.json: they take seconds in the loop."""


class Evaluation:
    """The groups of an evaluation and the results of its complete groups."""

    def __init__(
        self,
        label: str,
        what: EvaluationSet,
        *,
        version: int,
        now: float,
        done: Mapping[str, ProblemSamples],
    ) -> None:
        """label: with the set's name. done: by prompt id, earlier results."""
        self.label = label
        self.version = version
        self.started_at = now
        self._set = what
        self.complete: list[ProblemSamples] = list(done.values())
        """Problems whose rollouts are all scored."""
        left = [prompt for prompt in what.prompts if prompt.id not in done]
        self._unopened = left[::-1]
        self._left = len(left)
        self._open: dict[int, Group] = {}
        """Open groups by number."""
        self.lost = 0
        """Number of groups without a result."""
        self.not_graded = 0
        """Completions without a verdict, which count neither as right nor as wrong."""
        self.is_late = False
        """The timeout is over: the evaluation ends without the missing groups."""
        self.lost_ungraded = 0
        """Lost groups without any graded completion."""
        self.versions: set[int] = set()
        """Policy versions that sampled the completions of this start."""

    @property
    def has_unopened(self) -> bool:
        return bool(self._unopened)

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    @property
    def completions(self) -> int:
        return self._set.completions

    def open_group(self, number: int) -> Group:
        prompt = self._unopened.pop()
        draws_by = self._set.draws_by
        group = self._open[number] = Group(
            number,
            prompt,
            msgspec.structs.replace(self._set.sampling, seed=_seed_of(prompt)),
            self._set.samples,
            self.version,
            evaluation=self.label,
            draws_by=draws_by and f"{draws_by}/{self.label}/{prompt.id}",
            # A single completion has no vote.
            needs_classes=self._set.samples > 1,
        )
        return group

    @property
    def completions_done(self) -> int:
        """Completions that are scored or lost, including earlier results."""
        in_open = sum(len(group.scored) + len(group.lost) for group in self._open.values())
        finished = len(self._set.prompts) - len(self._open) - len(self._unopened)
        return finished * self._set.samples + in_open

    def close(self, group: Group) -> None:
        self.complete.append(problem_of(group))
        for one in group.ordered:
            self.versions |= {span.version for span in one.rollout.spans}
        self._left -= 1
        del self._open[group.number]

    def lose(self, group: Group) -> None:
        self.lost += 1
        self.lost_ungraded += bool(group.lost)
        self._left -= 1
        del self._open[group.number]

    def lose_unopened(self) -> None:
        self.lost += len(self._unopened)
        self._left -= len(self._unopened)
        self._unopened.clear()

    def describe(self, now: float) -> str:
        """One line: the evaluation and its unfinished prompts."""
        return (
            f"evaluation {self.label!r} of version {self.version}: {self._left} prompts unfinished "
            f"({len(self._unopened)} not leased) after {now - self.started_at:.0f} s"
        )


def problem_of(group: Group) -> ProblemSamples:
    """The results of a complete group with at least one scored rollout."""
    prompt, scored = group.prompt, group.ordered
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
        tokens=np.array([one.rollout.sampled_tokens for one in scored], np.int64),
        rewards=np.array(group.rewards, np.float64),
        classes=None if classes is None else np.array(classes, np.int64),
    )


def summarize(problems: Sequence[ProblemSamples], seconds: float) -> dict[str, float]:
    """Results of an evaluation by metric name; standard errors are over problems.

    A figure of one problem has no standard error, so no name with _se.
    """
    accuracy = mean_figure([problem.accuracy for problem in problems])
    votes = maj_figures([problem for problem in problems if problem.n <= VOTED_SAMPLES])
    unknown = sum(problem.classes is None and problem.n > 1 for problem in problems)
    return {
        **_named("eval/accuracy", accuracy),
        "eval/format": float(np.concatenate([p.is_well_formed for p in problems]).mean()),
        "eval/length_tokens": float(np.concatenate([p.tokens for p in problems]).mean()),
        "eval/reward": float(np.concatenate([p.rewards for p in problems]).mean()),
        "eval/n": len(problems),
        "eval/seconds": seconds,
        **_named_by_k(PASS_AT, pass_figures(problems)),
        **_named_by_k(MAJ_AT, votes),
        **({"eval/without_classes": unknown} if unknown else {}),
    }


def _named_by_k(prefix: str, figures: Mapping[int, Figure]) -> dict[str, float]:
    named = {}
    for k, figure in figures.items():
        named |= _named(f"{prefix}{k}", figure)
    return named


def _named(name: str, figure: Figure) -> dict[str, float]:
    error = {} if figure.se is None else {f"{name}_se": figure.se}
    return {name: figure.value} | error


def _seed_of(prompt: Prompt) -> int:
    """Seed of a prompt's group, below 2**31: the same in every evaluation of every run.

    It also draws the tests of a program, so all evaluations use the same tests. It depends on the
    question, because ids depend on the name of a file.
    """
    digest = hashlib.sha256(prompt.normalized_question.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Evaluators:
    """The generators that only evaluate, if any."""

    def __init__(self, wanted: int) -> None:
        """wanted: number of evaluators during training; 0: every generator evaluates."""
        self._wanted = wanted
        self._confirmed: set[str] = set()
        """Evaluators that reported that they hold the version."""
        self._orders: list[tuple[str, Hold]] = []
        self.names: frozenset[str] = frozenset()
        """Names of the evaluators; if empty, all generators evaluate."""
        self.version = -1
        """The version that the evaluators hold."""
        self.are_lost = False
        """The last evaluator is gone: no generator holds the version."""

    def choose(self, generators: Iterable[Peer], version: int) -> None:
        """Choose evaluators of a version among live generators, if enough remain to train."""
        # A generator without capacity leaves the run.
        able = [p.name for p in generators if p.version == version and p.capacity]
        able.sort(reverse=True)
        self.are_lost = False
        if not self._wanted or len(able) <= self._wanted:
            return
        self.names, self.version = frozenset(able[: self._wanted]), version
        self._order(self.names, is_held=True)
        log.info("version %d is measured by %s alone", version, ", ".join(sorted(self.names)))

    def _order(self, names: Iterable[str], *, is_held: bool) -> None:
        self._orders += [(name, Hold(is_held=is_held)) for name in sorted(names)]

    def correct(self, name: str, *, is_held: bool) -> None:
        """Repeat an order that a generator's state contradicts, since it may have been lost."""
        if is_held != (name in self.names):
            self._order([name], is_held=not is_held)

    def note(self, generators: Iterable[Peer]) -> None:
        """Update the evaluators from the state of all live generators."""
        live = {peer.name: peer for peer in generators}
        for name in sorted(self.names):
            peer = live.get(name)
            if peer is not None and peer.is_held and peer.version == self.version:
                self._confirmed.add(name)
            elif peer is None or name in self._confirmed or peer.version != self.version:
                why = "is gone" if peer is None else "holds its version no more"
                log.warning("evaluator %s %s", name, why)
                self.names -= {name}
                self._confirmed.discard(name)
                # If it still runs, it would otherwise never get a weight sync again.
                self._order([name], is_held=False)
                self.are_lost = not self.names

    def release(self) -> None:
        """End of the evaluation: the evaluators take part in weight syncs again."""
        self._order(self.names, is_held=False)
        self.names, self.version, self.are_lost = frozenset(), -1, False
        self._confirmed.clear()

    @property
    def hold_all(self) -> bool:
        """Whether there are evaluators, and all of them hold the version."""
        return bool(self.names) and self._confirmed == self.names

    def pop_orders(self) -> list[tuple[str, Hold]]:
        orders, self._orders = self._orders, []
        return orders
