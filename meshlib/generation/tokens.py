"""Tokenisation, and stop sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from meshlib.core.arguments import at, items, whole
from meshlib.core.errors import GraphError

WHAT = "generate"


@runtime_checkable
class Tokenizer(Protocol):
    """Interface of tokenizers."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


class ByteTokenizer:
    """A tokenizer with one token per byte of UTF-8.

    >>> import meshlib as mtf
    >>> mtf.generation.ByteTokenizer().decode(mtf.generation.ByteTokenizer().encode("café"))
    'café'
    """

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes; invalid UTF-8 and ids that are not bytes become a replacement character."""
        return bytes(t if t < 256 else 255 for t in tokens).decode(errors="replace")


def encoded(prompts: object, tokenizer: Tokenizer | None, vocab: int) -> list[list[int]]:
    """Prompts as tokens. Raises: GraphError unless `prompts` are texts or lists of tokens of the vocabulary."""
    single = isinstance(prompts, str) or (
        isinstance(prompts, Sequence | np.ndarray) and len(prompts) and isinstance(prompts[0], int | np.integer)
    )
    given = [prompts] if single else items(prompts, WHAT, "prompts")
    if not given:
        raise GraphError(f"{at(WHAT)}: prompts must be a non-empty list of texts or of lists of tokens, got []")
    token_lists = []
    for n, prompt in enumerate(given):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise GraphError(
                    f"{at(WHAT)}: prompt {n} is a text; give a tokenizer, such as mtf.generation.ByteTokenizer()"
                )
            prompt = tokenizer.encode(prompt)
        tokens = [whole(t, WHAT, f"each token of prompt {n}") for t in items(prompt, WHAT, f"prompt {n}")]
        strange = [t for t in tokens if not 0 <= t < vocab]
        if strange or not tokens:
            what = f"has token {strange[0]}, which is not in 0 to {vocab - 1}" if strange else "is empty"
            raise GraphError(f"{at(WHAT)}: prompt {n} {what}")
        token_lists.append(tokens)
    return token_lists


@dataclass(frozen=True)
class Stops:
    """Tokens and texts that end a completion."""

    tokens: frozenset[int]
    texts: tuple[str, ...]
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, stop: object, tokenizer: Tokenizer | None, vocab: int) -> Stops:
        """Stops from a list of tokens and texts, or from one."""
        given = [stop] if isinstance(stop, str | int | np.integer) else items(stop, WHAT, "stop")
        tokens, texts = set(), []
        for one in given:
            if isinstance(one, str):
                if tokenizer is None or not one:
                    why = "give a tokenizer" if one else "it is empty"
                    raise GraphError(f"{at(WHAT)}: stop has the text {one!r}; {why}")
                texts.append(one)
            elif not 0 <= whole(one, WHAT, "stop") < vocab:
                raise GraphError(f"{at(WHAT)}: stop has token {one}, which is not in 0 to {vocab - 1}")
            else:
                tokens.add(int(one))
        return cls(frozenset(tokens), tuple(texts), tokenizer)

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], str, bool]:
        """A completion cut before its stop sequence: tokens, text (empty without a tokenizer), and whether it ended.

        Tokens that lie entirely within a stop text are dropped.
        """
        place = next((n for n, token in enumerate(tokens) if token in self.tokens), len(tokens))
        cut_tokens, ended = list(tokens[:place]), place < len(tokens)
        if self.tokenizer is None:
            return cut_tokens, "", ended
        text = self.tokenizer.decode(cut_tokens)
        begin = min((text.index(stop) for stop in self.texts if stop in text), default=len(text))
        while begin < len(text) and cut_tokens and len(self.tokenizer.decode(cut_tokens[:-1])) >= begin:
            cut_tokens.pop()
        return cut_tokens, text[:begin], ended or begin < len(text)
