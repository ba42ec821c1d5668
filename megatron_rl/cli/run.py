"""`megatron-rl run`: a whole run on one node."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import ConfigFiles, DryRun, Overrides, RunDirOption

if TYPE_CHECKING:
    from megatron_rl.config.tree import Config


KEYS_HELP = (
    "All keys, with meaning, unit and default: megatron-rl config. Of one key or section: "
    "megatron-rl config explain train.group_size. What a command line comes to: megatron-rl "
    "config show --config FILE KEY=VALUE."
)
_EXAMPLES = """Examples:

megatron-rl run --config tiny run.dir=runs/first

megatron-rl run --config base.toml --config mine.toml train.steps=20 optimizer.lr=2e-6

megatron-rl run --config mine.toml --dry-run

"""


@dataclass(frozen=True)
class StartOptions:
    """Options of `run`, `prepare` and `sft`."""

    config: ConfigFiles
    overrides: Overrides = field(default_factory=list)
    run_dir: RunDirOption = None
    dry_run: DryRun = False


@dataclass(frozen=True)
class RunOptions(StartOptions):
    model: Annotated[str, typer.Option(metavar="DIR")] = ""
    """The same as model.path=DIR."""

    @property
    def given(self) -> list[str]:
        """The overrides, with --model as one."""
        from megatron_rl.config.files import override

        return [*self.overrides, *([override("model.path", self.model)] if self.model else [])]


@command(
    "run", "Train, evaluate, export, summarize; the same command resumes a run.",
    epilog=_EXAMPLES + KEYS_HELP,
)  # fmt: skip
def run(options: RunOptions, console: Console) -> int:
    """Exit code: 0, 1 (the run failed), 2 (bad input, nothing was started)."""
    from megatron_rl.launcher import run as launch
    from megatron_rl.launcher.dry_run import dry_run
    from megatron_rl.launcher.last_words import last_words
    from megatron_rl.observe.deaths import until_death

    if options.dry_run:
        with tempfile.TemporaryDirectory(prefix="megatron-rl-dry-") as made:
            files = with_tiny(options, Path(made))
            config = load(files, options.given, options.run_dir, is_dry=True)
            return dry_run(config, console)
    files = with_tiny(options, None)
    config = load(files, options.given, options.run_dir)
    return until_death(lambda: launch.run(config, console), lambda: last_words(config))


def with_tiny(options: RunOptions, folder: Path | None) -> list[str]:
    """The files of `--config`; for the configuration tiny also paths.toml of its made inputs.

    A given model.path replaces the made inputs. folder: where to make them; None: RUN/start, where
    a resumed run finds them. Raises ConfigError.
    """
    from megatron_rl.config.files import read_layers, require, resolve
    from megatron_rl.config.shipped import config_path, shipped
    from megatron_rl.data.tiny import make_tiny

    paths = [config_path(text) for text in options.config]
    tiny = shipped()["tiny"]
    layers = read_layers(paths, options.given)
    if tiny not in paths or "path" in layers.tree.get("model", {}):
        return options.config
    run = resolve(layers).run
    if folder is None and options.run_dir is None:
        # Before anything is made.
        require(layers, ["run.dir"])
    folder = folder or (options.run_dir or run.dir) / "start"
    layer = folder / "paths.toml"
    if not layer.exists():
        make_tiny(folder, run.seed)
    place = paths.index(tiny) + 1
    return [*options.config[:place], str(layer), *options.config[place:]]


def load(
    config: list[str], overrides: list[str], run_dir: Path | None, *, is_dry: bool = False
) -> "Config":
    """The configuration of a command line. Raises ConfigError.

    is_dry: nothing is written, so run.dir may be missing.
    """
    from megatron_rl.config.files import override, read_layers, require, resolve
    from megatron_rl.config.shipped import config_path

    given = list(overrides)
    if run_dir is not None:
        given.append(override("run.dir", str(run_dir)))
    layers = read_layers([config_path(text) for text in config], given)
    found = resolve(layers)
    require(layers, ["model.path"] if is_dry else ["model.path", "run.dir"])
    return found
