"""The HTML of a report: one self-contained file with all texts escaped.

Completions are untrusted texts of a model. The page's content security policy allows no requests.
"""

import html
import json
import re
from collections.abc import Sequence

from plotly.offline import get_plotlyjs

from megatron_rl.observe.report.figures import Plot
from megatron_rl.observe.report.material import MAX_SHOWN_CHARS, Answer, Run

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1280px; padding: 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .2rem; }
p.note { color: #555; margin: .1rem 0 .4rem; } nav a { margin-right: 1rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(560px, 1fr)); gap: 0 1.5rem; }
pre { background: #f6f6f6; padding: .6rem; overflow-x: auto; white-space: pre-wrap;
      overflow-wrap: anywhere; unicode-bidi: isolate; }
.pair pre { max-height: 20rem; overflow-y: auto; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.right { border-left: 4px solid #2ca02c; } .wrong { border-left: 4px solid #d62728; }
summary { cursor: pointer; }
"""
_PARTS = ("summary", "plots", "timeline", "examples", "configuration")
_SCRIPT = """
for (const [id, figure] of Object.entries(FIGURES)) {
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false});
}
"""
_VISIBLE = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
)
"""Signs of Unicode for control characters, such as U+241B for ESC; the later ones have none."""


def render(
    runs: Sequence[Run], texts: Sequence[str], *, timelines: Sequence[Plot], plots: Sequence[Plot]
) -> str:
    """The page; texts: one summary per run."""
    title = " and ".join(run.name for run in runs)
    small = {f"plot-{number}": plot for number, plot in enumerate(plots)}
    wide = {f"timeline-{number}": plot for number, plot in enumerate(timelines)}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">',
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_escaped(title)}</h1>",
        "<nav>" + "".join(f'<a href="#{name}">{name}</a>' for name in _PARTS) + "</nav>",
        '<h2 id="summary">Summary</h2>',
        *(f"<h3>{_escaped(r.name)}</h3>{_text(t)}" for r, t in zip(runs, texts, strict=True)),
        '<h2 id="plots">Plots</h2>',
        '<div class="grid">', *(_box(name, plot) for name, plot in small.items()), "</div>",
        '<h2 id="timeline">Timeline</h2>', *(_box(name, plot) for name, plot in wide.items()),
        '<h2 id="examples">Before and after</h2>', *(_examples(run) for run in runs),
        '<h2 id="configuration">Configuration</h2>', *(_configuration(run) for run in runs),
        f"<script>{get_plotlyjs()}</script>",
        f"<script>const FIGURES = {_json(small | wide)};{_SCRIPT}</script>",
        "</body></html>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _box(name: str, plot: Plot) -> str:
    title, explained = _escaped(plot.title), _escaped(plot.explained)
    return (
        f'<section><h2>{title}</h2><p class="note">{explained}</p>'
        f'<div class="plot" id="{name}"></div></section>'
    )


def _json(figures: dict[str, Plot]) -> str:
    """Figures as JSON in which no text can end the script element."""
    whole = {name: json.loads(plot.figure.to_json()) for name, plot in figures.items()}
    text = json.dumps(whole, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(text: str) -> str:
    """The text as HTML; control characters become visible: browsers hide most of them."""
    return html.escape(text.translate(_VISIBLE))


def _text(text: str) -> str:
    return f"<pre>{_escaped(text)}</pre>"


def _examples(run: Run) -> str:
    if not run.examples:
        return f'<p class="note">{_escaped(run.name)}: no evaluation before and after.</p>'
    shown = []
    for example in run.examples:
        problem = _escaped(_cut(example.before.problem))
        sides = _side("before", example.before) + _side("after", example.after)
        accepted = [example.before.answer, *example.before.other_answers]
        reference = _escaped(_cut(" or ".join(accepted)))
        shown.append(
            f"<details open><summary>{problem}</summary><p class='note'>reference answer: "
            f"{reference}</p><div class='pair'>{sides}</div></details>"
        )
    return f"<h3>{_escaped(run.name)}</h3>" + "".join(shown)


def _side(when: str, answer: Answer) -> str:
    kind = "right" if answer.reason == "correct" else "wrong"
    reward = "not graded" if answer.reward is None else f"reward {answer.reward:.3g}"
    head = html.escape(f"{when}: {answer.reason}, {reward}")
    text = _escaped(_cut(answer.text))
    return f"<div><p class='note'>{head}</p><pre class='{kind}'>{text}</pre></div>"


def _cut(text: str) -> str:
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[:MAX_SHOWN_CHARS]} ... ({len(text) - MAX_SHOWN_CHARS} more characters)"


def _configuration(run: Run) -> str:
    path = run.folder / "config.toml"
    text = path.read_text() if path.exists() else ""
    # People pass reports on, and by the label sockets know the run's processes.
    text = re.sub(r'(?m)^label = ".+"$', 'label = "(left out)"', text)
    name = _escaped(run.name)
    return f"<details><summary>{name}/config.toml</summary>{_text(text)}</details>"
