"""`megatron-rl prepare`, `node` and `join`: a run on several nodes."""

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import DryRun, RunFolder
from megatron_rl.cli.command_line.printing import say
from megatron_rl.cli.run import KEYS_HELP, RunOptions, load

_GPUS_PER_HOST = Annotated[
    int | None,
    typer.Option(
        help="GPUs of each node; default: the number that this node lists. Give 1 for "
        "nodes without GPUs"
    ),
]


@dataclass(frozen=True)
class PrepareOptions(RunOptions):
    nodes: Annotated[int | None, typer.Option(envvar="SLURM_JOB_NUM_NODES")] = None
    """Nodes of the run; default: as many as the configuration needs."""
    gpus_per_node: _GPUS_PER_HOST = None


@command("prepare", "Prepare a run on several nodes: once, on the first one.", epilog=KEYS_HELP)
def prepare(options: PrepareOptions, console: Console) -> int:
    from megatron_rl.launcher import nodes
    from megatron_rl.launcher.dry_run import dry_run
    from megatron_rl.launcher.placement import Machines
    from megatron_rl.launcher.ports import ports_text

    config = load(options.config, options.given, options.run_dir, is_dry=options.dry_run)
    machines = Machines(options.nodes, options.gpus_per_node)
    if warning := machines.warning():
        console.print(warning, style="bold red", highlight=False, soft_wrap=True)
    if options.dry_run:
        return dry_run(config, console, machines)
    placed = machines.place(config)
    if warning := nodes.warning_of_host(config, max(len(placed), options.nodes or 1)):
        console.print(warning, style="bold red", highlight=False, soft_wrap=True)
    config = nodes.prepare(config, console)
    say(console, f"{config.run.dir}: {ports_text(config.ports)}")
    return 0


@dataclass(frozen=True)
class NodeOptions:
    run_dir: RunFolder
    node: int
    """Place of this node, from 0."""
    nodes: int
    """Number of nodes."""
    gpus_per_node: _GPUS_PER_HOST = None
    dry_run: DryRun = False


@command("node", "Start one node of a prepared run.")
def node(options: NodeOptions, console: Console) -> int:
    """Exit code: 0, 1 (the run failed), 2 (bad input, nothing was started)."""
    from megatron_rl.launcher import nodes
    from megatron_rl.observe.deaths import until_death

    if options.dry_run:
        for line in nodes.describe_node(
            options.run_dir,
            node=options.node,
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
        ):
            say(console, line)
        return 0
    return until_death(
        lambda: nodes.run_node(
            options.run_dir,
            console,
            node=options.node,
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
        ),
        lambda: nodes.last_words(options.run_dir, options.node, options.nodes),
    )


@dataclass(frozen=True)
class JoinOptions:
    run_dir: RunFolder
    generators: int = 1
    """Generators to start; 0: none."""
    verifier: Annotated[bool, typer.Option("--verifier")] = False
    """Start a verifier."""


@command("join", "Join a running run with more generators, or a verifier.")
def join(options: JoinOptions, console: Console) -> int:
    """Exit code: 0, 1 (a role or the run failed), 2 (bad input, nothing was started)."""
    from megatron_rl.launcher import joining
    from megatron_rl.observe.deaths import until_death

    return until_death(
        lambda: joining.join(
            options.run_dir, console, generators=options.generators, has_verifier=options.verifier
        )
    )
