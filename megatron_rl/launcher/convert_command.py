"""`megatron-rl convert SRC DST`: converts a model folder and shows how far it is."""

import logging

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_rl.weights.folders.conversion import Request, VerificationFailed, convert

log = logging.getLogger(__name__)


def run(request: Request, console: Console) -> int:
    """Convert; exit code 1 when the disk fails or is found at fault. Raises InputError."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    columns = (*columns, TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    try:
        with bar:
            task = bar.add_task(request.source.name, total=None)
            done = convert(
                request, lambda read, total: bar.update(task, completed=read, total=total)
            )
    except (VerificationFailed, OSError) as failure:
        log.error("%s is not made: %s", request.target, failure)
        return 1
    checked = ", every digest compared" if request.verify else ""
    console.print(
        f"{request.target}: {done.architecture}, {done.kind} to {done.to}, {done.tensors} tensors, "
        f"{done.size_bytes / 1e9:.3f} GB{checked}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0
