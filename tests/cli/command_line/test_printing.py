"""Lines and tables that change no text; progress as lines, or as a bar of which nothing is left."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.printing import (
    PLAIN_S,
    counted,
    open_console,
    progress,
    say,
    show_table,
)
from megatron_rl.config.errors import printable


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(seconds: list[float], *, in_bytes: bool = False, unit: int = 1) -> list[str]:
    """What is printed when one of four parts takes each of these times."""
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=60)
    with progress(console, "parts", in_bytes=in_bytes, clock=clock) as report:
        for done, taken in enumerate(seconds, 1):
            clock.now += taken
            report(done * unit, 4 * unit)
    return out.getvalue().splitlines()


def test_a_short_work_prints_nothing() -> None:
    assert lines_of([2.0, 2.0, 2.0, 2.0]) == []


def test_a_long_work_prints_a_line_every_so_often() -> None:
    # After 6, 12, 18, 24 s: the second is the first beyond 10 s, the fourth 12 s later.
    assert PLAIN_S == 10.0
    assert lines_of([6.0] * 4) == [
        "parts: 2 of 4 (50%), 12 s left",
        "parts: 4 of 4 (100%), 0 s left",
    ]


def test_bytes_are_gigabytes() -> None:
    assert lines_of([30.0], in_bytes=True, unit=250_000_000) == [
        "parts: 0.25 GB of 1.00 GB (25%), 90 s left"
    ]


def test_items_are_counted_when_they_are_done() -> None:
    seen: list[tuple[int, int | None]] = []
    for item in counted("abc", 3, lambda done, total: seen.append((done, total))):
        assert seen[-1] == ("abc".index(item), 3)
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_terminal_has_a_bar_that_goes() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60)
    with progress(console, "[parts]") as report:
        report(1, 4)
    text = out.getvalue()
    assert "[parts]" in text and "1/4" in text
    # The line is erased at the end.
    assert "\x1b[2K" in text


def test_control_characters_of_a_model_become_blanks_and_letters_stay() -> None:
    assert printable("a\x1b[31mé\r\x9b1m\x07\u2028\u202e√") == "a [31mé  1m   √"


def test_codes_of_emojis_and_markup_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = "p.jsonl:100: sort :fire: [bold]12[/bold]"
    console = open_console()
    say(console, line)
    table = Table("task", box=None, pad_edge=False)
    table.add_row(line)
    show_table(console, table)
    assert [text.rstrip() for text in capsys.readouterr().out.splitlines()] == [line, "task", line]


def printed_table(width: int, *, is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=is_terminal, color_system=None, legacy_windows=False
    )
    table = Table("name of a thing", "p", "sent, received", "B - A")
    table.add_row("a text of several words", "3.81e-06", "1,234,567 8,901,234", "+0.123456")
    show_table(console, table)
    return out.getvalue()


def test_a_file_has_one_line_a_row_however_narrow() -> None:
    lines = printed_table(20, is_terminal=False).splitlines()
    # A frame of three lines, the titles and the row.
    assert len(lines) == 5
    cells = [cell.strip() for cell in lines[3].split("│") if cell.strip()]
    row = ["a text of several words", "3.81e-06", "1,234,567 8,901,234", "+0.123456"]
    assert cells == row


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_folds_at_blanks_only(width: int) -> None:
    text = printed_table(width, is_terminal=True)
    for word in ("several", "received", "3.81e-06", "1,234,567", "8,901,234", "+0.123456"):
        assert word in text
    assert "…" not in text


def test_a_word_longer_than_any_number_folds_in_a_terminal() -> None:
    out = io.StringIO()
    table = Table("path", box=None, pad_edge=False)
    table.add_row("/" + "a" * 60)
    show_table(Console(file=out, width=40, force_terminal=True, color_system=None), table)
    assert "".join(out.getvalue().split()) == "path/" + "a" * 60
    assert max(map(len, out.getvalue().splitlines())) == 40
