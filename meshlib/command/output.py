"""Output of commands: lines within the terminal's width, JSON, coloured verdicts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from meshlib.core.errors import GraphError
from meshlib.core.text import USUAL

SMALLEST = 40  # minimum width of a line, however narrow the terminal
MARGIN = 4  # indent of continuation lines
GREEN, RED, PLAIN = "\033[32;1m", "\033[31;1m", "\033[0m"


def terminal_width() -> int:
    """Width of the terminal, or of COLUMNS; 80 if neither is known."""
    return max(SMALLEST, shutil.get_terminal_size((USUAL, 24)).columns)


def say(text: object) -> None:
    """Print text, wrapping long lines with an indent."""
    width = terminal_width()
    for line in str(text).splitlines() or [""]:
        for part in folded(line, width):
            print(part)


def folded(line: str, width: int) -> Iterable[str]:
    """A line in pieces of at most `width` letters, cut at blanks, otherwise behind `;`, `/`, `,` or anywhere.

    >>> list(folded("  layout  batch:data;d_model:data", 24))
    ['  layout  batch:data;', '      d_model:data']
    """
    margin = " " * min(len(line) - len(line.lstrip()) + MARGIN, width // 2)
    while len(line) > width:
        start = len(line) - len(line.lstrip())
        cut = line.rfind(" ", start, width + 1)
        if cut <= start + (width - start) // 3:  # cutting at a blank far to the left would waste the line
            cut = max((line.rfind(mark, start, width) + 1 for mark in ";/,+"), default=0)
        if cut <= start + (width - start) // 3:
            cut = width
        yield line[:cut].rstrip()
        line = margin + line[cut:].lstrip()
    yield line


def writable(path: str, suffix: str = "") -> Path:
    """The path of an output file, whose folder may not exist yet; checked before any long computation.

    Raises: GraphError for a folder, for a folder that can't be created, and for a name with another end than `suffix`,
      if given.
    """
    file = Path(path)
    if file.is_dir():
        raise GraphError(f"{path} is a folder; name a file" if path else "--out is empty; name a file")
    nearest_folder = next(folder for folder in file.absolute().parents if folder.exists())
    if not nearest_folder.is_dir():
        raise GraphError(f"{path} can't be written: {nearest_folder} is a file; name another folder")
    if suffix and file.suffix != suffix:
        raise GraphError(f"{path} must end in {suffix}, as what is written; name it {file.with_suffix(suffix)}")
    return file


def create_folder(file: Path) -> None:
    """Create the folder of an output file if it does not exist.

    Raises: GraphError if it can't be created.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise GraphError(f"{file} can't be written: {fault.strerror}; name another folder") from None


def say_json(value: object) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, default=str))


def answer(as_json: bool, figures: Callable[[], object], text: Callable[[], object]) -> None:
    """Print figures as JSON, or text; only the one that is asked for is computed."""
    if as_json:
        say_json(figures())
    else:
        say(text())


def say_verdict(text: str, good: bool) -> None:
    """Print text as `say`, in green or red if the output is a terminal without NO_COLOR (https://no-color.org)."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    for part in folded(text, terminal_width()):
        print(part if plain else f"{GREEN if good else RED}{part}{PLAIN}")
