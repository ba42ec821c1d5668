"""Event files for TensorBoard: one folder (TensorBoard run) per role."""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megatron_rl.observe.exporters.follow import Row, numbers, set_suffix

_OURS = "events.out.tfevents.*"


class TensorBoardWriter:
    """Writes rows below a folder, in place of earlier event files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, EventFileWriter] = {}
        for file in folder.glob(f"*/{_OURS}"):
            file.unlink()

    def add(self, rows: list[Row]) -> None:
        for row in rows:
            values = numbers(row)
            if not values:
                continue
            suffix = set_suffix(row)
            summary = Summary(
                value=[Summary.Value(tag=tag + suffix, simple_value=v) for tag, v in values.items()]
            )
            event = Event(wall_time=row["time"], step=max(row["step"], 0), summary=summary)
            self._writer(row["source"]).add_event(event)
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, source: str) -> EventFileWriter:
        if source not in self._writers:
            folder = self._folder / source
            folder.mkdir(parents=True, exist_ok=True)
            self._writers[source] = EventFileWriter(str(folder))
        return self._writers[source]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
