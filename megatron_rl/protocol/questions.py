"""When two questions are the same. Imported by every process."""


def normalized(text: str) -> str:
    """The same for texts that differ in case and spacing alone."""
    return " ".join(text.casefold().split())
