"""The table FORMAT_CHECKS: whether a response has the shape that the system prompt asks for.

Runs in the verifier and in its grading processes. Pure string code in time linear in any text.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from verification.code.languages import NO_PROGRAMS, find_language, plain_tag

# TeX skips blanks and one line break between a command and its argument. Possessive: a run of
# blanks without a brace behind it is not tried again.
_BOX_START = re.compile(r"\\boxed[ \t]*+(?:\r?\n[ \t]*+)?\{")
# An escaped character is consumed as a pair, so that \{ and \} are not counted as braces.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# A line that can open or close a fenced block, perhaps behind the marker of a list. Possessive: a
# failed line is not tried again.
_FENCE_LINE = re.compile(
    r"^([ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]{1,4}+)?+)(`{3,}+|~{3,}+)([^\n]*+)$", re.MULTILINE
)
_LIST_ITEM = re.compile(r"^[ \t]*+(?:[-*+]|\d{1,9}[.)])[ \t]", re.MULTILINE)
FREE_BLANKS = 3
"""How far a fence may be indented outside lists, and a closing one deeper than its opening."""

_QUOTATION = re.compile(r"""(["'`])([^"'`\n]*+)\1""")
QUOTED_CHARS = 20
"""Most characters around think tags in a quotation that only names the tags."""

CUT_OFF_REFUSALS = frozenset(
    "no_think_end no_boxed box_before_think_end unclosed_box empty_box no_code_block "
    "code_before_think_end no_language_tag unclosed_code_block".split()
)
"""Refusals that a longer completion might have avoided.

A full box may follow an empty one, since the last box counts. No text repairs an empty code block,
since the first block with a tag counts.
"""


class FormatResult(NamedTuple):
    """Result of a format check of a response."""

    refusal: str = ""
    """Why the response earns nothing; empty when it passed."""
    answer: str = ""
    """Content of the box, source of the code block, or the whole text; empty when refused."""
    tag: str = ""
    """First word after the opening fence, in lower case; empty when refused."""
    thoughts: str = ""
    final: str = ""
    """Text after the thoughts; without thoughts the whole text."""


class FencedBlock(NamedTuple):
    """One fenced code block of a text."""

    tag: str
    """First word of the info string, as written; empty when there is none."""
    source: str
    is_closed: bool
    start: int
    """Offset of the opening fence's line."""
    end: int
    """Offset behind the closing fence's line; the end of the text when the block is open."""


def with_opening(text: str, prompt_tail: str, tags: ThinkTags = HOUSE_TAGS) -> str:
    """The response with the opening tag that its prompt ends with.

    Some chat templates (DeepSeek-R1's, QwQ's) open the thoughts for the model. prompt_tail comes
    from the generator, not from a model, so that a response cannot claim an opening.
    """
    return tags.open + text if tags.is_opened_by(prompt_tail) else text


def _with_tags_of_prompt(text: str, prompt_tail: str, tags: ThinkTags) -> str:
    """The response with the tags that its prompt ends with.

    Other templates (Qwen3's with enable_thinking=false) close empty thoughts, so that the answer
    follows.
    """
    if tags.is_closed_by(prompt_tail) and not text.startswith(tags.open):
        return tags.around("") + text
    return with_opening(text, prompt_tail, tags)


def think_box(text: str, prompt_tail: str = "", tags: ThinkTags = HOUSE_TAGS) -> FormatResult:
    """Thoughts between one pair of tags, then an answer in `\\boxed{}`; the last box counts.

    Refusals: no_think_start, several_think_tags, no_think_end, no_boxed, box_before_think_end,
    unclosed_box, empty_box.
    Source: Magistral (arXiv 2506.10910), section 2.2.1.
    """
    text = _with_tags_of_prompt(text, prompt_tail, tags)
    thoughts, final = split_response(text, tags)
    refusal = _check_think_tags(text, tags)
    checked = FormatResult(refusal) if refusal else box(final)
    if checked.refusal == "no_boxed" and has_box(thoughts):
        checked = checked._replace(refusal="box_before_think_end")
    return checked._replace(thoughts=thoughts, final=final)


def think_code(text: str, prompt_tail: str = "", tags: ThinkTags = HOUSE_TAGS) -> FormatResult:
    """Thoughts between tags, then a fenced code block in a known language; the first one counts.

    The paper asks for "at least one" such block. So a block of something else before it (an
    example's input, a sketch, a command) neither passes nor spoils the format check. Refusals:
    those of the think tags, and no_code_block, code_before_think_end, no_language_tag,
    unclosed_code_block, empty_code_block.
    Source: Magistral (arXiv 2506.10910), section 2.2.1.
    """
    text = _with_tags_of_prompt(text, prompt_tail, tags)
    thoughts, final = split_response(text, tags)
    refusal = _check_think_tags(text, tags)
    checked = FormatResult(refusal) if refusal else code(final)
    if checked.refusal == "no_code_block" and any(True for _ in fenced_blocks(thoughts)):
        checked = checked._replace(refusal="code_before_think_end")
    return checked._replace(thoughts=thoughts, final=final)


def box(text: str, prompt_tail: str = "", tags: ThinkTags = HOUSE_TAGS) -> FormatResult:
    """An answer in `\\boxed{}`, anywhere."""
    answer = last_box(text)
    if answer is None:
        return FormatResult("unclosed_box" if has_box(text) else "no_boxed")
    return FormatResult("" if answer.strip() else "empty_box", answer.strip(), final=text)


def code(text: str, prompt_tail: str = "", tags: ThinkTags = HOUSE_TAGS) -> FormatResult:
    """A fenced code block with a language tag, anywhere."""
    return _first_tagged_block(text)._replace(final=text)


def anything(text: str, prompt_tail: str = "", tags: ThinkTags = HOUSE_TAGS) -> FormatResult:
    """Any text that is not blank; all of it is the answer."""
    return FormatResult("" if text.strip() else "empty_response", text, final=text)


class FormatCheck(Protocol):
    """A format check of a response, given the end of the rendered prompt and the think tags."""

    def __call__(
        self, text: str, prompt_tail: str = "", tags: ThinkTags = HOUSE_TAGS, /
    ) -> FormatResult: ...


FORMAT_CHECKS: dict[str, FormatCheck] = {
    "think_box": think_box,
    "think_code": think_code,
    "box": box,
    "code": code,
    "none": anything,
}


def _first_tagged_block(text: str) -> FormatResult:
    """The first block in a known language, else the first in another one.

    Blocks of text, shell, data or output, and those without a tag, are passed over.
    """
    other: FormatResult | None = None
    is_any = False
    for block in fenced_blocks(text):
        is_any = True
        if not block.is_closed:
            return other or FormatResult("unclosed_code_block")
        is_known = find_language(block.tag) is not None
        if not is_known and (not block.tag or plain_tag(block.tag) in NO_PROGRAMS):
            continue
        check = FormatResult("", block.source, block.tag.lower())
        if not block.source.strip():
            check = FormatResult("empty_code_block")
        if is_known:
            return check
        other = other or check
    return other or FormatResult("no_language_tag" if is_any else "no_code_block")


def split_response(text: str, tags: ThinkTags = HOUSE_TAGS) -> tuple[str, str]:
    """Thoughts and final answer of a response; never raises.

    Thoughts end at the first closing tag. Without that tag the whole text is thoughts
    if it starts with the opening tag, else answer.
    """
    thoughts, tag, final = text.partition(tags.close)
    if not tag and not text.startswith(tags.open):
        return "", text
    return thoughts.removeprefix(tags.open), final


def has_box(text: str) -> bool:
    """Whether a `\\boxed{` begins anywhere in a text."""
    return _BOX_START.search(text) is not None


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed{...}` with balanced braces; None when it is absent or open."""
    start = max((match.end() for match in _BOX_START.finditer(text)), default=-1)
    if start < 0:
        return None
    depth = 1
    for match in _BRACE.finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start : match.start()]
    return None


def fenced_blocks(text: str) -> Iterator[FencedBlock]:
    """The fenced code blocks of a text in order, by the rules of CommonMark.

    A fence is 3 or more backticks or tildes after at most 3 spaces, or at any depth once a
    list has begun. The closing fence has the same character, is at least as long, at most 3 spaces
    deeper, and has nothing behind it. The info string of a backtick fence holds no backtick. The
    opening fence's indentation is taken off the content. Other deep indentation and block quotes
    open no block. Offsets count the text after its line ends have become \\n.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    item = _LIST_ITEM.search(text)
    list_start = item.start() if item else len(text)
    opening: re.Match[str] | None = None
    for line in _FENCE_LINE.finditer(text):
        if opening is None:
            opening = line if _opens(line, list_start) else None
        elif _closes(line, opening):
            yield _block(text, opening, line)
            opening = None
    if opening is not None:
        yield _block(text, opening, None)


def _check_think_tags(text: str, tags: ThinkTags) -> str:
    """Why the think tags are refused; empty when they are correct."""
    if not text.startswith(tags.open):
        return "no_think_start"
    if _has_several(text, tags):
        thoughts, _, final = text.partition(tags.close)
        if _has_several(thoughts, tags) or not _has_only_quoted_tags(final, tags):
            return "several_think_tags"
    return "" if tags.close in text else "no_think_end"


def _has_several(text: str, tags: ThinkTags) -> bool:
    return text.count(tags.open) > 1 or text.count(tags.close) > 1


def _has_only_quoted_tags(final: str, tags: ThinkTags) -> bool:
    """Whether think tags of the final part are all in programs or in quotation marks.

    A quotation holds hardly more than the tags: thoughts in quotation marks are thoughts.
    """
    rest, end = [], 0
    final = final.replace("\r\n", "\n").replace("\r", "\n")
    for block in fenced_blocks(final):
        if find_language(block.tag) is not None:
            rest.append(final[end : block.start])
            end = block.end
    rest.append(final[end:])

    def without_quoted_tags(quotation: re.Match[str]) -> str:
        is_name = len(tags.removed_from(quotation[2])) <= QUOTED_CHARS
        return "" if is_name else quotation[0]

    return not tags.is_in(_QUOTATION.sub(without_quoted_tags, "\n".join(rest)))


def _opens(line: re.Match[str], list_start: int) -> bool:
    if _width(line[1]) > FREE_BLANKS and line.start() < list_start:
        return False
    return line[2][0] == "~" or "`" not in line[3]


def _closes(line: re.Match[str], opening: re.Match[str]) -> bool:
    is_same_kind = line[2][0] == opening[2][0] and len(line[2]) >= len(opening[2])
    is_bare = not line[1].strip() and not line[3].strip(" \t")
    # Deeper fences are in a text within the program.
    return is_same_kind and is_bare and _width(line[1]) <= _width(opening[1]) + FREE_BLANKS


def _width(indentation: str) -> int:
    return len(indentation.expandtabs(4))


def _block(text: str, opening: re.Match[str], closing: re.Match[str] | None) -> FencedBlock:
    source = text[opening.end() + 1 : closing.start() if closing else len(text)]
    if opening[1]:
        width = _width(opening[1])
        # Where tabs indent the fence, they indent the content.
        step = rf"\t{{1,{-(-width // 4)}}}" if "\t" in opening[1] else rf" {{1,{width}}}"
        source = re.sub(rf"^{step}", "", source, flags=re.MULTILINE)
    tag, *_ = opening[3].split(maxsplit=1) or [""]
    end = closing.end() if closing else len(text)
    return FencedBlock(tag, source, closing is not None, opening.start(), end)
