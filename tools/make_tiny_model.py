"""Makes a random Llama of 1.3M parameters with a character tokenizer, for quick runs and tests.

`python -m tools.make_tiny_model OUT_DIR [--seed S] [--programs]`. The model is in
megatron_rl/data/tiny_model.py.
"""

import argparse
import sys
from pathlib import Path

from megatron_rl.data.tiny_model import make_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--programs", action="store_true", help="with tokens for their fences")
    arguments = parser.parse_args()
    try:
        folder = arguments.out.absolute()
        count = make_folder(folder, arguments.seed, programs=arguments.programs)
    except FileExistsError as error:
        sys.exit(f"error: {error}")
    print(f"a random Llama of {count / 1e6:.2f}M parameters is in {arguments.out}")


if __name__ == "__main__":
    main()
