"""Buffers of grouped products, which are kernels of their own: operands and results are in memory.

A fusion group with a grouped product becomes several kernels: what its operands are computed by, the product, and what
follows it. Gate and input of an expert's layer are free when the product of that layer begins.

Source: steps of Mixtral and Qwen3 compiled for TPUs; in Qwen3's prompts for v6e, gate and input of 768 MiB each have
ended where the layer's result of 2 GiB is put back into the order of the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from meshlib.core.opdef import Storage
from meshlib.estimation.work.tiles import tiled_value_bytes
from meshlib.program.analysis.buffers import Buffer, MemoryPlan
from meshlib.program.instructions import Compute, Instruction, Value
from meshlib.program.records import Program


def is_grouped(i: Instruction) -> bool:
    """True for a grouped product."""
    return isinstance(i, Compute) and i.operation.opdef.read_share is not None


def more_buffers(program: Program, plan: MemoryPlan) -> Iterator[tuple[Buffer, int]]:
    """Operands and results of grouped products without a buffer of their own, with their bytes: those that the plan
    computes inside the kernels that read or write them, and those that overwrite others."""
    values = _operands_and_results(program)
    if not values:
        return
    own = {b.owner for b in plan.buffers}
    begins = {y: n for n, i in enumerate(program.instructions) for y in i.outputs}
    last = _last_reads(program, plan)
    for v in values:
        if v not in own:
            yield Buffer(v, begins[v], last.get(v, begins[v]), []), tiled_value_bytes(v)


def earlier_ends(program: Program, plan: MemoryPlan) -> Mapping[Buffer, int]:
    """The ends of buffers that are free before the fusion group ends that reads them last."""
    split = {i.group for i in program.instructions if is_grouped(i)}
    if not split:
        return {}
    last = _last_reads(program, plan)
    ends = {}
    for b in plan.buffers:
        if b.end < len(program.instructions) and program.instructions[b.end].group in split:
            ends[b] = max(last.get(v, n) for n, v in [(b.begin, b.owner), *b.shown])
    return ends


def _operands_and_results(program: Program) -> dict[Value, None]:
    """Operands and results of grouped products; of views, the values that they show."""
    sources: dict[Value, Value] = {}
    values: dict[Value, None] = {}
    for i in program.instructions if any(map(is_grouped, program.instructions)) else ():
        read = [sources.get(x, x) for x in i.inputs]
        if i.operation.opdef.storage is Storage.ALIAS:
            sources.update(dict.fromkeys(i.outputs, read[0]))
        elif is_grouped(i):
            values.update(dict.fromkeys((*read, *i.outputs)))
    return values


def _last_reads(program: Program, plan: MemoryPlan) -> Mapping[Value, int]:
    """The last instruction of the last kernel that reads each value; one that computes a value again reads its
    sources."""
    splits = Counter[int]()
    kernels: list[tuple[int, int, bool]] = []
    for i in program.instructions:
        alone = is_grouped(i)
        splits[i.group] += alone
        kernels.append((i.group, splits[i.group], alone))
    ends = {kernel: n for n, kernel in enumerate(kernels)}
    inlined = plan.stored.unstored - _operands_and_results(program).keys()
    last: dict[Value, int] = {}
    for n, i in reversed([*enumerate(program.instructions)]):
        until = ends[kernels[n]]
        if i.operation.opdef.storage is Storage.ALIAS or not inlined.isdisjoint(i.outputs):
            until = max(until, *(last.get(y, n) for y in i.outputs))
        for x in i.inputs:
            last[x] = max(last.get(x, until), until)
    return last
