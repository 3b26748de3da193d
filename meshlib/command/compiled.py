"""What the command line says of compiled programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import meshlib.jax as real
from meshlib.core.errors import GraphError


def hlo_text(program: str) -> str | None:
    """The text of a compiled program in a file, such as step.hlo.txt; None if the argument names no such file.

    Raises: GraphError for a file that can't be read.
    """
    path = Path(program)
    if path.suffix == ".py" or ".py:" in program or not path.is_file():
        if path.suffix in (".txt", ".hlo"):
            raise GraphError(f"explain: no file {program}")
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as fault:
        raise GraphError(f"explain: {program} can't be read as a text: {fault}") from None


def explained_hlo(text: str, where: str | None, mesh: str | None) -> Any:
    """The collectives of a compiled program.

    Raises: GraphError without a slice.
    """
    if where is None:
        raise GraphError("explain: say what the program is compiled for: --slice v5e-256, and --mesh data:16;model:16")
    return real.explain(text, where, mesh)
