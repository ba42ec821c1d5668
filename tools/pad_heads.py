"""Adds attention heads of zeros to a HF folder, so that tensor parallelism divides the heads.

`python -m tools.pad_heads IN_DIR OUT_DIR --multiple 2`. SmolLM2-135M has 9 heads in 3 key-value
groups, which two ranks cannot share; with an added group there are 12 in 4. The model computes the
same function, also in training: the values of an added head are zero, so its output columns get no
gradient; its output columns are zero, so its queries, keys and values get none. An existing OUT_DIR
is kept.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM")
WEIGHTS = "model.safetensors"


class PaddingError(RuntimeError):
    """The folder cannot be padded."""


def pad_folder(source: Path, out: Path, multiple: int) -> None:
    """Write `out`: `source` with key-value groups padded up to a multiple. Raises PaddingError."""
    config = json.loads((source / "config.json").read_text())
    if config["architectures"][0] not in SUPPORTED or config.get("attention_bias"):
        raise PaddingError(
            f"{source} cannot be padded: allowed: {', '.join(SUPPORTED)} without attention biases"
        )
    if not (source / WEIGHTS).is_file():
        raise PaddingError(f"{source} has no {WEIGHTS} (files split into several are not read)")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    new_groups = math.ceil(groups / multiple) * multiple
    new_heads = heads // groups * new_groups
    widths = {"q_proj": new_heads, "k_proj": new_groups, "v_proj": new_groups, "o_proj": new_heads}
    weights = load_file(source / WEIGHTS)
    for name, weight in weights.items():
        projection = name.split(".")[-2]
        if projection in widths:
            dim = 1 if projection == "o_proj" else 0
            weights[name] = pad_to(weight, widths[projection] * head_dim, dim)
    config |= {
        "num_attention_heads": new_heads,
        "num_key_value_heads": new_groups,
        "head_dim": head_dim,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        folder = Path(temporary) / "model"
        shutil.copytree(source, folder)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.move(folder, out)


def pad_to(weight: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """The matrix padded with zeros along `dim`."""
    shape = list(weight.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([weight, weight.new_zeros(shape)], dim).contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--multiple", type=int, default=2, help="of the key-value groups")
    arguments = parser.parse_args()
    if (arguments.out / "config.json").exists():
        print(f"{arguments.out} exists already")
        return
    try:
        pad_folder(arguments.source, arguments.out, arguments.multiple)
    except PaddingError as error:
        sys.exit(f"error: {error}")
    print(f"padded model in {arguments.out}")


if __name__ == "__main__":
    main()
