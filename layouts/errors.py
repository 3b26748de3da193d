"""Exceptions of the project, and the nearest-name hint at the end of most messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from textwrap import indent
from typing import Self


class MeshlibError(Exception):
    """Base of all errors that this distribution raises on purpose.

    Args:
      message: one complete line: call and source line, names, numbers, the rule and a remedy.
      details: exception notes, printed below that line by a traceback, such as operands with their types.
    Example:
      >>> from layouts import MeshlibError
      >>> fault = MeshlibError("conv2d: filters have 5 of the channels 'c', but need 4", "image: f32[batch:8, c:4]")
      >>> str(fault), fault.__notes__
      ("conv2d: filters have 5 of the channels 'c', but need 4", ['  image: f32[batch:8, c:4]'])
    """

    faults: tuple[str, ...] = ()  # faults of `listing`, without its head

    def __init__(self, message: object = "", *details: object) -> None:
        super().__init__(message)
        for detail in details:
            self.add_note(indent(str(detail), "  "))

    @classmethod
    def listing(cls, head: str, faults: Sequence[str], *details: object, most: int = 8) -> Self:
        """An error from a list of faults: a single one is put in the head line, several are counted and listed below
        it.

        >>> from layouts import MeshlibError
        >>> print(MeshlibError.listing("Routing", ["top_k must be at least 1, got 0"]))
        Routing: top_k must be at least 1, got 0
        >>> print(MeshlibError.listing("Routing", ["top_k must be at least 1", "jitter must be in [0, 1)"]))
        Routing: 2 faults
          top_k must be at least 1
          jitter must be in [0, 1)
        """
        more = [f"and {len(faults) - most} more"] if len(faults) > most else []
        lines = [f"{head}: {len(faults)} faults", *faults[:most], *more]
        error = cls(f"{head}: {faults[0]}" if len(faults) == 1 else "\n  ".join(lines), *details)
        error.faults = tuple(faults)
        return error


class LayoutError(MeshlibError, ValueError):
    """An invalid dimension, mesh, layout or sharding; the message has sizes and a remedy.

    Example:
      >>> from layouts import LayoutError
      >>> from layouts import LayoutRules
      >>> try:
      ...     LayoutRules("batch:data").sharding("batch:6", "data:4")
      ... except LayoutError as fault:
      ...     print(str(fault).partition(": ")[2])
      dim 'batch' does not divide over axis 'data': 6 % 4 = 2. Pad batch to 8 (+33.33 %), or remove batch:data.
    """


def nearest(name: object, candidates: Iterable[str]) -> str:
    """The end of an error message with the most similar known name, or "".

    >>> from layouts import nearest
    >>> nearest("bacth", ["batch", "hidden"])
    "; did you mean 'batch'?"
    >>> nearest("d_ff", ["d_model", "expert_d_ff"])
    "; did you mean 'expert_d_ff'?"
    >>> nearest("GPT3", ["gpt2", "gpt3-175b"])
    "; did you mean 'gpt3-175b'?"
    >>> nearest("rlu", ["loss", "layers/scan/relu"])
    "; did you mean 'layers/scan/relu'?"
    >>> nearest("ffn/relu", ["ffn/kernel", "relu"])
    "; did you mean 'relu'?"
    >>> nearest("zzz", ["batch", "hidden"])
    ''
    """
    known, word = list(candidates), str(name)
    unscoped = {x.rpartition("/")[2]: x for x in known}
    matches = (
        difflib.get_close_matches(word, known, n=1, cutoff=0.85)
        or [x for end, x in unscoped.items() if "/" in word and end == word.rpartition("/")[2]]
        or [x for x in known if x.startswith((f"{word.lower()}-", f"{word}_"))]
        or difflib.get_close_matches(word, known, n=1)
        or difflib.get_close_matches(word.lower(), known, n=1)
        or [x for x in known if x.endswith(f"_{word}")]
        or [unscoped[x] for x in difflib.get_close_matches(word, unscoped, n=1)]
    )
    return f"; did you mean {matches[0]!r}?" if matches else ""
