"""What a record says of engines, fusion, memory and homes: what an element depends on, and where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshlib.core.graph import Operation
from meshlib.core.opdef import EVERY, ON_MXU, RESIDENT, Home, Kind, OpDef, Storage
from meshlib.ops.movement.indexing import index_count
from meshlib.ops.movement.tables import FrozenArray
from tests.cases import Array
from tests.ops.traits.samples import STRUCTURE, TRIES, Sample, apply, same

# ---------------------------------------------------------------- what an element depends on


def _nudged(s: Sample, n: int, at: tuple[Any, ...]) -> list[Array]:
    """The operands, of which one has another element at `at`; an index stays one."""
    x = s.arrays[n].copy()
    if x.dtype == bool:
        x[at] = ~x[at]
    elif x.dtype.kind == "f":
        x[at] = x[at] * 1.375 + 0.109375
    else:
        dim = s.op.attrs.get("dim")
        x[at] = (x[at] + 1) % index_count(s.op) if s.op.opdef.indices == n and dim is not None else x[at] + 1
    return [*s.arrays[:n], x, *s.arrays[n + 1 :]]


def _somewhere(s: Sample, n: int) -> Iterator[tuple[int, ...]]:
    x = s.arrays[n]
    for flat in s.rng.permutation(x.size)[:TRIES]:
        yield tuple(int(i) for i in np.unravel_index(flat, x.shape))


def _in_place(record: OpDef, s: Sample) -> bool:
    """Whether an element of an operand changes the result at its own position only, in the operand's own order."""
    factors, out = record.roles(s.op), s.op.output.shape
    whole = apply(record, s.op, s.arrays)[0]
    for n, x in enumerate(s.op.inputs):
        partner = {f.outputs[0]: f.operands[n] for f in reversed(factors)}  # the first way to split a dim says it
        sizes = {name: x.shape.dim(own).size for name, own in partner.items() if own is not None}
        if None in sizes or any(out.dim(name).size != size for name, size in sizes.items() if name):
            return False
        for at in _somewhere(s, n):
            index = dict(zip(x.shape.names, at, strict=True))
            changed = apply(record, s.op, _nudged(s, n, at))[0] != whole
            own = np.zeros(whole.shape, bool)
            own[tuple(index.get(partner.get(d.name) or "", np.s_[:]) for d in out)] = True
            if (changed & ~own).any():
                return False
        kept = [partner[d.name] for d in out if partner.get(d.name) is not None]
        if len(s.op.inputs) == 1 and kept != [d for d in x.shape.names if d in kept]:
            return False
    return True


def check_kind(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """What the numbers and the work say of the engine and of fusion."""
    kind, sources = record.kind, not any(s.op.inputs for s in uses)
    held = sources and all(any(isinstance(v, FrozenArray) for v in s.op.attrs.values()) for s in uses)
    if (kind in (Kind.SOURCE, *RESIDENT)) != (sources and not held):
        yield f"{record.name}: {kind} with operands, or without"
    for resident, where in ((Kind.INPUT, "inputs"), (Kind.VARIABLE, "variables")):
        if (kind is resident) != all(s.op in getattr(s.op.graph, where).values() for s in uses):
            yield f"{record.name}: {kind}, and its graph has it among the {where}, or not"
    if held and kind is not Kind.INDEXED:
        yield f"{record.name}: {kind}, but it looks up what an attribute holds"
    if (kind is Kind.LOOP) != all(s.op.loop is not None for s in uses):
        yield f"{record.name}: {kind} with a body, or without"
        return
    if (kind is Kind.COPY) != all(s.op.output.on_host or any(x.on_host for x in s.op.inputs) for s in uses):
        yield f"{record.name}: {kind} between device and host, or not"
    if (kind is Kind.KERNEL) != (record.scores is not None):
        yield f"{record.name}: {kind} with scores, or without"
    if kind in STRUCTURE or sources:
        return
    flops = [record.work(tuple(x.type for x in s.op.inputs), s.op.output.type, s.op.attrs).mxu_flops for s in uses]
    if not all((n > 0) == (kind in ON_MXU) for n in flops):
        yield f"{record.name}: {kind} and {max(flops)} flops on the MXU"
    reduces = all(len(s.op.inputs) == 1 and _loses(record, s.op) for s in uses)
    if (kind is Kind.REDUCTION) != reduces:
        yield f"{record.name}: {kind} and dims that are reduced, or none"
    if kind is Kind.VIEW:
        known = (np.isin(np.abs(apply(record, s.op, s.arrays)[0]), np.abs(s.arrays[0])).all() for s in uses)
        if not all(known):
            yield f"{record.name}: {kind}, but it computes something"
    elif record.storage is not Storage.FRESH:
        yield f"{record.name}: {kind}, but its result is a view"
    placed = [_in_place(record, s) for s in uses]
    if kind is Kind.ELEMENTWISE and not all(placed):
        yield f"{record.name}: {kind}, but an element depends on others"
    shapes = any(x.shape == s.op.output.shape for s in uses for x in s.op.inputs)
    fresh = record.storage is Storage.FRESH and not record.writes_part
    forgotten = fresh and kind not in (Kind.ELEMENTWISE, Kind.COPY)
    if forgotten and shapes and all(placed):
        yield f"{record.name}: {kind}, but each element depends on those at its position only"


def _loses(record: OpDef, op: Operation) -> bool:
    kept = {f.operands[0] for f in record.roles(op) if f.outputs[0] is not None}
    gone = [f for f in record.roles(op) if f.operands[0] not in (None, *kept)]
    return bool(gone) and all(f.role.reduces for f in gone)


# ---------------------------------------------------------------- memory


def check_storage(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Whether NumPy shares memory, and in which order the elements come."""
    if record.kind in (*RESIDENT, Kind.LOOP):
        return
    uses = [replace(s, arrays=tuple(np.array(x, order="C") for x in s.arrays)) for s in uses]  # as they lie in a memory
    made = [(s, apply(record, s.op, s.arrays)[0]) for s in uses]
    if not any(s.op.inputs for s in uses):
        shown = all(not any(y.strides) for _, y in made if y.size > 1)
        found = {Storage.VIEW if shown else Storage.FRESH}
    elif not all(np.shares_memory(y, s.arrays[0]) for s, y in made):
        found = {Storage.FRESH}
        if any(np.shares_memory(y, x) for s, y in made for x in s.arrays):
            found = set()
    elif not all(y.size == s.arrays[0].size and np.array_equal(y.ravel(), s.arrays[0].ravel()) for s, y in made):
        found = {Storage.VIEW}
    else:
        found = {Storage.ALIAS if all(y.shape == s.arrays[0].shape for s, y in made) else Storage.RESHAPED}
    if record.storage not in found:
        yield f"{record.name}: says {record.storage}, its arrays {[x.value for x in found] or 'share at times'}"


def check_overwrites(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Writing the result over an operand changes no number."""
    tried: set[int] = set()
    least = EVERY
    for s in uses if record.kind not in STRUCTURE else ():
        if len(s.op.outputs) > 1 or record.storage is not Storage.FRESH:
            continue
        wanted = apply(record, s.op, s.arrays)
        for n, x in enumerate(s.op.inputs):
            if x.shape != s.op.output.shape or x.dtype.storage != s.op.output.dtype.storage:
                continue
            arrays = [a.copy() for a in s.arrays]
            tried.add(n)
            if not same(wanted, apply(record, s.op, arrays, buffer=arrays[n])):
                least = min(least, n)
    if record.overwrites > least:
        yield f"{record.name}: writing over operand {least} gives other numbers"
    untried = {*range(min(record.overwrites, max(len(s.op.inputs) for s in uses) if uses else 0))} - tried
    if untried and record.kind is not Kind.ELEMENTWISE:
        yield f"{record.name}: no row has operands {untried} of the result's type, to be written over"
    if record.kind is Kind.ELEMENTWISE and tried and record.overwrites < least:
        yield f"{record.name}: could be written over {'every operand' if least == EVERY else f'the first {least}'}"


def check_home(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """What has the operand's value, in the same dims, lies where that does; an attribute that binds it goes first."""
    bound = all("layout" in s.op.attrs for s in uses)
    follows = bool(uses) and all(_is_operand(record, s) for s in uses)
    wanted = Home.GIVEN if bound else Home.OPERAND if follows else Home.RULES
    if record.home is not wanted:
        yield f"{record.name}: says {record.home}, is {wanted}"


def _is_operand(record: OpDef, s: Sample) -> bool:
    if len(s.op.inputs) != 1 or s.op.inputs[0].shape != s.op.output.shape or record.kind in (*RESIDENT, Kind.LOOP):
        return False
    return s.op.inputs[0].dtype is not s.op.output.dtype or same(apply(record, s.op, s.arrays), s.arrays)


CHECKS = {"kind": check_kind, "storage": check_storage, "overwrites": check_overwrites, "home": check_home}
