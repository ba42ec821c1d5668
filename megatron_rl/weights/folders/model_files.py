"""The files of a model folder besides its weights, and what a run puts into their place.

Used by trainer ranks, which export models, and by conversions.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_run
from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS
from megatron_rl.protocol.render import open_renderer
from megatron_rl.weights.folders import mistral_format
from megatron_rl.weights.folders.megatron_folder import is_megatron_folder
from megatron_rl.weights.layout.shape import read_values

_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx",
    ".onnx_data", ".npz", ".distcp",
)  # fmt: skip
_OF_WEIGHTS = ("adapter_config.json", "latest_checkpointed_iteration.txt")
"""Files that mean nothing without other weights."""
_OF_CHECKPOINT = ("metadata.json", "COMPLETE", "queue.json", "sft.json")
"""Files of a Megatron checkpoint that are not tensors."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class ModelFiles:
    """Files and sub-folders that go with a model's weights."""

    paths: tuple[Path, ...]
    run: Config | None = None
    """The run that trained the weights."""
    origin: Path | None = None
    """Hugging Face folder that may hold more than the model, such as towers; None: unknown."""

    def write(self, folder: Path) -> None:
        """Copy all into `folder`, which holds none of them; contents only, not permissions.

        The chat template and the end tokens are those of the run. Raises InputError.
        """
        copy_files(self.paths, folder)
        if self.run is None:
            return
        if template := self.run.render.chat_template:
            # transformers prefers this file to the template in tokenizer_config.json.
            (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        if any((folder / name).exists() for name in TOKENIZERS):
            model = self.run.model.model_copy(update={"path": folder})
            renderer = open_renderer(self.run.model_copy(update={"model": model}))
            # Engines that load the folder end completions where the run did.
            _write_ends(renderer.stop_ids, folder)


def files_to_carry(folder: Path, files_from: Path | None) -> ModelFiles:
    """The files of `folder`; those that it lacks are of `files_from`, else of its run's model.

    A checkpoint inside its run's folder also gets the run's chat template and ends. Raises
    InputError.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: give a model folder")
    if files_from is not None and not files_from.is_dir():
        raise InputError(f"--files-from: there is no folder {files_from}")
    run = _run_of(folder) if is_megatron_folder(folder) else None
    if run is not None and files_from is None:
        files_from = run.model.path
        if not files_from.is_dir():
            raise InputError(
                f"{folder} is of a run with model.path {files_from}, which does not exist: name a "
                "folder with its config.json and tokenizer by --files-from"
            )
    others = [] if files_from is None else carried_files(files_from)
    own = carried_files(folder)
    if is_megatron_folder(folder):
        own = [file for file in own if file.name not in _OF_CHECKPOINT]
    found = {file.name: file for file in (*others, *own)}
    is_mistral = not is_megatron_folder(folder) and mistral_format.is_mistral_folder(folder)
    if is_mistral:
        found.pop(mistral_format.PARAMS, None)
    if is_mistral and not any(name in found for name in TOKENIZERS):
        raise InputError(
            f"{folder} is in mistral format and has no tokenizer that transformers reads (one of "
            f"{', '.join(TOKENIZERS)}): name a folder that has it with --files-from"
        )
    origin = files_from if is_megatron_folder(folder) else folder
    return ModelFiles(tuple(found.values()), run, origin)


def read_config(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Values of the config.json among `files`. Raises InputError."""
    path = next((file for file in files if file.name == "config.json"), None)
    if path is None:
        raise InputError(
            f"{folder} has no config.json: give a model folder, or name a Hugging Face folder of "
            "the same model with --files-from"
        )
    return read_values(path)


def _run_of(checkpoint: Path) -> Config | None:
    """The run whose folder holds the checkpoint, or the folder of its checkpoints."""
    for path in (checkpoint.absolute(), *checkpoint.absolute().parents[:2]):
        if path.name == CHECKPOINTS and (path.parent / "config.toml").is_file():
            return load_run(path.parent)
    return None


def carried_files(folder: Path) -> list[Path]:
    """All files and sub-folders of a model but its weights: tokenizer, processor, code and others.

    Of a folder with weights inside, such as another format's, nothing is carried, and nothing that
    is hidden.
    """
    found = [path for path in folder.iterdir() if not _is_left_out(path)]
    return sorted(path for path in found if path.is_file() or not _holds_weights(path))


def _is_left_out(path: Path) -> bool:
    name = path.name.removesuffix(".index.json")
    is_hidden = name.startswith((".", "__"))
    # A link to a folder may lead anywhere.
    is_link = path.is_dir() and path.is_symlink()
    return is_hidden or is_link or name in _OF_WEIGHTS or name.endswith(_WEIGHTS)


def _holds_weights(folder: Path) -> bool:
    return any(path.name.endswith(_WEIGHTS) for path in folder.rglob("*"))


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy files and folders into `folder` under their names; contents only, not permissions."""
    for path in files:
        target = folder / path.name
        if path.is_dir():
            # Not copytree, whose error has no errno: a full disk is waited for, and then all of
            # this is repeated.
            target.mkdir(exist_ok=True)
            copy_files(path.iterdir(), target)
        else:
            shutil.copyfile(path, target)


def _write_ends(end_ids: Iterable[int], folder: Path) -> None:
    """Name the tokens that end a completion in generation_config.json; its other values stay."""
    path = folder / "generation_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    values["eos_token_id"] = sorted(end_ids)
    path.write_text(json.dumps(values, indent=2) + "\n")
