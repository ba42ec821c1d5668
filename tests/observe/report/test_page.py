import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

from megatron_rl.cli import main as cli
from megatron_rl.observe.report.material import MAX_SHOWN_CHARS
from tests.chromium import needs_chromium, open_page
from tests.observe.report.runs import HOSTILE, SECRET, leave_run, lines, read, rollout, step_row


def report(folder: Path, *more: Path) -> Path:
    path = folder.parent / "report.html"
    names = [str(one) for one in (folder, *more)]
    assert cli.main(["report", *names, "--html", str(path)]) == 0
    return path


def without_scripts(page: str) -> str:
    return re.sub(r"<script>.*?</script>", "", page, flags=re.S)


def test_texts_of_a_model_are_text(tmp_path: Path) -> None:
    page = report(leave_run(tmp_path / "run")).read_text()
    # Two scripts of ours: the library and the plots; the reason that closes a script does not.
    assert page.count("<script>") == 2 and page.count("</script>") == 2
    shown = without_scripts(page)
    assert HOSTILE not in shown and "<img" not in shown
    assert "&lt;script&gt;document.title = &#x27;owned&#x27;&lt;/script&gt;" in shown
    assert f"... ({1_000_000 - MAX_SHOWN_CHARS} more characters)" in shown


def test_control_characters_of_a_model_are_visible(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run")
    for label in ("before", "after"):
        text = "a\0b\x1b[31mc\td\ne\x7ff\x9bg√"
        record = rollout(0, 0, [0], problem="NUL \0?", text=text)
        (run / "rollouts" / f"eval_{label}.jsonl").write_text(lines([record]))
    shown = without_scripts(report(run).read_text())
    # U+2400 stands for NUL, U+241B for ESC, U+2421 for DEL.
    assert "a\u2400b\u241b[31mc\td\ne\u2421f\\x9bg√</pre>" in shown
    assert "NUL \u2400?" in shown
    assert not {char for char in shown if unicodedata.category(char) == "Cc"} - {"\n", "\t"}


def test_an_extended_run_shows_no_completions_of_its_earlier_end(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    assert len(read(folder).examples) == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(lines([step_row(3, 130.0)]))
    assert read(folder).examples == []


class Addresses(HTMLParser):
    """Everything that a tag of a page points to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href", "action")]


def test_the_label_of_the_sockets_is_not_passed_on(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run")
    assert f'label = "{SECRET}"' in (folder / "config.toml").read_text()
    page = report(folder).read_text()
    assert SECRET not in page and "label = &quot;(left out)&quot;" in page


def test_nothing_is_fetched(tmp_path: Path) -> None:
    shown = without_scripts(report(leave_run(tmp_path / "run")).read_text())
    reader = Addresses()
    reader.feed(shown)
    assert len(reader.found) == 5 and all(str(one).startswith("#") for one in reader.found)
    assert "default-src &#x27;none&#x27;" in shown


def test_several_runs_are_beside_each_other(tmp_path: Path) -> None:
    first, second = leave_run(tmp_path / "a" / "run"), leave_run(tmp_path / "b" / "run")
    page = report(first, second).read_text()
    assert "<h1>a/run and b/run</h1>" in page and "a/run: reward" in page


@needs_chromium
def test_a_browser_draws_every_plot_and_runs_nothing_of_the_texts(tmp_path: Path) -> None:
    page = report(leave_run(tmp_path / "run"))
    document, complaints = open_page(page.as_uri(), tmp_path / "profile")
    assert complaints == []
    assert "<title>run</title>" in document
    boxes = re.findall(r'<div class="plot[^"]*" id="([\w-]+)"', document)
    drawn = re.findall(r'class="main-svg"', document)
    assert len(boxes) >= 8 and len(drawn) >= len(boxes)
    # Points, lines and bars: plots have data.
    assert document.count('class="point"') >= 10 and 'class="js-line"' in document
