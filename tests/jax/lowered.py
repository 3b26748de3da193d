"""The collectives in what JAX gives its compiler, read off the StableHLO, and those that a program says it has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from meshlib.jax.step import Step
from meshlib.program.instructions import Compute, Instruction, Loop, Widen
from meshlib.program.records import Program

KINDS = {
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "collective_permute",
}
BITS = {"f32": 32, "bf16": 16, "i32": 32, "ui8": 8, "i8": 8, "f64": 64, "ui32": 32, "i1": 8, "f8E4M3FN": 8, "f8E5M2": 8}
Found = tuple[str, frozenset[frozenset[int]], int]  # kind, groups of devices, bytes of the operand on one device


def in_text(step: Step) -> Counter[Found]:
    """Kind, groups and payload of each collective -> how often it runs. Permutes have no groups."""
    module = step.lowered().compiler_ir("stablehlo")
    functions = {str(f.name).strip(chr(34)): f for f in module.body.operations}
    found: Counter[Found] = Counter()
    for op, times in _walk(functions["main"], functions, 1):
        kind = KINDS[op.name]
        groups: frozenset[frozenset[int]] = frozenset()
        if kind != "collective_permute":
            groups = frozenset(frozenset(map(int, row)) for row in _groups(op.attributes["replica_groups"], step))
        for x in op.operands:
            found[kind, groups, _bytes(x.type)] += times
    return found


def _groups(attribute: Any, step: Step) -> Any:
    """Replica groups: [group, device]; JAX 0.11 writes them as axes of a mesh."""
    text = str(attribute)
    if "mesh_axes" not in text:
        return np.asarray(attribute)
    assert "sub_axis" not in text
    sizes, names = step.program.mesh.sizes, [*step.program.mesh.axes]
    axes = [names.index(name) for name in re.findall(r'axis_ref<name = "(\w+)">', text)]
    devices = np.moveaxis(np.arange(step.program.mesh.size).reshape(sizes), axes, range(-len(axes), 0))
    return devices.reshape(-1, prod(sizes[n] for n in axes))


def _walk(op: Any, functions: dict[str, Any], times: int) -> Iterator[tuple[Any, int]]:
    for region in op.regions:
        for block in region:
            for inner in block:
                o = inner.operation
                if o.name in KINDS:
                    yield o, times
                elif o.name in ("func.call", "sdy.manual_computation"):
                    if o.name == "func.call":
                        yield from _walk(functions[str(inner.attributes["callee"]).strip("@")], functions, times)
                    else:
                        yield from _walk(o, functions, times)
                elif o.name == "stablehlo.while":
                    yield from _walk(o, functions, times * _trips(o))
                else:
                    yield from _walk(o, functions, times)


def _trips(loop: Any) -> int:
    """The trips of a loop that counts from 0 below a constant, as lax.scan writes it."""
    compare = next(o for o in loop.regions[0].blocks[0] if o.operation.name == "stablehlo.compare")
    limit = compare.operands[1].owner
    if limit.name == "stablehlo.constant":
        return int(np.asarray(limit.attributes["value"]))
    raise AssertionError(f"no constant limit: {limit}")


def _bytes(t: Any) -> int:
    text = str(t)
    *sizes, dtype = text[text.index("<") + 1 : text.index(">")].split("x")
    return prod(map(int, sizes)) * BITS[dtype] // 8


def written(program: Program, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Every instruction with the trips of the loops around it: a branch is there in each, taken or not."""
    for i in program.instructions:
        yield i, times
        if isinstance(i, Loop):
            yield from written(i.body, times * i.trips)


def in_program(program: Program) -> Counter[Found]:
    """The same of what `program.collectives` lists, but for what moves along a dim inside an operation."""
    mesh, found = program.mesh, Counter[Found]()
    for i, times in written(program):
        if isinstance(i, Compute | Widen):
            continue
        for part in i.transfers:
            groups = frozenset(frozenset(g) for g in mesh.groups(part.sent.axes))
            if part.sent.kind == "collective_permute":
                groups = frozenset()
            found[part.sent.kind, groups, part.sent.payload_bytes] += times
    return found


def exchanges(program: Program) -> Counter[Found]:
    """How the summaries of blocks travel: as the program says, or as the two halves of an all_reduce."""
    mesh, found = program.mesh, Counter[Found]()
    for i, times in written(program):
        if not isinstance(i, Compute):
            continue
        for e in i.exchanges:
            count = mesh.group_size(e.axes)
            groups = frozenset(frozenset(g) for g in mesh.groups(e.axes))
            if e.kind == "collective_permute":
                found[e.kind, frozenset(), e.payload_bytes] += times
            elif e.kind == "all_reduce":
                found["all_to_all", groups, e.payload_bytes] += times
                found["all_gather", groups, e.payload_bytes // count] += times
            else:
                found[e.kind, groups, e.payload_bytes] += times
    return found
