"""Pre-tokenisation: splitting of texts into words, numbers, punctuation and spaces, which merges do not cross.

Patterns are those of tokenizer files, in which \\p{L} is any letter, \\p{N} any digit and \\s Unicode's white space.
Python's `re` lacks classes by category, so they are expanded here.
"""

from __future__ import annotations

import importlib
import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from meshlib.core.errors import GraphError

# Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; openai/gpt-2: src/encoder.py.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Python's \s has four more, \x1c to \x1f
MOST_CHARACTERS, MOST_COUNT, MOST_ENDLESS = 10_000, 1000, 3  # limit of patterns; published ones have 400, 3 and 2
parser: Any = importlib.import_module("re._parser")  # the parse trees of `re`
_ESCAPE = re.compile(r"\\(?:p\{\^?(\w+)\}|P\{(\w+)\}|(.))", re.S)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern compiled for `re`.

    Raises: GraphError for one that `re` cannot express.
    >>> compiled(GPT2).findall("It's 3 cafés,  no?")
    ['It', "'s", ' 3', ' cafés', ',', ' ', ' no', '?']
    """
    try:
        if len(pattern) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(pattern)} characters, more than {MOST_CHARACTERS}")
        python = "".join(_translated(pattern))
        _check_time(parser.parse(python), "")
        return re.compile(python)
    except (re.error, ValueError, OverflowError, RecursionError) as fault:
        raise GraphError(f"the pattern {pattern!r:.120} can't be used here: {fault}") from None


def _check_time(parsed: Any, repeated: str) -> None:
    """Raise ValueError for a pattern that may take more than cubic time in the length of a text: nested repeats."""
    endless = 0
    for op, of in parsed:
        name = str(op)
        if name.startswith("GROUPREF"):
            raise ValueError("it has a back-reference")
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = of
            count = f"{{{least},{'' if most == parser.MAXREPEAT else most}}}"
            if least > MOST_COUNT or (most != parser.MAXREPEAT and most > MOST_COUNT):
                raise ValueError(f"it repeats something {count} times, more than {MOST_COUNT}")
            if repeated and least != most:
                raise ValueError(f"a part repeated {repeated} times has a part repeated {count} times")
            endless += most == parser.MAXREPEAT
            _check_time(inner, count if most > 1 else repeated)
        elif name == "BRANCH":
            if repeated:
                raise ValueError(f"a part repeated {repeated} times has alternatives, which may overlap")
            for branch in of[1]:
                _check_time(branch, repeated)
        elif name in ("SUBPATTERN", "ATOMIC_GROUP", "ASSERT", "ASSERT_NOT", "GROUPREF_EXISTS"):
            _check_time(of if name == "ATOMIC_GROUP" else of[-1], repeated)
    if endless > MOST_ENDLESS:
        raise ValueError(f"it has {endless} unbounded repeats in a row, more than {MOST_ENDLESS}")


def escaped(text: str) -> str:
    """A pattern that matches this text literally."""
    return "".join(c if c.isalnum() or c == "_" else f"\\{c}" for c in text)


def words(text: str, pattern: str) -> Iterator[str]:
    """The parts of a text, which concatenate to the text, even where the pattern does not match."""
    at = 0
    for match in compiled(pattern).finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        if match.end() > match.start():
            yield match[0]
        at = match.end()
    if at < len(text):
        yield text[at:]


def _translated(pattern: str) -> Iterator[str]:
    at, inside = 0, False
    while at < len(pattern):
        if pattern[at] == "\\":
            escape = _ESCAPE.match(pattern, at)
            if escape is None:
                raise ValueError(f"a lone backslash at {at}")
            yield _class(escape, inside)
            at = escape.end()
            continue
        if pattern[at] == "[" and not inside:
            inside = True
        elif pattern[at] == "[":
            raise ValueError("nested character classes are not supported")
        elif pattern[at] == "]":
            inside = False
        yield pattern[at]
        at += 1


def _class(match: re.Match[str], inside: bool) -> str:
    """A category class expanded to characters; other items unchanged."""
    negated = match[2] is not None or "{^" in match[0] or match[3] == "S"
    if match[1] or match[2]:
        members = _category(match[1] or match[2])
    elif match[3] in ("s", "S"):
        members = WHITE
    else:
        return match[0]
    if inside and negated:
        raise ValueError(f"{match[0]} within a character class is not supported")
    return members if inside else f"[{'^' if negated else ''}{members}]"


@cache
def _runs() -> list[tuple[str, int, int]]:
    """All of Unicode as runs of one category: (name, first character, last character)."""
    names = [*map(unicodedata.category, map(chr, range(sys.maxunicode + 1))), ""]
    ends = [n for n, (name, following) in enumerate(pairwise(names)) if name != following]
    return [(names[last], first + 1, last) for first, last in pairwise([-1, *ends])]


@cache
def _category(name: str) -> str:
    """All characters of a category, such as L or Lu, as the inside of a character class."""
    runs = [f"\\U{first:08x}-\\U{last:08x}" for category, first, last in _runs() if category.startswith(name)]
    if not runs:
        raise ValueError(f"no characters of category {name}")
    return "".join(runs)
