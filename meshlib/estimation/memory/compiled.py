"""Memory of a compiled step beyond its program's buffers, and of a whole run.

A compiled step of our own program, as `mtf.on_jax` runs it:

    layout         operands and results of attention kernels are laid out head by head with features minor: heads of 64
                   fill half of the 128 lanes; no position of an image is in lanes, where windows slide over it; a table
                   whose rows do not fill lanes is copied for a lookup; all other values have their densest layout
                   (`tiles`)
    operands       grouped products are kernels of their own, whose operands and results are stored; those that one
                   kernel computes together overwrite nothing
    accumulators   attention kernels sum gradients of keys and values in float32; scatter-adds have float32 results, as
                   long as these are read
    order          in loops a weight's gradient is computed as soon as its operands exist, before the product that
                   passes the cotangent on: all gradients of a block's weights are beside the weights that it gathers;
                   not where memory is short
    code           per kernel
    fragmentation  gaps between buffers (`heap`), and a share of temporaries

Plain `jit` with sharding annotations (`mtf.GSPMD`) takes more:

    hoisted casts  of weights that loops slice: those of all layers are cast before the loop
    loops          where eight devices or more share a product's weight, the product is a loop over its blocks, with a
                   second operand and result of the widest such product; the logits' gradient is kept for the loop of
                   its weight if memory allows, else the scheduler, which knows the limit, runs that loop first
    fragmentation  more, since such loops allocate and free blocks; outputs stacked by loops are not affected

A whole run takes as much as its largest program: the step; an evaluation, measured at least `RUN_ADDS_BYTES` above the
step; or an export that gathers float32 weights, with the state and two copies of a file at any batch size.

Sources: steps compiled for v5e ahead of time by libtpu, ours and Levanter's, of 1.5 billion parameters; runs of
Levanter and MaxText on v5e; openxla/xla: xla/service/latency_hiding_scheduler.h (SchedulerConfig.memory_limit).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from hardware.memory import LANES, padded_bytes
from meshlib.core.compiler import Compiler
from meshlib.core.dtypes import FLOAT32
from meshlib.core.graph import BACKWARD
from meshlib.core.opdef import Halo, Kind, Role, Storage
from meshlib.estimation.memory.grouped import earlier_ends, more_buffers
from meshlib.estimation.memory.heap import Spans, gap_bytes, live_ranges, peak_bytes
from meshlib.estimation.work.hbm_traffic import row_looked_up
from meshlib.estimation.work.tiles import tiled_bytes, tiled_value_bytes
from meshlib.program.analysis.buffers import START, Buffer, MemoryPlan
from meshlib.program.instructions import Compute, Instruction, Loop, Move, Value
from meshlib.program.records import Program, walk

CODE_BYTES = 120 << 10  # per kernel: 0.04 GiB for a step of 350
FRAGMENTATION = 0.01  # of everything except variables and slots
LOOPED_FRAGMENTATION = 0.075  # of temporary buffers, if products are loops over blocks: 6 to 9 %
LOOPED_FROM = 8  # products are loops if at least this many devices share a gathered weight
RUN_ADDS_BYTES = 1 << 29  # smallest excess of whole runs over their step; the largest was 5 GiB
_WINDOWED = (Kind.CONTRACTION, Kind.INDEXED)  # convolutions and pools
FILE_BYTES = 5 * 10**9  # per file of exported weights: `shard_bytes` of `mtf.sharing.write_weights`


@dataclass(frozen=True)
class CompiledStepMemory:
    """Bytes of one device used by a compiled step, by cause. Modelled except `buffers_bytes`.

    Attributes:
      buffers_bytes: peak of the program's buffers in tiles; layout_bytes: more for layouts of attention and images,
        operands and results of grouped products, and accumulators.
      casts_bytes, loops_bytes: hoisted casts and looped products under plain jit; 0 for our own program.
      code_bytes, fragmentation_bytes: machine code; gaps between allocations.
      state_bytes: variables and slots; export_bytes: extra memory of an export, 0 without training.
    """

    buffers_bytes: int
    layout_bytes: int
    casts_bytes: int
    loops_bytes: int
    code_bytes: int
    fragmentation_bytes: int
    state_bytes: int
    export_bytes: int

    @property
    def step_bytes(self) -> int:
        """Total of the step."""
        parts = (self.buffers_bytes, self.layout_bytes, self.casts_bytes, self.loops_bytes)
        return sum(parts) + self.code_bytes + self.fragmentation_bytes

    @property
    def run_bytes(self) -> int:
        """Total of a whole run; for a program that trains nothing, of its step."""
        if not self.export_bytes:
            return self.step_bytes
        return max(self.step_bytes + RUN_ADDS_BYTES, self.state_bytes + self.export_bytes)


def compiled_memory(
    program: Program, compiler: Compiler, buffers_bytes: int, capacity_bytes: int
) -> CompiledStepMemory:
    """Memory of a step under a given compiler.

    Args:
      program: the result of `mtf.lower`.
      compiler: its partitioner selects our own step or plain jit.
      buffers_bytes: peak of the program's buffers in tiles; capacity_bytes: HBM available to programs.
    """
    early = _in_order(program, compiler, buffers_bytes, capacity_bytes, _spans_of(program))
    if early.step_bytes <= capacity_bytes:
        return early
    return _in_order(program, compiler, buffers_bytes, capacity_bytes, _spans_of(program, early=False))


def _in_order(
    program: Program, compiler: Compiler, buffers_bytes: int, capacity_bytes: int, spans: Spans
) -> CompiledStepMemory:
    """Memory of a step whose buffers have these spans."""
    plain = compiler.partitioner == "gspmd"
    ranges = [*live_ranges(program, tiled_value_bytes, _scratch, _beyond_plan, spans)]
    laid = max(peak_bytes(ranges), buffers_bytes)
    casts = _hoisted_casts(program) if plain else 0
    widest, logits = _loops(program) if plain else (0, 0)
    share, stays = (LOOPED_FRAGMENTATION, _stacked(program)) if widest + logits else (FRAGMENTATION, 0)
    code = CODE_BYTES * len({(id(inside), i.group) for i, inside, _ in walk(program)})
    state = sum(tiled_value_bytes(v) for v in program.variables.values() if not v.tensor.on_host)
    trained = [program.variables[n] for n in program.updates if n in program.variables]
    weights = sum(4 * v.tensor.shape.size for v in trained if v.tensor.operation.attrs["trainable"])

    def with_loops(loops_bytes: int) -> CompiledStepMemory:
        allocated = laid + casts + loops_bytes
        lost = ceil(share * max(0, allocated - state - stays))
        if not plain:
            lost += gap_bytes(ranges, capacity_bytes - allocated - code - lost)
        return CompiledStepMemory(
            buffers_bytes=buffers_bytes,
            layout_bytes=laid - buffers_bytes,
            casts_bytes=casts,
            loops_bytes=loops_bytes,
            code_bytes=code,
            fragmentation_bytes=lost,
            state_bytes=state,
            export_bytes=2 * min(FILE_BYTES, weights),
        )

    fastest = with_loops(widest + logits)
    return with_loops(widest) if logits and fastest.step_bytes > capacity_bytes else fastest


def _is_attention(i: Instruction) -> bool:
    return isinstance(i, Compute) and i.operation.opdef.scores is not None


def _by_heads(i: Instruction, v: Value, itemsize: float) -> int:
    """Bytes of an attention operand or result with (position, head feature) as minor dims."""
    attrs = i.operation.attrs
    sizes = {d.name: d.size for d in v.local_shape}
    features = [attrs[n] for n in ("key_dim", "value_dim") if attrs[n] in sizes]
    positions = [attrs[n] for n in ("length", "memory_length") if attrs[n] in sizes]
    if not features or not positions:
        return tiled_bytes(v.local_shape.sizes, itemsize)
    last = positions[0], features[0]
    return padded_bytes((*(size for n, size in sizes.items() if n not in last), *(sizes[n] for n in last)), itemsize)


def _beyond_plan(program: Program, plan: MemoryPlan) -> Iterator[tuple[Buffer, int]]:
    """Buffers with bytes that the plan does not count."""
    yield from _head_by_head(program, plan.buffers)
    yield from _of_windows(program, plan.buffers)
    yield from more_buffers(program, plan)
    yield from _added_rows(program, plan.buffers)


def _head_by_head(program: Program, buffers: tuple[Buffer, ...]) -> Iterator[tuple[Buffer, int]]:
    """Attention buffers with the extra bytes of their head-by-head layout over the densest one."""
    taken = {v: i for i in program.instructions if _is_attention(i) for v in (*i.inputs, *i.outputs)}
    for buffer in buffers if taken else ():
        kernels = [(taken[v], v) for v in {buffer.owner, *(v for _, v in buffer.shown)} if v in taken]
        wide = max((_by_heads(i, v, v.tensor.dtype.itemsize) for i, v in kernels), default=0)
        if wide > tiled_value_bytes(buffer.owner):
            yield buffer, wide - tiled_value_bytes(buffer.owner)


def _of_windows(program: Program, buffers: tuple[Buffer, ...]) -> Iterator[tuple[Buffer, int]]:
    """Buffers of images with the extra bytes of a layout that has another dim in lanes than those of positions."""
    slid: dict[int, set[str | None]] = {}  # of kernels
    for i in program.instructions:
        kind = i.operation.opdef
        if isinstance(i, Compute) and kind.kind in _WINDOWED and isinstance(kind.lower, Halo) and not kind.scores:
            factors = (f for f in kind.roles(i.operation) if f.role is Role.HALO)
            slid.setdefault(i.group, set()).update(n for f in factors for n in (*f.operands, *f.outputs))
    positions: dict[Value, set[str | None]] = {}
    for i in program.instructions if slid else ():
        for v in (*i.inputs, *i.outputs) if i.group in slid else ():
            positions.setdefault(v, set()).update(slid[i.group])
    for buffer in (b for b in buffers if positions and b.begin != START):
        wide = max((_beside_lanes(v, positions[v]) for _, v in buffer.shown if v in positions), default=0)
        if wide > tiled_value_bytes(buffer.owner):
            yield buffer, wide - tiled_value_bytes(buffer.owner)


def _beside_lanes(v: Value, positions: Container[str | None]) -> int:
    """Bytes of a value in its densest layout without any of these dims in lanes; 0 if it has no others."""
    sizes = {d.name: d.size for d in v.local_shape}
    layouts = [
        (*(size for n, size in sizes.items() if n not in (row, lane)), sizes[row], sizes[lane])
        for lane in sizes
        for row in sizes
        if row != lane and lane not in positions
    ]
    return min((padded_bytes(layout, v.tensor.dtype.itemsize) for layout in layouts), default=0)


def _added_rows(program: Program, buffers: tuple[Buffer, ...]) -> Iterator[tuple[Buffer, int]]:
    """Results of scatter-adds of less than 32 bits, with the bytes that they have in float32."""
    buffer_of = {v: b for b in buffers for _, v in b.shown}
    ends = {i.group: n for n, i in enumerate(program.instructions)}
    for n, i in enumerate(program.instructions):
        if not isinstance(i, Compute) or i.operation.opdef.indices != 1 or i.operation.opdef.reads_part:
            continue
        (y,) = i.outputs
        wide = tiled_bytes(y.local_shape.sizes, 4)
        if wide > tiled_value_bytes(y):
            b = buffer_of.get(y)
            yield (Buffer(y, n, ends[i.group], []), wide) if b is None else (b, wide - tiled_value_bytes(y))


def _scratch(program: Program, i: Instruction) -> int:
    """Bytes live while an instruction runs, besides operands and results: float32 sums of attention's gradients, and
    copies of tables."""
    if not isinstance(i, Compute):
        return 0
    if i.operation.opdef.scores is not None and i.region == BACKWARD and len(i.outputs) > 1:
        return sum(_by_heads(i, y, 4) for y in i.outputs) if i.outputs[0].tensor.dtype.itemsize < 4 else 0
    return 0 if program.is_body else _relaid_table(program, i)


def _relaid_table(program: Program, i: Instruction) -> int:
    """Bytes of the copy from which a lookup reads rows that do not fill lanes: the table in memory, whose layout is the
    densest, with its rows in lanes. Kernels that compute a table store it so."""
    row = row_looked_up(i, i.inputs[0]) if isinstance(i, Compute) and i.operation.opdef.reads_part else 0
    if row % LANES == 0:
        return 0
    producers = {y: j for j in program.instructions for y in j.outputs}
    unstored, table = program.memory_plan.stored.unstored, i.inputs[0]
    while isinstance(j := producers[table], Compute) and (
        table in unstored or j.operation.opdef.storage is Storage.ALIAS
    ):
        table = j.inputs[0]
    wide = padded_bytes((table.local_size // row, row), table.tensor.dtype.itemsize)
    return 0 if isinstance(j, Compute) or wide <= tiled_value_bytes(table) else wide


def _spans_of(whole: Program, early: bool = True) -> Spans:
    """A function (program, plan) -> first and last instructions of buffers, where a compiled step has another order.

    `early`: whether weights' gradients are computed as soon as their operands exist.
    """
    weight_dims = frozenset(d.name for v in whole.variables.values() for d in v.tensor.shape)

    def spans(program: Program, plan: MemoryPlan) -> Mapping[Buffer, tuple[int, int]]:
        begins = _earlier_begins(program, plan, weight_dims) if early and program.is_body else {}
        ends = earlier_ends(program, plan)
        return {b: (begins.get(b, b.begin), ends.get(b, b.end)) for b in (*begins, *ends)}

    return spans


def _earlier_begins(program: Program, plan: MemoryPlan, weight_dims: frozenset[str]) -> Mapping[Buffer, int]:
    """Buffers of weights' gradients that are computed as soon as their operands exist, with the first instruction."""
    owned = {b.owner: b for b in plan.buffers}
    unstored = plan.stored.unstored
    exists: dict[Value, int] = {}  # the last instruction that a value needs, without those that its consumers repeat
    begins = {}
    for n, i in enumerate(program.instructions):
        ready = max((exists.get(x, START) for x in i.inputs), default=START)
        shows = i.operation.opdef.storage is Storage.ALIAS
        exists |= {y: ready if shows or y in unstored else n for y in i.outputs}
        if not isinstance(i, Compute) or i.region != BACKWARD or i.operation.opdef.kind is not Kind.CONTRACTION:
            continue
        (y, *_) = i.outputs
        if y in owned and len(y.tensor.shape) > 1 and weight_dims.issuperset(y.tensor.shape.names):
            begins[owned[y]] = min(n, ready + 1)
    return begins


def _hoisted_casts(program: Program) -> int:
    """Bytes of bfloat16 copies of float32 variables that loops slice, one copy per variable."""
    sliced = {
        v
        for i in program.instructions
        if isinstance(i, Loop)
        for name, v in zip(i.body.inputs, i.inputs, strict=True)
        if name in i.slices and v.tensor.dtype is FLOAT32 and _is_cast(i.body, i.body.inputs[name])
    }
    stored = {*program.variables.values()}
    return sum(tiled_bytes(v.local_shape.sizes, 2) for v in sliced if v in stored)


def _stacked(program: Program) -> int:
    """Largest total of stacked values at once: those that a running loop reads, and its own."""
    placed, stacks, most = {*program.updates.values()}, set[Value](), 0
    for i in program.instructions:
        if isinstance(i, Loop):
            own = {y for y in i.outputs[len(i.carries) :] if y not in placed and not y.tensor.on_host}
            there = own.union(x for x in i.inputs if x in stacks)
            most = max(most, sum(tiled_value_bytes(v) for v in there))
            stacks |= own
    return most


def _is_cast(body: Program, x: Value) -> bool:
    readers = [i for i in body.instructions if x in i.inputs]
    return any(i.opcode == "cast" and i.outputs[0].tensor.dtype.itemsize == 2 for i in readers)


def _loops(program: Program) -> tuple[int, int]:
    """Bytes held by products that loop over the blocks of a gathered weight: (widest in layers, logits)."""
    widest = logits = 0
    makers: dict[Program, Mapping[Value, Instruction]] = {}
    for i, inside, _ in walk(program):
        if not isinstance(i, Compute) or i.operation.opdef.kind is not Kind.CONTRACTION or i.region == BACKWARD:
            continue
        if inside not in makers:
            makers[inside] = {y: maker for maker in inside.instructions for y in maker.outputs}
        gathered = [x for x in i.inputs[:2] if _gathered_over(inside, makers[inside], x) >= LOOPED_FROM]
        if len(gathered) == 1:
            (x,) = (x for x in i.inputs[:2] if x not in gathered)
            result = tiled_value_bytes(i.outputs[0])
            if inside is program:
                logits = max(logits, result)
            else:
                widest = max(widest, tiled_value_bytes(x) + result)
    return widest, logits


def _gathered_over(program: Program, makers: Mapping[Value, Instruction], x: Value) -> int:
    """Devices over which a value was gathered, directly or before casts and renames; 1 if it was not."""
    i = makers.get(x)
    while i is not None and not i.is_collective and len(i.inputs) == 1:
        i = makers.get(i.inputs[0])
    if not isinstance(i, Move) or not i.step_kind.gathers:
        return 1
    return program.mesh.group_size(i.steps[0].axes)
