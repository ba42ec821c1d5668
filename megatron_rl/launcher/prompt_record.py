"""RUN/prompts.json: the prompt files of a run, and the files of the user's functions, with digests.

Used by the launcher. A resumed run continues by prompt numbers, so it refuses a changed file of
prompts. It tells of changed functions.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from megatron_rl.config.errors import InputError
from megatron_rl.config.staging import check_stages, resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.data.kinds import read_as, with_hub_name
from megatron_rl.data.prompts import prompts_of_run
from megatron_rl.data.tables.hub import is_commit, pinned
from megatron_rl.launcher.hub_models import pin_models
from megatron_rl.launcher.run_folder import earlier_config
from megatron_rl.launcher.thinking import decide_thinking
from megatron_rl.launcher.user_code import code_files
from megatron_rl.protocol.render import stop_strings
from megatron_rl.protocol.whole_file import write_whole

RECORD = "prompts.json"


class FileRecord(msgspec.Struct, frozen=True):
    """One file of prompts."""

    path: str
    bytes: int
    xxh3_128: str
    """Digest of its content, as `xxhsum -H2` prints it."""


class SourceRecord(msgspec.Struct, frozen=True):
    """A dataset of the Hub."""

    name: str
    revision: str
    """The commit."""


class PromptRecord(msgspec.Struct, frozen=True):
    """The file."""

    files: list[FileRecord]
    hub: list[SourceRecord]
    own: list[str] = []
    """Digests of the files of [[prompts]], in their order. Earlier releases wrote none."""
    code: list[FileRecord] = []
    """Files of the user's functions. Earlier releases wrote none."""


def pin_revisions(config: Config) -> Config:
    """The configuration with a cached commit of each Hub model and dataset.

    A resumed run keeps its commits. `train.epochs` becomes `train.steps`; think tags and format
    checks are decided; `sampling.stop` gets the model's own strings. Raises InputError.
    """
    earlier = earlier_config(config.run.dir)
    config = decide_thinking(pin_models(config, earlier), earlier)
    config = _add_stop_strings(config)
    return _count_epochs(_pin_prompts(config, earlier))


def _add_stop_strings(config: Config) -> Config:
    """Join the strings that end a completion by the model's folder to `sampling.stop`."""
    added = stop_strings(config.model.path)
    sampling = config.sampling.ending_at(added)
    if sampling == config.sampling:
        return config
    if config.generator.engine == "vllm":
        raise InputError(
            f"{config.model.path / 'generation_config.json'} has stop_strings={added}, and "
            "generator.engine='vllm' ends completions at tokens alone: use 'sglang', or leave "
            "stop_strings out of a copy of the folder"
        )
    return config.model_copy(update={"sampling": sampling})


def _count_epochs(config: Config) -> Config:
    """Turn `train.epochs` into the steps that sample each train prompt that many times."""
    if not config.train.epochs:
        return config
    sizes = {stage.train.prompts_per_batch for stage in resolve_stages(config)}
    if len(sizes) > 1:
        raise InputError(
            f"train.epochs={config.train.epochs} with stages of {sorted(sizes)} groups a batch: "
            "give train.steps in its place"
        )
    sets = prompts_of_run(config)
    drawn = zip(sets.weights_of(config), sets.train, strict=True)
    prompts = sum(len(found) for weight, found in drawn if weight)
    if not prompts:
        raise InputError(
            f"train.epochs={config.train.epochs} counts no prompt ({sets.describe()}): lower "
            "prompts.held_out_share, or add prompts to train on"
        )
    if not config.sampled_groups:
        raise InputError("train.epochs counts sampled groups, and replay.share=1 samples none")
    steps = -(-config.train.epochs * prompts // config.sampled_groups)
    tree = config.model_dump()
    tree["train"] |= {"steps": steps, "epochs": 0}
    found = Config.model_validate(tree)
    check_stages(found)
    return found


def _pin_prompts(config: Config, saved: Config | None) -> Config:
    sources = [*config.prompts, *(one.prompts for one in config.eval.sets)]
    if all(read_as(source) != "hub" for source in sources):
        return config
    before = [] if saved is None else saved.prompts
    sets_before = {} if saved is None else {one.name: one.prompts for one in saved.eval.sets}
    earlier = [*before, *sets_before.values()]
    # One data set may be read at several commits: each source keeps that of its own place.
    found = [pinned(one, [*before[n : n + 1], *earlier]) for n, one in enumerate(config.prompts)]
    sets = []
    for one in config.eval.sets:
        own = [sets_before[one.name]] if one.name in sets_before else []
        sets.append(one.model_copy(update={"prompts": pinned(one.prompts, [*own, *earlier])}))
    evaluation = config.eval.model_copy(update={"sets": sets})
    return config.model_copy(update={"prompts": found, "eval": evaluation})


def make_record(config: Config, files: Sequence[Path], own_files: Sequence[Path]) -> PromptRecord:
    """The record of the files in their present state. own_files: those of [[prompts]]."""
    sources = [*config.prompts, *(one.prompts for one in config.eval.sets)]
    records = {path: _record_of(path) for path in files}
    return PromptRecord(
        [*records.values()],
        [
            SourceRecord(with_hub_name(s).name, s.revision)
            for s in sources
            if read_as(s) == "hub" and is_commit(s.revision)
        ],
        [records[path].xxh3_128 for path in own_files],
        [_record_of(path) for path in code_files(config)],
    )


def changed_code(config: Config) -> list[str]:
    """Files of the user's functions that have changed since the run's last start.

    Raises InputError for a damaged record.
    """
    earlier = _read(config.run.dir / RECORD)
    if earlier is None:
        return []
    now = {file.path: file for file in map(_record_of, code_files(config))}
    return [file.path for file in earlier.code if now.get(file.path, file) != file]


def record_prompts(
    config: Config, files: Sequence[Path], own_files: Sequence[Path], *, is_resumed: bool
) -> None:
    """Write the record. Raises InputError if a resumed run would read other prompts."""
    path = config.run.dir / RECORD
    record = make_record(config, files, own_files)
    if is_resumed:
        check_same_prompts(path, record)
    content = msgspec.json.format(msgspec.json.encode(record), indent=1).decode()
    write_whole(path, content + "\n")


def check_same_prompts(path: Path, record: PromptRecord) -> None:
    """Raise InputError if the record at `path` is of other prompts. path: need not exist."""
    earlier = _read(path)
    if earlier is None:
        return
    now = {file.path: file for file in record.files}
    for file in earlier.files:
        found = now.get(file.path)
        # Files of evaluation sets may be added or removed; common files must not change.
        if found is not None and found != file:
            raise InputError(
                f"{file.path} has changed since the run began (digest {file.xxh3_128[:12]}, now "
                f"{found.xxh3_128[:12]}), and the run finds prompts by line number. Put the old "
                f"file back, or delete {path} to use the new one"
            )
    if earlier.own and earlier.own != record.own:
        paths = [file.path for file in earlier.files if file.xxh3_128 in earlier.own]
        raise InputError(
            "the files of [[prompts]] are others than those with which the run began "
            f"({', '.join(paths)}), and the run finds prompts by line number. Give files with the "
            f"same content in the same order, or delete {path} to use the new ones"
        )


def _read(path: Path) -> PromptRecord | None:
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=PromptRecord)
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is damaged: {error}; delete it, and start again") from error


def _record_of(path: Path) -> FileRecord:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128)
            size = file.tell()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return FileRecord(str(path.absolute()), size, digest.hexdigest())
