"""`megatron-rl view RUN`: shows recorded rollouts in a browser."""

import asyncio
import signal
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import RunFolder
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config

if TYPE_CHECKING:
    from megatron_rl.observe.viewer.server import Viewer


@dataclass(frozen=True)
class ViewOptions:
    run_dir: RunFolder
    port: int = 0
    """Port of 127.0.0.1; 0: a free one."""


@command("view", "Look at the rollouts of a run in a browser.")
def view(options: ViewOptions, console: Console) -> int:
    # Only this command loads the web server.
    from megatron_rl.observe.missing_records import warn_of_missing
    from megatron_rl.observe.viewer.index import Index
    from megatron_rl.observe.viewer.server import Viewer
    from megatron_rl.observe.viewer.tokens import load_decoder

    if not 0 <= options.port <= 65535:
        raise InputError(f"--port {options.port}: give one from 0 to 65535")
    saved = options.run_dir / "config.toml"
    config = load_config(saved) if saved.is_file() else None
    model = config.model.path if config else options.run_dir
    tags = config.render.tags if config and not config.render.thinking.is_none else None
    name = options.run_dir.resolve().name
    with (
        tempfile.TemporaryDirectory(prefix="megatron-rl-view-") as folder,
        Index(options.run_dir, Path(folder) / "index.sqlite") as index,
    ):
        count = index.refresh()
        console.print(f"{count} rollouts of {options.run_dir}; Ctrl-C ends", highlight=False)
        warn_of_missing(options.run_dir)
        viewer = Viewer(index, load_decoder(model), name=name, tags=tags)
        try:
            asyncio.run(_until_signal(viewer, options.port, console))
        except OSError as error:
            raise InputError(f"--port {options.port}: {error.strerror}") from error
    return 0


async def _until_signal(viewer: "Viewer", port: int, console: Console) -> None:
    from megatron_rl.observe.viewer.server import serve

    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.set)

    await serve(viewer, port, partial(say, console), ending)
