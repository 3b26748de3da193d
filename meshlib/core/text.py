"""Figures and tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import floor, log10

from layouts.cells import clipped as clipped


def bytes_text(n: int | float) -> str:
    """Bytes in readable units: 1536 -> '1.5 KiB'.

    >>> bytes_text(512), bytes_text(1536), bytes_text(2**20 - 1)
    ('512 B', '1.5 KiB', '1 MiB')
    """
    return _scaled(float(n), 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    """Four digits in the first of the units, each `step` of the one before, in which they are less than `step`."""
    for unit in units[:-1]:
        if float(digits := f"{value:.4g}") < step:
            return f"{digits} {unit}".rstrip()
        value /= step
    return f"{value:.4g} {units[-1]}"


def read_bytes(text: str) -> float | None:
    """The number of bytes in a text such as "1.5 KiB", or None if it is not a size.

    >>> read_bytes("1.5 KiB"), read_bytes("512 B"), read_bytes("2GiB"), read_bytes("some")
    (1536.0, 512.0, 2147483648.0, None)
    """
    number = text.strip().rstrip("BKMGTi").strip()
    unit = text.strip()[len(text.strip().rstrip("BKMGTi")) :]
    units = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
    if unit not in units or not number.replace(".", "", 1).isdecimal():
        return None
    return float(number) * float(1024 ** units[unit])


def exact_text(n: float) -> str:
    """All digits of an exact figure.

    >>> exact_text(44463783180), exact_text(2.5), exact_text(44463783180.0)
    ('44,463,783,180', '2.5', '44,463,783,180')
    """
    return f"{int(n):,}" if n == int(n) else f"{n:,}"


def seconds_text(seconds: float) -> str:
    """Seconds in readable units.

    >>> seconds_text(1.5e-6), seconds_text(0.0123), seconds_text(75), seconds_text(9.99999e-7)
    ('1.5 us', '12.3 ms', '75 s', '1 us')
    """
    return _scaled(seconds * 1e9, 1000, ("ns", "us", "ms", "s"))


def count_text(n: float) -> str:
    """Counts with metric prefixes.

    >>> count_text(999), count_text(1.234e9), count_text(2e15)
    ('999', '1.234 G', '2 P')
    """
    return _scaled(n, 1000, ("", "k", "M", "G", "T", "P"))


def counted(n: int, one: str, several: str = "") -> str:
    """A count with its noun, which is in the singular for 1.

    >>> counted(1, "core"), counted(4096, "axis", "axes")
    ('1 core', '4,096 axes')
    """
    return f"{n:,} {one if n == 1 else several or one + 's'}"


def usd_text(dollars: float) -> str:
    """US dollars: with two digits that count below ten cents, without cents from a thousand dollars.

    >>> usd_text(0.0000233), usd_text(0.5), usd_text(307.2), usd_text(170312.4)
    ('$0.000023', '$0.50', '$307.20', '$170,312')
    """
    if dollars >= 1000:
        return f"${dollars:,.0f}"
    digits = 1 - floor(log10(dollars)) if 0 < dollars < 0.1 else 2
    return f"${dollars:.{digits}f}"


_width: ContextVar[int | None] = ContextVar("width", default=None)
PRICED = {"tokens": (1e9, "a billion"), "images": (1e6, "a million")}  # how many of them a price is of
LEAST, LEGIBLE = 10, 22  # least width of a column, and the width below which a narrow table drops columns
USUAL = 80


@contextmanager
def fitted_to(width: int | None) -> Iterator[None]:
    """Tables and wrapped lines formatted inside fit into a width in characters; None: tables are not narrowed.

    >>> with fitted_to(20):
    ...     grid([("a/very/long/name", "1 KiB"), ("b", "2 KiB")], right=(1,))
    ['.../long/name  1 KiB', 'b              2 KiB']
    """
    token = _width.set(width)
    try:
        yield
    finally:
        _width.reset(token)


def width() -> int:
    """Characters per line: those of `fitted_to`, or 80."""
    return _width.get() or USUAL


def too_wide(lines: Iterable[str]) -> bool:
    """True if a line is longer than `fitted_to` allows.

    >>> with fitted_to(4):
    ...     too_wide(["12345"]), too_wide(["1234"])
    (True, False)
    """
    limit = _width.get()
    return limit is not None and any(len(line) > limit for line in lines)


def grid(cells: Sequence[Sequence[str]], right: Sequence[int] = (), spare: Sequence[int] = ()) -> list[str]:
    """Rows of text in aligned columns, those numbered in `right` aligned to the right.

    If the table is wider than `fitted_to` allows, columns in `spare` are dropped in order until no other column must be
    cut to less than `LEGIBLE` characters; then the widest columns that are not in `right` are narrowed.
    """
    widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
    limit = _width.get()
    if limit is not None:
        flexible = [k for k in range(len(widths)) if k not in right]
        if spare and not _legible(widths, flexible, limit):
            return _grid_without(spare[0], cells, right, spare)
        widths = _narrowed(widths, flexible, limit)
    return [
        "  ".join(f"{c:>{w}}" if k in right else f"{c:<{w}}" for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in ([shortened(c, w) for c, w in zip(row, widths, strict=True)] for row in cells)
    ]  # fmt: skip


def _legible(widths: Sequence[int], flexible: Sequence[int], limit: int) -> bool:
    """True if all columns fit into `limit` characters with no flexible column cut to less than `LEGIBLE`."""
    least = [min(w, LEGIBLE) if n in flexible else w for n, w in enumerate(widths)]
    return sum(least) + 2 * (len(least) - 1) <= limit


def _grid_without(column: int, cells: Sequence[Sequence[str]], right: Sequence[int], spare: Sequence[int]) -> list[str]:
    """The grid without one column; the others are renumbered."""
    rest = [n for n in range(len(cells[0])) if n != column]
    new_numbers = {n: number for number, n in enumerate(rest)}
    return grid(
        [[row[n] for n in rest] for row in cells],
        [new_numbers[n] for n in right if n != column],
        [new_numbers[n] for n in spare if n != column],
    )


def _narrowed(widths: Sequence[int], flexible: Sequence[int], limit: int) -> list[int]:
    """Widths of columns, of which the widest flexible ones are cut until all fit or none exceeds `LEAST`."""
    result = list(widths)
    while sum(result) + 2 * (len(result) - 1) > limit:
        widest = max(flexible, key=lambda k: result[k], default=None)
        if widest is None or result[widest] <= LEAST:
            break
        result[widest] -= 1
    return result


def shortened(cell: str, letters: int) -> str:
    """A cell cut to a limit: the beginning of prose, the end of a name.

    >>> shortened("training run", 10), shortened("layers/scan/attention", 12)
    ('trainin...', '...attention')
    """
    if len(cell) > letters and " " in cell and "/" not in cell:
        return f"{cell[: letters - 3]}..."
    return ending(cell, letters)


def ending(name: str, letters: int) -> str:
    """The end of a scoped name that is too long, which is its most specific part.

    >>> ending("layers/scan/feed_forward", 15)
    '...feed_forward'
    """
    return name if len(name) <= letters else f"...{name[3 - letters :]}"


def wrapped(text: str, head: str, after: str, limit: int | None = None) -> list[str]:
    """Text in lines of at most `limit` characters (default `width()`), broken after `after`; `head` begins the first
    line.

    >>> wrapped("batch:data;d_model:data?;heads:model", "layout ", ";", 24)
    ['layout batch:data;', '       d_model:data?;', '       heads:model']
    """
    limit = limit or width()
    lines, margin = [head], " " * len(head)
    parts = text.split(after)
    for n, part in enumerate(parts):
        piece = part + (after if n < len(parts) - 1 else "")
        if len(lines[-1]) > len(head) and len(lines[-1]) + len(piece.rstrip()) > limit:
            lines.append(margin)
        lines[-1] += piece
    return [line.rstrip() for line in lines]
