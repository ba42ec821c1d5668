"""`megatron-rl simulate CONFIG`: predict a run's step time, idle shares and staleness.

No GPU, and no process but this one; docs/simulator.md says what is modelled and what is not.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.sizing.gpus import GPUS
from megatron_rl.launcher.sizing.plan import Hardware, make_plan
from megatron_rl.launcher.whole_file import write_whole
from megatron_rl.simulation.advice import best_of, reasons
from megatron_rl.simulation.calibration import Calibration, calibrate
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.hardware import Assumptions, cluster_model, read_lanes
from megatron_rl.simulation.machines import ClusterModel
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.plots import check_library, draw_all
from megatron_rl.simulation.records import read_run
from megatron_rl.simulation.variants import Variant, make_variants, parse_sweep
from megatron_rl.simulation.workload import LogNormalLengths, PassRates, Workload, mean_tokens

_MANY_SLOTS = 1024
"""With more completions in flight the queue answers in grains of 1 % of a completion's time."""
_GRAINS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--calibrate", type=Path, metavar="RUN", help="finished run that the models are fitted to"
    )
    parser.add_argument(
        "--cores", type=float, help="that all roles of that run shared; default: no sharing"
    )
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=V,V",
        help="compare settings; several: every combination. KEY: of the configuration, or split, "
        "tp, lanes, overlap, verifier_servers, verify_s, dead, mfu; split=auto tries all splits",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, help="of the whole run; default: what the config uses")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNGs to this folder")
    _add_assumptions(parser.add_argument_group("assumed without --calibrate"))
    _add_workload(parser.add_argument_group("what is generated, without --calibrate"))
    parser.add_argument("--steps", type=int, default=Span.steps, help="measured; default 12")
    parser.add_argument("--warm-up", type=int, default=Span.warm_up, help="before; default 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(handler=simulate)


def _add_assumptions(group: argparse._ArgumentGroup) -> None:
    default = Assumptions()
    group.add_argument("--gpu", default=default.gpu, help=f"one of {', '.join(GPUS)}")
    group.add_argument("--mfu", type=float, help="of the trainer; default 0.35, with experts 0.2")
    group.add_argument(
        "--gb-per-s", type=float, default=default.bytes_per_s / 1e9,
        help="that a rank sends or receives in a publish; default %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--lanes", default="copies",
        help="engines that a publish serves at once: a number, all, or one for each copy of the "
        "trainer's model (default)",
    )  # fmt: skip
    group.add_argument("--overlap", action="store_true", help="publish beside the next step")
    group.add_argument("--verify-s", type=float, default=default.verify_s,
                       help="of grading one completion; default %(default)s")  # fmt: skip
    group.add_argument("--verifier-servers", type=int, help="default: the config's, 8 GPUs a node")
    group.add_argument("--deaths-per-engine-hour", type=float, default=0.0)
    group.add_argument("--restart-s", type=float, default=default.restart_s)
    group.add_argument("--dead", type=int, default=0, help="engines that never serve")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--median-tokens", type=float, help="default: a fifth of max_new_tokens")
    group.add_argument("--sigma", type=float, default=0.7, help="of log length")
    group.add_argument("--correlation", type=float, default=0.5, help="of log length in a group")
    group.add_argument("--prompt-tokens", type=int, default=300)
    group.add_argument("--pass-rate", type=float, default=0.4)
    group.add_argument(
        "--flat-share", type=float, default=0.25, help="of groups of the config's size"
    )


def simulate(options: argparse.Namespace, console: Console) -> int:
    """The command."""
    _check(options)
    if options.plots is not None:
        check_library()

    def load(overrides: Sequence[str]) -> Config:
        return load_config(options.config, [*options.overrides, *overrides])

    calibration = None
    if options.calibrate:
        calibration = calibrate(read_run(options.calibrate), options.cores)
    sweeps = [parse_sweep(text) for text in options.sweep]
    variants = make_variants(load, sweeps, _assumptions(options), options.gpus)
    workload = _workload(options, load([]), calibration)
    variants = [v for v in variants if _fits(v, calibration, console, alone=len(variants) == 1)]
    if not variants:
        raise InputError("none of these settings fits its GPUs: the lines above say why")
    models = [_model(variant, calibration) for variant in variants]
    span = Span(options.steps, options.warm_up)
    pairs = list(zip(variants, models, strict=True))
    if not options.json and len(pairs) > 1:
        pairs = track(pairs, "simulating", console=console, transient=True)
    outcomes = [
        Cluster(v.config, model, workload, _grained(span, v.config, model, workload)).run()
        for v, model in pairs
    ]
    best = best_of(outcomes)
    _show(variants, outcomes, best, console, as_json=options.json)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name, png in draw_all([v.name for v in variants], outcomes).items():
            write_whole(options.plots / name, png)
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("steps", "gb_per_s", "restart_s", "median_tokens", "prompt_tokens", "gpus", "mfu",
                 "verifier_servers", "cores"):  # fmt: skip
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} {value} must be above 0")
    for name in ("sigma", "verify_s", "deaths_per_engine_hour", "dead", "warm_up"):
        if getattr(options, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} must not be below 0")
    for name in ("correlation", "pass_rate", "flat_share"):
        if not 0 <= getattr(options, name) <= 1:
            raise InputError(f"--{name.replace('_', '-')} must be between 0 and 1")
    if not 0 < options.pass_rate < 1 or options.flat_share >= 1:
        raise InputError("--pass-rate must be above 0 and below 1, --flat-share below 1")
    read_lanes(options.lanes)


def _assumptions(options: argparse.Namespace) -> Assumptions:
    return Assumptions(
        gpu=options.gpu,
        mfu=options.mfu,
        bytes_per_s=options.gb_per_s * 1e9,
        lanes=read_lanes(options.lanes),
        is_overlapped=options.overlap,
        verify_s=options.verify_s,
        verifier_servers=options.verifier_servers,
        deaths_per_engine_hour=options.deaths_per_engine_hour,
        restart_s=options.restart_s,
        dead=options.dead,
    )


def _workload(
    options: argparse.Namespace, config: Config, calibration: Calibration | None
) -> Workload:
    if calibration is not None:
        return dataclasses.replace(calibration.workload, seed=options.seed)
    median = options.median_tokens or config.sampling.max_new_tokens / 5
    return Workload(
        LogNormalLengths(median, options.sigma, options.correlation),
        options.prompt_tokens,
        PassRates.of(options.pass_rate, options.flat_share, config.train.group_size),
        options.seed,
    )


def _model(variant: Variant, calibration: Calibration | None) -> ClusterModel:
    if calibration is not None:
        return calibration.model(variant.config, variant.assumed)
    return cluster_model(variant.config, variant.assumed)


def _fits(
    variant: Variant, calibration: Calibration | None, console: Console, *, alone: bool
) -> bool:
    """Whether a setting fits its GPUs; one that does not is named and left out of a comparison."""
    if calibration is not None:
        return True
    problems = make_plan(variant.config, Hardware(variant.assumed.gpu)).problems
    if problems and alone:
        raise InputError(f"the configuration does not work: {'; '.join(problems)}")
    if problems:
        text = f"left out: {variant.name}: {'; '.join(problems)}"
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
    return not problems


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
    best: int,
    console: Console,
    *,
    as_json: bool,
) -> None:
    why = reasons(outcomes[best])
    if as_json:
        runs = [
            {"setting": v.values, "trainer_gpus": v.trainer_gpus, "engine_gpus": v.engine_gpus}
            | dataclasses.asdict(outcome)
            for v, outcome in zip(variants, outcomes, strict=True)
        ]
        tree = runs[0] | {"reasons": why} if len(runs) == 1 else (
            {"runs": runs, "best": runs[best]["setting"], "reasons": why}
        )  # fmt: skip
        console.print(json.dumps(tree), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(_table(variants, outcomes), markup=False)
    label = "best split" if "split" in variants[best].values else "best"
    if len(variants) > 1:
        console.print(f"{label}: {variants[best].name}", markup=False, highlight=False)
    for text in why:
        console.print(f"- {text}", markup=False, highlight=False, soft_wrap=True)


def _table(variants: Sequence[Variant], outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        Column("setting", no_wrap=True), "GPUs", "step\ns", "trainer\nidle", "engines\nidle",
        "places\nused", "staleness\nmean, max", "publish\ns", "tokens\na second",
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
            f"{outcome.publish_s:.3g}",
            f"{outcome.tokens_per_s:,.0f}",
        )
    return table
