"""Commands that need no program: slices, models, validation, records."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, is_dataclass

from hardware.checks import HardwareError
from hardware.chips import CHIPS
from hardware.slices import Slice, legal_slices
from meshlib.command import figures
from meshlib.command.output import answer, say, say_json
from meshlib.command.terminal import Progress
from meshlib.core.compiler import COMPILERS
from meshlib.core.errors import GraphError, nearest
from meshlib.core.text import count_text, counted, grid, wrapped
from meshlib.models import IMAGE_PRESETS, PRESETS
from meshlib.records import make
from meshlib.validation.machine_figures import machine_figures
from meshlib.validation.runs import HELD_OUT
from meshlib.validation.served import served_figures
from meshlib.validation.talks import talks
from meshlib.validation.validating import validate

GOOD = 0


def slices(args: argparse.Namespace) -> int:
    """`meshlib slices`: names of slices."""
    if args.kind and args.kind not in CHIPS:
        hint = nearest(args.kind, CHIPS) or f"; there are {', '.join(CHIPS)}"
        raise HardwareError(f"no chip {args.kind!r}{hint}")
    kinds = {kind: legal_slices(kind) for kind in ([args.kind] if args.kind else sorted(CHIPS))}
    if args.json:
        say_json({kind: [figures.of_slice(Slice(name)) for name in names] for kind, names in kinds.items()})
        return GOOD
    for kind, names in kinds.items():
        say("\n".join(wrapped(" ".join(names), f"{kind:<5} ", " ")))
    return GOOD


def models(args: argparse.Namespace) -> int:
    """`meshlib models`: names of models."""
    sizes = {name: config.parameters for name, config in {**PRESETS, **IMAGE_PRESETS}.items()}
    if args.json:
        say_json(sizes)
        return GOOD
    rows = [(name, count_text(size), "images" if name in IMAGE_PRESETS else "text") for name, size in sizes.items()]
    say("\n".join(grid([("model", "parameters", "of"), *rows], right=(1,))))
    return GOOD


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
