"""What a record says splitting a dim does, tried on blocks: see `tests/ops/traits/samples.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np

import meshlib as mtf
from layouts import Shape
from meshlib.core.graph import Operation, TensorType
from meshlib.core.opdef import Factor, Halo, OpDef, Role, Summary
from meshlib.program.instructions import Compute
from tests.cases import Array
from tests.ops.traits.samples import EXCUSED, STRUCTURE, Sample, apply, same
from tests.oracle import run

TOGETHER = {
    Role.HALO: Halo,
    Role.OVERLAP: Halo,
    Role.SUMMARY: Summary,
    Role.SHARE: Summary,
}  # blocks need each other, and how
ALONE = (Role.PARALLEL, Role.SUM, Role.MAX, Role.MIN)
TOLERANCE = 1e-10
SPLIT_ALL = mtf.Balance(1e-6, 1e-6)  # work done twice is dearer than anything sent


def check_roles(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Every dim has one role; blocks make up the whole as it says, and no weaker role would do."""
    kept: dict[str, list[bool]] = {}  # what must be necessary somewhere: by attribute or role, whether it is
    for s in uses if record.kind not in STRUCTURE else ():
        factors = record.roles(s.op)
        yield from _incomplete(s, factors)
        for f in factors:
            count = next((n for n in range(2, f.size + 1) if f.size % n == 0), 1)
            if count == 1:
                continue
            blocks = _blocks_alone(record, s, f, count)
            whole = apply(record, s.op, s.arrays) if blocks else ()
            if f.role in ALONE:
                if not _works(s, f, f.role, blocks, whole):
                    yield f"{s}: blocks of {f.name} do not make up the whole as {f.role}"
                continue
            needed = not any(_works(s, f, role, blocks, whole) for role in ALONE)
            if f.role is Role.WHOLE:
                needed = needed and not _needs_a_run(record, s, f)
                dim = _attributes(s.op, f) or "a dim"
                if (record.name, dim) not in EXCUSED:
                    kept.setdefault(f"{f.role} of {dim}", []).append(needed)
            else:
                kept.setdefault(str(f.role), []).append(needed)
    for what, needed_at in kept.items():
        if not any(needed_at):
            yield f"{record.name}: {what} is never necessary"
    if isinstance(record.lower, Halo):
        yield from _idle_ends(record, uses)
    found = {TOGETHER[f.role] for s in uses for f in record.roles(s.op) if f.role in TOGETHER}
    if uses and found != ({type(record.lower)} if record.lower else set()):
        yield f"{record.name}: its roles {found} do not go with how it runs along a split dim"


def _incomplete(s: Sample, factors: Sequence[Factor]) -> Iterator[str]:
    for n, x in enumerate(s.op.inputs):
        if {name for f in factors if (name := f.operands[n]) is not None} != set(x.shape.names):
            yield f"{s}: a dim of operand {n} has no role, or another's"
    for n, y in enumerate(s.op.outputs):
        if {name for f in factors if (name := f.outputs[n]) is not None} != set(y.shape.names):
            yield f"{s}: a dim of result {n} has no role, or another's"


def _attributes(op: Operation, f: Factor) -> str:
    """The attributes that name a dim, which tell what the dim is to the operation."""
    return "+".join(key for key, value in op.attrs.items() if isinstance(value, str) and value == f.name)


# ---------------------------------------------------------------- blocks


def _cut(t: TensorType, dim: str | None, count: int) -> TensorType:
    return t if dim is None else TensorType(t.shape.resize(dim, t.shape.dim(dim).size // count), t.dtype)


def _block(x: Array, shape: Shape, dim: str | None, index: int, count: int) -> Array:
    return x if dim is None else np.split(x, count, axis=shape.index(dim))[index]


def _blocks(record: OpDef, s: Sample, f: Factor, count: int, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
    """The results of `local` on each block of a factor, nothing else split."""
    made = []
    for index in range(count):
        types = [_cut(x.type, f.operands[n], count) for n, x in enumerate(s.op.inputs)]
        xs = [_block(x, s.op.inputs[n].shape, f.operands[n], index, count) for n, x in enumerate(arrays)]
        offsets = {g.name: 0 for g in record.roles(s.op)} | {f.name: index * (f.size // count)}
        outs = [_cut(y.type, f.outputs[n], count) for n, y in enumerate(s.op.outputs)]
        ys = apply(record, s.op, xs, inputs=tuple(types), out=outs[0], offsets=offsets)
        assert [y.shape for y in ys] == [t.shape.sizes for t in outs]
        made.append(ys)
    return made


def _blocks_alone(record: OpDef, s: Sample, f: Factor, count: int) -> list[tuple[Array, ...]]:
    """The results of blocks, each run alone; none where some can't be."""
    if any(name and y.shape.dim(name).size % count for name, y in zip(f.outputs, s.op.outputs, strict=True)):
        return []
    try:
        return _blocks(record, s, f, count, s.arrays)
    except Exception:  # what was never meant to run on a block may fail in any way
        return []


def _works(s: Sample, f: Factor, role: Role, made: Sequence[tuple[Array, ...]], whole: tuple[Array, ...]) -> bool:
    """Whether blocks, each run alone, make up the whole in a role."""
    if not made:
        return False
    joined = []
    for n, y in enumerate(s.op.outputs):
        parts, dim = [ys[n] for ys in made], f.outputs[n]
        if role.reduces:
            if dim is not None:
                return False
            joined.append({Role.SUM: np.add, Role.MAX: np.maximum, Role.MIN: np.minimum}[role].reduce(parts))
        elif dim is not None:
            joined.append(np.concatenate(parts, axis=y.shape.index(dim)))
        elif all(same([a], [b], TOLERANCE) for a, b in pairwise(parts)):
            joined.append(parts[0])
        else:
            return False
    # Results in float32 of operands in float64 are the sum of rounded parts.
    single = any(y.dtype == np.float32 for y in whole) and role.reduces
    return same(joined, whole, 1e-6 if single else TOLERANCE)


def _needs_a_run(record: OpDef, s: Sample, f: Factor) -> bool:
    """Whether some of the smallest blocks of the results are the same whatever some block of the operands holds."""
    if not any(f.operands) or not all(f.outputs):
        return False
    whole, count = apply(record, s.op, s.arrays), f.size
    blocks = range(count)
    for index in blocks:
        arrays = [x.copy() for x in s.arrays]
        for n, x in enumerate(arrays):
            part = _block(x, s.op.inputs[n].shape, f.operands[n], index, count)
            if f.operands[n] is not None and x.dtype != bool:
                part[...] = s.rng.permutation(part.ravel()).reshape(part.shape)
                part += np.asarray(s.rng.integers(-30, 30, part.shape), part.dtype)
        changed = apply(record, s.op, arrays)
        for n, y in enumerate(s.op.outputs):
            pairs = [[_block(z, y.shape, f.outputs[n], i, count) for z in (whole[n], changed[n])] for i in blocks]
            if any(same([a], [b]) for a, b in pairs):
                return True
    return False


def _idle_ends(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """Runs of an operand that blocks ask for, whose first or last element, inside the operand, none of them reads.

    Data may leave out an element that others like it are needed for, so that one is enough.
    """
    read: dict[tuple[int, str], bool] = {}
    for s, f in ((use, f) for use in uses for f in record.roles(use.op) if f.role is Role.HALO):
        assert isinstance(record.lower, Halo)
        length, whole = Halo.length(s.op, f), apply(record, s.op, s.arrays)
        blocks = [(count, index) for count in (2, 3) if length % count == 0 for index in range(count)]
        for (n, dim), (count, index) in product(enumerate(f.operands), blocks):
            if dim is None:
                continue
            size = s.op.inputs[n].shape.dim(dim).size
            begin, end = record.lower.needs(s.op, f, n, index * length // count, (index + 1) * length // count)
            wrap = record.lower.wrap(s.op)
            for end_of, at, edge in (("begins", begin, 0), ("ends", end - 1, size - 1)):
                inside = begin < end and (wrap or (0 <= at < size and at != edge))
                if not read.setdefault((n, end_of), False) and inside:
                    read[n, end_of] = _reads(record, s, whole, f, n, at % size, index, count)
    for (n, end_of), found in read.items():
        if not found:
            yield f"{record.name}: no run of operand {n} {end_of} at an element that its block reads"


def _reads(
    record: OpDef, s: Sample, whole: tuple[Array, ...], f: Factor, n: int, at: int, index: int, count: int
) -> bool:
    """Whether a block of the results depends on what operand `n` holds at `at` along the factor's dim."""
    axis = s.op.inputs[n].shape.index(f.operands[n] or "")
    for by in (-30, 30):
        x = s.arrays[n].copy()
        row = np.moveaxis(x, axis, 0)[at : at + 1]
        row[...] = ~row if x.dtype == bool else row + np.asarray(by, x.dtype)
        changed = apply(record, s.op, [*s.arrays[:n], x, *s.arrays[n + 1 :]])
        for k, y in enumerate(s.op.outputs):
            a, b = (_block(z[k], y.shape, f.outputs[k], index, count) for z in (whole, changed))
            if not same([a], [b]):
                return True
    return False


# ---------------------------------------------------------------- through the exact executor


def check_split(record: OpDef, uses: Sequence[Sample]) -> Iterator[str]:
    """What runs along a split dim gives the same numbers, with what moves inside and nothing else."""
    wanted: set[str] = set()
    ran: set[str] = set()  # ways in which some row was split
    for s in uses if record.kind not in STRUCTURE else ():
        for f in record.roles(s.op):
            if f.role not in TOGETHER:
                continue
            wanted.add(_way(f))
            named = {*f.operands, *f.outputs}
            sizes = [d.size for x in (*s.op.inputs, *s.op.outputs) for d in x.shape if d.name in named]
            for count in (2, 3, 4):
                if not any(n % count for n in sizes):
                    took, fault = _split(record, s, f, count)
                    ran.add(took)
                    if fault:
                        yield f"{s}: {f.name} over {count}: {fault}"
    if wanted - ran:
        yield f"{record.name}: no row was split along the dim that {record.lower} is about: {wanted - ran}"


def _way(f: Factor) -> str:
    """Which of the ways to split a dim it is."""
    return f"{f.role}, shared out" if f.shares is not None else str(f.role)


def _split(record: OpDef, s: Sample, f: Factor, count: int) -> tuple[str, str]:
    """How the dims of a factor were split, and what was wrong."""
    with mtf.Graph() as graph:
        xs = [mtf.input(f"x{n}", x.shape, x.dtype) for n, x in enumerate(s.op.inputs)]
        made = graph.add(record, xs, [y.type for y in s.op.outputs], s.op.attrs)
    feeds = {f"x{n}": x for n, x in enumerate(s.arrays)}
    dims = "".join(dict.fromkeys(f"{d}:p;" for d in f.operands if d is not None))
    outputs = {f"y{n}": y for n, y in enumerate(made.outputs)}
    try:
        program = mtf.lower(outputs, (), f"p:{count}", dims[:-1], "highest", SPLIT_ALL)
        (found,) = run(program, feeds)
    except Exception as fault:  # a wrong record may fail in any way
        return "", f"{type(fault).__name__} {fault}"
    (instruction,) = (i for i in program.instructions if i.operation is made and isinstance(i, Compute))
    took = dict(instruction.assignment).get("p")
    ways = {g.name: _way(g) for g in record.roles(s.op) if g.operands == f.operands}
    if took not in ways:
        return "", "it was not split there"
    if any(i.is_collective for i in program.instructions if not {x.tensor for x in i.inputs} <= {*made.outputs}):
        return ways[took], "its operands moved"
    pending = instruction.outputs[0].sharding.pending
    kind = next(g.role.pending for g in record.roles(s.op) if g.name == took)
    if pending != ((("p", kind),) if kind else ()):
        return ways[took], f"it leaves {pending} pending"
    whole = [np.asarray(y, np.float64) for y in apply(record, s.op, s.arrays)]
    right = same([np.asarray(found[n], np.float64) for n in outputs], whole, TOLERANCE)
    return ways[took], "" if right else "other numbers"


CHECKS = {"roles": check_roles, "split": check_split}
