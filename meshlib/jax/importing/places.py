"""Origins of the equations of a traced function: source lines, named scopes, and the owners of files."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import jax

from meshlib.core.source_lines import shown_file
from meshlib.jax.importing.code import SourcePlace

_WORD = re.compile(r"[\w.\-]+")


def place_of(eqn: Any, around: SourcePlace) -> SourcePlace:
    """The place of an equation, whose line is the innermost in the user's code."""
    return SourcePlace(_line(eqn) or around.line, (*around.scope, *scopes_of(eqn)))


def scopes_of(eqn: Any) -> tuple[str, ...]:
    """The user's named scopes around an equation."""
    stack = getattr(eqn.source_info.name_stack, "stack", ())
    names = (str(part.name) for part in stack if type(part).__name__ == "Scope")
    # Scopes that libraries add themselves, such as the text of an einsum, are not names.
    return tuple(piece for name in names for piece in name.split("/") if _WORD.fullmatch(piece))


def _line(eqn: Any) -> str | None:
    """The innermost source line in the user's code, otherwise in a library other than JAX."""
    trace = eqn.source_info.traceback
    frames = trace.frames if trace is not None else ()
    other = None
    for frame in frames:
        kind = _kind(frame.file_name)
        if kind == "user":
            return f"{shown_file(frame.file_name)}:{frame.line_num}"
        if kind == "library" and other is None:
            other = f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return other


def author_of(closed: Any) -> str:
    """Author of a called function, as `_kind`; "user" if unknown."""
    info = getattr(getattr(closed, "jaxpr", closed), "debug_info", None)
    file = getattr(info, "func_filename", None)
    return "user" if file is None else _kind(file)


@cache
def _kind(file: str) -> str:
    """Owner of a source file: "user", "library", or "jax" (with its runtime)."""
    if file.startswith(os.path.dirname(jax.__file__) + os.sep) or not shown_file(file):
        return "jax"
    return "library" if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file else "user"
