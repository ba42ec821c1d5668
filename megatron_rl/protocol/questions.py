"""Comparison of questions. Imported by every process."""


def normalized(text: str) -> str:
    """Equal for texts that differ only in case and spacing."""
    return " ".join(text.casefold().split())
