"""`megatron-rl replay RUN --step N`: repeat recorded steps, and compare."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, Overrides, RunFolder
from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.errors import InputError
from megatron_rl.observe.deaths import until_death
from megatron_rl.protocol.exports import EXPORTS, step_name

if TYPE_CHECKING:
    from megatron_rl.launcher.replay import ComparedStep

_SHOWN = ("train/loss", "train/grad_norm", "train/entropy_nats", "train/clip_fraction")
_EXAMPLES = """Examples:

megatron-rl replay runs/mine --step 12

megatron-rl replay runs/mine --step 12 --to 14 expert.train.record_tokens=true

megatron-rl replay runs/mine --step 12 algorithm.preset=cispo

megatron-rl replay runs/mine --step 11 --to 20 --rebuild

"""


@dataclass(frozen=True)
class ReplayOptions:
    run_dir: RunFolder
    overrides: Overrides = field(default_factory=list)
    step: int = 0
    """First step to repeat, counted from 1."""
    to: int = 0
    """Last step to repeat; default: the first."""
    out: Path | None = None
    """New folder for metrics, logs and token records; default: RUN/replay_STEP, or
    RUN/replay_STEP_2, _3, ... where that exists."""
    export: bool = False
    """Also write the policy after the last step as a model folder, OUT/hf/step_LAST."""
    rebuild: bool = False
    """Also rebuild the run's lost checkpoint of the last step. It is put into RUN/checkpoints if
    all figures of all steps equal recorded ones, else it stays in OUT/checkpoints."""
    json: Json = False


@command("replay", "Repeat recorded steps of a run, and compare their figures.", epilog=_EXAMPLES)
def replay(options: ReplayOptions, console: Console) -> int:
    """Exit code: 0, 1 (a rank failed), 2 (bad input)."""
    # Loads most of the launcher.
    from megatron_rl.launcher.replay import (
        compare_steps,
        find_config,
        find_replay,
        place_rebuilt,
        run_replay,
    )
    from megatron_rl.launcher.replay_keys import check_keys

    if options.step < 1:
        raise InputError("megatron-rl replay needs --step N, counted from 1")
    wanted = find_replay(
        options.run_dir, options.step, options.to or options.step, options.out,
        options.overrides, exports=options.export, rebuilds=options.rebuild,
    )  # fmt: skip
    source = find_config(wanted)
    notes = check_keys(source, options.overrides)
    if not options.json:
        say(console, *notes)
    if options.overrides and wanted.trained_from < wanted.first and not options.json:
        trained = f"steps {wanted.trained_from} to {wanted.last}, since the checkpoint"
        say(console, f"The given keys hold for all trained steps: {trained}")
    repeated: list[dict] = []
    code = until_death(lambda: repeated.extend(run_replay(wanted, source)))
    if code:
        return code
    steps = compare_steps(wanted, repeated)
    written: dict[str, Path] = {}
    if options.export:
        written["model"] = wanted.out / EXPORTS / step_name(wanted.last)
    if options.rebuild:
        is_equal = all(one.differences == {} for one in steps)
        written["checkpoint"] = place_rebuilt(wanted, is_equal=is_equal)
    if options.json:
        tree = [{"step": one.repeated["step"], "differences": one.differences} for one in steps]
        tail = {name: str(path) for name, path in written.items()}
        said = {"out": str(wanted.out), "steps": tree, "trained_from": wanted.trained_from} | tail
        print(json.dumps(said), file=console.file)
        return 0
    show_steps(console, steps)
    say(console, f"Rows and logs       {wanted.out}")
    for name, path in written.items():
        say(console, f"{name.capitalize():<20}{path}")
    return 0


def show_steps(console: Console, steps: Sequence["ComparedStep"]) -> None:
    """Each figure next to the recorded one, and how many steps are equal or not compared."""
    table = Table("step", "metric", "recorded", "repeated", box=None, pad_edge=False)
    for one in steps:
        old, new = one.recorded or {}, one.repeated
        for name in dict.fromkeys([*(n for n in _SHOWN if n in new), *(one.differences or {})]):
            table.add_row(str(new["step"]), name, f"{old.get(name, '-')}", f"{new[name]}")
    show_table(console, table)
    compared = [one for one in steps if one.recorded is not None]
    equal = sum(not one.differences for one in compared)
    say(console, f"{equal} of {len(compared)} steps equal the recorded ones in all their figures")
    missing = [str(one.repeated["step"]) for one in steps if one.recorded is None]
    if missing:
        say(console, f"Not compared        without a recorded row: {', '.join(missing)}")
