"""Sampling of tokens on the host, and verification of drafts (speculative decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sampling:
    """Sampling options: `temperature` 0 is greedy; `top_k` and `top_p` restrict the candidates."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def probabilities(self, logits: Array) -> Array:
        """The probability of each token.

        >>> Sampling(1.0, top_k=2).probabilities(np.log([0.5, 0.3, 0.2])).round(3).tolist()
        [0.625, 0.375, 0.0]
        >>> Sampling(1.0, top_p=0.4).probabilities(np.log([0.5, 0.3, 0.2])).tolist()
        [1.0, 0.0, 0.0]
        """
        if self.temperature == 0:
            likeliest = np.zeros(len(logits))
            likeliest[int(np.argmax(logits))] = 1.0
            return likeliest
        scaled = logits.astype(np.float64) / self.temperature
        chances = np.exp(scaled - scaled.max())
        order = np.argsort(-chances, kind="stable")
        left = np.ones(len(chances), bool)
        if self.top_k is not None:
            left[order[self.top_k :]] = False
        if self.top_p is not None:  # the smallest set of likeliest tokens with this total probability
            total = np.cumsum(chances[order] * left[order])
            left[order[1:][total[:-1] >= self.top_p * total[-1]]] = False
        chances = chances * left
        return np.asarray(chances / chances.sum())

    def draw(self, chances: Array, random: np.random.Generator) -> int:
        """A sampled token."""
        if self.temperature == 0:
            return int(np.argmax(chances))
        place = int(np.searchsorted(np.cumsum(chances), random.random() * chances.sum(), side="right"))
        return min(place, int(np.flatnonzero(chances)[-1]))

    def verified(self, logits: Array, drafts: Sequence[int], random: np.random.Generator) -> list[int]:
        """The next tokens, at least one: drafts as long as they are accepted, then a sampled one.

        A draft x has probability 1 in the draft model, so it is accepted with probability p(x); otherwise another token
        is sampled from p without x. Each token then has the distribution p, whatever the drafts are.

        Args:
          logits: [drafts + 1, vocab]: for each draft, and after the last one.

        Source: Leviathan et al., arXiv:2211.17192, theorem 1 in section 3, with q(x) = 1.
        """
        accepted: list[int] = []
        for row, draft in zip(logits, drafts, strict=False):
            chances = self.probabilities(row)
            if random.random() >= chances[draft]:
                chances[draft] = 0.0
                return [*accepted, self.draw(chances / chances.sum(), random)]
            accepted.append(draft)
        return [*accepted, self.draw(self.probabilities(logits[len(drafts)]), random)]


def repeated(tokens: Sequence[int], count: int) -> list[int]:
    """Prompt-lookup drafts: the tokens after the previous occurrence of the last three tokens, or two or one.

    >>> repeated([5, 1, 2, 3, 9, 1, 2], count=2)
    [3, 9]
    >>> repeated([1, 2, 3], count=2)
    []
    """
    for n in range(min(3, len(tokens) - 1), 0, -1):
        last = list(tokens[-n:])
        for begin in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[begin : begin + n]) == last:
                return list(tokens[begin + n : begin + n + count])
    return []
