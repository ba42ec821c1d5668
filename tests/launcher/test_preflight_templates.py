"""What a start says about the chat template of the run."""

from pathlib import Path

import pytest

from tests.launcher.test_preflight import check, overrides

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")

__all__ = ["overrides"]


def test_a_start_says_what_the_template_does_not_do(tmp_path: Path, overrides: list[str]) -> None:
    """Also what it would write otherwise than SFT teaches: this one ends answers with a word."""
    template = (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}"
        "{% if m.role == 'assistant' %} ok{% endif %}{% endfor %}"
    )
    notes = check(
        tmp_path,
        [
            *overrides, f"render.chat_template={template}", 'render.system_prompt="be brief"',
            "render.chat_template_kwargs.enable_thinking=false",
        ],
    ).notes  # fmt: skip
    texts = "\n".join(notes)
    assert "reads no variable 'enable_thinking', so it changes nothing; it reads none but" in texts
    assert "warning: the chat template leaves out or changes the run's system prompt." in texts
    assert "warning: the chat template writes 'ok' after an answer" in texts
    assert "SFT responses" not in texts
    template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    notes = check(tmp_path, [*overrides, f"render.chat_template={template}"]).notes
    assert "the chat template leaves out or changes: questions (" in "\n".join(notes)
