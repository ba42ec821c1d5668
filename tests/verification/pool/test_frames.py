import pytest

from verification.pool.frames import Aborted, GradeFailed, pack, reply_decoder, unpack


@pytest.mark.parametrize(
    ("reply", "sent"),
    [
        (GradeFailed(1, "no \ud800 character"), GradeFailed(1, "no \\ud800 character")),
        (Aborted(2, "host", "\udcff"), Aborted(2, "host", "\\udcff")),
        (GradeFailed(3, "x" * 10_000), GradeFailed(3, "x" * 2000)),
    ],
)
def test_what_a_completion_put_into_a_reason_can_be_sent(
    reply: GradeFailed | Aborted, sent: GradeFailed | Aborted
) -> None:
    assert unpack(bytearray(pack(reply)), reply_decoder) == [sent]
