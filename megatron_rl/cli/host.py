"""`megatron-rl prepare` and `megatron-rl host`: a run on several hosts."""

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.groups import plain_app
from megatron_rl.cli.command_line.parameters import DryRun, RunFolder
from megatron_rl.cli.run import KEYS_HELP, RunOptions, load

app = plain_app()


_GPUS_PER_HOST = Annotated[
    int | None, typer.Option(help="GPUs of each host; default: the number that this host lists")
]


@dataclass(frozen=True)
class PrepareOptions(RunOptions):
    """What `prepare` is given."""

    hosts: Annotated[
        int | None,
        typer.Option(
            envvar="SLURM_JOB_NUM_NODES",
            help="hosts of the run; default: as many as the configuration needs",
        ),
    ] = None
    gpus_per_host: _GPUS_PER_HOST = None


@command(app, "prepare", "Several hosts: once, on the first one.", epilog=KEYS_HELP)
def prepare(options: PrepareOptions, console: Console) -> int:
    """Exit code: 0, 2 (bad input)."""
    from megatron_rl.launcher import hosts
    from megatron_rl.launcher.dry_run import dry_run
    from megatron_rl.launcher.placement import Machines
    from megatron_rl.launcher.ports import ports_text

    config = load(options.config, options.given, options.run_dir, is_dry=options.dry_run)
    machines = Machines(options.hosts, options.gpus_per_host)
    hosts.refuse(config)
    if options.dry_run:
        return dry_run(config, console, machines)
    machines.place(config)
    config = hosts.prepare(config, console)
    console.print(f"{config.run.dir}: {ports_text(config.ports)}", soft_wrap=True, highlight=False)
    return 0


@dataclass(frozen=True)
class HostOptions:
    """What `host` is given."""

    run_dir: RunFolder
    host: Annotated[int, typer.Option(help="place of this host, from 0")]
    hosts: Annotated[int, typer.Option(help="how many there are")]
    gpus_per_host: _GPUS_PER_HOST = None
    dry_run: DryRun = False


@command(app, "host", "Several hosts: then, on each.")
def host(options: HostOptions, console: Console) -> int:
    """Exit code: 0, 1 (the run failed), 2 (bad input, nothing was started)."""
    from megatron_rl.launcher import hosts
    from megatron_rl.observe.deaths import until_death

    if options.dry_run:
        for line in hosts.describe_host(
            options.run_dir,
            host=options.host,
            hosts=options.hosts,
            gpus_per_host=options.gpus_per_host,
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return 0
    return until_death(
        lambda: hosts.run_host(
            options.run_dir,
            console,
            host=options.host,
            hosts=options.hosts,
            gpus_per_host=options.gpus_per_host,
        ),
        lambda: hosts.last_words(options.run_dir, options.host),
    )
