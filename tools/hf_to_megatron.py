"""`python -m tools.hf_to_megatron SRC DST [...]`: the same as `megatron-rl convert --to megatron`.

SRC is a Hugging Face or mistral-format folder.
"""

import sys

from megatron_rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", "--to", "megatron", *sys.argv[1:]]))
