"""What tests of the queue leave open is closed after each of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.protocol.metrics import JsonlWriter


@pytest.fixture(autouse=True)
def metrics_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Played queues die by the hundred, and nobody closes the files of a dead one."""
    opened: list[JsonlWriter] = []
    begin = JsonlWriter.__init__

    def remember(writer: JsonlWriter, path: Path, *given: Any, **named: Any) -> None:
        begin(writer, path, *given, **named)
        opened.append(writer)

    monkeypatch.setattr(JsonlWriter, "__init__", remember)
    yield
    for writer in opened:
        writer.close()
