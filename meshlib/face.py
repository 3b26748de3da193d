"""Whose a tensor is: what a public function returns is the user's, what it makes on the way is the library's own.

The user answers for the layout of the first. The second (softmax's maximum, the product of two of three factors, a
gradient's slices) he has never seen: it is laid out by what fits it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, isclass, isfunction, signature
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from meshlib.errors import ArgumentError, nearest
from meshlib.foreign import OF_ARGUMENTS
from meshlib.origin import is_users, shown_file, source_line

if TYPE_CHECKING:
    from meshlib.graph import Operation

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])


def public(function: Callable[P, T]) -> Callable[P, T]:
    """`function` as users call it: operations that it adds to a graph and does not return are marked as inner ones."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        made: list[Operation] = []  # filled by `record`, which finds it in this frame
        try:
            result = function(*args, **kwargs)
        except TypeError as fault:
            told = _misfit(function, kwargs) if _is_of_call(fault) else None
            if told is None:
                raise
            raise ArgumentError(f"{function.__name__} ({source_line()}): {told}") from None
        if made:
            returned = set(_operations(result))
            for op in made:
                if op not in returned:
                    op.graph.inner.add(op)
        return result

    return called


def _is_of_call(fault: TypeError) -> bool:
    """Whether calling failed, and not something within."""
    trace = fault.__traceback__
    return trace is not None and trace.tb_next is None


def _misfit(function: Callable[..., Any], given: Mapping[str, object]) -> str | None:
    """What is wrong with the names of arguments; None where they are right."""
    known = list(signature(function).parameters)
    for name in given:
        if name not in known:
            hint = OF_ARGUMENTS.get(name)
            hint = f"; {hint}" if hint else nearest(name, known) or f"; it has {', '.join(known)}"
            return f"no argument {name!r}{hint}"
    return None


def named_arguments(call: C) -> C:
    """A function, or a class, that refuses arguments by names that it has not, with the nearest that it has.

    Classes of ours that a class derives from have arguments of theirs, which it hands on.
    """
    inits = [vars(kind)["__init__"] for kind in call.__mro__[:-1] if "__init__" in vars(kind)] if isclass(call) else []
    known = [
        name
        for function in inits or [call]
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD and name != "self"
    ]
    own = inits[0] if inits else call

    @wraps(own)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                hint = nearest(name, known) or f"; it has {', '.join(known)}"
                raise ArgumentError(f"{call.__name__} ({source_line()}): no argument {name!r:.80}{hint}")
        return own(*args, **kwargs)

    if not isclass(call):
        return checked  # type: ignore[return-value]
    setattr(call, "__init__", checked)  # noqa: B010
    return call


_FACE: CodeType = public(lambda: None).__code__  # all wrappers share it


def public_calls(package: str, modules: Sequence[str]) -> Callable[[Any], Any]:
    """What a package exports instead of a value: of a function from modules whose names begin so, its public call."""
    calls: dict[object, Any] = {}  # a function may have two names, but is one

    def exported(value: Any) -> Any:
        if not (isfunction(value) and value.__module__.startswith(tuple(modules))):
            return value
        if value not in calls:
            calls[value] = call = public(value)
            call.__module__ = package  # where pickle looks for it
        return calls[value]

    return exported


def record(op: Operation) -> None:
    """Tell the public function that makes `op`, if the library's code calls it and not the user's, called by it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (shown_file(frame.f_code.co_filename) and is_users(frame)):  # the first is fast
        if frame.f_code is _FACE:
            frame.f_locals["made"].append(op)
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
