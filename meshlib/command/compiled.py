"""Compiled programs on the command line: the compiler's verdict on a plan, and the collectives of any HLO."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import meshlib.jax as real
from hardware.slices import Slice
from meshlib.command.terminal import Progress
from meshlib.core.errors import GraphError
from meshlib.core.files import open_file
from meshlib.program.records import Program

MOST_BYTES = 2**30


def compiled_for(programs: Sequence[Program], where: Slice, args: argparse.Namespace) -> list[Any]:
    """Compile programs with the real compiler, announced on standard error with a progress bar."""
    announced = args.quiet

    def tell(done: int, total: int, text: str) -> None:
        nonlocal announced
        if not announced:
            print(f"{args.command}: {text}", file=sys.stderr)
        announced = True
        bar(done, total, text)

    with Progress(args.quiet) as bar:
        verdicts: list[Any] = real.compile_for(list(programs), where, backend=args.backend, progress=tell)
    return verdicts


def hlo_text(program: str) -> str | None:
    """The text of a compiled program in a file, such as step.hlo.txt; None if the argument names no such file.

    Raises: GraphError for a file that can't be read.
    """
    path = Path(program)
    if path.suffix not in (".txt", ".hlo"):
        return None
    if not path.exists():
        raise GraphError(f"explain: no file {program}; name what a compiler wrote, or a model: meshlib models")
    with open_file(path, "explain", GraphError, MOST_BYTES) as (file, target):
        raw = file.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as fault:
        raise GraphError(f"explain: {target} is not UTF-8: byte {fault.start} is 0x{raw[fault.start]:02x}") from None


def explained_hlo(text: str, where: str | None, mesh: str | None) -> Any:
    """The collectives of a compiled program.

    Raises: GraphError without a slice.
    """
    if where is None:
        raise GraphError("explain: say what the program is compiled for: --slice v5e-256, and --mesh data:16;model:16")
    return real.explain(text, where, mesh)
