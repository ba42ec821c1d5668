"""Data sets of the Hugging Face Hub by name: which commit, which of its files, and their download.

Only files of rows are fetched, and nothing of a data set is executed. With HF_HUB_OFFLINE=1, or
without a network, what the cache of huggingface_hub holds is taken. Used by the launcher, which
pins the commit, and by the processes that read the same files from the cache then.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.tables.files import SUFFIXES
from megatron_rl.data.tables.folders import TableFiles, find_files
from megatron_rl.data.tables.source import Reading, RowFault, read_table

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DESCRIBING = ("README.md", "dataset_dict.json", "state.json")
"""Files that say which others are the rows; they are small."""
INFO_TIMEOUT_S = 30.0


class HubSilent(Exception):
    """The Hub does not answer; the text says how."""


class Fetched(NamedTuple):
    """The files of a source, as they lie in the cache."""

    commit: str
    files: TableFiles


def read_hub(source: PromptSource, on_fault: Callable[[RowFault], None] | None = None) -> Reading:
    """Prompts of a data set of the Hub. Raises InputError."""
    commit, files = fetch(source)
    return read_table(source, files, f"{source.name} @ {commit[:12]}", on_fault)


def is_pinned(source: PromptSource) -> bool:
    """Whether the revision names one commit, which never changes."""
    return is_commit(source.revision)


def is_commit(revision: str) -> bool:
    """Whether a revision is the whole name of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def fetch(source: PromptSource, *, completes: bool = False) -> Fetched:
    """The files of a source, downloaded where they are not yet in the cache. Raises InputError.

    completes: ask the Hub even for a commit that is in the cache, whose files may be a part.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source.name)
    except errors.HFValidationError as error:
        raise InputError(
            f"prompts.name={source.name!r}: expected the name of a data set on the Hub, as "
            f"'openai/gsm8k': {error}"
        ) from error
    if is_pinned(source) and not completes:
        cached = _from_cache(source)
        if cached is not None:
            return cached
    if constants.HF_HUB_OFFLINE:
        return _offline(source, "HF_HUB_OFFLINE is set")
    return _download(source)


def _download(source: PromptSource) -> Fetched:
    from huggingface_hub import HfApi, snapshot_download

    revision = source.revision or None
    try:
        with hub_answers("data set", source.name, source.revision):
            info = HfApi().dataset_info(source.name, revision=revision, timeout=INFO_TIMEOUT_S)
            names = [one.rfilename for one in info.siblings or []]

            def get(patterns: Sequence[str]) -> Path:
                folder = snapshot_download(
                    source.name,
                    repo_type="dataset",
                    revision=info.sha,
                    allow_patterns=list(patterns),
                )
                return Path(folder)

            described = [name for name in names if PurePosixPath(name).name in _DESCRIBING]
            folder = get(described or ["README.md"])
            folder = get(_choose(source, names, described, folder))
    except HubSilent as error:
        return _offline(source, str(error))
    files = find_files(folder, subset=source.subset, split=source.dataset_split)
    return Fetched(str(info.sha), files)


@contextmanager
def hub_answers(kind: str, name: str, revision: str) -> Iterator[None]:
    """Raise InputError for what the Hub refuses, HubSilent where it does not answer.

    kind: what is asked for, "data set" or "model". revision: "" for the newest.
    """
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} is gated: accept its conditions on {error.response.url.host}, then run "
            "`hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise InputError(
            f"the Hub has no {kind} {name!r}"
            + (f" with the revision {revision!r}" if revision else "")
            + ": look for its name on the Hub (a private one needs `hf auth login`)"
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise HubSilent(f"the Hub does not answer: {type(error).__name__}: {error}") from error


def _choose(
    source: PromptSource, names: Sequence[str], described: Sequence[str], folder: Path
) -> list[str]:
    """Names of the files that hold the wanted rows, and of those that say so.

    The files are chosen as in a folder: in one of empty files with the same names.
    """
    with tempfile.TemporaryDirectory(prefix="data_set.") as made:
        root = Path(made)
        for name in names:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"{source.name} names a file outside its folder: {name!r}")
            if path.suffix in SUFFIXES or name in described:
                target = root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((folder / path).read_bytes() if name in described else b"")
        try:
            found = find_files(root, subset=source.subset, split=source.dataset_split)
        except InputError as error:
            raise InputError(str(error).replace(str(root), source.name)) from error
        return [*described, *(file.relative_to(root).as_posix() for file in found.files)]


def _from_cache(source: PromptSource) -> Fetched | None:
    """What the cache holds of the revision; None where it lacks the wanted files."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(
            snapshot_download(
                source.name,
                repo_type="dataset",
                revision=source.revision or None,
                # Of the whole data set the cache holds what was wanted alone.
                allow_patterns=list(_DESCRIBING),
                local_files_only=True,
            )
        )
        files = find_files(folder, subset=source.subset, split=source.dataset_split)
    except (errors.LocalEntryNotFoundError, InputError):
        return None
    return Fetched(folder.name, files)


def _offline(source: PromptSource, why: str) -> Fetched:
    """The cache's files; InputError with the fix where it has none."""
    cached = _from_cache(source)
    if cached is not None:
        return cached
    command = f"hf download --repo-type dataset {source.name}"
    if source.revision:
        command += f" --revision {source.revision}"
    raise InputError(
        f"{source.name} is not in the cache, or not the wanted split of it, and {why}. On a "
        f"machine with a network run `{command} --local-dir FOLDER`, copy FOLDER here, and give "
        "prompts.kind = 'files' with prompts.path = 'FOLDER'; or copy the cache ($HF_HOME/hub)"
    )


def pinned(source: PromptSource, earlier: Sequence[PromptSource] = ()) -> PromptSource:
    """The same source with the commit in place of a branch, its files in the cache.

    earlier: the sources of the run that goes on, whose commits are kept. Raises InputError.
    """
    if source.kind != "hub":
        return source
    if not is_pinned(source):
        kept = next((one.revision for one in earlier if _is_same(one, source)), source.revision)
        source = source.model_copy(update={"revision": kept})
    return source.model_copy(update={"revision": fetch(source, completes=True).commit})


def _is_same(one: PromptSource, other: PromptSource) -> bool:
    """Whether a source with a commit is of the same rows."""
    keys = ("kind", "name", "subset", "dataset_split")
    return is_pinned(one) and all(getattr(one, key) == getattr(other, key) for key in keys)
