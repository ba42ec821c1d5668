"""Which policy version sampled which tokens, from what an engine reports.

Used by engines. Pure functions.
"""

from typing import Any

from megatron_rl.protocol.types import VersionSpan


def spans_from_report(report: list[dict[str, Any]], tokens: int) -> list[VersionSpan]:
    """Spans of SGLang's `weight_versions` ([{version, start, end}], SGLang 0.5.20 and later).

    Raises ValueError when they do not cover exactly the completion's tokens.
    """
    spans = [
        VersionSpan(int(entry["version"]), entry["start"], entry["end"])
        for entry in report
        if entry["end"] > entry["start"]
    ]
    return _checked(spans, tokens)


def spans_from_arrivals(arrivals: list[tuple[int, int]], tokens: int) -> list[VersionSpan]:
    """Spans from (tokens so far, policy version held then), recorded as tokens arrived.

    For servers that do not report versions: exact when tokens stream one by one, because a pause
    outlasts the arrival of the tokens sampled before it.
    """
    spans: list[VersionSpan] = []
    start = 0
    for end, version in arrivals:
        if end <= start:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end)
        else:
            spans.append(VersionSpan(version, start, end))
        start = end
    return _checked(spans, tokens)


def spans_from_cuts(cuts: list[tuple[int, int]], version: int, tokens: int) -> list[VersionSpan]:
    """Spans from (version replaced, tokens sampled by then) of each weight sync.

    version: that of the tokens after the last weight sync.
    """
    return spans_from_arrivals([(end, old) for old, end in cuts] + [(tokens, version)], tokens)


def _checked(spans: list[VersionSpan], tokens: int) -> list[VersionSpan]:
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens:
        raise ValueError(f"version spans {spans} do not cover {tokens} tokens")
    return spans
