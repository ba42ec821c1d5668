"""math-verify as most trainers use it: for audits of what our own rules change.

Runs in grading processes only: it may take unbounded time and memory.
"""

import functools


@functools.lru_cache(maxsize=16)
def same_by_bare_library(answer: str, reference: str) -> bool:
    """Whether math-verify by itself takes a box with the answer for the boxed reference.

    False where it can read one of them not at all, as its users have it.
    """
    # Imported here: the verifier's own process needs no SymPy.
    from math_verify import parse, verify

    # Its own limits of time replace signal handlers; the process has limits of its own.
    gold, target = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (reference, answer)
    )
    return bool(verify(gold, target, timeout_seconds=None))
