"""Whether a reference answer can be read as mathematics, before any completion is held against it.

Used by checks of prompts. An answer that our grammar does not read is compared as text, and by the
library: right answers in another form may earn nothing.
"""

from verification.math.readings import read
from verification.math.text import MAX_CHARS, normalise, refusal


def why_illegible(answer: str) -> str:
    """Why no comparison can rely on the answer; empty where it is read.

    Words alone are read: they are compared as words.
    """
    text = answer.strip()
    if not text:
        return "it is empty"
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters, over the {MAX_CHARS} that are compared"
    plain = normalise(text)
    if not plain:
        return "nothing is left of it without its layout"
    refused = refusal(plain)
    if refused:
        return f"it is refused ({refused})"
    return "" if read(plain) else "our grammar does not read it: only equal text is surely right"


def find_illegible(answers: list[str]) -> dict[int, str]:
    """Why answers are not read, by their place in the list."""
    return {place: why for place, answer in enumerate(answers) if (why := why_illegible(answer))}
