"""Alternatives: step time against memory, the Pareto front, and the reasons against the other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshlib.core.text import bytes_text, seconds_text
from meshlib.report.markup import MODELLED, folding_table, paragraph, section, text
from meshlib.report.memory import FAR
from meshlib.report.svg import Picture, Scale, binary_ticks
from meshlib.searching import Found

SHOWN, MOST = 12, 200


@dataclass(frozen=True)
class Alternative:
    """One estimated layout.

    Attributes:
      name: mesh and layout, or their preset's name; choices: further differences, such as "remat full".
      step_seconds, needed_bytes (of the compiled step), fits: modelled.
      chosen: whether the page is about it; why: the reason why it loses, or "".
    """

    name: str
    step_seconds: float
    needed_bytes: float
    fits: bool
    chosen: bool = False
    choices: str = ""
    why: str = ""


def pareto_front(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """The alternatives that fit and that no other beats in both step time and memory, fastest first.

    Example:
      >>> a, b, c = (Alternative(n, s, m, True) for n, s, m in (("a", 1, 9), ("b", 2, 4), ("c", 3, 5)))
      >>> [x.name for x in pareto_front([c, b, a])]
      ['a', 'b']
    """
    front: list[Alternative] = []
    for a in sorted((a for a in alternatives if a.fits), key=lambda a: (a.step_seconds, a.needed_bytes)):
        if not front or a.needed_bytes < front[-1].needed_bytes:
            front.append(a)
    return front


def alternatives(options: Sequence[Alternative], capacity_bytes: float, certificate: str = "") -> str:
    """The section of alternatives; "" if there is only one."""
    if len(options) < 2:
        return ""
    proof = paragraph(text(certificate)) if certificate else ""
    return section("alternatives", "Alternatives", scatter(options, capacity_bytes), proof, ranking(options[:MOST]))


def ranking(options: Sequence[Alternative], linked: bool = True) -> str:
    """The table of alternatives, without empty columns; `linked`: discs of the picture link to its rows."""
    rows = [_row(n, a) for n, a in enumerate(options, start=1)]
    head = ("", f"step {MODELLED}", f"needs {MODELLED}", "layout", "choices", "why not")
    filled = [k for k in range(len(head)) if any(row[k] for row in rows)]
    shown = [tuple(row[k] for k in filled) for row in (head, *rows)]
    long = [k for k, title in enumerate(shown[0]) if title in ("layout", "why not")]
    ids = [f"alternative-{n}" for n in range(1, len(rows) + 1)] if linked else ()
    return folding_table(shown[0], shown[1:], SHOWN, "", (0, 1, 2), ids, sortable=linked, long=long)


def scatter(options: Sequence[Alternative], capacity_bytes: float, linked: bool = True) -> str:
    """The picture: time to the right, memory upwards, the Pareto front, and the memory of a device."""
    picture = Picture(460, 300, label="alternatives by step time and memory")
    times, sizes = [a.step_seconds for a in options], [a.needed_bytes for a in options]
    far = max(sizes) * FAR < capacity_bytes  # all would be points at the bottom
    top = max(sizes) if far else max(min(max(sizes), 4 * capacity_bytes), capacity_bytes)  # larger ones at the edge
    spread = max(times) - min(times) or max(times)
    across = Scale((max(0.0, min(times) - 0.08 * spread), max(times) + 0.08 * spread), (picture.left, picture.right))
    up = Scale((0.0, top * 1.1), (picture.bottom, picture.top))
    picture.axis_below(across, lambda t: seconds_text(t) if t else "0", "step ≈")
    picture.axis_left(up, bytes_text, binary_ticks(up))
    capacity = f"capacity {bytes_text(capacity_bytes)}"
    y = picture.top + 8 if far else up(capacity_bytes)
    if not far:
        picture.line(picture.left, y, picture.right, y, "limit", capacity)
    picture.text(picture.right - 4, y - 4, f"{capacity}, above this picture" if far else capacity, anchor="end")
    front = pareto_front(options)
    steps = [(across(a.step_seconds), up(a.needed_bytes)) for a in front]
    ends = [*(x for x, _ in steps[1:]), picture.right]
    corners = [p for (x, y), after in zip(steps, ends, strict=False) for p in ((x, y), (after, y))]
    if corners:
        picture.path(corners, "front", title="nothing is both faster and smaller")
    for n, a in reversed(list(enumerate(options, start=1))):
        about = f"{a.name} {a.choices}: {seconds_text(a.step_seconds)}, {bytes_text(a.needed_bytes)}. {a.why}"
        class_ = "option" + (" chosen" if a.chosen else "") + ("" if a.fits else " large")
        href = "" if not linked else f"#alternative-{n}" if n <= MOST else "#alternatives"
        picture.circle(
            across(a.step_seconds), max(picture.top, up(a.needed_bytes)), 6 if a.chosen else 4, class_, about, href
        )
    return str(picture)


def _row(n: int, a: Alternative) -> tuple[str, ...]:
    name = f"<b>{text(a.name)}</b>" if a.chosen else text(a.name)
    why = a.why or ("" if a.fits else "does not fit")
    numbers = str(n), text(seconds_text(a.step_seconds)), text(bytes_text(a.needed_bytes))
    return (*numbers, name, text(a.choices), text(why))


def alternatives_of(search: Found) -> list[Alternative]:
    """The estimated candidates, in the order of the ranking."""
    options = []
    for outcome in search.ranking:
        candidate, figures = outcome.candidate, outcome.figures
        assert figures is not None
        choices = " ".join(f"{name} {value}" for name, value in candidate.choices)
        name = f"{candidate.layout or '(nothing is split)'} on {candidate.mesh}"
        options.append(
            Alternative(
                name, figures.step_seconds, figures.peak_bytes, figures.fits, outcome is search.best, choices,
                search.why(outcome),
            )
        )  # fmt: skip
    return options
