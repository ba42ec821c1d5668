"""Version spans, worked out by hand."""

import pytest

from generation.weight_versions import spans_from_cuts, spans_from_report
from megatron_rl.protocol.types import VersionSpan


def test_sglangs_report_becomes_spans_without_empty_ones() -> None:
    report = [("3", 0, 5), ("4", 5, 5), ("5", 5, 9)]
    assert spans_from_report(report, 9) == [VersionSpan(3, 0, 5), VersionSpan(5, 5, 9)]


@pytest.mark.parametrize("tokens", [8, 10])
def test_a_report_that_does_not_fit_the_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"do not cover {tokens} tokens"):
        spans_from_report([("3", 0, 9)], tokens)


def test_cuts_end_the_span_of_the_version_that_was_replaced() -> None:
    assert spans_from_cuts([], 2, 6) == [VersionSpan(2, 0, 6)]
    assert spans_from_cuts([(2, 4), (3, 4)], 4, 6) == [VersionSpan(2, 0, 4), VersionSpan(4, 4, 6)]
    assert spans_from_cuts([(2, 6)], 3, 6) == [VersionSpan(2, 0, 6)]
    assert spans_from_cuts([(0, 1), (0, 2)], 1, 5) == [VersionSpan(0, 0, 2), VersionSpan(1, 2, 5)]
