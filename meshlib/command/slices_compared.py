"""`meshlib plan --slice A,B`: the best plan on each of several slices, the cheapest first"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hardware.slices import Slice
from meshlib.command.output import say, say_json, say_verdict
from meshlib.command.plan import json_of, next_commands
from meshlib.command.planning import planned_of
from meshlib.command.subject import Subject, slice_of
from meshlib.command.terminal import FAILED, GOOD
from meshlib.command.tried_layouts import PlannedLayout
from meshlib.core.errors import GraphError
from meshlib.core.text import bytes_text, count_text, counted, grid, seconds_text, usd_text
from meshlib.estimation import Estimate


@dataclass(frozen=True)
class _SlicePlan:
    """The plans of a program on one slice, best first."""

    subject: Subject
    where: Slice
    plans: list[PlannedLayout]

    @property
    def est(self) -> Estimate | None:
        """The best plan's estimate."""
        return self.plans[0].est if self.plans else None

    @property
    def fits(self) -> bool:
        """True if a plan fits."""
        return bool(self.plans) and self.plans[0].fits

    @property
    def needed_bytes(self) -> float:
        """Bytes that the best plan needs on each device; infinite without an estimate."""
        return self.est.memory.needed_bytes if self.est is not None else float("inf")

    @property
    def rate(self) -> float:
        """Tokens or images per second, or steps of a function; 0 without an estimate."""
        return (self.subject.counted or (1, "steps"))[0] / self.est.step_seconds if self.est is not None else 0.0

    @property
    def usd(self) -> float:
        """Dollars of as much work as is done at a rate of 1 in a second; infinite without a price."""
        price = self.where.usd_per_hour
        return price / 3600 / self.rate if price is not None and self.rate else float("inf")


def compared_slices(args: argparse.Namespace) -> int:
    """Print the best plan on each slice; returns the exit status: whether the program fits on one."""
    if args.emit or args.compile:
        raise GraphError(f"--{'emit' if args.emit else 'compile'} is for one slice, not for {args.slice}; name one")
    names = [name.strip() for name in args.slice.split(",")]
    if not all(names):
        raise GraphError(f"--slice {args.slice}: no slice beside a comma; write NAME,NAME, such as v5e-64,v6e-16")
    slices = [slice_of(name) for name in dict.fromkeys(names)]
    rows = [_SlicePlan(subject, where, plans) for where in slices for subject, plans, _ in [planned_of(args, where)]]
    rows.sort(key=lambda row: (not row.fits, row.usd if row.fits else row.needed_bytes))
    best = rows[0]
    if args.json:
        say_json([json_of(row.subject, row.where, row.plans) for row in rows])
        return GOOD if best.fits else FAILED
    fastest = max((row for row in rows if row.fits), key=lambda row: row.rate, default=best)
    verdict = f"cheapest on {best.where.name}, fastest on {fastest.where.name}" if best.fits else "FITS ON NONE of them"
    say_verdict(f"{best.subject.name} on {counted(len(rows), 'slice')}: {verdict}", best.fits)
    say("\n".join(["", *_table(rows), *(["! does not fit"] if not all(r.fits for r in rows) else [])]))
    say("\n* modelled; all others exact")
    if best.fits and not args.quiet:
        args.slice = best.where.name
        say("\n".join(["", "next:", *next_commands(args, best.subject, best.plans[0])]))
    return GOOD if best.fits else FAILED


def _table(rows: list[_SlicePlan]) -> list[str]:
    what = (rows[0].subject.counted or (1, "steps"))[1]
    size, many = {"tokens": (1e9, "1 G tokens"), "images": (1e6, "1 M images")}.get(what, (1e3, "1 k steps"))
    cells: list[tuple[str, ...]] = [
        ("slice", "step*", "MFU*", f"{what}/s*", "$ an hour", f"{many}*", "needs*", "layout", "mesh")
    ]
    for row in rows:
        if (est := row.est) is None:
            cells.append((f"{row.where.name} !", *["-"] * 8))
            continue
        price = row.where.usd_per_hour
        cells.append((
            row.where.name + ("" if row.fits else " !"), seconds_text(est.step_seconds), f"{est.mfu:.1%}",
            count_text(row.rate), "-" if price is None else usd_text(price),
            "-" if price is None else usd_text(row.usd * size), bytes_text(est.memory.needed_bytes), row.plans[0].name,
            row.plans[0].mesh,
        ))  # fmt: skip
    return grid(cells, right=(1, 2, 3, 4, 5, 6), spare=(2, 6, 4))
