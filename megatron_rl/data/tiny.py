"""Makes the inputs of a first run: a model of 1.3M parameters, prompts and SFT examples.

`python -m megatron_rl.data.tiny FOLDER [--seed S]` writes the model to FOLDER/model, the task
`sort` to FOLDER/tasks, and their paths to FOLDER/paths.toml. Then
`megatron-rl run --config tiny --config FOLDER/paths.toml --run-dir DIR` works from any folder.
`examples/quickstart.sh --tiny` uses the same model and tasks. Runs in no process of a run.
"""

import argparse
import sys
from pathlib import Path

import tomli_w

from megatron_rl.config.errors import InputError
from megatron_rl.data.example_tasks import Sizes, make_sort, solve_sort, write_tasks
from megatron_rl.data.tiny_model import make_folder
from megatron_rl.protocol.whole_file import write_whole

TRAIN, HELD_OUT, SFT_EXAMPLES = 8000, 1000, 500
WRONG_SHARE = 0.6
"""Share of the SFT examples that sort downwards, so that RL can outgrow this teacher."""


def make_tiny(folder: Path, seed: int) -> Path:
    """Make the folder, or complete an interrupted one; returns the path of its paths.toml.

    Raises InputError for a complete folder.
    """
    layer, model, tasks = (folder.absolute() / name for name in ("paths.toml", "model", "tasks"))
    if layer.exists():
        raise InputError(f"{layer} exists: name another folder, or use what is there")
    if not model.exists():
        make_folder(model, seed)
    sizes = Sizes(TRAIN, HELD_OUT, SFT_EXAMPLES, WRONG_SHARE, seed)
    prompts, teaching = make_sort(sizes)
    write_tasks(tasks, prompts, teaching=teaching, solve=solve_sort, sizes=sizes)
    settings = {
        "model": {"path": str(model)},
        "sft": {"dataset": str(tasks / "sft.jsonl")},
        "prompts": [{"kind": "jsonl", "path": str(tasks / "prompts.jsonl")}],
    }
    # Written last: it marks a complete folder.
    write_whole(layer, tomli_w.dumps(settings))
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and SFT examples")
    options = parser.parse_args()
    try:
        layer = make_tiny(options.folder, options.seed)
    except InputError as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(
        f"{layer.parent}: a model of 1.3M parameters, prompts and SFT examples. A run of them:\n"
        f"  megatron-rl run --config tiny --config {layer} --run-dir runs/tiny\n"
    )


if __name__ == "__main__":
    main()
