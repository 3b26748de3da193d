"""Python's collector of cyclic garbage, paused while a plan is made, and run when enough has come together.

A plan is many small objects, nearly all of which stay until it is done: the collector would look through them again
and again, and find nothing, for an eighth of the time that it takes to plan a step of DeepSeek-V3 or ResNet-50. Pausing
it alone moves that cost to the user's next allocation, at which all that is new is looked at. So what is new at the end
joins the oldest generation, unlooked at, and is counted. When the count exceeds a share of what was alive after the
last full collection, as in CPython's own rule for its oldest generation, the call that planned collects.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 2  # a collection when half as many objects have joined as were alive
LEAST = 75_000  # objects, for which a collection is worth it
OBJECT_BYTES = 256  # of arrays, that count as an object: a graph of few operations may hold large constants


class _Joined:
    """Objects that have joined the oldest generation since the last full collection, and those alive after it."""

    def __init__(self) -> None:
        self.objects = 0
        self.alive = 0

    def settle(self) -> None:
        """Let new objects join the oldest generation; collect if there are enough of them."""
        self.objects += gc.get_count()[0]
        if gc.get_freeze_count():  # the user's, who would find them thawed
            return
        gc.freeze()
        gc.unfreeze()  # two moves of whole lists, from all generations into none and from there into the oldest
        if self.objects > max(LEAST, self.alive // SHARE):
            gc.collect()
            gc.freeze()
            self.alive, self.objects = gc.get_freeze_count(), 0
            gc.unfreeze()


_joined = _Joined()


def held(byte_count: int) -> None:
    """Note that so many bytes are held by what only a collection frees, such as a graph."""
    _joined.objects += byte_count // OBJECT_BYTES


def uncollected(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, while which runs nothing is collected, unless another thread lets the collector run.

    >>> uncollected(gc.isenabled)(), gc.isenabled()
    (False, True)
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not gc.isenabled():  # paused further out, or by the user
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            try:
                _joined.settle()
            finally:
                gc.enable()

    return called
