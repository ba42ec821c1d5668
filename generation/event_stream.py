"""Server-sent events out of the chunks of bytes in which they arrive. Pure; of `sglang_http.py`."""

END = b"\n\n"


class EventStream:
    """Collects chunks until an event is whole, and joins them once.

    An event with expert choices has tens of megabytes and comes in chunks of some kilobytes: adding
    each to what is there would copy all of it for every chunk.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        """Of the event that is not whole yet."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that end in this chunk, without their ends; chunk: not empty."""
        # The two characters of an end may come in two chunks: the first is moved.
        if self._chunks and self._chunks[-1].endswith(END[:1]):
            self._chunks[-1] = self._chunks[-1][:-1]
            chunk = END[:1] + chunk
        first, *rest = chunk.split(END)
        self._chunks.append(first)
        if not rest:
            return []
        events = [b"".join(self._chunks), *rest[:-1]]
        self._chunks = [rest[-1]] if rest[-1] else []
        return events
