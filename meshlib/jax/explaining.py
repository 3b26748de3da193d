"""`explain`: the collectives of any compiled program, with axes, bytes, counts, times and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from hardware.checks import HardwareError
from hardware.network import Demand, collective_cost
from hardware.placement import Placement
from hardware.slices import Slice
from layouts import Mesh
from layouts.checking import some
from layouts.step_kinds import STEP_KINDS
from meshlib.core.compiler import XLA_TPU
from meshlib.core.errors import GraphError, ProgramError, SliceError
from meshlib.core.slices import slice_for
from meshlib.core.text import bytes_text, counted, grid, seconds_text, wrapped
from meshlib.estimation.work.communication import priced_for
from meshlib.jax.hlo.collectives import HloCollective, collectives_of
from meshlib.jax.hlo.groups import PartOfAxis, axes_of, permuted_axes
from meshlib.jax.hlo.reasons import phase_of, reason_of
from meshlib.jax.hlo.text import Module, damage_as_error, parse

HIDDEN = (
    "/site-packages/",
    "/dist-packages/",
    "/meshlib/jax/",
    "/meshlib/program/",
    "<frozen ",
)  # files that are not the user's


@dataclass(frozen=True)
class ExplainedCollective:
    """One collective of a compiled program. Bytes are for one run on one device, and exact unless ragged.

    kind, axes     as in `Program.collectives`; part of an axis as `x:(2)4`, a factor of 4 of `x` behind major factors
                   of 2; None if the groups are not axes of the mesh
    operands       of one device, such as "bf16[64,8192]", one for each value that the compiler merged; operand_bytes of
                   each
    payload_bytes  of all operands; sent_bytes: sent by a device on a ring
    count          runs per step; None where the trips of a loop depend on data
    seconds        modelled time of one run alone on the network; None where the axes are unknown
    phase, op, source, reason  where it comes from in the user's program, and why
    is_async       whether other work runs meanwhile; conditional: it is in a branch, which may not run
    follows        names of collectives whose results its operands are parts or copies of
    is_ragged      a `lax.ragged_all_to_all`: how many rows go where depends on data, and bytes are upper bounds
    """

    kind: str
    axes: tuple[str, ...] | None
    operands: tuple[str, ...]
    operand_bytes: tuple[int, ...]
    payload_bytes: int
    sent_bytes: float
    count: int | None
    seconds: float | None
    phase: str
    op: str
    source: str
    reason: str
    name: str
    is_async: bool
    conditional: bool
    sliced: bool
    follows: tuple[str, ...] = ()
    is_ragged: bool = False

    @property
    def total_bytes(self) -> float:
        """Bytes sent per step; one run if the count is unknown."""
        return self.sent_bytes * (1 if self.count is None else self.count)

    @property
    def total_seconds(self) -> float | None:
        """Modelled seconds of all runs; one run if the count is unknown."""
        return None if self.seconds is None else self.seconds * (1 if self.count is None else self.count)


@dataclass(frozen=True)
class Explained:
    """The collectives of a compiled program, slowest first. `print` it.

    mesh, slice  over which axes they run, and what times are modelled for
    collectives  in the order of the schedule

    Example:
      >>> import meshlib as mtf
      >>> text = '''HloModule jit_step, num_partitions=4
      ... ENTRY %main (p: f32[8]) -> f32[8] {
      ...   %p = f32[8]{0} parameter(0)
      ...   ROOT %s = f32[8]{0} all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%add
      ... }'''
      >>> explained = mtf.jax.explain(text, "v5e-4", mesh="data:4")
      >>> explained.sent_bytes, [(c.kind, c.axes) for c in explained.collectives]
      (48.0, [('all_reduce', ('data',))])
    """

    module: str
    mesh: Mesh
    slice: Slice
    collectives: tuple[ExplainedCollective, ...]
    placement: Placement

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends on rings per step; loops whose trips depend on data count once."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def seconds(self) -> float:
        """Modelled seconds of all collectives in sequence, without those over unknown axes."""
        return sum(c.total_seconds or 0.0 for c in self.collectives)

    def ranked(self) -> list[ExplainedCollective]:
        """The slowest first."""
        return sorted(self.collectives, key=lambda c: (-(c.total_seconds or 0.0), -c.total_bytes))

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON."""
        rows = [
            {
                "kind": c.kind, "axes": c.axes, "operands": c.operands, "payload_bytes": c.payload_bytes,
                "sent_bytes": c.sent_bytes, "count": c.count, "seconds_modelled": c.seconds, "phase": c.phase,
                "op": c.op, "source": c.source, "reason": c.reason, "name": c.name, "async": c.is_async,
                "conditional": c.conditional, "ragged": c.is_ragged,
            }
            for c in self.collectives
        ]  # fmt: skip
        total = {"sent_bytes": self.sent_bytes, "seconds_modelled": self.seconds}
        return {"module": self.module, "mesh": str(self.mesh), "slice": self.slice.name, **total, "collectives": rows}

    def __str__(self) -> str:
        head = f"{self.module}: mesh {self.mesh} on {self.slice.name}"
        if not self.collectives:
            return f"{head}: no collectives"
        runs = sum(c.count or 1 for c in self.collectives)
        sent = ("at most " if any(c.is_ragged for c in self.collectives) else "") + bytes_text(self.sent_bytes)
        lines = [
            f"{head}: {counted(runs, 'run')} of {counted(len(self.collectives), 'collective')} send {sent} from "
            f"each device, {seconds_text(self.seconds)}* one after the other"
        ]
        ranked = self.ranked()
        cells = [("collective", "over", "sent", "runs", "time*", "line", "operand"), *map(_cells, ranked)]
        texts = grid(cells, right=(2, 3, 4))
        lines.append(texts[0])
        for c, text in zip(ranked, texts[1:], strict=True):
            lines += [text, *wrapped(c.reason + _more(c), "    ", " ", 100)]
        lines += _notes(self.collectives)
        return "\n".join(lines)


def _cells(c: ExplainedCollective) -> tuple[str, ...]:
    count = "?" if c.count is None else f"{c.count:,}"
    time = "?" if c.total_seconds is None else seconds_text(c.total_seconds)
    over = "?" if c.axes is None else "+".join(c.axes) or "-"
    sent = "<= " * c.is_ragged + bytes_text(c.total_bytes)
    return c.kind, over, sent, count, time, c.source or "?", some(c.operands, 1)


def _more(c: ExplainedCollective) -> str:
    parts = [c.phase] if c.phase else []
    parts += ["asynchronous"] if c.is_async else []
    parts += ["in a branch, which may not run"] if c.conditional else []
    return f" [{', '.join(parts)}]" if parts else ""


def _notes(collectives: Sequence[ExplainedCollective]) -> Iterator[str]:
    ragged = any(c.is_ragged for c in collectives)
    yield f"* modelled, each alone on the network; {'all other ' if ragged else ''}bytes and counts are exact"
    if ragged:
        yield "<= sent: how many rows go to other devices depends on data; all rows are counted"
    if any(c.count is None for c in collectives):
        yield "? runs: the trips of a loop depend on data; one is counted"
    if any(c.axes is None for c in collectives):
        yield "? over: the groups are not axes of this mesh; give the mesh that the program was compiled for"


def explain(compiled: Any, slice: Any, mesh: Any = None) -> Explained:
    """Every collective of a compiled program: mesh axes, bytes, runs, source line, modelled time, and its reason.

    For any JAX program, from this library or not: the result of `jax.jit(f).lower(...).compile()`, or its text
    (`.as_text()`, or a file of `--xla_dump_to`), for CPUs, GPUs and TPUs, partitioned by GSPMD or Shardy.

    Args:
      compiled: the compiled object, or its HLO text.
      slice: slice for which times are modelled, a name like "v5e-256" or a Slice, with as many devices as the program.
      mesh: the axes, major first, as "data:16;model:16", a dict or a JAX mesh. By default a compiled object's own mesh,
        for a text one axis "devices".
    Returns: an `Explained`: `print` it; `.collectives`, `.sent_bytes`, `.seconds`, `.as_json()`.
    Raises: ProgramError if `compiled` is not compiled HLO or the mesh has another size; SliceError for an unknown
      slice, or one of another size; GraphError for other bad arguments.
    Example:
      >>> import meshlib as mtf
      >>> text = '''HloModule jit_step, num_partitions=4
      ... ENTRY %main (p: bf16[64,128]) -> bf16[256,128] {
      ...   %p = bf16[64,128]{1,0} parameter(0), metadata={op_name="params['w']"}
      ...   ROOT %g = bf16[256,128]{1,0} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={0}
      ... }'''
      >>> explained = mtf.jax.explain(text, "v5e-4", mesh="data:4")
      >>> [(c.kind, c.axes, c.sent_bytes, c.count) for c in explained.collectives]
      [('all_gather', ('data',), 49152.0, 1)]
      >>> explained.collectives[0].reason
      "argument 'params['w']' is split over data along dim 0; an operation without a name needs all of it"
    """
    text = _text_of(compiled)
    with damage_as_error("explain"):
        return _explained(text, compiled, slice, mesh)


def _explained(text: str, compiled: Any, slice: Any, mesh: Any) -> Explained:
    module = parse(text)
    mesh_ = _mesh(compiled, mesh, slice, module.devices)
    slice_ = slice_for("explain", mesh_, slice)
    slices = _slices_of(module, mesh_, slice_)
    collectives = collectives_of(module, HIDDEN, slices)
    if module.devices and module.devices * slices != mesh_.size:
        raise ProgramError(
            f"explain: module '{module.name}' is compiled for {module.devices} devices, but mesh {mesh_} has "
            f"{mesh_.size}; give the mesh and the slice that it was compiled for"
        )
    parts = [_parts(c, mesh_) for c in collectives]
    placement, names = _placement(slice_, mesh_, collectives, parts)
    rows = tuple(
        _row(c, axes, placement, names, reason) for c, axes, reason in _with_reasons(module, collectives, parts)
    )
    return Explained(module.name, mesh_, slice_, rows, placement)


def _slices_of(module: Module, mesh: Mesh, slice_: Slice) -> int:
    """The number of slices for which a module was compiled per slice; 1 for a module that numbers all devices."""
    if slice_.slices == 1 or module.devices * slice_.slices != mesh.size:
        return 1
    if mesh.sizes[0] % slice_.slices:
        raise ProgramError(
            f"explain: {slice_.name} has {slice_.slices} slices, which join along the first axis of a mesh; "
            f"{mesh.sizes[0]} of '{mesh.axes[0]}' does not divide by that"
        )
    return slice_.slices


def _with_reasons(
    module: Module, collectives: Sequence[HloCollective], parts: Sequence[tuple[PartOfAxis, ...] | None]
) -> Iterator[tuple[HloCollective, tuple[PartOfAxis, ...] | None, str]]:
    for c, axes in zip(collectives, parts, strict=True):
        over = "+".join(map(str, axes)) if axes else "some devices"
        yield c, axes, reason_of(module, c, over)


def _row(
    c: HloCollective,
    axes: tuple[PartOfAxis, ...] | None,
    placement: Placement,
    names: Mapping[PartOfAxis, tuple[str, ...]],
    reason: str,
) -> ExplainedCollective:
    seconds = None
    if axes is not None:
        over = [n for p in axes for n in names[p]]
        seconds = collective_cost(placement, c.kind, over, c.larger_bytes).seconds if over else 0.0
    return ExplainedCollective(
        kind=c.kind,
        axes=None if axes is None else tuple(map(str, axes)),
        operands=tuple(map(str, c.operands)) or ("",),
        operand_bytes=tuple(a.bytes for a in c.operands) or (0,),
        payload_bytes=c.payload_bytes,
        sent_bytes=c.sent_bytes,
        count=c.count,
        seconds=seconds,
        phase=phase_of(c.op_name),
        op=c.op_name,
        source=c.source,
        reason=reason,
        name=c.name,
        is_async=c.is_async,
        conditional=c.conditional,
        sliced=c.sliced,
        follows=c.follows,
        is_ragged=c.is_ragged,
    )


def _text_of(compiled: Any) -> str:
    if isinstance(compiled, str):
        return compiled
    as_text = getattr(compiled, "as_text", None)
    if not callable(as_text):
        raise GraphError(
            "explain: give a compiled program, jax.jit(f).lower(...).compile(), or its text, "
            f"got {type(compiled).__name__} {compiled!r:.60}"
        )
    text = as_text()
    if not isinstance(text, str):
        raise ProgramError(f"explain: {type(compiled).__name__}.as_text() gives {type(text).__name__}, not a text")
    return text


def _mesh(compiled: Any, mesh: Any, slice: Any, devices: int) -> Mesh:
    if mesh is None:
        mesh = _own_mesh(compiled)
    if mesh is None:
        slice_ = _slice(slice)  # of several slices, each has a program of its own
        return Mesh({"devices": slice_.devices if slice_.slices > 1 else devices or slice_.devices})
    shape = getattr(mesh, "shape", None)
    return Mesh(dict(shape) if isinstance(shape, Mapping) else mesh)


def _slice(slice: Any) -> Slice:
    try:
        return slice if isinstance(slice, Slice) else Slice(slice)
    except HardwareError as fault:
        raise SliceError(f"explain: {fault}") from None


def _own_mesh(compiled: Any) -> Any:
    """The mesh of the first argument that has one."""
    if isinstance(compiled, str) or not hasattr(compiled, "input_shardings"):
        return None
    import jax

    shardings = jax.tree.leaves(compiled.input_shardings) + jax.tree.leaves(compiled.output_shardings)
    return next((s.mesh for s in shardings if getattr(s, "mesh", None) is not None), None)


def _parts(c: HloCollective, mesh: Mesh) -> tuple[PartOfAxis, ...] | None:
    if STEP_KINDS[c.kind].permutes:
        return permuted_axes(c.groups, mesh)
    return axes_of(c.groups, mesh)


def _placement(
    slice_: Slice, mesh: Mesh, collectives: Sequence[HloCollective], parts: Sequence[tuple[PartOfAxis, ...] | None]
) -> tuple[Placement, dict[PartOfAxis, tuple[str, ...]]]:
    """The fastest placement of the mesh for these collectives, with axes cut where groups use a part of them."""
    sizes, names = _refined(mesh, [p for axes in parts for p in axes or ()])
    demands = []
    for c, axes in zip(collectives, parts, strict=True):
        over = tuple(n for p in axes or () for n in names[p])
        if over:
            demands.append(Demand(c.kind, over, c.larger_bytes, c.count or 1))
    try:
        priced = priced_for(slice_, tuple(sizes.items()), tuple(demands), XLA_TPU.whole_torus_axes)
        return priced.placements[priced.cheapest], names
    except HardwareError as fault:
        raise SliceError(f"explain: mesh {mesh} on {slice_.name}: {fault}") from None


def _refined(mesh: Mesh, parts: Sequence[PartOfAxis]) -> tuple[dict[str, int], dict[PartOfAxis, tuple[str, ...]]]:
    """The mesh with axes cut at the boundaries of parts, which nest or are apart, and each part in the new axes."""
    sizes: dict[str, int] = {}
    pieces: dict[str, list[tuple[str, int, int]]] = {}
    for axis, size in mesh.sizes_by_axis.items():
        own = [p for p in parts if p.axis == axis and not p.whole]
        cuts = sorted({1, size, *(p.before for p in own), *(p.before * p.size for p in own)})
        if any(b % a for a, b in pairwise(cuts)):
            raise ProgramError(f"explain: groups cut axis '{axis}' of {size} at {cuts}, which do not divide each other")
        pieces[axis] = [(axis if len(cuts) == 2 else f"{axis}:({a}){b // a}", a, b) for a, b in pairwise(cuts)] or [
            (axis, 1, size)
        ]
        sizes.update({name: b // a for name, a, b in pieces[axis]})
    names = {
        p: tuple(n for n, a, b in pieces[p.axis] if a >= p.before and b <= p.before * p.size) if not p.whole else
        tuple(n for n, _, _ in pieces[p.axis])
        for p in parts
    }  # fmt: skip
    assert prod(sizes.values()) == mesh.size
    return sizes, names
