"""Fill of packed microbatches: `python -m tools.bench.packing [--quick]`.

2,048 sequences (--quick: 512) with Magistral's lengths, a token budget of 40,960, one and eight
data-parallel ranks.

| figure | meaning |
|---|---|
| fill | tokens over microbatches x budget, one rank, the worst of several draws |
| microbatches_over_lower_bound | microbatches over tokens / budget rounded up, the worst |
| ..._dp8 | the same for eight ranks with equally many; the bound is a multiple of eight |
| imbalance_dp8 | tokens of the fullest rank over the mean, the worst |
| ms | packing and dealing for one rank, median |
| padding_* | 1 - fill, mean of the draws, for ours and others |

ours: the product's `deal`. first_fit: the paper's greedy, longest sequence first into the first
open microbatch with room. arrival: in order of arrival; a microbatch closes when the next sequence
does not fit. arrival_padded: the same with rows padded to the longest of their microbatch, as
without packed attention. The last line is one JSON object.

Lengths. The paper (arXiv 2506.10910) gives no histogram. It says that completions reach 32k tokens,
that the longest take up to five times the shortest, and that they started at a few thousand. Here:
completions are log-normal with a median of 7,000 tokens and sigma 0.7, cut at 32,768 as by
max_new_tokens (the middle 90 % span a factor of 10); prompts with their system prompt are uniform
from 80 to 600.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.protocol.packing import Microbatch, deal, first_fit_decreasing
from tools.bench.measuring import parser, report

SEQUENCES, QUICK_SEQUENCES = 2048, 512
DRAWS = 5
BUDGET = 40_960
DP_SIZE = 8
MEDIAN_TOKENS = 7_000
SIGMA = 0.7
MAX_COMPLETION = 32_768
PROMPT_TOKENS = (80, 600)
LONGEST = MAX_COMPLETION + PROMPT_TOKENS[1]


class Lengths(NamedTuple):
    prompt: int
    completion: int

    @property
    def total(self) -> int:
        return self.prompt + self.completion


def magistral_like(count: int, *, seed: int, scale: float = 1.0) -> list[Lengths]:
    """`count` sequences; scale multiplies their lengths."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        completion = min(MEDIAN_TOKENS * chance.lognormvariate(0, SIGMA), MAX_COMPLETION)
        prompt = chance.randint(*PROMPT_TOKENS)
        found.append(Lengths(max(1, round(prompt * scale)), max(1, round(completion * scale))))
    return found


def main() -> int:
    is_quick = parser(__doc__, quick="fewer sequences").parse_args().quick
    count = QUICK_SEQUENCES if is_quick else SEQUENCES
    draws = [[s.total for s in magistral_like(count, seed=seed)] for seed in range(DRAWS)]
    found = [figures(lengths, BUDGET) for lengths in draws]
    conditions = {"sequences": count, "budget_tokens": BUDGET, "draws": DRAWS, "longest": LONGEST}
    report(conditions | combine(found))
    return 0


def figures(lengths: Sequence[int], budget: int) -> dict[str, float]:
    total, least = sum(lengths), math.ceil(sum(lengths) / budget)
    started = time.perf_counter()
    (mine,) = deal(list(lengths), budget_tokens=budget, dp_size=1)
    seconds = time.perf_counter() - started
    ranks = deal(list(lengths), budget_tokens=budget, dp_size=DP_SIZE)
    rank_tokens = [sum(lengths[i] for microbatch in rank for i in microbatch) for rank in ranks]
    least_dp = math.ceil(least / DP_SIZE) * DP_SIZE
    greedy = first_fit_decreasing(list(lengths), budget)
    arrival = in_order_of_arrival(lengths, budget)
    padded = in_order_of_arrival(lengths, budget, is_padded=True)
    return {
        "fill": total / (len(mine) * budget),
        "microbatches_over_lower_bound": len(mine) / least,
        "microbatches_over_lower_bound_dp8": sum(map(len, ranks)) / least_dp,
        "imbalance_dp8": max(rank_tokens) / (total / DP_SIZE),
        "ms": 1e3 * seconds,
        "padding_ours": 1 - total / (len(mine) * budget),
        "padding_first_fit": 1 - total / (len(greedy) * budget),
        "padding_arrival": 1 - total / (len(arrival) * budget),
        "padding_arrival_padded": 1 - total / sum(padded_tokens(m, lengths) for m in padded),
    }


def combine(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over the draws: mean of paddings, median of the time, the worst of other figures."""
    worst = {"fill": min, "ms": statistics.median}
    return {
        name: round(
            (statistics.fmean if name.startswith("padding") else worst.get(name, max))(
                [figure[name] for figure in found]
            ),
            4,
        )
        for name in found[0]
    }


def in_order_of_arrival(
    lengths: Sequence[int], budget: int, *, is_padded: bool = False
) -> list[Microbatch]:
    """Close a microbatch when the next sequence, or the padded rows, would exceed the budget."""
    microbatches: list[Microbatch] = [[]]
    for index in range(len(lengths)):
        grown = [*microbatches[-1], index]
        tokens = padded_tokens(grown, lengths) if is_padded else sum(lengths[i] for i in grown)
        if tokens <= budget or len(grown) == 1:
            microbatches[-1] = grown
        else:
            microbatches.append([index])
    return microbatches


def padded_tokens(microbatch: Microbatch, lengths: Sequence[int]) -> int:
    """Tokens of rows padded to the longest."""
    return len(microbatch) * max(lengths[i] for i in microbatch)


if __name__ == "__main__":
    sys.exit(main())
