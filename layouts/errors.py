"""The exceptions of the project, and the hint of the nearest name that most messages end with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshlibError(Exception):
    """Base of every error that this distribution raises on purpose."""


class LayoutError(MeshlibError, ValueError):
    """A dimension, mesh, layout or sharding that cannot be; the message names sizes and a remedy."""


def nearest(name: object, candidates: Iterable[str]) -> str:
    """The end of an error message that names the likeliest intended spelling, or "".

    >>> nearest("bacth", ["batch", "hidden"])
    "; did you mean 'batch'?"
    >>> nearest("d_ff", ["d_model", "expert_d_ff"])
    "; did you mean 'expert_d_ff'?"
    >>> nearest("zzz", ["batch", "hidden"])
    ''
    """
    known, word = list(candidates), str(name)
    matches = difflib.get_close_matches(word, known, n=1) or [x for x in known if x.endswith(f"_{word}")]
    return f"; did you mean {matches[0]!r}?" if matches else ""
