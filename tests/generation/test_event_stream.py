"""Server-sent events come out whole however they were cut, without copying the beginning again."""

import tracemalloc

import pytest

from generation.sglang_http import EventStream

EVENTS = [b"data: one", b"data: two\nof two lines", b"data: " + b"x" * 40, b"data: [DONE]"]


@pytest.mark.parametrize("size", range(1, 30))
def test_events_do_not_depend_on_chunks(size: int) -> None:
    sent = b"\n\n".join(EVENTS) + b"\n\n"
    stream = EventStream()
    chunks = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert [event for chunk in chunks for event in stream.feed(chunk)] == EVENTS


def test_what_has_not_ended_is_no_event() -> None:
    stream = EventStream()
    assert stream.feed(b"data: one\n") == []
    assert stream.feed(b"data: still one\n\ndata: t") == [b"data: one\ndata: still one"]
    assert stream.feed(b"wo\n\n") == [b"data: two"]


def test_a_chunk_costs_its_own_bytes_and_not_those_before_it() -> None:
    chunk, count = b"y" * 16_384, 500
    stream, allocated = EventStream(), 0
    tracemalloc.start()
    try:
        for _ in range(count):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            assert stream.feed(chunk) == []
            allocated += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # Copied once more for each chunk, the event would cost 250 times its bytes.
    assert allocated < 2 * count * len(chunk)
    assert stream.feed(b"\n\n") == [chunk * count]
