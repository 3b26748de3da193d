"""The exceptions of the project, and the hint that most of their messages end with."""

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
    >>> nearest("zzz", ["batch", "hidden"])
    ''
    """
    found = difflib.get_close_matches(str(name), list(candidates), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
