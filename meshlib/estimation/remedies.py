"""What would lower the peak of a device's memory, and by how much.

Each remedy is a change of what some buffers take. The program's buffers are added up again with that, so a gain
counts that the peak moves elsewhere. It is exact for this order; a changed program may have another, and buffers that
this one does not have, such as gathered weights or what is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from meshlib.estimation.tiles import tiled_bytes, tiled_value_bytes
from meshlib.graph import FORWARD
from meshlib.program.instructions import Loop, Resident, Value
from meshlib.program.memory import Size, bytes_after, kind_of, live_buffers
from meshlib.program.records import Program
from meshlib.text import bytes_text

Change = Callable[[Value], int | None]  # bytes that it would take instead; None: as many

_WORTH = 0.01  # of the peak: what saves less is not worth a line
_MOST = 6  # remedies shown


@dataclass(frozen=True)
class Remedy:
    """Something that would lower the peak: what to do, and the bytes of the peak that it would save, about."""

    what: str
    gain_bytes: int

    def __str__(self) -> str:
        return f"{self.what}: saves about {bytes_text(self.gain_bytes)}"


def remedies(program: Program) -> tuple[Remedy, ...]:
    """The best remedies, best first."""
    usage = bytes_after(program, tiled_value_bytes)
    peak = max(usage)
    n = usage.index(peak) - 1
    live = [b.at(n)[1] for b in live_buffers(program, n)]
    kinds = {b.owner: kind_of(program, b.owner, b.begin) for b in program.buffers}
    changes = [*(_more_devices(program) or _new_axis(program, live)), *_rules(program, live, kinds)]
    changes += _recomputed(program, live)
    found = [Remedy(what, peak - max(bytes_after(program, _changed(change)))) for what, change in changes]
    worth = sorted((r for r in found if r.gain_bytes >= _WORTH * peak), key=lambda r: -r.gain_bytes)
    return tuple(worth[:_MOST])


def _cut(v: Value, ways: Callable[[str], int]) -> int:
    """Bytes of a value's block with each dim in that many parts more."""
    return tiled_bytes(tuple(-(-d.size // ways(d.name)) for d in v.local.shape), v.tensor.dtype.itemsize)


def _changed(change: Change) -> Size:
    def size(v: Value) -> int:
        found = change(v)
        return tiled_value_bytes(v) if found is None else found

    return size


def _more_devices(program: Program) -> list[tuple[str, Change]]:
    """An axis of the mesh twice as long."""
    found: list[tuple[str, Change]] = []
    for axis in program.mesh.axes:
        size = program.mesh.axis_size(axis)
        if not any(axis in rule.axes for rule in program.layout.rules):
            continue  # it would only repeat

        def change(v: Value, axis: str = axis) -> int | None:
            split = {d.name for d, axes in zip(v.local.shape, v.sharding.axes, strict=True) if axis in axes}
            return _cut(v, lambda dim: 2 if dim in split else 1) if split else None

        found.append((f"twice the devices, mesh axis '{axis}' {size} -> {2 * size}", change))
    return found


def _new_axis(program: Program, live: list[Value]) -> list[tuple[str, Change]]:
    """Where no axis splits anything: one that splits a dim of what is live."""

    def halved(dim: str) -> Change:
        return lambda v: _cut(v, lambda name: 2 if name == dim else 1) if dim in v.local.shape else None

    dims = [
        d
        for d in _free_dims(program, live)
        if all(v.local.shape.dim(d).size % 2 == 0 for v in live if d in v.local.shape)
    ]
    return [(f"twice the devices, a new mesh axis 'new' of 2 with rule '{dim}:new'", halved(dim)) for dim in dims]


def _rules(program: Program, live: list[Value], kinds: Mapping[Value, str]) -> Iterator[tuple[str, Change]]:
    """For each axis the best layout rule that splits a dim wherever the axis is free, and the best for slots alone."""
    dims = _free_dims(program, live)
    for axis in program.mesh.axes:
        what = f"(split wherever {axis} is free)"
        whole = [(f"layout rule '{dim}:{axis}?' {what}", _split(program, dim, axis)) for dim in dims]
        slots = [
            (f"layout rule 'slots/{dim}:{axis}' (ZeRO-1: slots and gradients split)", _of_slots(change, kinds))
            for dim, (_, change) in zip(dims, whole, strict=True)
        ]
        for rules in (whole, slots):
            gains = [sum(tiled_value_bytes(v) - _changed(change)(v) for v in live) for _, change in rules]
            if any(gains):
                yield rules[gains.index(max(gains))]


def _free_dims(program: Program, live: list[Value]) -> list[str]:
    """Dims of what is live that no rule splits and no loop goes over."""
    taken = {rule.dim for rule in program.layout.rules}
    taken |= {i.record.dim.name for i in program.instructions if isinstance(i, Loop)}
    return sorted({d.name for v in live for d in v.local.shape} - taken)


def _split(program: Program, dim: str, axis: str) -> Change:
    ways = program.mesh.axis_size(axis)

    def change(v: Value) -> int | None:
        used = {a for axes in v.sharding.axes for a in axes} | set(v.sharding.pending_axes)
        if axis in used or dim not in v.local.shape or v.local.shape.dim(dim).size % ways:
            return None
        return _cut(v, lambda name: ways if name == dim else 1)

    return change


def _of_slots(change: Change, kinds: Mapping[Value, str]) -> Change:
    """The same for slots and gradients alone; not for what is inside loops."""
    return lambda v: change(v) if kinds.get(v) in ("slots", "gradients") else None


def _recomputed(program: Program, live: list[Value]) -> Iterator[tuple[str, Change]]:
    """What the forward pass keeps for the backward pass: computed again, or on the host."""
    regions = [i.region for i in program.instructions]
    stacked, carries, values = set(), set(), set()
    for i in program.instructions:
        if isinstance(i, Loop):
            *_, befores, saved = i.record.outputs(i.operation.outputs)
            carries |= {y for y in i.outputs if y.tensor in befores}
            stacked |= {y for y in i.outputs if y.tensor in saved}
            continue
        for y in i.outputs:
            if i.region == FORWARD and not isinstance(i, Resident):
                end = program.last_use.get(y, 0)
                if end < len(regions) and regions[end] != FORWARD:
                    values.add(y)
    kept = [v for v in live if v in values]
    if len(kept) > 1:
        spared = values - {max(kept, key=lambda v: v.local_bytes)}  # what is computed again takes its place in turn
        yield "compute again what the forward pass keeps (mtf.recompute_grad)", lambda v: 0 if v in spared else None
    if stacked:
        yield "compute again what the loop keeps (mtf.scan, remat='full')", lambda v: 0 if v in stacked else None
    if carries:
        offload = "keep what the loop carries on the host (mtf.scan, remat=mtf.Remat(offload_carries=True))"
        yield offload, lambda v: 0 if v in carries else None
