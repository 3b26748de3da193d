"""Assertions for users' tests: collectives of a program, layout invariance, memory.

Plain functions. They raise AssertionError with everything needed to understand the failure, and a MeshlibError for
invalid arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layouts import Mesh
from layouts.step_kinds import COLLECTIVES
from meshlib.core.arguments import flag
from meshlib.core.errors import GraphError, nearest
from meshlib.core.explained_calls import explain_module
from meshlib.core.graph import Operation, Tensor
from meshlib.core.slices import slice_for
from meshlib.core.text import bytes_text, exact_text, read_bytes
from meshlib.estimation.memory.device_memory import memory_on
from meshlib.program.instructions import Instruction, Move, Value
from meshlib.program.records import Collective, Program, require_program, walk
from meshlib.program.views.plan_changes import assert_snapshot
from meshlib.verification import Verification, verify

__all__ = ["assert_collectives", "assert_fits", "assert_layout_invariant", "assert_sent_at_most", "assert_snapshot"]

SHOWN_TENSORS = 8  # listed values live at the peak, and largest collectives

_TEXT = re.compile(
    r"(?:(?P<count>\d+)\s*(?:x|\*)\s+)?(?P<kind>\w+)\s+over\s+(?P<axes>\w+(?:\+\w+)*)(?:\s+of\s+(?P<of>\S+))?"
)


# ---------------------------------------------------------------- collectives


@dataclass(frozen=True)
class _Expected:
    """One expected collective; None: any."""

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int | None = None
    of: str | None = None

    def fits(self, c: _Actual) -> bool:
        return (
            (self.kind, self.axes) == (c.collective.kind, c.collective.axes)
            and self.payload_bytes in (None, c.collective.payload_bytes)
            and (self.of is None or self.of in c.names)
        )

    def near(self, c: _Actual) -> bool:
        """True if it matches except for its bytes or axes."""
        same_tensor = self.of is not None and self.of in c.names
        return self.kind == c.collective.kind and (self.axes == c.collective.axes or same_tensor)

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of else ""
        payload = f", payload {self.payload_bytes} B" if self.payload_bytes is not None else ""
        return f"{self.kind} over {'+'.join(self.axes)}{of}{payload}"


@dataclass(frozen=True)
class _Actual:
    """A collective with all names of its value; the last is the variable of which it is the gradient."""

    collective: Collective
    names: tuple[str, ...]

    @property
    def why(self) -> tuple[str, str]:
        return f"      because {self.collective.reason}", f"      avoid: {self.collective.avoid}"

    def __str__(self) -> str:
        c = self.collective
        also = f" (gradient of {self.names[1]})" if len(self.names) > 1 else ""
        return f"{c.kind} over {'+'.join(c.axes)} of {c.tensor}{also}, payload {c.payload_bytes} B"


def assert_collectives(program: Program, expected: Sequence[Any] | Mapping[str, int]) -> None:
    """Assert that a program runs exactly the expected collectives, in any order.

    Args:
      program: the lowered program.
      expected: one entry per collective:
        a tuple (kind, axes) or (kind, axes, payload_bytes), axes as "rows+cols" or a list, major first, the payload
        being the bytes of the operand on one core; or a text "all_reduce over rows+cols", optionally "... of w1",
        which names the tensor, or the variable whose gradient it is, and optionally "2 x ..." in front.
        One in the body of a loop counts once. Or a dict of kinds to how many of each there are: {"all_reduce": 3}.
    Raises: AssertionError with the difference and the reason of everything unexpected; GraphError for an entry that
      is no collective.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8)])
      ...     total = mtf.reduce_sum(x, name="total")
      >>> program = mtf.lower({"total": total}, mesh="rows:2", layout="batch:rows")
      >>> mtf.testing.assert_collectives(program, [("all_reduce", "rows", 4)])
      >>> mtf.testing.assert_collectives(program, ["all_reduce over rows of total"])
      >>> mtf.testing.assert_collectives(program, [])
      Traceback (most recent call last):
      AssertionError: other collectives than expected: 0 missing, 1 unexpected
        + all_reduce over rows of total, payload 4 B  (<doctest meshlib.testing.assert_collectives[1]>:3)
            because reduce_sum 'total' sums over 'batch', split over rows: every core holds a partial sum
            avoid: leave 'batch' unsplit over rows (rule batch:rows)
        mesh rows:2   layout batch:rows
    """
    __tracebackhide__ = True
    require_program(program, "assert_collectives")
    if isinstance(expected, Mapping):
        _assert_counts(program, expected)
        return
    if isinstance(expected, str) or not isinstance(expected, Sequence):
        raise GraphError(
            f"assert_collectives: expected must be a list, such as ['all_reduce over rows'], got {expected!r:.80}"
        )
    wanted = [w for entry in expected for w in _read(entry, program)]
    collectives = _found(program)
    missing, unexpected = _unmatched(wanted, collectives)
    if not missing and not unexpected:
        return
    lines = [f"other collectives than expected: {len(missing)} missing, {len(unexpected)} unexpected"]
    for w in missing:
        lines.append(f"  - {w}")
        close = next((c for c in unexpected if w.near(c)), None)
        if close is not None:
            lines.append(f"      nearest: {close}")
    for c in unexpected:
        lines += [f"  + {c}  ({c.collective.source})", *c.why]
    lines += [f"    {c}" for c in collectives if c not in unexpected]
    raise AssertionError("\n".join([*lines, _place(program)]))


def _assert_counts(program: Program, expected: Mapping[str, int]) -> None:
    __tracebackhide__ = True
    for kind, count in expected.items():
        if kind not in COLLECTIVES or isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise GraphError(
                f"assert_collectives: {kind!r}: {count!r:.80} must be a kind with a number; kinds are "
                f"{', '.join(COLLECTIVES)}{nearest(kind, COLLECTIVES)}"
            )
    collectives = _found(program)
    counts = Counter(c.collective.kind for c in collectives)
    if counts != {kind: count for kind, count in expected.items() if count}:
        lines = [f"expected {dict(expected)}, found {dict(counts)}"]
        for c in collectives:
            if counts[c.collective.kind] != expected.get(c.collective.kind, 0):
                lines += [f"  {c}  ({c.collective.source})", *c.why]
        raise AssertionError("\n".join([*lines, _place(program)]))


def _unmatched(wanted: Sequence[_Expected], present: Sequence[_Actual]) -> tuple[list[_Expected], list[_Actual]]:
    """The unmatched items of both sides after a maximum matching (augmenting paths)."""
    holder: dict[int, int] = {}  # index of found -> index of wanted

    def place(w: int, tried: set[int]) -> bool:
        for n, c in enumerate(present):
            if n not in tried and wanted[w].fits(c):
                tried.add(n)
                if n not in holder or place(holder[n], tried):
                    holder[n] = w
                    return True
        return False

    missing = [w for n, w in enumerate(wanted) if not place(n, set())]
    return missing, [c for n, c in enumerate(present) if n not in holder]


def _check_axes(entry: object, axes: tuple[str, ...], given: object, mesh: Mesh) -> None:
    """Raise unless a mesh has the axes of an entry, given as `given`."""
    strange = [a for a in axes if a not in mesh]
    if strange or not axes:
        raise GraphError(
            f"assert_collectives: {entry!r:.80}: no axis {strange[0] if strange else given!r} in mesh {mesh}"
            f"{nearest(strange[0], mesh.axes) if strange else ''}"
        )


def _read(entry: Any, program: Program) -> list[_Expected]:
    """The collectives described by one entry."""
    form = "a tuple (kind, axes[, payload_bytes]) or a text like 'all_reduce over rows of w1'"
    count, payload, of, over = 1, None, None, None
    if isinstance(entry, str):
        read = _TEXT.fullmatch(entry.strip())
        if read is None:
            raise GraphError(f"assert_collectives: {entry!r:.80} is not {form}")
        kind, axes, of = read["kind"], tuple(read["axes"].split("+")), read["of"]
        count = int(read["count"] or 1)
    elif isinstance(entry, list | tuple) and len(entry) in (2, 3):
        kind, over, payload = (*entry, None)[:3]
        axes = tuple(over.split("+")) if isinstance(over, str) else tuple(over) if isinstance(over, Sequence) else ()
        if payload is not None and (isinstance(payload, bool) or not isinstance(payload, int) or payload < 0):
            raise GraphError(f"assert_collectives: {entry!r:.80}: payload_bytes must be a number of bytes")
    else:
        raise GraphError(f"assert_collectives: {entry!r:.80} is not {form}")
    if kind not in COLLECTIVES:
        raise GraphError(
            f"assert_collectives: {entry!r:.80}: {kind!r} is none of {', '.join(COLLECTIVES)}"
            f"{nearest(kind, COLLECTIVES)}"
        )
    _check_axes(entry, axes, over, program.mesh)
    if of is not None:
        known = {name for c in _values(program) for name in _names(program, c)}
        known |= {y.tensor.name for i, _, _ in walk(program) for y in i.outputs}
        if of not in known:
            raise GraphError(f"assert_collectives: {entry!r:.80}: the program has no tensor {of!r}{nearest(of, known)}")
    return [_Expected(kind, axes, payload, of)] * count


def _found(program: Program) -> list[_Actual]:
    named = [_names(program, v) for v in _values(program)]
    return [_Actual(c, names) for c, names in zip(program.collectives, named, strict=True)]


def _values(program: Program) -> list[Value]:
    """The operands of all collectives, in the order of `program.collectives`."""
    return [t.value for i, _, _ in walk(program) for t in i.transfers]


def _names(program: Program, value: Value) -> tuple[str, ...]:
    """The tensor's name, and that of the variable of which it is a gradient, directly or after reduction."""
    t: Tensor | None = value.tensor
    while t is not None:
        variable = t.operation.graph.gradient_of.get(t)
        if variable is not None:
            return (value.tensor.name, variable.name)
        users = {i.outputs[0].tensor: i for i in _users(program, t)}
        t = next(iter(users)) if len(users) == 1 else None
    return (value.tensor.name,)


def _users(program: Program, t: Tensor) -> list[Instruction]:
    backward = [i for i in program.instructions if i.region == "backward" and not isinstance(i, Move)]
    return [i for i in backward if len(i.outputs) == 1 and any(x.tensor is t for x in i.inputs)]


# ---------------------------------------------------------------- layouts, memory and bytes


def assert_layout_invariant(
    outputs: Any = None,
    updates: Sequence[Operation] = (),
    mesh: Any = None,
    layouts: Any = "all",
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Verification:
    """Assert that layouts change no value, updated variable or gradient beyond rounding.

    Args:
      outputs, updates: as in `mtf.lower`.
      mesh: the mesh; None if `layouts` are (mesh, layout) pairs.
      layouts: "all", a number of legal layouts to draw, or a list of them.
      inputs, options: as in `mtf.verify` (precision, executor, state, steps, seed, rtol).
    Returns: the Verification.
    Raises: AssertionError naming for every failing layout the wrong values and the first operation that diverges; as in
      `mtf.verify` for invalid arguments.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 4), mtf.Dimension("d", 2)])
      ...     y = mtf.softmax(x, mtf.Dimension("d", 2))
      >>> [row.layout for row in mtf.testing.assert_layout_invariant({"y": y}, mesh="p:2").rows]
      ['', 'batch:p', 'd:p', 'd:p;batch:p?']
    """
    __tracebackhide__ = True
    verification = verify(outputs, updates, inputs, layouts, mesh, **options)
    if not verification.ok:
        raise AssertionError("\n".join([str(verification).splitlines()[0], *map(str, verification.failures)]))
    return verification


def assert_fits(program: Program, slice: Any, tight: bool = False) -> None:
    """Assert that a program fits the HBM of one device of a slice: that `mtf.estimate(...).memory.verdict` is "yes".

    The compiler is that for which the program was lowered; memory reserved by the runtime is excluded.

    Args:
      program: the lowered program.
      slice: a name like "v3-8", or a Slice, with as many devices as the mesh.
      tight: allow the step to use memory that a whole run needs for evaluations and exports of weights.
    Raises: AssertionError with both sizes, the largest live tensors with their lines, and remedies; SliceError for an
      unknown slice or one of another size than the mesh.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8)])
      ...     program = mtf.lower({"y": x * 2.0}, mesh="rows:8", layout="batch:rows")
      >>> mtf.testing.assert_fits(program, "v3-8")
    """
    __tracebackhide__ = True
    require_program(program, "assert_fits")
    if slice is None:
        raise GraphError("assert_fits: give a slice, a name like 'v3-8'")
    memory = memory_on(program, slice_for("assert_fits", program.mesh, slice))
    if memory.verdict == "yes" or (flag(tight, "assert_fits", "tight") and memory.fits):
        return
    if memory.fits:
        step, run, room = map(bytes_text, (memory.needed_bytes, memory.run_bytes, memory.capacity_bytes))
        raise AssertionError(
            f"tight on {memory.slice_name}: a step takes {step} of {room}, a run {run} ({memory.run_bytes} bytes),"
            " with evaluations and exports of weights; split more, export smaller files, or pass tight=True"
        )
    peak, capacity = memory.needed_bytes, memory.capacity_bytes
    lines = [
        f"does not fit {memory.slice_name}: a core needs {bytes_text(peak)} ({peak} bytes) at its peak, in tiles, "
        f"a device has {bytes_text(capacity)} ({capacity} bytes), {bytes_text(peak - capacity)} less "
        f"({peak / capacity:.3g} times the memory is needed)",
        f"  peak at {memory.at}; " + ", ".join(f"{k} {bytes_text(n)}" for k, n in memory.by_kind.items() if n),
        "  largest live tensors, bytes on one core:",
    ]
    live = sorted(memory.live, key=lambda v: -v.bytes)
    lines += [f"    {v}" for v in live[:SHOWN_TENSORS]]
    rest = live[SHOWN_TENSORS:]
    if rest:
        lines.append(f"    {bytes_text(sum(v.bytes for v in rest)):>10}  in {len(rest)} more")
    lines += [f"  note: {note}" for note in memory.notes]
    lines += ["  what would help:", *(f"    {r}" for r in memory.remedies)] if memory.remedies else []
    raise AssertionError("\n".join([*lines, _place(program)]))


def assert_sent_at_most(program: Program, bytes: float | str) -> None:
    """Assert that a core sends at most `bytes` in one run of the program, over all collectives. Exact.

    Args:
      program: the lowered program.
      bytes: a number of bytes, at least 0, or a text such as "1 KiB".
    Raises: AssertionError with both numbers and the largest collectives, with their reasons; GraphError for invalid
      bytes.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8)])
      ...     program = mtf.lower({"total": mtf.reduce_sum(x)}, mesh="rows:2", layout="batch:rows")
      >>> mtf.testing.assert_sent_at_most(program, 4)
    """
    __tracebackhide__ = True
    require_program(program, "assert_sent_at_most")
    most_bytes = read_bytes(bytes) if isinstance(bytes, str) else bytes
    if isinstance(most_bytes, bool) or not isinstance(most_bytes, int | float) or not most_bytes >= 0:
        raise GraphError(
            f"assert_sent_at_most: bytes must be a number of at least 0, or a text such as '1 KiB', got {bytes!r:.80}"
        )
    sent = program.sent_bytes
    if sent <= most_bytes:
        return
    most = sorted(_found(program), key=lambda c: -c.collective.sent_bytes * c.collective.count)
    lines = [
        f"a core sends {bytes_text(sent)} ({exact_text(sent)} bytes), more than {bytes_text(most_bytes)} "
        f"({exact_text(most_bytes)} bytes) by {bytes_text(sent - most_bytes)}; the largest of {len(most)} collectives:"
    ]
    for c in most[:SHOWN_TENSORS]:
        x = c.collective
        times = f", {x.count} times" if x.count > 1 else ""
        lines += [f"  {bytes_text(x.sent_bytes * x.count)}  {c}{times}  ({x.source})", *c.why]
    raise AssertionError("\n".join([*lines, _place(program)]))


def _place(program: Program) -> str:
    return f"  mesh {program.mesh}   layout {program.layout or '(none)'}"


explain_module(__name__)
