"""Downloads models of the Hugging Face Hub by name, and pins their commits.

Used by the launcher before anything starts; other processes get the folder in the cache. With
HF_HUB_OFFLINE=1, or without a network, only the cache of huggingface_hub is used. No code of a
model's repository is executed.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from megatron_rl.config.errors import InputError
from megatron_rl.config.paths import is_hub_name
from megatron_rl.config.tree import Config
from megatron_rl.data.tables.hub import INFO_TIMEOUT_S, HubSilent, hub_answers, is_commit
from megatron_rl.protocol.weight_files import weight_files
from megatron_rl.weights.layout.shape import FOR_SIZES

_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja")
_SNAPSHOT = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})/?")


def pin_models(config: Config, earlier: Config | None, *, only_sizes: bool = False) -> Config:
    """The configuration with cached folders in place of Hub names of policy and reference.

    earlier: the configuration of the resumed run; its commits are kept. only_sizes: download
    config.json alone. Raises InputError.
    """
    model, algorithm = config.model, config.algorithm
    found = find_model(
        str(model.path),
        key="model.path",
        revision=model.revision,
        old=None if earlier is None else earlier.model.path,
        only_sizes=only_sizes,
    )
    if found is not None:
        config = config.replaced(model={"path": found, "revision": found.name})
    if algorithm.reference.folder is None:
        return config
    found = find_model(
        algorithm.reference.policy,
        key="algorithm.reference.policy",
        old=None if earlier is None else earlier.algorithm.reference.folder,
        only_sizes=only_sizes,
    )
    if found is None:
        return config
    algorithm = algorithm.replaced(reference={"policy": str(found)})
    return config.model_copy(update={"algorithm": algorithm})


def folder_of(path: Path, *, key: str) -> Path:
    """The folder itself, or the cached folder of the Hub's model. Raises InputError."""
    return find_model(str(path), key=key) or path


def find_model(
    text: str, *, key: str, revision: str = "", old: Path | None = None, only_sizes: bool = False
) -> Path | None:
    """Cached folder of the Hub's model, named by its commit; None if `text` is a folder itself.

    key: configuration key, for errors. revision: branch, tag or commit; "" for the newest. old:
    folder that an earlier part of the run used. Raises InputError.
    """
    if not is_hub_name(text) or Path(text).exists():
        return None
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except errors.HFValidationError:
        return None
    kept = _commit_of(old, text)
    if kept and not is_commit(revision):
        revision = kept
    if is_commit(revision) and (cached := _from_cache(text, revision, only_sizes=only_sizes)):
        return cached
    try:
        if constants.HF_HUB_OFFLINE:
            raise HubSilent("HF_HUB_OFFLINE is set")
        return _download(text, revision, only_sizes=only_sizes)
    except HubSilent as error:
        if cached := _from_cache(text, revision, only_sizes=only_sizes):
            return cached
        raise InputError(_offline_text(text, key, revision, why=str(error))) from error


def _offline_text(name: str, key: str, revision: str, *, why: str) -> str:
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    return (
        f"{key} = {name}: there is no such folder (looked in {Path.cwd()}; a path in a TOML file "
        f"is relative to that file), and the cache of the Hub does not hold a model of that name: "
        f"{why}. On a machine with a network run `{command} --local-dir FOLDER`, copy FOLDER here "
        f"and give {key}=FOLDER ({FOR_SIZES}); or copy the cache ($HF_HOME/hub)"
    )


def _commit_of(folder: Path | None, name: str) -> str:
    """Commit of the cached model in a folder; "" for any other folder."""
    found = None if folder is None else _SNAPSHOT.fullmatch(str(folder))
    return found[3] if found is not None and f"{found[1]}/{found[2]}" == name else ""


def _download(name: str, revision: str, *, only_sizes: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    with hub_answers("model", name, revision):
        info = HfApi().model_info(name, revision=revision or None, timeout=INFO_TIMEOUT_S)
        names = [one.rfilename for one in info.siblings or []]
        wanted = ["config.json"] if only_sizes else choose_files(names)
        folder = snapshot_download(name, revision=info.sha, allow_patterns=wanted)
    return Path(folder)


def choose_files(names: Sequence[str]) -> list[str]:
    """Files to download from a model's repository.

    Subfolders hold the same weights in other formats; consolidated* is mistral's format.
    """
    top = [name for name in names if "/" not in name and PurePosixPath(name).suffix in _SUFFIXES]
    has_hf_weights = any(
        name.endswith(".safetensors") and not name.startswith("consolidated") for name in top
    )
    return [name for name in top if not (has_hf_weights and name.startswith("consolidated"))]


def _from_cache(name: str, revision: str, *, only_sizes: bool) -> Path | None:
    """The cached model; None if it is missing or incomplete."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None
    is_whole = (folder / "config.json").exists() and (only_sizes or _has_weights(folder))
    return folder if is_whole else None


def _has_weights(folder: Path) -> bool:
    files = weight_files(folder)
    return bool(files) and all(file.exists() for file in files)
