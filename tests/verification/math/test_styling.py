"""LaTeX that only changes looks is taken away, and what it hides stays hidden."""

import pytest

from verification.math.answer import compare
from verification.math.text import normalise


@pytest.mark.parametrize(
    "text",
    [
        "\\color{red}{5}", "{\\color{blue}5}", "\\color{red} 5", "\\textcolor[rgb]{1,0,0}{5}",
        "\\colorbox{yellow}{5}", "\\fcolorbox{red}{white}{5}", "\\underline{5}", "\\fbox{5}",
        "\\underline{\\underline{5}}", "\\boxed {5}", "\\bold{5}", "\\mathbf{5}", "\\textbf{5}",
        "5\\hfill", "5\\phantom{0}", "\\hspace{2mm}5", "5 \\label{eq:a}", "\\left. 5 \\right.",
        "= 5", "5\\ ", "{\\large 5}", "5\\kern1pt", "\\mbox{5}", "\\num{5}", "\\boxed{\\fbox{5}}",
    ],
)  # fmt: skip
def test_looks_are_taken_away(text: str) -> None:
    assert normalise(text) == "5"


@pytest.mark.parametrize(
    "text",
    ["\\phantom{5}", "\\hspace{5}", "\\color{5}{6}", "\\underline{5}0", "\\textcolor{red}{5}0",
     "\\cancel{5}", "\\sout{5}", "\\label{5}", "\\overline{5}", "\\color{red}{-}5", "\\not 5"],
)  # fmt: skip
def test_what_is_hidden_or_changed_is_not_the_answer(text: str) -> None:
    assert not compare(text, "5").is_correct
    assert not compare("5", text).is_correct


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("\\SI{5}{\\kilogram}", "5\\text{kilogram}"), ("\\qty{5}{km}", "5\\text{km}"),
        ("\\SI{20}{\\kilo\\metre\\per\\hour}", "20\\text{kilometre/hour}"),
        ("5\\,\\unit{m.s^{-1}}", "5\\text{m s^-1}"), ("\\ang{30}", "30\\deg"),
        ("32\\text{,}349", "32,349"), ("8\\text{:}30", "8:30"), ("30^{\\prime}", "30'"),
        ("f^\\prime(x)", "f'(x)"),
        ("\\begin{pmatrix}1\\\\[4pt]2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("\\begin{pmatrix}1\\cr2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ],
)  # fmt: skip
def test_commands_are_spelled_out(text: str, spelling: str) -> None:
    assert normalise(text) == spelling
    assert normalise(spelling) == spelling
