"""Public calls: tensors that they return belong to the user, tensors created inside belong to the library.

The user is responsible for the layout of the former. The latter (softmax's maximum, the product of two of three
factors, a gradient's slices) are hidden from the user, and layout rules apply to them only where they fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from meshlib.core.errors import MeshlibError
from meshlib.core.explained_calls import explained_calls, refuse_mesh, refuse_misfit
from meshlib.core.source_lines import is_users, shown_file

if TYPE_CHECKING:
    from meshlib.core.graph import Operation

P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """`function` as users call it: operations that it adds to a graph and does not return are marked as inner."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        created: list[Operation] = []  # filled by `record`, which looks it up in this frame
        try:
            result = function(*args, **kwargs)
        except TypeError as fault:
            refuse_mesh(function, args)
            refuse_misfit(fault, function.__name__, [function], args, kwargs)
            raise
        except MeshlibError:
            refuse_mesh(function, args)
            raise
        if created:
            returned = set(_operations(result))
            for op in created:
                if op not in returned:
                    op.graph.inner.add(op)
        return result

    return called


_FACE: CodeType = public(lambda: None).__code__  # shared by all wrappers


def public_calls(package: str, modules: Sequence[str]) -> Callable[[Any], Any]:
    """Like `explained_calls`; functions of modules whose names begin with one of `modules` also get `public`."""
    return explained_calls(package, lambda f: public(f) if f.__module__.startswith(tuple(modules)) else None)


def record(op: Operation) -> None:
    """Register `op` with the active public call, if library code and not the user's created it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (shown_file(frame.f_code.co_filename) and is_users(frame)):  # the first is cached
        if frame.f_code is _FACE:
            frame.f_locals["created"].append(op)
            return
        frame = frame.f_back


def _operations(result: object) -> Iterator[Any]:
    if isinstance(result, list | tuple):
        for part in result:
            yield from _operations(part)
    elif isinstance(result, dict):
        yield from _operations(list(result.values()))
    else:
        yield getattr(result, "operation", result)
