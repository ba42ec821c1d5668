"""`data dedupe` and `data decontaminate`: near duplicates in a file, and of evaluation problems."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_rl.curation.near_duplicates import Match, NearDuplicates
from megatron_rl.curation.report import Report, Tally
from megatron_rl.curation.rows import Row
from megatron_rl.protocol.questions import normalized


class Outcome(NamedTuple):
    """What a tool makes of rows."""

    rows: list[Row]
    report: Report


def dedupe(
    rows: Sequence[Row],
    *,
    threshold: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """The rows of which no earlier row that is kept is a near duplicate.

    Held-out rows come before all others, so that none of them is in training too. progress is
    told the rows done, and all.
    """
    tally = Tally("dedupe", {"threshold": threshold}, read=len(rows))
    known = NearDuplicates(threshold, ordered=True)
    row_of = {row.prompt.id: row for row in rows}
    dropped: set[str] = set()
    ordered = sorted(rows, key=lambda row: row.prompt.split != "held_out")
    for number, row in enumerate(ordered):
        progress(number, len(rows))
        question = known.prepare(row.prompt.question)
        match = known.find(question)
        if match is None:
            known.add(row.prompt.id, question)
            continue
        first = row_of[match.key].prompt
        is_same = normalized(first.answer) == normalized(row.prompt.answer)
        reason = "duplicate" if is_same else "duplicate_with_other_answer"
        tally.drop(row.prompt, reason, _detail(match, first.place))
        dropped.add(row.prompt.id)
    tally.figures = {"pairs_compared": known.candidates}
    kept = [row for row in rows if row.prompt.id not in dropped]
    return Outcome(kept, tally.report(written=len(kept)))


def decontaminate(
    rows: Sequence[Row],
    evaluations: Sequence[Row],
    *,
    threshold: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """The rows that are no near duplicate of an evaluation problem.

    Numbers in another order are the same here: a problem too few costs less than a leak. progress
    is told the rows done, and all.
    """
    options = {"threshold": threshold, "evaluation_problems": len(evaluations)}
    tally = Tally("decontaminate", options, read=len(rows))
    known = NearDuplicates(threshold, ordered=False)
    for place, row in _distinct(evaluations).items():
        known.add(place, known.prepare(row.prompt.question))
    kept, hit = [], set()
    for number, row in enumerate(rows):
        progress(number, len(rows))
        match = known.find(known.prepare(row.prompt.question))
        if match is None:
            kept.append(row)
            continue
        hit.add(match.key)
        tally.drop(row.prompt, "near_evaluation_problem", _detail(match, match.key))
    tally.figures = {"pairs_compared": known.candidates, "evaluation_problems_found": len(hit)}
    return Outcome(kept, tally.report(written=len(kept)))


def _distinct(rows: Sequence[Row]) -> dict[str, Row]:
    """By place: ids of different files may be the same."""
    return {row.prompt.place: row for row in rows}


def _detail(match: Match, place: str) -> str:
    return f"{match.similarity:.2f} like {place}"
