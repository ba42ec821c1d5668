"""Installed packages that a task may allow to its solutions: the table PACKAGES.

Runs wherever prompts are checked and in grading processes.
"""

PACKAGES: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "sympy": ("sympy", "mpmath"),
    "mpmath": ("mpmath",),
}
"""Name in the tests -> modules that come with it."""
