"""`python -m tools.megatron_to_hf SRC DST [...]`: the same as `megatron-rl convert --to hf`.

SRC is a Megatron checkpoint folder, with or without optimizer state.
"""

import sys

from megatron_rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "hf", *sys.argv[1:]]))
