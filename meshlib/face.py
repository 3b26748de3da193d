"""Whose a tensor is: what a public function returns is the user's, what it makes on the way is the library's own.

The user answers for the layout of the first. The second (softmax's maximum, the product of two of three factors, a
gradient's slices) he has never seen: it is laid out by what fits it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import isfunction
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from meshlib.graph import Operation

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = str(Path(__file__).parent)


def public(function: Callable[P, T]) -> Callable[P, T]:
    """`function` as users call it: operations that it adds to a graph and does not return are marked as inner ones."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        made: list[Operation] = []  # filled by `record`, which finds it in this frame
        result = function(*args, **kwargs)
        if made:
            returned = set(_operations(result))
            for op in made:
                if op not in returned:
                    op.graph.inner.add(op)
        return result

    return called


_FACE: CodeType = public(lambda: None).__code__  # all wrappers share it


def show(namespace: dict[str, Any], makers: Sequence[str]) -> None:
    """Make public the functions among the names that a package exports which come from the modules `makers`."""
    shown: dict[object, object] = {}  # a function may have two names
    for name in namespace["__all__"]:
        f = namespace[name]
        if isfunction(f) and f.__module__.startswith(tuple(makers)):
            if f not in shown:
                shown[f] = called = public(f)
                called.__module__ = namespace["__name__"]  # where pickle finds it
            namespace[name] = shown[f]


def record(op: Operation) -> None:
    """Tell the public function that makes `op`, if the library's code calls it and not the user's, called by it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_between(frame):
        if frame.f_code is _FACE:
            frame.f_locals["made"].append(op)
            return
        frame = frame.f_back


def is_between(frame: FrameType) -> bool:
    """Whether a frame is of this package, or of what Python puts in between, and so not the user's."""
    # Context managers run through contextlib, dataclasses through an __init__ made from a string.
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    return file.startswith(_PACKAGE) or file == contextlib.__file__ or (file, function) == ("<string>", "__init__")


def _operations(result: object) -> Iterator[Any]:
    if isinstance(result, list | tuple):
        for part in result:
            yield from _operations(part)
    elif isinstance(result, dict):
        yield from _operations(list(result.values()))
    else:
        yield getattr(result, "operation", result)
