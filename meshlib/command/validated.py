"""`meshlib validate`: predictions beside published figures."""

from __future__ import annotations

import argparse
from dataclasses import fields, is_dataclass

from meshlib.command import figures
from meshlib.command.output import answer
from meshlib.command.terminal import GOOD, Progress
from meshlib.core.compiler import COMPILERS
from meshlib.core.errors import GraphError
from meshlib.validation.machine_figures import machine_figures
from meshlib.validation.runs import HELD_OUT
from meshlib.validation.served import served_figures
from meshlib.validation.talks import talks
from meshlib.validation.validating import validate


def validated(args: argparse.Namespace) -> int:
    """`meshlib validate`: predicted beside published figures."""
    own = [name for name in ("talks", "machine", "served", "held_out") if getattr(args, name)]
    if len(own) > 1 or (own and (args.file or args.refit)):
        first, *rest = (name.replace("_", "-") for name in own)
        others = f"--{rest[0]}" if rest else "--file and --refit"
        raise GraphError(f"--{first} has figures of its own; leave out {others}")
    with Progress(args.quiet) as bar:
        if args.talks:
            result: object = talks()
        elif args.machine:
            result = machine_figures()
        elif args.served:
            result = served_figures()
        else:
            result = validate(
                HELD_OUT if args.held_out else args.file,
                args.refit,
                COMPILERS[args.compiler],
                lambda done, all_: bar(done, all_, "rows"),
            )
    answer(args.json, lambda: [*map(_row, getattr(result, "rows", ()))], lambda: result)
    return GOOD


def _row(row: object) -> dict[str, object]:
    """The figures of one row; missing ones are None."""
    names = [f.name for f in fields(row)] if is_dataclass(row) else vars(row)
    values = {name: getattr(row, name) for name in names if name not in ("run", "images", "priced")}
    plain = {n: value for n, value in values.items() if value is None or isinstance(value, str | int | float | bool)}
    return figures.marked(plain)
