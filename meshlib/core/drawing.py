"""Pictures in files: matplotlib, where it is installed, and files that are whole or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from meshlib.core.errors import GraphError
from meshlib.core.files import replace_file


def new_figure(what: str, width: float, height: float) -> Any:
    """An empty figure, in inches.

    Raises: GraphError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise GraphError(f"{what} needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(draw: Callable[[], Any], path: str | Path, what: str) -> None:
    """Write what `draw` returns into a file; its ending says the format, such as .png, .svg or .pdf.

    Raises: GraphError where the file cannot be written, and as `draw`.
    """

    def write(file: BinaryIO) -> None:
        try:
            draw().savefig(file, dpi=150, format=Path(path).suffix[1:] or None)
        except ValueError as fault:  # an ending that matplotlib does not know
            raise GraphError(f"{what}: {path} can't be written: {fault}") from None

    replace_file(path, write, what, GraphError)
