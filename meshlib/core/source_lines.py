"""Source lines of operations: in the user's code, or given by another front end.

Every operation and every message names one line, `file.py:12`: that of the innermost frame of the user's code. Code
of a model that the library writes has one such line, the call; there the scoped name of the operation, which stands
beside the line wherever it is shown, tells rows apart.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType

import numpy as np

from meshlib.core.errors import GraphError

_given: ContextVar[tuple[str, FrameType | None] | None] = ContextVar("given", default=None)


UNKNOWN_LINE = "unknown line"
OWN = ("hardware", "layouts", "meshlib")


def source_line() -> str:
    """`file.py:line` of the innermost frame of the user's code; or what `written_at` says.

    Where no frame is the user's, as at the command line, that of a model of the library which writes the operation,
    such as `models/blocks.py:31`; "unknown line" where there is none either: a thread pool that runs a function of this
    package.
    """
    given = _given.get()
    if given is not None and given[1] is None:
        return given[0]
    frame = _user_frame()
    if given is not None and frame is given[1]:
        return given[0]
    return _model_line() if frame is None else f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"


@contextlib.contextmanager
def written_at(position: str, default: bool = False) -> Iterator[None]:
    """Operations made inside, and messages about them, name `position` as where they were written.

    For what is written on behalf of something else: gradients name the line of the operation that they belong to,
    copies that of the original, and a front end that traces other programs the lines of these. With
    `meshlib.core.graph.absolute_scope`, which does the same for names, nothing of the caller shows.

    Args:
      position: such as "model.py:12".
      default: lines of the user's code that runs inside come first, such as those of a gradient rule of his own.
    Raises: GraphError for a position that is no text.
    Example:
      >>> import meshlib as mtf
      >>> from meshlib.core.graph import absolute_scope
      >>> with mtf.Graph() as graph, written_at("traced.py:3"), absolute_scope("block"):
      ...     x = mtf.ones([mtf.Dimension("d", 4)])
      >>> graph.operations[0]
      constant 'block/ones' (traced.py:3)
    """
    if not isinstance(position, str) or not position:
        raise GraphError(f"written_at: expected a position such as 'model.py:12', got {position!r:.80}")
    token = _given.set((position, _user_frame() if default else None))
    try:
        yield
    finally:
        _given.reset(token)


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs the user's code: not this package, nor what Python and NumPy put in between."""
    code = frame.f_code
    # What dataclasses make from text has no file; text that the user runs has none either.
    return bool(shown_file(code.co_filename)) and not code.co_qualname.startswith("__create_fn__.")


def _user_frame() -> FrameType | None:
    """The innermost frame of the user's code; what runs the command `meshlib` is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (shown_file(frame.f_code.co_filename) and is_users(frame)):  # the first is fast
        if frame.f_code.co_filename == _COMMAND:
            return None
        frame = frame.f_back
    return frame


def _model_line() -> str:
    """The innermost line of a model of this package, `models/file.py:12`; "unknown line" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_MODELS):
            return f"models/{file.removeprefix(_MODELS).replace(os.sep, '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return UNKNOWN_LINE


# As the frames have it, which holds in archives and after a move of compiled files too.
_PACKAGE = os.path.dirname(os.path.dirname(_user_frame.__code__.co_filename))
_MODELS, _COMMAND = os.path.join(_PACKAGE, "models", ""), os.path.join(_PACKAGE, "command", "__init__.py")
_NUMPY, _LIBRARY = os.path.dirname(np.__file__), os.path.dirname(contextlib.__file__)


@contextlib.contextmanager
def users_function(what: str) -> Iterator[None]:
    """In it runs a function that the user gave: what it raises becomes one line, with the user's line that raised it.

    Raises: GraphError from the exception; errors of this library as they are.
    """
    try:
        yield
    except Exception as fault:
        if type(fault).__module__.partition(".")[0] in OWN:
            raise
        trace, frames = fault.__traceback__, list[tuple[str, int]]()
        while trace is not None:
            if is_users(trace.tb_frame):
                frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
        own = [f for f in frames if "site-packages" not in f[0] and "dist-packages" not in f[0]] or frames
        where = f" at {shown_file(own[-1][0])}:{own[-1][1]}" if own else ""
        first = next(iter(str(fault).strip().splitlines()), "")
        raise GraphError(f"{what} failed{where}: {type(fault).__name__}: {first:.300}") from fault


@functools.cache
def shown_file(file: str) -> str:
    """The name of a file of the user's; "" for this package and what calls back: NumPy, Python's own library."""
    if file.startswith("<frozen ") or any(file.startswith(folder + os.sep) for folder in (_PACKAGE, _NUMPY)):
        return ""
    inside = file.removeprefix(_LIBRARY + os.sep)
    if inside != file and not inside.startswith(("site-packages", "dist-packages")):
        return ""
    return os.path.basename(file)
