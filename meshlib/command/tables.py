"""Lists: the slices and the models there are."""

from __future__ import annotations

import argparse

from hardware.checks import HardwareError
from hardware.chips import CHIPS
from hardware.slices import Slice, legal_slices
from meshlib.command import figures
from meshlib.command.output import say, say_json
from meshlib.command.terminal import GOOD
from meshlib.core.errors import nearest
from meshlib.core.text import count_text, grid, wrapped


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
    from meshlib.models import IMAGE_PRESETS, PRESETS  # slow to load, and of no use for slices

    sizes = {name: config.parameters for name, config in {**PRESETS, **IMAGE_PRESETS}.items()}
    if args.json:
        say_json(sizes)
        return GOOD
    rows = [(name, count_text(size), "images" if name in IMAGE_PRESETS else "text") for name, size in sizes.items()]
    say("\n".join(grid([("model", "parameters", "of"), *rows], right=(1,))))
    return GOOD
