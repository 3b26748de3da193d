"""Python's cyclic garbage collector, paused during planning.

A plan consists of many small objects, nearly all of which live until it is done: the collector would traverse them
repeatedly without freeing any, for an eighth of the time of planning a step of DeepSeek-V3 or ResNet-50. Pausing alone
would move that cost to the user's next allocation. So new objects are moved to the oldest generation without being
traversed, and counted. When the count exceeds a share of the objects alive after the last full collection, as in
CPython's own rule for its oldest generation, planning ends with a full collection. Bytes of constants are counted
separately: a process with a million objects must not keep gigabytes in a few graphs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 2  # collect when 1 / SHARE as many objects, or bytes, were added as were alive
LEAST_OBJECTS = 500_000  # least number of new objects for a collection: a few tens of MB
OBJECTS_OF_A_COMMAND = 20_000_000  # the same for a process that ends with one answer: about 2 GB
YOUNG_OBJECTS_OF_A_COMMAND = 100_000  # that it makes outside of planning before the youngest are traversed: about 10 MB
FEW_OBJECTS = 10_000  # traversed within a millisecond: these stay in the youngest generation
LEAST_BYTES = 32 * 2**20  # least bytes of constants for a collection: a graph of few operations may have large ones


class _NewObjects:
    """Objects and bytes of graph constants added since the last full collection, and alive after it."""

    def __init__(self) -> None:
        self.objects = self.objects_alive = 0
        self.bytes = self.bytes_alive = 0  # `bytes_alive` is current, `bytes_before` as of the last full collection
        self.bytes_before = 0
        self.recount_after = 0  # new objects until a recount of frozen ones; > 0 while the user froze some
        self.least_objects = LEAST_OBJECTS

    def settle(self) -> None:
        """Move new objects to the oldest generation; collect if there are enough of them, or of their bytes."""
        new_objects = gc.get_count()[0]
        many_bytes = self.bytes > max(LEAST_BYTES, self.bytes_before // SHARE)
        if new_objects < FEW_OBJECTS and not many_bytes:
            return
        if self.recount_after <= 0:
            self.recount_after = gc.get_freeze_count()  # traverses all frozen objects
        if self.recount_after:  # unfreezing would thaw the user's frozen objects: leave new objects to the collector
            self.recount_after = max(0, self.recount_after - new_objects)
            gc.collect(2 if many_bytes else 0)
            if many_bytes:
                self.bytes, self.bytes_before = 0, self.bytes_alive
            return
        self.objects += new_objects
        gc.freeze()
        gc.unfreeze()  # two splices of whole lists: all generations into the permanent one, and that into the oldest
        if many_bytes or self.objects > max(self.least_objects, self.objects_alive // SHARE):
            gc.collect()
            gc.freeze()
            self.objects_alive, self.objects = gc.get_freeze_count(), 0
            self.bytes_before, self.bytes = self.bytes_alive, 0
            gc.unfreeze()

    def release(self, byte_count: int) -> None:
        """Subtract freed bytes."""
        self.bytes_alive -= byte_count


_joined = _NewObjects()


def collect_rarely() -> None:
    """Collect only after `OBJECTS_OF_A_COMMAND` new objects: for a process that ends with one answer."""
    _joined.least_objects = OBJECTS_OF_A_COMMAND
    gc.set_threshold(YOUNG_OBJECTS_OF_A_COMMAND, *gc.get_threshold()[1:])


def held(holder: object, byte_count: int) -> None:
    """Count the bytes of an array of `holder`, such as a graph, which only a collection frees."""
    _joined.bytes += byte_count
    _joined.bytes_alive += byte_count
    weakref.finalize(holder, _joined.release, byte_count).atexit = False


def uncollected(function: Callable[P, T]) -> Callable[P, T]:
    """`function` with garbage collection paused, unless another thread enables it.

    >>> uncollected(gc.isenabled)(), gc.isenabled()
    (False, True)
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if not gc.isenabled():  # paused by an outer call, or by the user
            return function(*args, **kwargs)
        gc.disable()
        try:
            result = function(*args, **kwargs)
            _joined.settle()  # after an exception, new objects are freed with its traceback
            return result
        finally:
            gc.enable()

    return called
