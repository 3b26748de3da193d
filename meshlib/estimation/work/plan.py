"""A program as schedule units in order, with kernels, collectives and dependencies.

Making a plan walks the program once; scheduling a plan again, with other constants or under another placement, takes a
fraction of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from layouts.step_kinds import STEP_KINDS
from meshlib.core.compiler import Compiler
from meshlib.core.graph import FORWARD, UPDATE
from meshlib.core.opdef import Kind
from meshlib.estimation.work.combined_collectives import combined
from meshlib.estimation.work.communication import Communication, CompiledCollectives, moves_of
from meshlib.estimation.work.kernel_passes import passes_of
from meshlib.estimation.work.kernels import Kernel, forward_names, kernel_of
from meshlib.estimation.work.products import Quantised, in_ragged_tiles, is_matmul, looked_up_registers, narrow_values
from meshlib.estimation.work.row_moves import RowMoves
from meshlib.estimation.work.stored_values import Stored
from meshlib.estimation.work.units import Unit, UnitPlan
from meshlib.estimation.work.vmem_reuse import Recent
from meshlib.program.analysis.buffers import written_inside
from meshlib.program.instructions import Compute, Instruction, Loop, Value
from meshlib.program.instructions import Move as Reshard
from meshlib.program.records import Program

_ELEMENTWISE = (Kind.ELEMENTWISE, Kind.VIEW, Kind.SOURCE)


def plan_of(program: Program, compiler: Compiler, compiled: CompiledCollectives | None = None) -> UnitPlan:
    """The plan of a program, with a compiler's rounding noise and tiles of ragged products.

    `compiled`: collectives of a compiled program, which replace the program's own.
    """
    whole = _PlanContext(forward_names(program), compiler, compiled)
    plan = _planned(program, whole, Recent(), program.memory_plan.in_place, None)
    if plan.kernels == 1:
        _note_passes(plan, program)
    return plan


@dataclass(frozen=True)
class _PlanContext:
    """Context shared by a program and its loops' bodies; `forward` names the operations of the forward pass."""

    forward: frozenset[str]
    compiler: Compiler
    compiled: CompiledCollectives | None = None


def _planned(
    program: Program,
    whole: _PlanContext,
    recent: Recent,
    in_place: frozenset[Value],
    region: str | None,
    loop: Loop | None = None,
) -> UnitPlan:
    """The plan of a program or a loop's body; `region`: the loop's, or an enclosing one's, unless that is forward."""
    planner = _UnitPlanner(program, whole, recent, in_place, region, Stored(program, loop))
    units = [planner.unit(n, members) for n, members in enumerate(kernels_of(program))]
    recent.close(units)
    units = combined(units)
    _note_chains(units)
    _note_windows(units)
    _note_leaders(units)
    return UnitPlan(tuple(units))


def kernels_of(program: Program) -> list[list[Instruction]]:
    """The fusion groups in order; groups of one weight's update that share operands are one kernel.

    Slots and weight are results of the program, so each has a group of its own; a compiler writes them in one pass.
    """
    kernels: list[list[Instruction]] = []
    for _, members in groupby(program.instructions, key=lambda i: i.group):
        group = list(members)
        if kernels and _is_update(group) and _is_update(kernels[-1]) and _share_arrays(kernels[-1], group):
            kernels[-1] += group
        else:
            kernels.append(group)
    return kernels


def _is_update(group: Sequence[Instruction]) -> bool:
    return all(
        isinstance(i, Compute) and i.region == UPDATE and not i.transfers and i.operation.opdef.kind in _ELEMENTWISE
        for i in group
    )


def _share_arrays(a: Sequence[Instruction], b: Sequence[Instruction]) -> bool:
    """True if group `b` reads a non-scalar array that group `a` reads or writes."""
    known = {x for i in a for x in (*i.inputs, *i.outputs) if x.local_size > 1}
    return any(x in known for i in b for x in i.inputs)


class _UnitPlanner:
    def __init__(
        self,
        program: Program,
        whole: _PlanContext,
        recent: Recent,
        in_place: frozenset[Value],
        region: str | None,
        stored: Stored,
    ) -> None:
        self.program, self.whole, self.recent = program, whole, recent
        self.in_place, self.region = in_place, region
        self.numbers: dict[Value, int] = {}
        self.stored = stored
        self.quantised = Quantised(whole.compiler.rounding_noise_bytes, whole.forward)
        self.narrow = narrow_values(program)

    def unit(self, place: int, members: Sequence[Instruction]) -> Unit:
        first = members[0]
        produced = {y for i in members for y in i.outputs}
        operands = dict.fromkeys(x for i in members for x in i.inputs if x not in produced)
        unit = Unit(
            first.group,
            first.operation.name,
            first.operation.source,
            self.region or first.region,
            tuple(self._number(x) for x in operands),
            tuple(self._number(y) for i in members for y in i.outputs),
        )
        if isinstance(first, Loop):
            self._repeat(unit, first)
            return unit
        result_bytes = sum(y.local_bytes for i in members for y in i.outputs)
        if isinstance(first, Compute) and first.operation.opdef.kind is Kind.COPY:
            unit.host_bytes = first.opcode, result_bytes
            return unit
        unit.early = isinstance(first, Reshard) and first.early
        unit.moves = tuple(self._moves(members))
        if first.is_collective:
            self.recent.leave(map(self.stored.of, operands))
            self.recent.moved_bytes += result_bytes
        else:
            kernel = kernel_of(
                self.program,
                members,
                self.stored,
                self.quantised,
                self.whole.forward,
                self.in_place,
                self.region,
                self.whole.compiler,
            )
            self.recent.run(place, kernel)
            unit.kernel = self._in_tiles(kernel, members) if kernel.matmuls else kernel
            unit.product = bool(unit.kernel.matmuls)
            unit.name, unit.source, unit.region = kernel.name, kernel.source, kernel.region
        return unit

    def _repeat(self, unit: Unit, loop: Loop) -> None:
        """Complete the unit of a loop: the plan of its body, its trips and branches."""
        inside = Recent.of(loop)
        region = self.region or (None if loop.region == FORWARD else loop.region)
        unit.body = _planned(loop.body, self.whole, inside, written_inside(loop, self.in_place), region, loop)
        unit.trips = loop.trips if loop.share == 1 else float(loop.share)
        unit.active, unit.timing = loop.active_share, loop.record.timing
        unit.branch = None if loop.record.branch is None else loop.record.branch.kind
        self.recent.moved_bytes += int(unit.trips * inside.moved_bytes)

    def _moves(self, members: Sequence[Instruction]) -> list[Communication]:
        """The transfers of a group; a collective of eight-bit values sends one byte per element."""
        compiled, first = self.whole.compiled, members[0]
        if compiled is not None:
            return [m for i in members for m in compiled.get(i, ())]
        moves = [m for i in members for m in moves_of(self.program, i)]
        if not first.is_collective or any(y not in self.narrow for y in first.outputs):
            return moves
        gathered, wide = self.quantised.gathered, first.inputs[0].tensor.dtype
        gathered.update({y: gathered.get(x, x) for x, y in zip(first.inputs, first.outputs, strict=True)})
        return [replace(m, larger_bytes=m.larger_bytes * 8 // wide.bits) for m in moves]

    def _in_tiles(self, kernel: Kernel, members: Sequence[Instruction]) -> Kernel:
        """A product's kernel, which for experts is padded to whole weight tiles, or looks up biases."""
        compiler, product = self.whole.compiler, next(filter(is_matmul, members))
        registers = looked_up_registers(product) if compiler.bias_lookups else 0
        if registers:
            return replace(kernel, matmuls=(), moves=RowMoves(registers))
        if not compiler.ragged_tile_width:
            return kernel
        ((matmul, itemsizes),) = kernel.matmuls
        tiled, columns = in_ragged_tiles(matmul, product, compiler.ragged_tile_width)
        return replace(kernel, matmuls=((tiled, itemsizes),), column_tiles=columns) if columns else kernel

    def _number(self, value: Value) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def _note_passes(plan: UnitPlan, program: Program) -> None:
    """Record the passes of a program's only kernel, unless it is in the body of a loop."""
    stored = Stored(program)
    groups = {members[0].group: members for members in kernels_of(program)}
    for unit in plan.units:
        if unit.kernel is not None and not unit.kernel.free and unit.kernel.attention is None:
            unit.kernel = replace(unit.kernel, passes=passes_of(groups[unit.number], stored))


def _note_chains(units: Sequence[Unit]) -> None:
    """Mark collectives whose result the next product needs, even indirectly, or that have no product after them."""
    needs: dict[int, frozenset[int]] = {}  # value -> collectives since the last product that it depends on
    since: list[int] = []
    for place, unit in enumerate(units):
        behind = frozenset[int]().union(*(needs.get(x, frozenset()) for x in unit.inputs))
        if unit.product or unit.body is not None:
            for n in since:
                units[n].chained = n in behind
            needs, since, behind = {}, [], frozenset()
        if unit.is_collective and not unit.early:
            since.append(place)
            behind |= {place}
        needs.update(dict.fromkeys(unit.outputs, behind))
    for n in since:
        units[n].chained = True


def _note_windows(units: Sequence[Unit]) -> None:
    """Record, for each product, the gathered values whose last consumer in pieces it is.

    A window holds products with nothing but element-wise work between them: the first product, loop or attention that
    does not read the value ends it.
    """
    last: dict[int, Unit] = {}  # gathered value -> last product of its open window
    gathered: set[int] = set()
    for unit in units:
        if unit.is_collective and STEP_KINDS[unit.moves[0].kind].gathers and unit.chained:
            gathered.update(unit.outputs)
        if not unit.is_large:
            continue
        taken = {x for x in unit.inputs if x in gathered} if unit.product else set()
        for x in [x for x in last if x not in taken]:
            last.pop(x).closes |= {x}
            gathered.discard(x)
        last.update(dict.fromkeys(taken, unit))
    for x, unit in last.items():
        unit.closes |= {x}


def _note_leaders(units: Sequence[Unit]) -> None:
    """Mark units that a product, attention or loop depends on, directly or indirectly."""
    needed: set[int] = set()
    for unit in reversed(units):
        unit.leads_on = unit.is_large or not needed.isdisjoint(unit.outputs)
        if unit.leads_on:
            needed.update(unit.inputs)
