"""Changes of plan: snapshots as short texts for tests, and operations whose strategies differ in two programs."""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layouts.checking import some
from meshlib.core.documents import MOST_BYTES
from meshlib.core.errors import GraphError
from meshlib.core.files import open_file, replace_file
from meshlib.core.graph import Operation
from meshlib.core.text import exact_text
from meshlib.program.instructions import Compute, Resident
from meshlib.program.records import Program, require_program, walk

UPDATE = "MESHLIB_UPDATE_SNAPSHOTS"  # if set to 1, snapshots are written
HEADS = ("mesh", "layout", "dims", "computes", "sends", "holds")  # first words of a snapshot's lines that occur once
SHOWN = 3  # operations named in a note; others are counted


def assert_snapshot(program: Program, path: str | Path, update: bool = False) -> None:
    """Assert that a program's plan is unchanged: collectives by cause, bytes sent, FLOPs, memory. All exact.

    Args:
      program: the lowered program.
      path: the snapshot file, a text to be committed with the tests and read in reviews.
      update: write the file instead, as the environment variable MESHLIB_UPDATE_SNAPSHOTS=1 does for all.
    Raises: AssertionError with the difference, or if there is no file yet; GraphError for a file that can't be written.
    Example:
      >>> import meshlib as mtf, tempfile, pathlib
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "total.txt"
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8)])
      ...     program = mtf.lower({"total": mtf.reduce_sum(x, name="total")}, mesh="rows:2", layout="batch:rows")
      >>> mtf.testing.assert_snapshot(program, path, update=True)
      >>> mtf.testing.assert_snapshot(program, path)
      >>> print(path.read_text().splitlines()[3])
      forward all_reduce over rows: 1 x total, sends 4 bytes
    """
    __tracebackhide__ = True
    require_program(program, "assert_snapshot")
    text = snapshot(program)
    if update or os.environ.get(UPDATE) == "1":
        replace_file(path, lambda file: file.write(text.encode()), "assert_snapshot", GraphError)
        return
    if isinstance(path, str | Path) and not os.path.lexists(path):
        raise AssertionError(f"there is no snapshot {path} yet; {UPDATE}=1 writes it")
    with open_file(path, "assert_snapshot", GraphError, MOST_BYTES) as (file, target):
        try:
            expected = file.read().decode()
        except UnicodeDecodeError as fault:
            raise GraphError(f"assert_snapshot: {target} is not a snapshot, which is text in UTF-8: {fault}") from None
    if expected != text:
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), "as it was", "as it is", lineterm="", n=1
        )
        shown = "\n".join(f"  {line}" for line in lines)
        changes = f"the program is not as in {path}: {_changes(expected, text)}"
        raise AssertionError(f"{changes}; if it should be so, {UPDATE}=1 writes it\n{shown}")


def _changes(expected: str, text: str) -> str:
    """What differs in the lines of `HEADS`, which name the cause of a changed plan and its effect."""
    was, now = (dict(line.split(" ", 1) for line in lines.splitlines() if " " in line) for lines in (expected, text))
    parts = []
    for head in HEADS:
        before, after = (lines.get(head, "none").split(", ") for lines in (was, now))
        if before != after:
            gone, new = ([x for x in own if x not in other] for own, other in ((before, after), (after, before)))
            parts.append(f"{head} {', '.join(gone) or 'none'} -> {', '.join(new) or 'none'}")
    return "; ".join(parts) or "other collectives"


def _dims(program: Program) -> str:
    """Names and sizes of the dims of inputs and variables."""
    residents = [y.tensor.shape for i in program.instructions if isinstance(i, Resident) for y in i.outputs]
    return ", ".join(sorted({str(dim) for shape in residents for dim in shape.dims})) or "none"


def snapshot(program: Program) -> str:
    """The text of a snapshot: mesh, layout, dims, one line per cause of collectives, in order, FLOPs, bytes, memory."""
    sent: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for c in program.collectives:
        key = f"{c.phase} {c.kind} over {'+'.join(c.axes)}", c.op
        cause = f"{key[0]}: {{}} x {key[1]}"
        sent[cause] += c.sent_bytes * c.count
        counts[cause] += c.count
    lines = [f"mesh {program.mesh}", f"layout {program.layout or '(none)'}", f"dims {_dims(program)}"]
    lines += [f"{cause.format(counts[cause])}, sends {exact_text(sent[cause])} bytes" for cause in sent]
    lines.append(f"computes {exact_text(program.work.mxu_flops)} FLOPs of products in each core")
    lines.append(f"sends {exact_text(program.sent_bytes)} bytes in all")
    lines.append(f"holds {program.memory.peak_bytes:,} bytes at its peak")
    lines += [f"  {kind}: {size:,} bytes" for kind, size in program.memory.by_kind.items() if size]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Replanned:
    """An operation of both programs with different strategies: `a` and `b` are the splits, "whole" for none."""

    operation: str
    name: str
    source: str
    phase: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.operation} '{self.name}' ({self.source})"


def replanned(a: Program, b: Program) -> tuple[Replanned, ...]:
    """Operations with different strategies, matched by name, phase and, for several runs, by order; in the order of
    a."""
    left, right = _ways(a), _ways(b)
    return tuple(
        Replanned(op.opdef.name, op.name, op.source, str(key[0]), split, right[key][1])
        for key, (op, split) in left.items()
        if key in right and right[key][1] != split
    )


def plan_notes(changes: Sequence[Replanned]) -> tuple[str, ...]:
    """One line per kind of change and phase, naming the first operations."""
    alike: dict[tuple[str, str, str], list[Replanned]] = {}
    for x in changes:
        alike.setdefault((x.phase, x.a, x.b), []).append(x)
    notes = []
    for (phase, before, after), members in alike.items():
        notes.append(f"{phase}: {_split(after)} in b, {_split(before)} in a: {some(members, SHOWN)}")
    return tuple(notes)


def _split(assignment: str) -> str:
    return "whole" if assignment == "whole" else f"split by {assignment}"


def _ways(program: Program) -> Mapping[tuple[object, ...], tuple[Operation, str]]:
    strategy_of: dict[tuple[object, ...], tuple[Operation, str]] = {}
    counts: dict[tuple[object, ...], int] = {}
    for i, _, _ in walk(program):
        if isinstance(i, Compute):
            op = i.operation
            key = (i.region, op.name, op.opdef.name)
            number = counts[key] = counts.get(key, 0) + 1
            by = sorted(f"{factor}@{axis}" for axis, factor in i.assignment)
            strategy_of[*key, number] = op, " ".join(by) or "whole"
    return strategy_of
