"""Python's collector of cyclic garbage, paused while a plan is made.

A plan is many small objects, nearly all of which stay until it is done. The collector looks through all of them again
whenever their number has grown by a quarter, and finds nothing: an eighth of the time that it takes to plan a step of
DeepSeek-V3 or ResNet-50, for a tenth of the memory of such a process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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
            gc.enable()

    return called
