"""`megatron-rl simulate CONFIG`: predict a run's step time, idle shares and staleness.

Needs no GPU and no other process; docs/simulator.md tells what is modelled.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json, check_above_zero
from megatron_rl.cli.command_line.printing import (
    check_plots,
    counted,
    open_console,
    progress,
    say,
    show_table,
)
from megatron_rl.cli.plan import SizesOptions
from megatron_rl.cli.run import KEYS_HELP
from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import GPUS
from megatron_rl.config.tree import Config
from megatron_rl.observe.missing_records import warn_of_missing
from megatron_rl.plan.card import Card
from megatron_rl.plan.plan import Hardware, make_plan
from megatron_rl.protocol.whole_file import write_whole
from megatron_rl.simulation.advice import best_of, reasons
from megatron_rl.simulation.calibration import Calibration, calibrate
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.hardware import Assumptions, cluster_model
from megatron_rl.simulation.machines import ClusterModel
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.plots import draw_all
from megatron_rl.simulation.records import read_run
from megatron_rl.simulation.variants import Variant, make_variants, parse_sweep
from megatron_rl.simulation.workload import (
    Conversation,
    LogNormalLengths,
    PassRates,
    Workload,
    mean_tokens,
)

_MANY_SLOTS = 1024
"""Completions in flight above which the queue answers in grains of 1 % of a completion's time."""
_GRAINS = 100


_ASSUMED = Assumptions()
_MODELS = "Assumed without --calibrate"
_ASSUME = typer.Option(rich_help_panel=_MODELS)
_PROMPT_TOKENS = 300
_GENERATE = typer.Option(rich_help_panel="What is generated, without --calibrate")


@dataclasses.dataclass(frozen=True)
class SimulateOptions(SizesOptions):
    calibrate: Annotated[Path | None, typer.Option(metavar="RUN")] = None
    """Finished run to which the models are fitted."""
    sweep: Annotated[list[str], typer.Option(metavar="KEY=V,V", show_default=False)] = (
        dataclasses.field(default_factory=list)
    )
    """Values to compare; of several options every combination. KEY is a configuration key or split,
    tp, overlap, verifier_servers, verify_s, dead, mfu; split=auto tries all splits."""
    gpus: int | None = None
    """GPUs of the whole run; default: as many as the configuration uses."""
    json: Json = False
    plots: Annotated[Path | None, typer.Option(metavar="DIR")] = None
    """Folder for plots as PNG files; default: no plots."""
    gpu: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(GPUS)}.", rich_help_panel=_ASSUME.rich_help_panel),
    ] = _ASSUMED.gpu
    mfu: Annotated[float | None, _ASSUME] = None
    """Model FLOPs utilization of the trainer; default: 0.35, with experts 0.2."""
    gb_per_s: Annotated[float | None, _ASSUME] = None
    """Bandwidth of a rank in a weight sync; default: 25, with weights.method=folder 2."""
    overlap: Annotated[bool, _ASSUME] = False
    """Sync weights during the next step, as expert.weights.overlap."""
    verify_s: Annotated[float, _ASSUME] = _ASSUMED.verify_s
    """Seconds to grade one completion."""
    verifier_servers: Annotated[int | None, _ASSUME] = None
    """Grading processes; default: as configured, on nodes of 8 GPUs."""
    deaths_per_engine_hour: Annotated[float, _ASSUME] = 0.0
    """Mean number of failures of an engine per hour."""
    restart_s: Annotated[float, _ASSUME] = _ASSUMED.restart_s
    """Seconds to restart an engine."""
    dead: Annotated[int, _ASSUME] = 0
    """Number of engines that never serve."""
    median_tokens: Annotated[float | None, _GENERATE] = None
    """Median tokens of a completion; default: a fifth of max_new_tokens."""
    sigma: Annotated[float, _GENERATE] = 0.7
    """Standard deviation of log length."""
    correlation: Annotated[float, _GENERATE] = 0.5
    """Correlation of log length in a group."""
    prompt_tokens: Annotated[int | None, _GENERATE] = None
    """Tokens of a prompt; default: 300, or what the context leaves if less."""
    pass_rate: Annotated[float, _GENERATE] = 0.4
    """Mean share of right completions."""
    zero_variance_share: Annotated[float, _GENERATE] = 0.25
    """Share of zero-variance groups."""
    turns: Annotated[int, _GENERATE] = 1
    """Replies of a conversation with an environment; 1: single answers."""
    environment_s: Annotated[float, _GENERATE] = 0.0
    """Mean seconds of an environment between two replies."""
    given_share: Annotated[float, _GENERATE] = 0.0
    """Share of a conversation's tokens that its environment gives."""
    steps: int = Span.steps
    """Number of measured steps."""
    warm_up: int = Span.warm_up
    """Number of steps before the measured ones."""
    seed: int = 0


@command("simulate", "Predict step time, idle shares and staleness of a run.", epilog=KEYS_HELP)
def simulate(options: SimulateOptions, console: Console) -> int:
    _check(options)
    if options.plots is not None:
        check_plots("leave --plots out")

    calibration = None
    if options.calibrate:
        warn_of_missing(options.calibrate)
        calibration = calibrate(read_run(options.calibrate))
    sweeps = [parse_sweep(text) for text in options.sweep]
    variants = make_variants(options.load, sweeps, _assumptions(options), options.gpus)
    workload = _workload(options, options.load(), calibration)
    variants = [v for v in variants if _fits(v, calibration, alone=len(variants) == 1)]
    if not variants:
        raise InputError("none of these settings fits its GPUs: the lines above say why")
    model_of = calibration.model if calibration is not None else cluster_model
    models = [model_of(variant.config, variant.assumed) for variant in variants]
    span = Span(options.steps, options.warm_up)
    pairs = list(zip(variants, models, strict=True))
    # With --json, stdout has nothing else.
    with progress(open_console(stderr=True) if options.json else console, "settings") as report:
        outcomes = [
            Cluster(v.config, model, workload, _grained(span, v.config, model, workload)).run()
            for v, model in counted(pairs, len(pairs), report)
        ]
    if calibration is not None:
        _warn(variants, [calibration.doubt(outcome) for outcome in outcomes])
    best = best_of(outcomes)
    dead_share = variants[best].assumed.dead / variants[best].config.generator.replicas
    why = reasons(outcomes[best], dead_share=dead_share, is_assumed=calibration is None)
    _show(variants, outcomes, why, console, as_json=options.json)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name, png in draw_all([v.name for v in variants], outcomes).items():
            write_whole(options.plots / name, png)
    return 0


def _check(options: SimulateOptions) -> None:
    check_above_zero(
        options, "steps", "gb_per_s", "restart_s", "median_tokens", "prompt_tokens", "gpus", "mfu",
        "verifier_servers", "turns",
    )  # fmt: skip
    for name in ("sigma", "verify_s", "deaths_per_engine_hour", "dead", "warm_up",
                 "environment_s"):  # fmt: skip
        if getattr(options, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} must not be below 0")
    for name in ("correlation", "pass_rate", "zero_variance_share", "given_share"):
        if not 0 <= getattr(options, name) <= 1:
            raise InputError(f"--{name.replace('_', '-')} must be between 0 and 1")
    if not 0 < options.pass_rate < 1 or options.zero_variance_share >= 1:
        raise InputError("--pass-rate must be above 0 and below 1, --zero-variance-share below 1")


def _assumptions(options: SimulateOptions) -> Assumptions:
    return Assumptions(
        gpu=options.gpu,
        mfu=options.mfu,
        bytes_per_s=None if options.gb_per_s is None else options.gb_per_s * 1e9,
        is_overlapped=options.overlap,
        verify_s=options.verify_s,
        verifier_servers=options.verifier_servers,
        deaths_per_engine_hour=options.deaths_per_engine_hour,
        restart_s=options.restart_s,
        dead=options.dead,
    )


def _workload(
    options: SimulateOptions, config: Config, calibration: Calibration | None
) -> Workload:
    if calibration is not None:
        return dataclasses.replace(calibration.workload, seed=options.seed)
    room = config.generator.context_tokens - config.sampling.max_new_tokens
    tokens = min(_PROMPT_TOKENS, room) if options.prompt_tokens is None else options.prompt_tokens
    if tokens > room:
        raise InputError(
            f"--prompt-tokens {tokens} is more than the {room} that "
            "generator.context_tokens leaves after sampling.max_new_tokens: give fewer"
        )
    median = options.median_tokens or config.sampling.max_new_tokens / 5
    return Workload(
        LogNormalLengths(median, options.sigma, options.correlation),
        tokens,
        PassRates.of(options.pass_rate, options.zero_variance_share, config.train.group_size),
        options.seed,
        Conversation(options.turns, options.given_share, options.environment_s),
    )


def _fits(variant: Variant, calibration: Calibration | None, *, alone: bool) -> bool:
    """Whether a setting fits its GPUs; a comparison names and leaves out others.

    Raises InputError for a single setting.
    """
    if calibration is not None:
        return True
    problems = make_plan(variant.config, Hardware(Card(variant.assumed.gpu))).problems
    if problems and alone:
        raise InputError(f"the configuration does not work: {'; '.join(problems)}")
    if problems:
        say(open_console(stderr=True), f"left out: {variant.name}: {'; '.join(problems)}")
    return not problems


def _warn(variants: Sequence[Variant], doubts: Sequence[str]) -> None:
    for variant, doubt in zip(variants, doubts, strict=True):
        if doubt:
            say(open_console(stderr=True), f"warning: {variant.name}: {doubt}")


def _grained(span: Span, config: Config, model: ClusterModel, workload: Workload) -> Span:
    engine = model.engine
    if config.generator.replicas * engine.max_running <= _MANY_SLOTS:
        return span
    tokens = mean_tokens(workload.lengths, config.sampling.max_new_tokens, draws=400)
    seconds = tokens * engine.iteration_s(engine.max_running, 0)
    return dataclasses.replace(span, grain_s=seconds / _GRAINS)


def _show(
    variants: Sequence[Variant],
    outcomes: Sequence[Outcome],
    why: Sequence[str],
    console: Console,
    *,
    as_json: bool,
) -> None:
    best = best_of(outcomes)
    if as_json:
        runs = [
            {"setting": v.values, "trainer_gpus": v.trainer_gpus, "engine_gpus": v.engine_gpus}
            | dataclasses.asdict(outcome)
            for v, outcome in zip(variants, outcomes, strict=True)
        ]
        tree = runs[0] | {"reasons": why} if len(runs) == 1 else (
            {"runs": runs, "best": runs[best]["setting"], "reasons": why}
        )  # fmt: skip
        say(console, json.dumps(tree))
        return
    show_table(console, _table(variants, outcomes))
    label = "best split" if "split" in variants[best].values else "best"
    if len(variants) > 1:
        say(console, f"{label}: {variants[best].name}")
    for text in why:
        say(console, f"- {text}")


def _table(variants: Sequence[Variant], outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        Column("setting", no_wrap=True), "GPUs", "step\ns", "trainer\nidle", "engines\nidle",
        "places\nused", "staleness\nmean, max", "sync\ns", "tokens\na second",
        box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for variant, outcome in zip(variants, outcomes, strict=True):
        table.add_row(
            variant.name,
            f"{variant.trainer_gpus}+{variant.engine_gpus}",
            f"{outcome.step_s:,.4g}",
            f"{outcome.trainer_idle:.1%}",
            f"{outcome.generator_idle:.1%}",
            f"{outcome.slots_used:.1%}",
            f"{outcome.staleness_mean:.2f}, {outcome.staleness_max}",
            f"{outcome.sync_s:.3g}",
            f"{outcome.tokens_per_s:,.0f}",
        )
    return table
