"""Byte-pair merges: learning them from a text, applying them to a word.

Source: Gage, "A new algorithm for data compression", 1994; Sennrich et al., arXiv:1508.07909.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

Pair = tuple[int, int]


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
