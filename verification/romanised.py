"""Whether a sentence is Chinese or Japanese in Latin letters, which the classifier does not know.

Pure string code. All its words are made of the syllables of one of the two. So are many Italian
and some English sentences: ask only about a sentence that the classifier is not sure of.
"""

import re
import unicodedata

MIN_WORDS = 5
MIN_SHARE = 0.9
"""Share of the words that must be made of the syllables."""

_PINYIN = re.compile(
    "(?:(?:zh|ch|sh|[bpmfdtnlgkhjqxrzcsyw])?"
    "(?:[iu]ang|iong|[aeio]ng|iao|ian|uai|uan|[aeiou]i|[aeiou]o|[aeiuv]n|er|i[ae]|[uv][aeo]|iu"
    "|[aeiouv]))+"
)
_ROMAJI = re.compile(
    "(?:(?:[kstpcg](?=[kstpcg]))?(?:[kgnhbpmr]y|sh|ch|ts|[kgsztdnhbpmyrwjf])?[aiueo]"
    "|n(?![aiueoy]))+"
)
_WORD = re.compile("[a-z]{2,}")


def is_romanised(sentence: str) -> bool:
    """Whether nearly all words are syllables of pinyin, or of romaji, with or without accents."""
    plain = unicodedata.normalize("NFD", sentence.lower())
    words = _WORD.findall("".join(c for c in plain if not unicodedata.combining(c)))
    if len(words) < MIN_WORDS:
        return False
    return any(
        sum(pattern.fullmatch(word) is not None for word in words) >= MIN_SHARE * len(words)
        for pattern in (_PINYIN, _ROMAJI)
    )
