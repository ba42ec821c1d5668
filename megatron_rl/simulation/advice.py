"""Finds the best setting and explains its waiting times. Pure; used by `megatron-rl simulate`."""

from collections.abc import Sequence

from megatron_rl.simulation.outcome import Outcome

TIE = 0.01
"""Steps within this share are equally long; lower staleness then decides."""
_NOTABLE = 0.05
_SLOW_GRADING = 0.25
"""Verifiers are the limit above this ratio of grading time to generation time."""


def best_of(outcomes: Sequence[Outcome]) -> int:
    """Index of the shortest step, or within TIE of the one with the least staleness."""
    shortest = min(outcome.step_s for outcome in outcomes)
    near = [i for i, outcome in enumerate(outcomes) if outcome.step_s <= shortest * (1 + TIE)]
    return min(near, key=lambda i: (round(outcomes[i].staleness_mean, 3), outcomes[i].step_s))


def reasons(outcome: Outcome, *, dead_share: float = 0.0, is_assumed: bool = False) -> list[str]:
    """Sentences that explain the waiting times.

    dead_share: share of engines that never serve. is_assumed: the grading time is not from a run.
    """
    found = [
        f"of a step of {outcome.step_s:.1f} s the trainer computes {outcome.compute_s:.1f}, "
        f"weight syncs {outcome.stall_s:.1f} and waits {outcome.wait_s:.1f} for completions"
    ]
    # Restarting engines count as idle too.
    idle = 0.0 if outcome.deaths else outcome.generator_idle - dead_share
    if outcome.trainer_idle <= _NOTABLE:
        found.append(
            f"generators fill {outcome.slots_used:.0%} of their places: as many groups are open "
            "as queue.max_staleness allows, so that the trainer sets the pace"
        )
    elif _is_limited_by_verifiers(outcome):
        found.append(_verifier_advice(outcome, is_assumed=is_assumed))
    elif idle > _NOTABLE:
        found.append(
            f"the trainer waits for completions {outcome.trainer_idle:.0%} of the time while "
            "engines have too few groups to work on: raise queue.max_staleness, or shorten the "
            "longest completions, before adding engines"
        )
    else:
        found.append(
            f"the trainer waits for generators {outcome.trainer_idle:.0%} of the time: more GPUs "
            "for engines would help"
        )
    if outcome.generator_idle > _NOTABLE:
        found.append(f"engines have nothing to do {outcome.generator_idle:.0%} of the time")
    if outcome.stall_s > _NOTABLE * outcome.step_s:
        found.append(
            f"the weight sync takes {outcome.stall_s / outcome.step_s:.0%} of the trainer's time: "
            "more trainer ranks, or expert.weights.overlap"
        )
    if outcome.retractions:
        found.append(
            f"{outcome.retractions:.0f} completions a step are put back for want of KV cache: "
            "lower generator.max_running, or raise generator.kv_tokens"
        )
    if outcome.timeouts:
        found.append(
            f"{outcome.timeouts} completions took longer than expert.generator.request_timeout_s "
            "and were generated again: raise it"
        )
    return found


def _is_limited_by_verifiers(outcome: Outcome) -> bool:
    """Whether grading takes much of a completion's time, or verifiers are always busy."""
    grading_s = outcome.verifier_s + outcome.verifier_wait_s
    is_slow = grading_s > _SLOW_GRADING * outcome.latency_s
    return is_slow or outcome.verifier_busy > 1 - _NOTABLE


def _verifier_advice(outcome: Outcome, *, is_assumed: bool) -> str:
    assumed = ", as --verify-s assumes" if is_assumed else ""
    waited = f"{outcome.verifier_wait_s:.3g} s"
    fix = "raise verifier.answers.workers"
    if outcome.verifier_wait_s < _NOTABLE * outcome.verifier_s:
        fix = "make grading faster"
    return (
        f"the trainer waits for verifiers {outcome.trainer_idle:.0%} of the time: grading one "
        f"completion takes {outcome.verifier_s:.3g} s{assumed}, after {waited} of waiting for a "
        f"free worker: {fix}; more engines would not help"
        + ("; --calibrate RUN takes the time from a run" if is_assumed else "")
    )
