"""Texts and pairs of texts as arrays of static length, for models with `packed=True`.

Each row of an array has one text, or, packed, as many as fit, one after the other. "segment_ids" is the number of each
token's text in its row, from 1; 0 is padding, which no token sees and no loss counts. "segment_positions" counts within
the text. So a model's result for a text does not depend on the texts that share its row.

Source: Raffel et al., arXiv:1910.10683, section 3.1.2 (packing).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from layouts.parsing import is_iterable
from meshlib.core.arguments import at, choice, flag, whole
from meshlib.core.errors import GraphError
from meshlib.core.text import counted
from meshlib.data.batching import SOURCES, TARGETS, Array, Batch, Batching, Drawn, Row

TOO_LONG = ("cut", "skip", "refuse")
OPEN_ROWS = 32  # open rows tried for a text


class Encoder(Protocol):
    """A vocabulary with an end-of-text token, such as `mtf.BytePairs`."""

    @property
    def end(self) -> int:
        """The token after a text."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""


@dataclass(frozen=True, eq=False)
class TextExamples:
    """Texts as arrays. Created by `text_to_text` and `texts_in_rows`.

    Attributes:
      arrays: int32 [rows, length] by the name of a model's input, for `mtf.Batches`.
      texts: number of texts; `cut` and `skipped`: numbers of those too long, truncated or left out.
      filled: share of positions with a token that is not padding.
    Example:
      >>> import meshlib as mtf
      >>> words = mtf.BytePairs.learn("to be or not to be", 260)
      >>> rows = mtf.texts_in_rows(["to be", "or"], words, length=12)
      >>> rows, rows.arrays["segment_ids"].tolist()
      (<TextExamples: 2 texts in 1 row, 58% filled>, [[1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0]])
    """

    arrays: dict[str, Array]
    texts: int
    cut: int
    skipped: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.arrays.values())))

    @property
    def filled(self) -> float:
        """Share of positions with a token that is not padding."""
        numbers = [x for name, x in self.arrays.items() if name.endswith("segment_ids")]
        return float(sum((x > 0).sum() for x in numbers) / sum(x.size for x in numbers))

    def __repr__(self) -> str:
        return f"<TextExamples: {counted(self.texts, 'text')} in {counted(self.rows, 'row')}, {self.filled:.0%} filled>"


def text_to_text(
    pairs: Iterable[tuple[str, str]],
    vocabulary: Encoder,
    source_length: int,
    length: int,
    packed: bool = True,
    too_long: str = "cut",
    start_token: int = 0,
) -> TextExamples:
    """Text-to-text examples for an encoder-decoder: `train_step(..., packed=True)`.

    Args:
      pairs: (source, target) texts.
      vocabulary: the tokenizer; its `end` terminates each target.
      source_length, length: length of a row of sources, and of targets.
      packed: whether several pairs share a row if both sides fit; otherwise each has its own.
      too_long: treatment of a text with more tokens than its row: "cut" at the end, left out ("skip"), or "refuse".
      start_token: first input of the decoder, as in `mtf.generate`.
    Returns: `TextExamples` with "sources", "source_segment_ids", "source_positions", "tokens", "targets",
      "segment_ids" and "segment_positions".
    Raises: GraphError for invalid arguments or texts, no pairs at all, and texts that are too long if refused.
    Example:
      >>> import meshlib as mtf
      >>> words = mtf.BytePairs.learn("to be or not to be", 260)
      >>> made = mtf.text_to_text([("to be", "or not"), ("a", "b")], words, source_length=8, length=12)
      >>> made.arrays["segment_ids"].tolist()
      [[1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]]
    """
    what = "text_to_text"
    rows = _TextRows(what, {"source": source_length, "target": length}, packed, too_long)
    end, start = _end(vocabulary, what), _start(start_token, what)
    for n, pair in enumerate(_given(pairs, what, "pairs")):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise GraphError(f"{at(what)}: pair {n} must be (source, target), got {pair!r:.80}")
        source, target = (_encoded(vocabulary, text, what, n) for text in pair)
        rows.add(n, {"source": source, "target": [*target, end]})
    arrays = rows.arrays()
    sources = {"sources": arrays["source"], **{name: arrays[name] for name in SOURCES}}
    return rows.examples({**sources, **_shifted(arrays, start)})


def texts_in_rows(
    texts: Iterable[str],
    vocabulary: Encoder,
    length: int,
    packed: bool = True,
    too_long: str = "cut",
    start_token: int = 0,
) -> TextExamples:
    """Texts for a decoder, with each token predicted from those before: `train_step(..., packed=True)`.

    Args: as in `text_to_text`.
    Returns: `TextExamples` with "tokens", "targets", "segment_ids" and "segment_positions".
    Raises: as in `text_to_text`.
    Example:
      >>> import meshlib as mtf
      >>> words = mtf.BytePairs.learn("to be or not to be", 260)
      >>> rows = mtf.texts_in_rows(["to be", "or"], words, length=12)
      >>> rows.arrays["segment_positions"].tolist()
      [[0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0, 0]]
    """
    what = "texts_in_rows"
    rows = _TextRows(what, {"target": length}, packed, too_long)
    end, start = _end(vocabulary, what), _start(start_token, what)
    for n, text in enumerate(_given(texts, what, "texts")):
        rows.add(n, {"target": [*_encoded(vocabulary, text, what, n), end]})
    return rows.examples(_shifted(rows.arrays(), start))


def _shifted(arrays: Batch, start: int) -> dict[str, Array]:
    """The input tokens: each target's previous token in its text, the start token for the first; and the targets."""
    targets, segments, positions = (arrays[name] for name in ("target", *TARGETS))
    tokens = np.zeros_like(targets)
    tokens[:, 1:] = targets[:, :-1]
    tokens[(positions == 0) & (segments > 0)] = start
    tokens[segments == 0] = 0
    return {"tokens": tokens, "targets": targets, **dict(zip(TARGETS, (segments, positions), strict=True))}


class _TextRows:
    """Assignment of texts to rows and positions."""

    def __init__(self, what: str, lengths: dict[str, int], packed: bool, too_long: str) -> None:
        self.what, self.packed = what, flag(packed, what, "packed")
        self.too_long = choice(too_long, what, "too_long", TOO_LONG)
        self.lengths = {side: whole(n, what, f"the length of a {side}") for side, n in lengths.items()}
        small = {side: n for side, n in self.lengths.items() if n < 1}
        if small:
            raise GraphError(f"{at(what)}: lengths must be at least 1, got {small}")
        self.rows: list[Row] = []
        self.open: deque[tuple[int, dict[str, int]]] = deque(maxlen=OPEN_ROWS)  # row number, free space
        self.cut = self.skipped = 0

    def add(self, number: int, sides: dict[str, list[int]]) -> None:
        """Place a text, or a pair, into a row with enough space."""
        over = {side: len(tokens) for side, tokens in sides.items() if len(tokens) > self.lengths[side]}
        if over and self.too_long == "refuse":
            lengths_text = ", ".join(f"{n} tokens of the {side} for {self.lengths[side]}" for side, n in over.items())
            raise GraphError(f"{at(self.what)}: text {number} is too long: {lengths_text}")
        if over and self.too_long == "skip":
            self.skipped += 1
            return
        self.cut += bool(over)
        truncated = Drawn(number, {side: np.array(x[: self.lengths[side]], np.int32) for side, x in sides.items()})
        for row, room in self.open if self.packed else ():
            if all(len(tokens) <= room[side] for side, tokens in truncated.example.items()):
                self.rows[row].append(truncated)
                for side, tokens in truncated.example.items():
                    room[side] -= len(tokens)
                return
        self.rows.append([truncated])
        room = {side: self.lengths[side] - len(tokens) for side, tokens in truncated.example.items()}
        self.open.append((len(self.rows) - 1, room))

    def arrays(self) -> Batch:
        """The tokens of each side, with segment ids and positions."""
        if not self.rows:
            left = f"; {self.skipped} were too long" if self.skipped else ""
            raise GraphError(f"{at(self.what)}: there are no texts{left}")
        lengths = {side: (n,) for side, n in self.lengths.items()}
        segments = {"source": SOURCES, "target": TARGETS}
        batching = Batching(len(self.rows), lengths=lengths, packed=True, segments=segments)
        return batching.finished(self.rows, len(self.rows))

    def examples(self, arrays: dict[str, Array]) -> TextExamples:
        """The result for the caller."""
        return TextExamples(arrays, sum(map(len, self.rows)), self.cut, self.skipped)


def _given(values: object, what: str, name: str) -> Iterator[Any]:
    if isinstance(values, str) or not is_iterable(values):
        raise GraphError(f"{at(what)}: {name} must be several, got {type(values).__name__} {values!r:.80}")
    return iter(values)


def _end(vocabulary: object, what: str) -> int:
    if not hasattr(vocabulary, "encode") or not hasattr(vocabulary, "end"):
        raise GraphError(
            f"{at(what)}: vocabulary must have encode and end, as mtf.BytePairs, got {type(vocabulary).__name__} "
            f"{vocabulary!r:.80}"
        )
    return whole(vocabulary.end, what, "the end of the vocabulary")


def _start(token: object, what: str) -> int:
    start = whole(token, what, "start_token")
    if not 0 <= start < 1 << 31:
        raise GraphError(f"{at(what)}: start_token must be a token, got {start}")
    return start


def _encoded(vocabulary: Encoder, text: object, what: str, n: int) -> list[int]:
    if not isinstance(text, str):
        raise GraphError(f"{at(what)}: text {n} must be text, got {type(text).__name__} {text!r:.80}")
    return list(vocabulary.encode(text))
