"""`meshlib records`: data converted to record files."""

from __future__ import annotations

import argparse
import os

from meshlib.command.output import answer
from meshlib.command.terminal import GOOD, Progress
from meshlib.core.text import counted
from meshlib.records import make


def recorded(args: argparse.Namespace) -> int:
    """`meshlib records`: convert data to record files."""
    columns = dict(args.column) if args.column else None
    with Progress(args.quiet) as bar:
        count, paths = make(
            args.source, args.target, labels=args.labels, columns=columns, compression=args.compression,
            progress=lambda done, total: bar(done, total, "written"),
        )  # fmt: skip
    where = paths[0] if len(paths) == 1 else f"{paths[0]} to {os.path.basename(paths[-1])}"
    answer(
        args.json,
        lambda: {"records": count, "files": [*map(str, paths)]},
        lambda: f"{counted(count, 'record')} in {where}",
    )
    return GOOD
