"""The policy version of each token, from the reports of an engine.

Used by engines. Pure functions.
"""

from megatron_rl.protocol.types import VersionSpan


def spans_from_report(report: list[tuple[str, int, int]], tokens: int) -> list[VersionSpan]:
    """Spans from (version, first token, token after the last), as SGLang 0.5.20 and later reports.

    Raises ValueError unless they cover exactly the tokens of the completion.
    """
    return _checked(
        [VersionSpan(int(version), start, end) for version, start, end in report if end > start],
        tokens,
    )


def spans_from_cuts(cuts: list[tuple[int, int]], version: int, tokens: int) -> list[VersionSpan]:
    """Spans from (version replaced, tokens sampled by then) of each weight sync.

    version: of the tokens after the last weight sync.
    """
    spans: list[VersionSpan] = []
    start = 0
    for held, end in [*cuts, (version, tokens)]:
        if end <= start:
            continue
        if spans and spans[-1].version == held:
            spans[-1] = VersionSpan(held, spans[-1].start, end)
        else:
            spans.append(VersionSpan(held, start, end))
        start = end
    return _checked(spans, tokens)


def _checked(spans: list[VersionSpan], tokens: int) -> list[VersionSpan]:
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens:
        raise ValueError(f"version spans {spans} do not cover {tokens} tokens")
    return spans
