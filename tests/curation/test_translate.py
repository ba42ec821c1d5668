"""Every number and formula survives a translation, whatever the translator does."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.curation.rows import Row, read_rows
from megatron_rl.curation.tool import place_of
from megatron_rl.curation.translate import (
    NAMES,
    Protected,
    TranslateOptions,
    Translator,
    choose,
    protect,
    restore,
    translate,
)
from megatron_rl.protocol.prompt import normalized
from megatron_rl.protocol.types import ChatMessage, Prompt

# English, and what a translator makes of it; the pieces may come in another order.
PHRASES = {
    "A farmer has {0} sheep and buys {1} more. How large is {2} when all of them are counted?": {
        "fr": "Un fermier achète {1} moutons en plus des {0} qu'il a déjà. Combien vaut {2} quand "
        "on les compte tous ?",
        "es": "Un granjero tiene {0} ovejas y compra {1} más. ¿Cuánto vale {2} cuando se cuentan "
        "todas?",
        "it": "Un contadino ha {0} pecore e ne compra altre {1}. Quanto vale {2} quando si contano "
        "tutte?",
        "de": "Ein Bauer hat {0} Schafe und kauft {1} weitere. Wie groß ist {2}, wenn alle gezählt "
        "werden?",
        "zh": "一位农民有 {0} 只羊，又买了 {1} 只。把所有的羊都数一遍，{2} 等于多少？",
        "ru": "У фермера есть {0} овец, и он покупает ещё {1}. Чему равно {2}, если посчитать "
        "всех?",
    },
    "Find the value of {0} for which the equation {1} has a solution that is below {2}.": {
        "fr": "Trouver la valeur de {0} pour laquelle l'équation {1} a une solution inférieure à "
        "{2}.",
        "es": "Encuentra el valor de {0} para el cual la ecuación {1} tiene una solución menor que "
        "{2}.",
        "it": "Trovare il valore di {0} per cui l'equazione {1} ha una soluzione minore di {2}.",
        "de": "Bestimme den Wert von {0}, für den die Gleichung {1} eine Lösung unter {2} besitzt.",
        "zh": "求 {0} 的值，使得方程 {1} 有一个小于 {2} 的解。",
        "ru": "Найдите значение {0}, при котором уравнение {1} имеет решение меньше {2}.",
    },
}


def number(rng: random.Random) -> str:
    return rng.choice(
        [str(rng.randrange(2, 9999)), f"{rng.randrange(1, 99)}.{rng.randrange(10, 99)}",
         f"{rng.randrange(1, 99)},{rng.randrange(100, 999)}", f"{rng.randrange(1, 99)}%"]
    )  # fmt: skip


def formula(rng: random.Random) -> str:
    a, b = rng.randrange(2, 99), rng.choice("xyzn")
    return rng.choice(
        [f"${b}^{{{a}}} + \\frac{{{b}}}{{{a}}}$", f"\\({b}_{{{a}}} \\le {a}\\)",
         f"$$\\sum_{{{b}=1}}^{{{a}}} {b}$$", f"\\[\\sqrt[{a}]{{{b}}}\\]",
         f"\\begin{{align}}{b} &= {a}\\end{{align}}", f"`f({b}) = {a}`", f"${a}\\%$"]
    )  # fmt: skip


def case(index: int) -> tuple[str, str, list[str]]:
    """(phrase, question, its pieces)."""
    rng = random.Random(index)
    phrase = rng.choice(list(PHRASES))
    makers = rng.choices((number, formula), k=3)
    pieces = [maker(rng) for maker in makers]
    return phrase, phrase.format(*pieces), pieces


def honest(text: str, language: str) -> str:
    """Knows the phrases, with signs in their gaps."""
    for phrase, translations in PHRASES.items():
        gaps = [re.escape(part) for part in re.split(r"\{\d\}", phrase)]
        if found := re.fullmatch("(.+?)".join(gaps), text):
            return translations[language].format(*found.groups())
    raise AssertionError(text)


def asking(translate_text: Callable[[str, str], str]) -> Translator:
    return lambda request: translate_text(request.text, request.language)


def rows(count: int) -> list[Row]:
    return [
        Row(
            {"question": case(i)[1]},
            Prompt(f"p{i}", "math", [ChatMessage("user", case(i)[1])], "7", place=f"p:{i}"),
        )
        for i in range(count)
    ]


def test_every_number_and_formula_survives_in_1000_cases() -> None:
    outcome = translate(rows(1000), asking(honest), TranslateOptions(share=1.0))
    figures = outcome.report.figures
    assert figures["refused"] == {} and figures["not_eligible"] == {}
    assert figures["chosen"] == 1000 == outcome.report.changed["translated"]
    assert set(figures["languages"]) == set(NAMES)
    # 1000 draws of one in six: 167, give or take 12.
    assert all(abs(count - 167) < 50 for count in figures["languages"].values())
    for i, row in enumerate(outcome.rows):
        phrase, _, pieces = case(i)
        language = row.prompt.language
        # What stands in the gaps of the phrase in the other language, found without our patterns.
        assert row.prompt.question == PHRASES[phrase][language].format(*pieces)
        assert row.prompt.id == f"p{i}/{language}" and row.fields["language"] == language


def sign(rng: random.Random, text: str) -> re.Match[str]:
    return rng.choice(list(re.finditer(r"⟦\d+⟧", text)))


def mutate(text: str, rng: random.Random) -> str:
    """What a careless or hostile translator may do to a translation."""
    one, other = sign(rng, text), sign(rng, text)
    place = rng.randrange(len(text))
    return rng.choice(
        [
            text.replace(one[0], "", 1),
            text.replace(one[0], one[0] * 2, 1),
            text.replace(one[0], f"{one[0]}{other[0]}", 1).replace(other[0], "", 1),
            text.replace(one[0], "⟦99⟧", 1),
            text.replace(one[0], one[0].strip("⟦⟧"), 1),
            text.replace(one[0], one[0].replace("⟦", "["), 1),
            text.replace("⟧", "⟧ ⟧", 1),
            text[:place] + rng.choice("0123456789") + text[place:],
            text[:place] + rng.choice(["$x$", "\\frac12", "٣", "４", "²", "`", "{", "=", "½"])
            + text[place:],
            text[:place],
            text.replace(one[0], "#").replace(other[0], one[0]).replace("#", other[0]),
            re.sub(r"⟦\d+⟧", "⟦0⟧", text),
            text.replace(" ", ""),
            text + text,
        ]
    )  # fmt: skip


def numbers_and_latex(text: str) -> Counter[str]:
    """Independent of our patterns: runs of digits with what binds them, and commands."""
    return Counter(re.findall(r"[0-9]+(?:[.,][0-9]+)*%?|\\[A-Za-z]+|[$^_{}\\`]", text))


def test_nothing_that_a_hostile_translator_changes_is_taken() -> None:
    rng = random.Random(11)
    taken, refused = 0, Counter()
    for i in range(3000):
        phrase, question, pieces = case(i)
        protected = protect(question)
        assert protected is not None
        language = rng.choice(list(NAMES))
        translated = mutate(honest(protected.text, language), rng)
        restored, refusal = restore(question, protected, translated)
        if refusal:
            refused[refusal] += 1
            continue
        taken += 1
        assert numbers_and_latex(restored) == numbers_and_latex(question)
        assert all(restored.count(p) >= question.count(p) for p in pieces)
    # Signs in another order and spaces left out harm nothing; all else is refused.
    assert taken < 700
    assert set(refused) == {
        "placeholder_lost", "placeholder_added", "placeholder_broken", "number_added",
        "formula_added", "pieces_run_together",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("translator", "reason"),
    [
        (lambda text, language: "", "no_translation"),
        (lambda text, language: text, "other_language"),
        (lambda text, language: honest(text, "de" if language != "de" else "fr"), "other_language"),
        (lambda text, language: " ".join(re.findall(r"⟦\d+⟧", text)), "language_unknown"),
        (lambda text, language: honest(text, language) + " und noch mehr davon" * 90, "too_long"),
        (lambda text, language: re.sub("⟦.⟧", "", honest(text, language)), "placeholder_lost"),
    ],
)
def test_refused_translations_leave_the_problem_as_it_was(
    translator: Callable[[str, str], str], reason: str
) -> None:
    outcome = translate(rows(20), asking(translator), TranslateOptions(share=1.0))
    assert [row.prompt.id for row in outcome.rows] == [f"p{i}" for i in range(20)]
    assert outcome.report.figures["refused"] == {reason: 20}
    assert len(outcome.report.figures["refused_rows"]) == 20


def test_the_share_is_drawn_by_the_question_alone() -> None:
    first, _ = choose(rows(1000), TranslateOptions())
    again, _ = choose(rows(2000)[::-1], TranslateOptions())
    names = {item.row.prompt.id for item in first}
    assert 70 < len(first) < 130
    early = {item.row.prompt.id for item in again if int(item.row.prompt.id[1:]) < 1000}
    assert early == names
    other, _ = choose(rows(1000), TranslateOptions(seed=1))
    assert {item.row.prompt.id for item in other} != names


def test_problems_that_cannot_be_translated_are_counted() -> None:
    good = rows(1)[0]
    german = good.with_question("Wie viele Schafe hat der Bauer, wenn er noch drei weitere kauft?")
    lines = [
        good.replace(id="a").replace(answer="Tuesday"),
        german.replace(id="b"),
        good.replace(id="c").with_question(good.prompt.question + " ⟦0⟧"),
        good.replace(id="d").replace(language="fr"),
        good.replace(id="e").replace(answer="5\\text{ cm}"),
    ]
    chosen, ineligible = choose(lines, TranslateOptions(share=1.0))
    assert [item.row.prompt.id for item in chosen] == ["e"]
    assert ineligible == {
        "answer_in_words": 1, "not_english": 1, "has_placeholders": 1, "language_given": 1,
    }  # fmt: skip


def test_prices_are_numbers_and_formulas_are_whole() -> None:
    protected = protect("It costs $5 and $7, or 3 - x^2 in $a\\$b$; see \\(c\\) and \\textbf{all}.")
    assert protected is not None
    assert protected.pieces == (
        "$5", "$7", "3", "^", "2", "$a\\$b$", "\\(c\\)", "\\textbf",
    )  # fmt: skip
    assert restore("", Protected("", ()), "⟦0⟧") == ("", "placeholder_added")


def test_a_file_of_translations_is_filled_in_between_two_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, asked, out = (tmp_path / name for name in ("p.jsonl", "r.jsonl", "o.jsonl"))
    lines = [{"id": f"p{i}", "question": case(i)[1], "answer": "7"} for i in range(30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    question_of = {line["id"]: normalized(line["question"]) for line in lines}
    share = ["--share", "0.5"]
    assert main(["data", "translate", str(path), "--out", str(asked), "--requests", *share]) == 0
    requests = [json.loads(line) for line in asked.read_text().splitlines()]
    assert 5 < len(requests) < 25
    filled = tmp_path / "t.jsonl"
    done = [r | {"text": honest(r["text"], r["language"])} for r in requests[1:]]
    filled.write_text("".join(json.dumps(line) + "\n" for line in done))
    command = ["data", "translate", str(path), "--out", str(out), "--translations", str(filled)]
    assert main([*command, "--keep-source", *share]) == 0
    written = read_rows(out)
    assert len(written) == 30 + len(done)
    report = json.loads((tmp_path / "o.jsonl.report.json").read_text())
    assert report["added"] == {"translated": len(done)}
    assert report["figures"]["refused"] == {"no_translation": 1}
    assert report["figures"]["translations_of_no_request"] == 0
    assert "warning" not in capsys.readouterr().out
    # Without --share a tenth is chosen; ids that no problem has are never asked for.
    first = {r["id"] for r in requests if place_of(0, "translate", question_of[r["id"]]) < 0.1}
    filled.write_text(filled.read_text() + json.dumps(done[0] | {"id": "ghost"}) + "\n")
    unused = 1 + sum(one["id"] not in first for one in done)
    assert 1 < unused
    assert main([*command, "--keep-source"]) == 0
    report = json.loads((tmp_path / "o.jsonl.report.json").read_text())
    assert report["figures"]["translations_of_no_request"] == unused
    said = " ".join(capsys.readouterr().out.split())
    assert f"warning: {unused} of {len(done) + 1} translations are not used" in said


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(InputError, match="--languages"):
        TranslateOptions(languages=["nl"])
