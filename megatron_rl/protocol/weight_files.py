"""Which files of a Hugging Face folder hold its weights. Imported by every process."""

import json
from pathlib import Path

from megatron_rl.config.errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def indexed_files(folder: Path) -> list[Path]:
    """Files that the index of a folder names. Raises InputError for a damaged index."""
    index = folder / INDEX
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(folder / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} is no index of safetensors ({error!r}): it must be JSON with a weight_map of "
            '{"tensor": "file"}. Fetch or export the folder again'
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The single file, or those that the index names, or all there are without both.

    Files that the index names may be missing. Raises InputError for a damaged index.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return indexed_files(folder)
    return sorted(folder.glob("*.safetensors"))


def whole_weight_files(folder: Path) -> list[Path]:
    """As `weight_files`; all files are there, and an index with several. Raises InputError."""
    files = weight_files(folder)
    if not files and any(folder.glob("pytorch_model*.bin")):
        raise InputError(
            f"{folder} has pytorch_model*.bin and no *.safetensors: write them with `python -c "
            '"from transformers import AutoModelForCausalLM as Model; '
            f"Model.from_pretrained('{folder}').save_pretrained('{folder}')\"`"
        )
    if not files:
        raise InputError(f"{folder} has no *.safetensors: give a Hugging Face folder with weights")
    if "-of-" in files[0].name and not (folder / INDEX).exists():
        raise InputError(f"{folder} has {files[0].name} without {INDEX}: fetch it")
    if missing := [file.name for file in files if not file.exists()]:
        raise InputError(
            f"{folder} lacks {len(missing)} of {len(files)} files of weights, such as "
            f"{missing[0]}: fetch them"
        )
    return files
