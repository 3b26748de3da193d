"""Python's cyclic garbage collector, paused while a plan is made.

A plan is many small objects, nearly all of which stay until it is done: the collector would look through them again
and again, and find nothing, for an eighth of the time that it takes to plan a step of DeepSeek-V3 or ResNet-50. Pausing
it alone moves that cost to the user's next allocation, at which all that is new is looked at. So what is new at the end
joins the oldest generation, unlooked at, and is counted. When the count exceeds a share of what was alive after the
last full collection, as in CPython's own rule for its oldest generation, the call that planned collects. Bytes of
constants are counted by themselves: a process with a million objects must not keep gigabytes in a few graphs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 2  # a collection when half as many objects, or bytes, have joined as were alive
LEAST_OBJECTS = 500_000  # for which a collection is worth it: a few tens of MB
FEW_OBJECTS = 10_000  # which the collector looks through within a millisecond: they stay in the youngest generation
LEAST_BYTES = 32 * 2**20  # of arrays in graphs: a graph of few operations may have large constants


class _Joined:
    """Objects, and bytes of arrays in graphs, since the last full collection, and what was alive after it."""

    def __init__(self) -> None:
        self.objects = self.objects_alive = 0
        self.bytes = self.bytes_alive = 0  # `bytes_alive` is exact at any time, `bytes_before` as of that collection
        self.bytes_before = 0
        self.recount_after = 0  # new objects until frozen ones are counted again; positive while the user froze some

    def settle(self) -> None:
        """Let new objects join the oldest generation; collect if there are enough of them, or of their bytes."""
        new_objects = gc.get_count()[0]
        many_bytes = self.bytes > max(LEAST_BYTES, self.bytes_before // SHARE)
        if new_objects < FEW_OBJECTS and not many_bytes:
            return
        if self.recount_after <= 0:
            self.recount_after = gc.get_freeze_count()  # walks through all of them
        if self.recount_after:  # the user's, who would find them thawed: what is new goes the collector's own way
            self.recount_after = max(0, self.recount_after - new_objects)
            gc.collect(2 if many_bytes else 0)
            if many_bytes:
                self.bytes, self.bytes_before = 0, self.bytes_alive
            return
        self.objects += new_objects
        gc.freeze()
        gc.unfreeze()  # two moves of whole lists, from all generations into none and from there into the oldest
        if many_bytes or self.objects > max(LEAST_OBJECTS, self.objects_alive // SHARE):
            gc.collect()
            gc.freeze()
            self.objects_alive, self.objects = gc.get_freeze_count(), 0
            self.bytes_before, self.bytes = self.bytes_alive, 0
            gc.unfreeze()

    def release(self, byte_count: int) -> None:
        """Count bytes as gone."""
        self.bytes_alive -= byte_count


_joined = _Joined()


def held(holder: object, byte_count: int) -> None:
    """Note that `holder`, which only a collection frees, as it does graphs, has an array of so many bytes."""
    _joined.bytes += byte_count
    _joined.bytes_alive += byte_count
    weakref.finalize(holder, _joined.release, byte_count).atexit = False


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
            result = function(*args, **kwargs)
            _joined.settle()  # what a call that raised has made goes with its traceback
            return result
        finally:
            gc.enable()

    return called
