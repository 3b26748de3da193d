"""Choice of tokens on the host: sampling, verification of drafts (speculative decoding), and beam search.

Scores are Mesh TensorFlow's: the sum of log-probabilities over ((5 + tokens) / 6) ** alpha, with stop tokens counted
(Wu et al., arXiv:1609.08144). Of the best 2 n extensions of the n hypotheses, finished ones compete with those finished
before, the others stay live. A sequence is done when its worst finished hypothesis beats the best possible future one,
independently of the rest of the batch; Mesh TensorFlow continues until that holds for all.

Source: tensorflow/mesh: mesh_tensorflow/beam_search.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

    >>> from meshlib.generation.sampling import repeated
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


class Hypothesis(NamedTuple):
    """Tokens after the prompt, and their score."""

    tokens: tuple[int, ...]
    score: float


class Alive(NamedTuple):
    """A live hypothesis, with the sum of its log-probabilities."""

    tokens: tuple[int, ...]
    log_prob: float


def length_penalty(tokens: int, alpha: float) -> float:
    """The divisor of a sum of log-probabilities.

    >>> length_penalty(1, 0.6), length_penalty(7, 1.0)
    (1.0, 2.0)
    """
    return float(((5 + tokens) / 6) ** alpha)


@dataclass
class Beams:
    """The hypotheses of one sequence.

    Args:
      count: number of live hypotheses, and of finished ones that are kept.
      stop: tokens that end a hypothesis.
      alpha: exponent of the length penalty; 0: none.
      most: largest number of tokens of a hypothesis.
    """

    count: int
    stop: frozenset[int]
    alpha: float
    most: int
    alive: list[Alive] = field(default_factory=lambda: [Alive((), 0.0)])
    ended: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def extend(self, log_probs: Array, tokens: Array) -> list[tuple[int, int]]:
        """Apply the best extensions of each live hypothesis.

        Args:
          log_probs, tokens: [hypotheses, extensions], the best of each first, at least 2 `count` of them (or all).
        Returns: (parent, last token) per live hypothesis; `count` of them, with repetitions if there are fewer.
        """
        if self.done:
            return [(0, 0)] * self.count
        extensions = [
            (before.log_prob + float(log_prob), n, int(token))
            for n, before in enumerate(self.alive)
            for log_prob, token in zip(log_probs[n], tokens[n], strict=True)
        ]
        best = sorted(extensions, key=lambda one: (-one[0], one[1], one[2]))[: 2 * self.count]
        grown = [(log_prob, n, (*self.alive[n].tokens, token)) for log_prob, n, token in best]
        penalty = length_penalty(len(grown[0][2]), self.alpha)
        ends = [
            Hypothesis(tokens_so_far, log_prob / penalty)
            for log_prob, _, tokens_so_far in grown
            if tokens_so_far[-1] in self.stop
        ]
        self.ended = sorted([*self.ended, *ends], key=lambda h: -h.score)[: self.count]
        going = [
            (log_prob, n, tokens_so_far) for log_prob, n, tokens_so_far in grown if tokens_so_far[-1] not in self.stop
        ][: self.count]
        self.alive = [Alive(tokens_so_far, log_prob) for log_prob, _, tokens_so_far in going]
        self.done = not going or len(grown[0][2]) >= self.most or self._nothing_better()
        chosen = [(n, tokens_so_far[-1]) for _, n, tokens_so_far in going] or [(0, 0)]
        return [*chosen, *[chosen[-1]] * (self.count - len(chosen))]

    def _nothing_better(self) -> bool:
        if not self.ended:
            return False
        return self.ended[-1].score > self.alive[0].log_prob / length_penalty(self.most, self.alpha)

    def best(self) -> Sequence[Hypothesis]:
        """The finished hypotheses, best first; if there are none, the live ones by log-probability."""
        return self.ended or [Hypothesis(a.tokens, a.log_prob) for a in self.alive]
