"""Pairs of consecutive lines of verse, and n-gram models of them as a baseline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from meshlib.core.errors import DataError
from meshlib.core.files import open_file

OWN = Path(__file__).with_name("verses.txt")
MOST_BYTES = 8 * 2**20
HELD_OUT = 10  # one in this many poems is held out
START = -1  # before the first token of a line

Pair = tuple[str, str]
Lines = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Verses:
    """Pairs of consecutive lines, of training poems and of held-out ones."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]
    source: str


def load_verses(path: str | None) -> Verses:
    """The verses of a file: lines, with an empty line between poems; lines that begin with # are ignored.

    For a text with fewer than `HELD_OUT` parts the last tenth is held out.
    Raises: DataError for a file that can't be read, or has fewer than 20 pairs of lines.
    """
    file = OWN if path is None else Path(path).expanduser()
    with open_file(file, "--text", DataError, MOST_BYTES) as (opened, _):
        text = opened.read().decode(errors="replace")
    poems: list[list[str]] = [[]]
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("#"):
            continue
        if line:
            poems[-1].append(line)
        elif poems[-1]:
            poems.append([])
    poems = [poem for poem in poems if len(poem) > 1]
    if 0 < len(poems) < HELD_OUT:
        lines = [line for poem in poems for line in poem]
        size = -(-len(lines) // HELD_OUT)
        poems = [lines[n : n + size] for n in range(0, len(lines), size)]
    chosen = (
        range(HELD_OUT // 2 - 1, len(poems), HELD_OUT) if len(poems) >= HELD_OUT else range(len(poems) - 1, len(poems))
    )
    train = pairs_of(poem for n, poem in enumerate(poems) if n not in chosen)
    held_out = pairs_of(poems[n] for n in chosen) if poems else ()
    if len(train) + len(held_out) < 20 or not held_out:
        raise DataError(f"{file}: holds {len(train) + len(held_out)} pairs of lines, fewer than 20")
    return Verses(
        train, held_out, f"{file.name}: {len(poems)} poems, {len(train)} pairs of lines, {len(held_out)} held out"
    )


def pairs_of(poems: Iterable[Sequence[str]]) -> tuple[Pair, ...]:
    """Each line of a poem with the next one."""
    return tuple(pair for poem in poems for pair in pairwise(poem))


class NgramCounts:
    """Smoothed unigram and bigram models of lines of tokens over one vocabulary.

    Both subtract a discount d from each count and distribute the rest over all tokens, the bigram by the number of
    different tokens that precede each (interpolated Kneser-Ney: Chen and Goodman, "An empirical study of smoothing
    techniques for language modeling", 1998, section 4.1.6).
    """

    def __init__(self, lines: Lines, vocab: int, discount: float) -> None:
        self.vocab, self.discount = vocab, discount
        self.tokens = Counter(token for line in lines for token in line)
        self.pairs = Counter(pair for line in lines for pair in pairwise([START, *line]))
        self.before = Counter(a for a, _ in self.pairs.elements())
        self.after = Counter(a for a, _ in self.pairs)  # number of different tokens after each
        self.kinds = Counter(b for _, b in self.pairs)  # number of different tokens before each
        self.total = sum(self.tokens.values())

    def unigram(self, token: int) -> float:
        """The probability of a token."""
        saved = self.discount * len(self.tokens) / self.total
        return max(self.tokens[token] - self.discount, 0) / self.total + saved / self.vocab

    def bigram(self, before: int, token: int) -> float:
        """The probability of a token after another one, or after `START` at the beginning of a line."""
        saved = self.discount * len(self.kinds) / len(self.pairs)
        lower = max(self.kinds[token] - self.discount, 0) / len(self.pairs) + saved / self.vocab
        seen = self.before[before]
        if not seen:
            return lower
        discounted = max(self.pairs[before, token] - self.discount, 0)
        return (discounted + self.discount * self.after[before] * lower) / seen

    def perplexities(self, lines: Lines) -> tuple[float, float]:
        """Perplexity per token on other lines, of the unigram and of the bigram model."""
        count = sum(map(len, lines))
        one = sum(math.log(self.unigram(token)) for line in lines for token in line)
        two = sum(math.log(self.bigram(a, b)) for line in lines for a, b in pairwise([START, *line]))
        return math.exp(-one / count), math.exp(-two / count)


def counted(lines: Lines, vocab: int) -> NgramCounts:
    """The models of lines, with the discount that fits a held-out tenth of them best."""
    part = [line for n, line in enumerate(lines) if n % 10 == 9]
    rest = [line for n, line in enumerate(lines) if n % 10 != 9]
    tried = [n / 20 for n in range(1, 20)]
    best = min(tried, key=lambda d: NgramCounts(rest, vocab, d).perplexities(part)[1]) if part else 0.75
    return NgramCounts(lines, vocab, best)
