"""Writes the inputs of an example's run: a tiny model, prompts and SFT examples. Used by run.sh.

python examples/agents/make_inputs.py NAME FOLDER SEED
"""

import importlib
import json
import random
import sys
from pathlib import Path

from megatron_rl.data.tiny_model import make_folder


def main() -> None:
    """Command line. NAME: a module of this folder with the functions `prompts` and `examples`."""
    name, target, seed = sys.argv[1], Path(sys.argv[2]).absolute(), int(sys.argv[3])
    example = importlib.import_module(name)
    target.mkdir(parents=True)
    make_folder(target / "model", seed=seed, programs=getattr(example, "WRITES_PROGRAMS", False))
    rng = random.Random(seed)
    made = {"prompts": example.prompts(rng), "sft": example.examples(rng)}
    if hasattr(example, "judge_examples"):
        made["judge"] = example.judge_examples(rng)
    for kind, lines in made.items():
        (target / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
