"""`megatron-rl replay RUN --step N`: repeat recorded steps, and compare."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, Overrides, RunFolder
from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.errors import InputError
from megatron_rl.observe.deaths import until_death

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
    """New folder for metrics, logs and token records; default: RUN/replay_STEP."""
    export: bool = False
    """Also write the policy after the last step to OUT/hf."""
    rebuild: bool = False
    """Also rebuild the run's lost checkpoint of the last step. It is put into RUN/checkpoints if
    all figures equal the recorded ones, else it stays in OUT/checkpoints."""
    json: Json = False


@command("replay", "Repeat recorded steps of a run, and compare their figures.", epilog=_EXAMPLES)
def replay(options: ReplayOptions, console: Console) -> int:
    """Exit code: 0, 1 (a rank failed), 2 (bad input)."""
    # Loads most of the launcher.
    from megatron_rl.launcher.replay import (
        differences,
        find_replay,
        place_rebuilt,
        run_replay,
        step_rows,
    )
    from megatron_rl.launcher.replay_keys import check_keys

    if options.step < 1:
        raise InputError("megatron-rl replay needs --step N, counted from 1")
    wanted = find_replay(
        options.run_dir, options.step, options.to or options.step, options.out,
        options.overrides, exports=options.export, rebuilds=options.rebuild,
    )  # fmt: skip
    notes = check_keys(options.run_dir, options.overrides)
    if not options.json:
        say(console, *notes)
    if options.overrides and wanted.trained_from < wanted.first and not options.json:
        trained = f"steps {wanted.trained_from} to {wanted.last}, since the checkpoint"
        say(console, f"The given keys hold for all trained steps: {trained}")
    repeated: list[dict] = []
    code = until_death(lambda: repeated.extend(run_replay(wanted)))
    if code:
        return code
    recorded = step_rows(options.run_dir, wanted)
    found = [differences(old, new) for old, new in zip(recorded, repeated, strict=True)]
    rebuilt = place_rebuilt(wanted, is_equal=not any(found)) if options.rebuild else None
    if options.json:
        tree = [
            {"step": old["step"], "differences": one}
            for old, one in zip(recorded, found, strict=True)
        ]
        tail: dict[str, object] = {"trained_from": wanted.trained_from}
        if rebuilt:
            tail["checkpoint"] = str(rebuilt)
        print(json.dumps({"out": str(wanted.out), "steps": tree} | tail), file=console.file)
        return 0
    table = Table("step", "metric", "recorded", "repeated", box=None, pad_edge=False)
    for old, new, differs in zip(recorded, repeated, found, strict=True):
        for name in dict.fromkeys([*(n for n in _SHOWN if n in new), *differs]):
            table.add_row(str(old["step"]), name, f"{old.get(name, '-')}", f"{new[name]}")
    show_table(console, table)
    equal = sum(not one for one in found)
    say(console, f"{equal} of {len(found)} steps equal the recorded ones in all their figures")
    say(console, f"Rows and logs       {wanted.out}")
    if rebuilt is not None:
        say(console, f"Checkpoint          {rebuilt}")
    return 0
