"""The command line: `megatron-rl run | eval | sweep | verify | data | report | plan | ...`.

On several hosts `megatron-rl prepare | host` instead of `run`; `megatron-rl doctor` looks at one.

Imports nothing heavy; the processes that `run` starts do.
"""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.config.shipped import config_path
from megatron_rl.config.tree import Config
from megatron_rl.launcher import (
    algorithms_command,
    analyse_command,
    config_command,
    data_command,
    doctor,
    metrics_command,
    simulate_command,
    status_command,
    verify_command,
    view_command,
)
from megatron_rl.launcher import hosts as cluster
from megatron_rl.launcher import run as launch
from megatron_rl.launcher.dry_run import dry_run
from megatron_rl.launcher.evaluation import command as eval_command
from megatron_rl.launcher.ports import ports_text
from megatron_rl.launcher.report import command as report_command
from megatron_rl.launcher.sizing.gpus import GPUS
from megatron_rl.launcher.sizing.plan import Hardware, make_plan
from megatron_rl.launcher.sizing.report import print_plan
from megatron_rl.launcher.supervisor import RoleDied
from megatron_rl.launcher.sweep import command as sweep_command
from megatron_rl.protocol.process import run_main

PROGRAM = "megatron-rl"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Asynchronous RL on Megatron-Core and SGLang"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, evaluate, export, summarize")
    _add_run_arguments(run, _run)
    run.add_argument("--dry-run", action="store_true", help="only check: could anything be earned?")
    evaluate = commands.add_parser("eval", help="evaluate a model folder, or compare evaluations")
    eval_command.add_arguments(evaluate, _until_death)
    compare = commands.add_parser("sweep", help="run variants over seeds, and compare them")
    sweep_command.add_arguments(compare)
    _add_run_arguments(commands.add_parser("prepare", help="several hosts: once, first"), _prepare)
    _add_host_arguments(commands.add_parser("host", help="several hosts: then, on each"))
    verify = commands.add_parser("verify", help="grade a file of completions, and say why")
    verify.add_argument("file", type=Path, help="rollouts of a run, or JSONL of {text, answer}")
    verify.add_argument("--config", type=Path, help="TOML file; default: that of the file's run")
    verify.add_argument("--disagree", action="store_true", help="where math parsers differ")
    verify.add_argument("overrides", nargs="*", metavar="section.key=value")
    verify.set_defaults(handler=_verify)
    report = commands.add_parser("report", help="what a run came to, as text and as an HTML file")
    report_command.add_arguments(report)
    state = commands.add_parser("status", help="how a run stands, from any shell")
    status_command.add_arguments(state)
    view = commands.add_parser("view", help="look at the rollouts of a run in a browser")
    view_command.add_arguments(view)
    _add_plan_arguments(commands.add_parser("plan", help="say what a run needs, and if it fits"))
    simulate_command.add_arguments(
        commands.add_parser("simulate", help="predict step time, idle shares and staleness")
    )
    plan = commands.add_parser("plan-weights", help="say what a publish moves between which ranks")
    plan.add_argument("config", help="TOML file, or the name of a shipped one")
    plan.add_argument("overrides", nargs="*", metavar="section.key=value")
    plan.set_defaults(handler=_plan_weights)
    _add_convert_arguments(commands.add_parser("convert", help="convert a model folder"))
    data = commands.add_parser("data", help="make prompts and traces")
    data_command.add_arguments(data, _until_death)
    settings = commands.add_parser("config", help="print every key, what a run uses, differences")
    config_command.add_arguments(settings)
    algorithms = commands.add_parser("algorithms", help="list the presets of [algorithm]")
    algorithms.add_argument("--json", action="store_true", help="print JSON")
    algorithms.set_defaults(handler=_algorithms)
    analyse = commands.add_parser("analyse", help="weights, and reward against length, of a run")
    analyse_command.add_arguments(analyse)
    numbers = commands.add_parser("metrics", help="meaning of metrics; metrics for other programs")
    metrics_command.add_arguments(numbers)
    check = commands.add_parser("doctor", help="say what this machine has and lacks")
    check.set_defaults(handler=_doctor)
    return parser


def _add_run_arguments(
    parser: argparse.ArgumentParser, handler: Callable[[argparse.Namespace, Console], int]
) -> None:
    config_command.add_config_argument(parser, is_required=True)
    parser.add_argument("--run-dir", type=Path, help="run folder; the same as run.dir=DIR")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.set_defaults(handler=handler)


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="Hugging Face, mistral-format or Megatron folder")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--to", choices=["hf", "megatron"], help="default: the other of the two")
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], help="default: as they are"
    )
    parser.add_argument("--verify", action="store_true", help="read again and compare digests")
    parser.add_argument("--shard-gb", type=float, default=4.0, help="size of files (default: 4)")
    parser.add_argument(
        "--files-from", type=Path, help="folder with config.json or tokenizer if SOURCE has none"
    )
    parser.set_defaults(handler=_convert)


def _add_host_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--host", type=int, required=True, help="place of this host, from 0")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--gpus-per-host", type=int, help="default: those that this host lists")
    parser.set_defaults(handler=_host)


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="TOML file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--gpu", default=Hardware.gpu, help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--gpus", type=int, help="of the whole run; default: what the config uses")
    parser.add_argument("--mfu", type=float, default=Hardware.mfu, help="default %(default)s")
    parser.add_argument(
        "--mean-tokens", type=int, help="of a sequence; default: half of generator.context_tokens"
    )
    parser.add_argument(
        "--gb-per-s", type=float, default=Hardware.bytes_per_s / 1e9,
        help="that a rank sends or receives in a publish; default %(default)s",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_plan)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 1 (a process of the run failed), 2 (bad input), 128 + signal."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.WARNING, format=f"{PROGRAM}: %(message)s", stream=sys.stderr)
    # INFO of our packages goes to the run's launch.log only.
    logging.getLogger().handlers[0].setLevel(logging.WARNING)
    codes: list[int] = []
    code = run_main(PROGRAM, lambda: codes.append(options.handler(options, Console())))
    return code or codes[0]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes positional arguments in one stretch only; overrides may stand anywhere.
    if rest and (any(word.startswith("-") for word in rest) or "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _load(options: argparse.Namespace) -> Config:
    overrides = list(options.overrides)
    if options.run_dir is not None:
        overrides.append(override("run.dir", str(options.run_dir)))
    return load_config(config_command.config_files(options), overrides)


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.dry_run:
        return dry_run(_load(options), console)
    return _until_death(lambda: launch.run(_load(options), console))


def _prepare(options: argparse.Namespace, console: Console) -> int:
    config = cluster.prepare(_load(options))
    console.print(f"{config.run.dir}: {ports_text(config.ports)}", soft_wrap=True, highlight=False)
    return 0


def _host(options: argparse.Namespace, console: Console) -> int:
    return _until_death(
        lambda: cluster.run_host(
            options.run_dir,
            host=options.host,
            hosts=options.hosts,
            gpus_per_host=options.gpus_per_host,
        )
    )


def _until_death(work: Callable[[], None]) -> int:
    try:
        work()
    except RoleDied as death:
        logging.getLogger(PROGRAM).error("%s", death)
        return death.launcher_exit_code
    return 0


def _verify(options: argparse.Namespace, console: Console) -> int:
    return verify_command.verify(
        options.file, options.config, options.overrides, disagree=options.disagree, console=console
    )


def _plan(options: argparse.Namespace, console: Console) -> int:
    for name in ("gpus", "mfu", "mean_tokens", "gb_per_s"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InputError(f"--{name.replace('_', '-')} {value} must be above 0")
    hardware = Hardware(options.gpu, options.gpus, options.mfu, options.gb_per_s * 1e9)
    plan = make_plan(
        load_config(config_path(options.config), options.overrides), hardware, options.mean_tokens
    )
    print_plan(plan, console, as_json=options.json)
    return 1 if plan.problems else 0


def _plan_weights(options: argparse.Namespace, console: Console) -> int:
    # Needs torch, which most commands do without.
    from megatron_rl.launcher.plan_weights import plan_weights

    plan_weights(load_config(config_path(options.config), options.overrides), console)
    return 0


def _convert(options: argparse.Namespace, console: Console) -> int:
    # Needs torch, which most commands do without.
    from megatron_rl.launcher import convert_command
    from megatron_rl.weights.folders.conversion import Request

    if not options.shard_gb > 0:
        raise InputError(f"--shard-gb {options.shard_gb}: give a size above 0")
    request = Request(
        options.source,
        options.target,
        to=options.to,
        dtype=options.dtype,
        verify=options.verify,
        shard_bytes=int(options.shard_gb * 1e9),
        files_from=options.files_from,
    )
    return convert_command.run(request, console)


def _algorithms(options: argparse.Namespace, console: Console) -> int:
    return algorithms_command.list_presets(console, as_json=options.json)


def _doctor(options: argparse.Namespace, console: Console) -> int:
    problems = doctor.examine(console)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
