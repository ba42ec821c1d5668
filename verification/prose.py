"""The prose of a text: its parts in a human language, sentence by sentence.

Runs in grading processes on hostile text, in time linear in it. LaTeX, code, numbers, addresses
and tags are no prose, but prose inside them is. A model that thinks in `$...$`, in a code fence, in
backticks, in a box, in a tag or in a comment still thinks in a language.
"""

import re
from typing import NamedTuple

from verification.format import fenced_blocks

DENSE_LETTERS = 4
"""Letters for which one Chinese, Japanese or Korean character counts."""
MIN_WORDS = 4
"""Words in a row from which the content of a wrapper is prose: no formula has as many."""
MIN_SCATTERED_WORDS = 6
"""Words of three letters or more, anywhere, that make the content of a wrapper prose."""
MIN_WORDS_IN_CODE = 5
"""The same for a line of code without a comment sign: `for word in words` is none."""
MIN_PROSE_SHARE = 0.5
"""Share of the letters of a code block from which its prose counts: a few comments do not."""

KANA = "\u3041-\u3096\u30a1-\u30fa"
HAN = "\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_DENSE = f"{KANA}{HAN}\uac00-\ud7a3"
_NOT_DENSE = re.compile(f"[^{_DENSE}]+")

_MATH_ENVIRONMENTS = (
    "align|alignat|aligned|array|bmatrix|cases|displaymath|eqnarray|equation|gather|gathered"
    "|math|matrix|multline|pmatrix|split|tabular|tikzpicture|verbatim|vmatrix"
)
# Patterns begin with their literal, and look behind only then: many times faster.
_MATH_OPENER = re.compile(
    rf"\$\$|\\(?<!\\\\)[\[(]|\\begin\{{(?P<name>(?:{_MATH_ENVIRONMENTS})\*?)\}}"
)
_CLOSERS = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}
# As in pandoc, so that "$5 and $7" are prices: no space inside, no digit behind.
_DOLLAR_MATH = re.compile(r"\$(?<!\\\$)(?=\S)([^$\n]{1,1000}+)(?<!\s)\$(?![0-9])")
# With spaces inside it is a formula to no reader, and prose to us if it holds words.
_NESTED = r"(?:[^{}\\]++|\\.|\{"
_BOX = re.compile(
    rf"\\f?boxed\s*+\{{({_NESTED}{_NESTED}{_NESTED}[^{{}}]*+\}})*+\}})*+\}})*+)\}}", re.DOTALL
)
_COMMAND = re.compile(r"\\(?:begin|end)\{[^{}\n]*+\}|\\[A-Za-z]++\*?|\\.", re.DOTALL)
# Spaces of TeX: without them the words of a formula would run together.
_TEX_SPACE = re.compile(r"\\(?:q?quad(?![A-Za-z])|[ ,;:!>~])|~")
_INLINE_CODE = re.compile(r"`(?<!``)(`{0,2})(?!`)([^`\n]++)`\1(?!`)")
_HTML_COMMENT = re.compile(r"<!--((?:[^-]++|-(?!->))*+)-->")
_URL = re.compile(r"(?:https?://|www\.)[!-~]++")
_MAIL = re.compile(r"(?<![A-Za-z0-9.+-])[A-Za-z0-9.+-]++@[A-Za-z0-9.-]++")
_TAG = re.compile(r"</?([A-Za-z][^<>\n]*+)>")
# Names with digits or underscores, and names called as functions: x1, a_n, gcd(, np.array(.
_IDENTIFIER = re.compile(
    r"(?<![A-Za-z0-9_\u00c0-\u024f])(?:[A-Za-z]*+[0-9_][A-Za-z0-9_]*+|[A-Za-z]++(?=\())"
)
# Words glued into one name, a sentence in disguise: four joints or more.
_GLUED = re.compile(r"(?<![^\W_])([^\W\d_]{1,20}(?:_[^\W\d_]{1,20}){4,60})(?![^\W_])")
# Keeps letters, apostrophes, line ends, and the marks of all alphabets, which \w leaves out; drops
# numbers, letter-like symbols, mathematical alphabets, which \w takes in. Lone surrogates go too.
_NOISE = re.compile(
    r"[^\w'\u2019\u0300-\u1fff\n]+"
    r"|[\d_\xb2\xb3\xb9\xbc-\xbe\u2070-\u218b\u2460-\u24ff\U0001d400-\U0001d7ff]+"
)
_SINGLE_LETTER = re.compile(r"(?<![\w'\u2019])[A-Za-z\u0391-\u03c9](?![\w'\u2019])")
_SENTENCE_END = re.compile(
    r"[.!?:;\u2026](?=[\s\"'\u201d\u2019)\]]|$)|[\u3002\uff01\uff1f\uff1b\u061f\u0964]"
)
# A word has letters of one of the alphabets; between words are spaces and punctuation.
_LETTER = r"[^\W\d_][\u0300-\u036f\u0900-\u0dff]*+"
_WORD = rf"(?:{_LETTER})++(?:['\u2019-](?:{_LETTER})++)*+"
_SIGNS = r"\"\u201c\u201d(\u2013\u2014-"
_PAUSE = rf"(?:[,;:.!?\u2026){_SIGNS}]*+[ \t\n]++[{_SIGNS}]*+[ \t\n]*+)"
_RUN = re.compile(rf"{_WORD}(?:{_PAUSE}{_WORD})*+")
_DENSE_RUN = re.compile(rf"[{_DENSE}\u3001\uff0c\u3002]{{5,}}+")
_LONG_WORD = re.compile(rf"(?:{_LETTER}){{3,}}")
_COMMENT = re.compile(r"(?:^|(?<=\s))(?:#+|//+|--+|/?\*+|%+|;+|\"\"\"|''')[ \t]*+(?=\S)|\*/")
_KEYWORD = re.compile(
    r"(?:for|if|elif|else|while|with|def|class|return|import|from|try|except|raise|assert|print"
    r"|select|insert|update|delete|public|private|static|using|const|let|var|not|del|yield)\b",
    re.IGNORECASE,
)


class Prose(NamedTuple):
    """The sentences of a text: words separated by single spaces; none is empty."""

    open: list[str]
    """Plain prose."""
    wrapped: list[str]
    """Prose inside formulas, code, boxes, tags and glued names."""


def read_prose(text: str, *, is_answer: bool = False) -> Prose:
    """The sentences of a text. In an answer, boxes and comments in code do not count."""
    wrapped: list[str] = []

    def unwrap(found: re.Match[str]) -> str:
        wrapped.append(_words_of(found[found.lastindex or 0]))
        return " "

    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _open_fenced(text, wrapped, has_comments=not is_answer)
    text = _URL.sub(" ", _INLINE_CODE.sub(unwrap, text))
    if "@" in text:
        text = _MAIL.sub(" ", text)
    text = _TAG.sub(unwrap, _HTML_COMMENT.sub(unwrap, text))
    text = _DOLLAR_MATH.sub(unwrap, _open_formulas(text, wrapped))
    text = _COMMAND.sub(" ", _BOX.sub(" " if is_answer else unwrap, text))
    text = _GLUED.sub(unwrap, text)
    return Prose(_sentences(text), _sentences("\n".join(wrapped).replace("_", " ")))


def _sentences(text: str) -> list[str]:
    text = _SENTENCE_END.sub("\n", text)
    for pattern in (_IDENTIFIER, _NOISE, _SINGLE_LETTER):
        text = pattern.sub(" ", text)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return [line for line in lines if line]


def strip_for_language(text: str) -> str:
    """The open prose of a text on one line: its words, separated by single spaces."""
    return " ".join(read_prose(text).open)


def count_letters(prose: str) -> int:
    """Letters of a stripped text; characters of Chinese, Japanese and Korean count for four."""
    others = sum(prose.count(mark) for mark in " '\u2019")
    return len(prose) - others + (DENSE_LETTERS - 1) * count_dense(prose)


def count_dense(prose: str) -> int:
    """Chinese, Japanese and Korean characters."""
    return len(_NOT_DENSE.sub("", prose))


def _words_of(content: str) -> str:
    """The words of a formula, a box, a tag or inline code if they are prose, on a line."""
    content = _COMMAND.sub(" ", _TEX_SPACE.sub(" ", content.replace("_", " ")))
    runs = [run[0] for run in _RUN.finditer(content)]
    # A sentence may be cut into pieces by signs: then it is known by the number of its words.
    is_prose = any(_count_words(run) >= MIN_WORDS for run in runs)
    if is_prose or sum(len(_LONG_WORD.findall(run)) for run in runs) >= MIN_SCATTERED_WORDS:
        return " ".join(runs)
    return "\n".join(run[0] for run in _DENSE_RUN.finditer(content))


def _count_words(run: str) -> int:
    """Words of a run; 0 if most are as short as names of variables."""
    words = [word for word in run.split() if len(word) > 1]
    return len(words) if 2 * len(_LONG_WORD.findall(run)) >= len(words) else 0


def _open_fenced(text: str, wrapped: list[str], *, has_comments: bool) -> str:
    kept, position = [], 0
    for block in fenced_blocks(text):
        kept.append(text[position : block.start])
        wrapped.append(_prose_of_code(block.source, has_comments=has_comments))
        position = block.end
    return "\n".join([*kept, text[position:]])


def _prose_of_code(source: str, *, has_comments: bool) -> str:
    """The prose of a code block if most of the block is prose."""
    found = [_prose_of_line(line, has_comments=has_comments) for line in source.split("\n")]
    prose = "\n".join(line for line in found if line.strip())
    letters = sum(map(str.isalpha, source))
    return prose if sum(map(str.isalpha, prose)) >= MIN_PROSE_SHARE * letters else ""


def _prose_of_line(line: str, *, has_comments: bool) -> str:
    """The prose of a line of code: its comments, and text that is no code."""
    code, *comments = _COMMENT.split(line)
    prose = comments if has_comments else []
    if not _is_statement(code):
        code = _GLUED.sub(lambda name: name[0].replace("_", " "), _TEX_SPACE.sub(" ", code))
        runs = [run[0] for run in _RUN.finditer(code)]
        prose += [run for run in runs if _count_words(run) >= MIN_WORDS_IN_CODE]
        prose += [run[0] for run in _DENSE_RUN.finditer(code)]
    return "\n".join(prose)


def _is_statement(code: str) -> bool:
    is_sentence = code.rstrip().endswith((".", "!", "?"))
    return _KEYWORD.match(code.strip()) is not None and not is_sentence


def _open_formulas(text: str, wrapped: list[str]) -> str:
    """Text without displayed formulas and \\(...\\); those left open stay."""
    kept, position, absent = [], 0, set()
    for opener in _MATH_OPENER.finditer(text):
        name = opener["name"]
        closer = f"\\end{{{name}}}" if name else _CLOSERS[opener[0]]
        # A closer once missed is missing further on, too: searched once, time stays linear.
        if opener.start() < position or closer in absent:
            continue
        end = text.find(closer, opener.end())
        if end < 0:
            absent.add(closer)
            continue
        # Of several openers before the closer the last counts: the others are strays.
        start = max(text.rfind(opener[0], opener.end(), end), opener.start())
        inner = text[start + len(opener[0]) : end]
        kept.append(text[position:start])
        wrapped.append(_words_of(inner))
        position = end + len(closer)
    return " ".join([*kept, text[position:]])
