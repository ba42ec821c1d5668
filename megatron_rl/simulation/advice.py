"""Which setting is best, and who waits for whom in it. Pure.

Used by `megatron-rl simulate`.
"""

from collections.abc import Sequence

from megatron_rl.simulation.outcome import Outcome

TIE = 0.01
"""Steps that differ by less are equally long; then the fresher one is better."""
_NOTABLE = 0.05


def best_of(outcomes: Sequence[Outcome]) -> int:
    """Place of the shortest step; of those within TIE, the one with the least staleness."""
    shortest = min(outcome.step_s for outcome in outcomes)
    near = [i for i, outcome in enumerate(outcomes) if outcome.step_s <= shortest * (1 + TIE)]
    return min(near, key=lambda i: (round(outcomes[i].staleness_mean, 3), outcomes[i].step_s))


def reasons(outcome: Outcome) -> list[str]:
    """Who waits for whom, in sentences."""
    found = [
        f"of a step of {outcome.step_s:.1f} s the trainer computes {outcome.compute_s:.1f}, "
        f"publishes {outcome.stall_s:.1f} and waits {outcome.wait_s:.1f} for completions"
    ]
    if outcome.trainer_idle > _NOTABLE and outcome.verifier_busy > 1 - _NOTABLE:
        found.append("the trainer waits for verifiers: all of them are busy all the time")
    elif outcome.trainer_idle > _NOTABLE:
        found.append(
            f"the trainer waits for generators {outcome.trainer_idle:.0%} of the time: more GPUs "
            "for engines would help"
        )
    else:
        found.append(
            f"generators fill {outcome.slots_used:.0%} of their places: as many groups are open "
            "as queue.max_staleness allows, so that the trainer sets the pace"
        )
    if outcome.generator_idle > _NOTABLE:
        found.append(f"engines have nothing to do {outcome.generator_idle:.0%} of the time")
    if outcome.stall_s > _NOTABLE * outcome.step_s:
        found.append(
            f"the publish takes {outcome.stall_s / outcome.step_s:.0%} of the trainer's time: "
            "more lanes, or an overlapped one"
        )
    if outcome.retractions:
        found.append(
            f"{outcome.retractions:.0f} completions a step are put back for want of KV cache: "
            "lower generator.max_running, or raise generator.kv_tokens"
        )
    if outcome.timeouts:
        found.append(
            f"{outcome.timeouts} completions took longer than generator.request_timeout_s and were "
            "generated again: raise it"
        )
    return found
