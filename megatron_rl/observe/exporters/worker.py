"""Process that passes metrics on: `python -m megatron_rl.observe.exporters.worker --config FILE`.

Reads RUN/metrics.jsonl every `expert.metrics.poll_s`, until SIGTERM; then once more. Nobody waits
for it, and its end does not end the run.
"""

import argparse
import logging
import signal
import sys
import threading
from functools import partial
from pathlib import Path

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.observe.exporters.exporter import Exporter
from megatron_rl.protocol.process import run_main, set_up_logging

ROLE = "metrics"
log = logging.getLogger(__name__)


def main(config: Config) -> None:
    """Pass rows on until the process is told to end."""
    ending = threading.Event()
    # The last rows are written while the run ends: the signal says when to look for them.
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with Exporter(config) as exporter:
        while not ending.wait(config.metrics.poll_s):
            exporter.advance()
        while exporter.advance():
            pass


def start() -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="passes metrics on; started by a run")
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args().config)
    set_up_logging(ROLE, config.run.dir / "logs")
    return run_main(ROLE, partial(main, config))


if __name__ == "__main__":
    sys.exit(start())
