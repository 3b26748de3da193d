"""`Verification`: the result of `mtf.verify`, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass

from hardware.unknown_names import Attributes
from layouts.checking import some
from meshlib.core.errors import ProgramError
from meshlib.core.text import bytes_text, counted, grid

NAMED = 8  # compared arrays that are listed


@dataclass(frozen=True)
class Divergence:
    """The first operation, in program order, whose value differs from the unsharded program's.

    `op` is the operation of the value, and `kind` the faulty step: the operation itself, or a collective.
    For a pending sum `devices` have one part each; `trip` counts the runs of a loop's body.
    """

    op: str
    kind: str
    source: str
    phase: str
    tensor: str
    value: str  # type and sharding
    split: str
    instruction: str
    mesh: str
    layout: str
    devices: tuple[int, ...]
    coordinate: dict[str, int]
    index: dict[str, int]
    found: float
    wanted: float
    allowed: float
    trip: int | None = None

    def __str__(self) -> str:
        where = ", ".join(f"{a}={i}" for a, i in self.coordinate.items())
        cores = f"core {self.devices[0]}" if len(self.devices) == 1 else f"cores {', '.join(map(str, self.devices))}"
        summed = "" if len(self.devices) == 1 else ", parts together"
        at = ", ".join(f"{d}={i}" for d, i in self.index.items())
        trip = "" if self.trip is None else f", trip {self.trip}"
        return (
            f"first to diverge: {self.instruction}, {self.phase}{trip}\n"
            f"  {self.tensor}: {self.value}{f', split {self.split}' if self.split else ''}\n"
            f"  on {cores}{f' ({where})' if where else ''}{summed}{f', at {at}' if at else ''}: "
            f"{self.found:.9g}, not {self.wanted:.9g} (allowed: {self.allowed:.2g})"
        )


@dataclass(frozen=True)
class LayoutRow:
    """One layout. `error` is the largest difference relative to the largest magnitude in its array, like `allowed`.

    `worst` names the array with the largest ratio of error to tolerance; `fault` is the reason if a run stopped.
    """

    mesh: str
    layout: str
    ok: bool
    error: float
    allowed: float
    worst: str
    collectives: int
    sent_bytes: float
    wrong: tuple[str, ...] = ()  # one text per wrong array
    fault: str = ""
    divergence: Divergence | None = None

    def __str__(self) -> str:
        lines = [f"mesh {self.mesh}   layout {self.layout or '(none)'}", *(f"  {w}" for w in self.wrong)]
        lines += [f"  {line}" for line in self.fault.splitlines()]
        if self.divergence is not None:
            lines += [f"  {line}" for line in str(self.divergence).splitlines()]
        elif not self.ok:
            lines.append("  no operation diverges by itself in the exact executor")
        return "\n".join(lines)


@dataclass(frozen=True)
class Verification(Attributes):
    """Result of `mtf.verify`: one row per layout, in order.

    `compared` names the arrays; `notes` lists limits of the proof; `refused` are searched layouts that the lowering
    refuses, each with the first line of its reason.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_sum(mtf.input("x", "batch:8;d:4"))
      >>> report = mtf.verify({"y": y}, layouts=[("data:2", "batch:data")])
      >>> report.ok, len(report.rows)
      (True, 1)
    """

    rows: tuple[LayoutRow, ...]
    compared: tuple[str, ...]
    precision: str
    executor: str
    seed: int
    steps: int
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every layout gives the unsharded numbers."""
        return all(r.ok for r in self.rows)

    @property
    def failures(self) -> tuple[LayoutRow, ...]:
        """The failing layouts."""
        return tuple(r for r in self.rows if not r.ok)

    def raise_for_failures(self) -> None:
        """Raise one ProgramError with all failing layouts, if there are any."""
        if not self.ok:
            raise ProgramError("\n".join([self._head(), *(str(r) for r in self.failures)]))

    def table(self) -> str:
        """One line per layout; errors and tolerances are relative to the largest magnitude in the array."""
        head = ("", "mesh", "layout", "collectives", "sent a core", "largest error", "allowed", "in")
        cells = [
            (
                "ok" if r.ok else "FAIL",
                r.mesh,
                r.layout or "(none)",
                str(r.collectives),
                bytes_text(r.sent_bytes),
                f"{r.error:.2g}",
                f"{r.allowed:.2g}",
                r.worst,
            )
            for r in self.rows
        ]
        return "\n".join(grid([head, *cells], right=(3, 4, 5, 6), spare=(4, 3, 7)))

    def _head(self) -> str:
        bad = len(self.failures)
        verdict = "all equal up to rounding" if not bad else f"{bad} NOT equal"
        return f"{counted(len(self.rows), 'layout')} against the unsharded program: {verdict}"

    def __repr__(self) -> str:
        return f"<Verification of {self._head()}>"

    def __str__(self) -> str:
        lines = [
            self._head(),
            f"compared in {counted(self.steps, 'step')}: {some(self.compared, NAMED)}",
            f"{self.executor} executor, precision {self.precision}, seed {self.seed}",
            *(f"note: {n}" for n in self.notes),
            *(f"refused by the lowering: {r}" for r in self.refused),
            self.table(),
            *(str(r) for r in self.failures),
        ]
        return "\n".join(lines)
