"""Makes prompts and SFT examples of the example tasks in megatron_rl/data/example_tasks.py.

`python -m tools.make_tasks sort|chain_sum OUT_DIR [options]` writes OUT_DIR/prompts.jsonl (train
and held-out lines) and OUT_DIR/sft.jsonl.
"""

import argparse
import sys
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import PromptSource
from megatron_rl.data.example_tasks import (
    CHAIN_SUM_PREFIX,
    MISTAKES,
    Sizes,
    chain_sum_solver,
    compact,
    make_chain_sum,
    make_sort,
    solve_sort,
    write_tasks,
)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="task", required=True)
    sort = commands.add_parser("sort", help="five different digits in ascending order")
    chain_sum = commands.add_parser("chain_sum", help="reasoning_gym's sums of a few numbers")
    for command, sizes in ((sort, (8000, 1000, 500, 0.6)), (chain_sum, (4000, 500, 400, 0.0))):
        command.add_argument("out", type=Path, help="folder for prompts.jsonl and sft.jsonl")
        names = ("--train", "--held-out", "--sft-examples")
        for name, default in zip(names, sizes, strict=False):
            command.add_argument(name, type=int, default=default, help="count (%(default)s)")
        command.add_argument(
            "--wrong-share", type=float, default=sizes[3], help="of the SFT examples"
        )
        command.add_argument("--seed", type=int, default=0)
    for name, default in (("terms", (2, 3)), ("digits", (1, 2))):
        metavar = ("MIN", "MAX")
        chain_sum.add_argument(f"--{name}", type=int, nargs=2, default=default, metavar=metavar)
        chain_sum.add_argument(f"--sft-{name}", type=int, nargs=2, metavar=metavar)
    chain_sum.add_argument("--template", default="Compute: {question}", help="user message")
    chain_sum.add_argument("--compact", action="store_true", help="no spaces in the question")
    chain_sum.add_argument("--mistake", choices=sorted(MISTAKES), default="slip")
    return parser.parse_args()


def _gym_options(terms: list[int], digits: list[int]) -> dict[str, int]:
    keys = ("min_terms", "max_terms", "min_digits", "max_digits")
    return dict(zip(keys, [*terms, *digits], strict=True))


def main() -> None:
    args = _parse_arguments()
    sizes = Sizes(args.train, args.held_out, args.sft_examples, args.wrong_share, args.seed)
    try:
        if not 0 <= sizes.wrong_share <= 1:
            raise InputError(f"--wrong-share {sizes.wrong_share} is not between 0 and 1")
        if args.task == "sort":
            prompts, teaching = make_sort(sizes)
            solve = solve_sort
        else:
            options = _gym_options(args.terms, args.digits)
            source = PromptSource(
                kind="reasoning_gym",
                name="chain_sum",
                options=options,
                template=args.template,
                strip_prefix=CHAIN_SUM_PREFIX,
            )
            example_options = _gym_options(
                args.sft_terms or args.terms, args.sft_digits or args.digits
            )
            prompts, teaching = make_chain_sum(sizes, source, teaching_options=example_options)
            solve = chain_sum_solver(args.template, args.mistake)
            if args.compact:
                prompts, teaching = compact(prompts), compact(teaching)
        write_tasks(args.out, prompts, teaching=teaching, solve=solve, sizes=sizes)
    except InputError as error:
        sys.exit(f"error: {error}")
    held_out = sum(prompt.split == "held_out" for prompt in prompts)
    print(
        f"{args.out}: {len(prompts) - held_out} train and {held_out} held-out prompts, "
        f"{len(teaching)} SFT examples ({sizes.wrong_share:.0%} with the teacher's mistake)"
    )


if __name__ == "__main__":
    main()
