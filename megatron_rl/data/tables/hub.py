"""Downloads data sets of the Hugging Face Hub: pins the commit and chooses the files.

Only files of rows are fetched, and nothing of a data set is executed. With HF_HUB_OFFLINE=1, or
without a network, the cache of huggingface_hub is used. The launcher pins the commit; other
processes then read the same files from the cache.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.kinds import read_as, with_hub_name
from megatron_rl.data.tables.files import format_of
from megatron_rl.data.tables.folders import TableFiles, find_files
from megatron_rl.data.tables.rows import RowFault
from megatron_rl.data.tables.source import Reading, read_table

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DESCRIBING = ("README.md", "dataset_dict.json", "state.json")
"""Small files that name the files with rows."""
INFO_TIMEOUT_S = 30.0


class HubSilent(Exception):
    """The Hub does not answer; the text gives the reason."""


class Fetched(NamedTuple):
    """The files of a source in the cache."""

    commit: str
    files: TableFiles


def read_hub(source: PromptSource, on_fault: Callable[[RowFault], None] | None = None) -> Reading:
    """Prompts of a data set of the Hub. Raises InputError."""
    commit, files = fetch(source)
    return read_table(source, files, f"{source.name} @ {commit[:12]}", on_fault)


def is_commit(revision: str) -> bool:
    """Whether a revision is the full hash of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def fetch(source: PromptSource, *, completes: bool = False) -> Fetched:
    """The files of a source, from the cache or the Hub. Raises InputError.

    completes: ask the Hub also for a cached commit, which may lack files.
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
    if is_commit(source.revision) and not completes:
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
    """Raise InputError if the Hub refuses a request, HubSilent if it does not answer.

    kind: "data set" or "model". revision: "" for the newest.
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
            + ": look for its name on the Hub (a private one needs `hf auth login`), or give an "
            "existing folder"
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise HubSilent(f"the Hub does not answer: {type(error).__name__}: {error}") from error


def _choose(
    source: PromptSource, names: Sequence[str], described: Sequence[str], folder: Path
) -> list[str]:
    """Names of the files with the wanted rows, and of the files in `described`.

    `find_files` chooses in a folder of empty files with the same names.
    """
    with tempfile.TemporaryDirectory(prefix="data_set.") as made:
        root = Path(made)
        for name in names:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"{source.name} names a file outside its folder: {name!r}")
            if format_of(path) or name in described:
                target = root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((folder / path).read_bytes() if name in described else b"")
        try:
            found = find_files(root, subset=source.subset, split=source.dataset_split)
        except InputError as error:
            raise InputError(str(error).replace(str(root), source.name)) from error
        return [*described, *(file.relative_to(root).as_posix() for file in found.files)]


def _from_cache(source: PromptSource) -> Fetched | None:
    """The cached files of the revision; None if wanted files are missing."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(
            snapshot_download(
                source.name,
                repo_type="dataset",
                revision=source.revision or None,
                # Without patterns the call would fail: the cache lacks files nobody wanted.
                allow_patterns=list(_DESCRIBING),
                local_files_only=True,
            )
        )
        files = find_files(folder, subset=source.subset, split=source.dataset_split)
    except (errors.LocalEntryNotFoundError, InputError):
        return None
    return Fetched(folder.name, files)


def _offline(source: PromptSource, why: str) -> Fetched:
    """The cached files. Raises InputError, with the fix, if any is missing."""
    cached = _from_cache(source)
    if cached is not None:
        return cached
    command = f"hf download --repo-type dataset {source.name}"
    if source.revision:
        command += f" --revision {source.revision}"
    raise InputError(
        f"{source.name} is no folder here, and as a data set of the Hub it is not in the cache, or "
        f"not the wanted split of it; {why}. On a "
        f"machine with a network run `{command} --local-dir FOLDER`, copy FOLDER here, and give "
        "prompts.path = 'FOLDER'; or copy the cache ($HF_HOME/hub)"
    )


def pinned(source: PromptSource, earlier: Sequence[PromptSource] = ()) -> PromptSource:
    """The source with a commit as its revision and its files in the cache. Raises InputError.

    earlier: sources of the resumed run; the first of the same rows gives its commit.
    """
    if read_as(source) != "hub":
        return source
    if not is_commit(source.revision):
        kept = next((one.revision for one in earlier if _is_same(one, source)), source.revision)
        source = source.model_copy(update={"revision": kept})
    return source.model_copy(
        update={"revision": fetch(with_hub_name(source), completes=True).commit}
    )


def _is_same(one: PromptSource, other: PromptSource) -> bool:
    """Whether `one` has a commit and the same rows as `other`."""
    if not is_commit(one.revision) or read_as(one) != "hub":
        return False
    keys = ("name", "subset", "dataset_split")
    first, second = with_hub_name(one), with_hub_name(other)
    return all(getattr(first, key) == getattr(second, key) for key in keys)
