"""Tokenisation by byte pairs: splitting of texts into words, learning of merges, and merging of a word's bytes.

Patterns are those of tokenizer files, in which \\p{L} is any letter, \\p{N} any digit and \\s Unicode's white space.
Python's `re` lacks classes by category, so they are expanded here.

Source: Gage, "A new algorithm for data compression", 1994; Sennrich et al., arXiv:1508.07909.
"""

from __future__ import annotations

import heapq
import importlib
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Pair = tuple[int, int]


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


def learnt(
    counts: Mapping[bytes, int], merges: int, progress: Callable[[int, int], object] | None = None
) -> list[Pair]:
    """The merges in order: always the most frequent pair; ties go to the lower ids.

    Bytes are 0 to 255, the first pair becomes 256. Ends early if no pair occurs twice.

    >>> learnt({b"abab": 2, b"abc": 1}, 2)
    [(97, 98), (256, 256)]
    """
    words = [list(word) for word in counts]
    times = list(counts.values())
    pair_counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for n, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += times[n]
            where[pair].add(n)
    waiting = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(waiting)
    learnt_pairs: list[Pair] = []
    while waiting and len(learnt_pairs) < merges:
        count, pair = heapq.heappop(waiting)
        if -count != pair_counts[pair]:  # outdated: its count has decreased
            if pair_counts[pair] > 0:
                heapq.heappush(waiting, (-pair_counts[pair], pair))
            continue
        if -count < 2:
            break
        new = 256 + len(learnt_pairs)
        learnt_pairs.append(pair)
        touched: set[Pair] = set()
        for n in where.pop(pair):
            before, after = words[n], _joined(words[n], pair, new)
            for old in pairwise(before):
                pair_counts[old] -= times[n]
            for one in pairwise(after):
                pair_counts[one] += times[n]
                where[one].add(n)
                touched.add(one)
            words[n] = after
        del pair_counts[pair]
        for one in touched:
            heapq.heappush(waiting, (-pair_counts[one], one))
        if progress is not None:
            progress(len(learnt_pairs), merges)
    return learnt_pairs


def _joined(word: Sequence[int], pair: Pair, new: int) -> list[int]:
    """A word with a pair replaced, from the left."""
    joined_word: list[int] = []
    at, last = 0, len(word) - 1
    while at <= last:
        if at < last and word[at] == pair[0] and word[at + 1] == pair[1]:
            joined_word.append(new)
            at += 2
        else:
            joined_word.append(word[at])
            at += 1
    return joined_word


def merged(word: Iterable[int], ranks: Mapping[Pair, Pair]) -> list[int]:
    """A word's tokens after merging pairs by rank, leftmost first; `ranks` maps a pair to (rank, merged id).

    Takes n log n for n bytes.

    >>> merged([1, 2, 1, 2, 3], {(1, 2): (0, 4), (4, 4): (1, 5)})
    [5, 3]
    """
    tokens = list(word)  # -1 for tokens merged into the previous one
    after = [*range(1, len(tokens)), -1]
    before = [*range(-1, len(tokens) - 1)]
    waiting = [(ranks[pair][0], n, pair) for n, pair in enumerate(pairwise(tokens)) if pair in ranks]
    heapq.heapify(waiting)
    while waiting:
        _, n, pair = heapq.heappop(waiting)
        second = after[n]
        if second < 0 or (tokens[n], tokens[second]) != pair:
            continue  # outdated: one of them was merged with another
        tokens[n], tokens[second] = ranks[pair][1], -1
        after[n] = after[second]
        if after[n] >= 0:
            before[after[n]] = n
        for first in (before[n], n):
            other = after[first] if first >= 0 else -1
            if other >= 0 and (tokens[first], tokens[other]) in ranks:
                candidate = tokens[first], tokens[other]
                heapq.heappush(waiting, (ranks[candidate][0], first, candidate))
    return [token for token in tokens if token >= 0]
