"""SGLang as an engine whose ranks also write down what they hold; for a generator under test.

`generator.engine = "tests.generation.inspected_engine:InspectedEngine"`. It notes when it stood
still, and forgets SGLang's begin of an update where a test left the file `skip-begin`.
"""

import json
import time
from pathlib import Path

from generation.engine import EngineSetup
from generation.sglang_engine import SGLangEngine

NAME = "tests.generation.inspected_engine:InspectedEngine"


class InspectedEngine(SGLangEngine):
    """SGLang's engine and its notes."""

    loader = "tests.generation.inspecting_loader.load"

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._folder = setup.log_path.parent
        self._paused_at = 0.0

    async def pause(self) -> None:
        self._paused_at = time.monotonic()
        await super().pause()

    async def _begin_update(self) -> None:
        if not (self._folder / "skip-begin").exists():
            await super()._begin_update()

    async def resume(self, version: int) -> None:
        await super().resume(version)
        note = {"version": version, "from": self._paused_at, "to": time.monotonic()}
        with pauses_path(self._folder).open("a") as file:
            file.write(json.dumps(note) + "\n")


def pauses_path(folder: Path) -> Path:
    """Where an engine whose log lies in the folder notes its pauses, one JSON object a line."""
    return folder / "pauses.jsonl"
