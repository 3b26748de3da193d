"""A Program on the blocks of one device: the body of one shard_map, traced instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from meshlib.core.dtypes import BFLOAT16
from meshlib.core.errors import ProgramError
from meshlib.core.graph import BACKWARD, Operation
from meshlib.core.opdef import Factor, Halo, Summary
from meshlib.jax.collectives import all_summaries, combined_summaries, gathered_run, move, shared_summaries
from meshlib.jax.context import Array, Index, Reported, TraceContext, passed_checks
from meshlib.jax.loop_trips import LoopTrip
from meshlib.jax.repeats import Repeats
from meshlib.jax.table import BlockRuns, RowContext, row_of, run_row
from meshlib.program.analysis.buffers import START
from meshlib.program.exchanges import RUNS, run_factors, summary_factor
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Resident, Value, Widen
from meshlib.program.interpreter import Interpreter
from meshlib.program.records import Program

Axes = Mapping[str, tuple[str, ...]]
_SHARE = 32  # a result is large if it takes this part of the updated variables' memory


class Executor(Interpreter[Array, TraceContext]):
    """Values are this device's blocks, margins included; elements past the ends of a dim are undefined."""

    def __init__(self, context: TraceContext) -> None:
        self.context = context
        self._repeats = Repeats()
        self._late: list[Value] | None = None  # updates not computed yet, unless the compiler was told to
        self._large_bytes = 0
        self._wide: dict[Value, Array] = {}  # result of a cast to bfloat16 -> its operand

    def run(self, program: Program, given: Mapping[Value, Array], context: TraceContext) -> dict[Value, Array]:
        """As in the interpreter, with barriers that keep the compiler from merging recomputations."""
        around, self._repeats = self._repeats, Repeats()
        try:
            return super().run(program, given, context)
        finally:
            self._repeats = around

    def results(
        self,
        program: Program,
        i: Instruction,
        inputs: Sequence[Array],
        values: Mapping[Value, Array],
        context: TraceContext,
    ) -> Iterable[Array]:
        if isinstance(i, Resident | Commit):
            return super().results(program, i, inputs, values, context)
        with jax.named_scope(i.scope):
            outputs = list(super().results(program, i, self._repeats.apart(i, inputs), values, context))
        self._repeats.note(i, outputs)
        return outputs

    def before(self, program: Program, n: int, values: dict[Value, Array]) -> None:
        """Before a loop, have the compiler compute the values that the plan keeps in memory during it.

        XLA otherwise schedules values needed only at the end of the step, such as the last weights' gradient, after the
        loop, and keeps their larger operands live until then.
        """
        if program.is_body:
            return
        i = program.instructions[n]
        if isinstance(i, Compute):
            self._updates_before(program, i, values)
        if not isinstance(i, Loop):
            return
        starts = {name for name, _ in i.carries}
        carried = [x for name, x in zip(i.body.inputs, i.inputs, strict=True) if name in starts][:1]
        live = [b.at(n - 1)[1] for b in program.buffers if START < b.begin < n < b.end]
        tied = [*carried, *(v for v in dict.fromkeys(live) if v in values and v not in i.inputs)]
        if carried and len(tied) > 1:
            arrays = lax.optimization_barrier(tuple(values[v] for v in tied))
            values.update(zip(tied, arrays, strict=True))

    def _updates_before(self, program: Program, i: Compute, values: dict[Value, Array]) -> None:
        """Have the compiler compute the updates due before a large result: it would hold their gradients."""
        if self._late is None:
            self._late = [*program.updates.values()]
            self._large_bytes = sum(v.local_bytes for v in self._late) // _SHARE
        if not (self._late and i.inputs and i.operation.region == BACKWARD):
            return
        if i.outputs[0].local_bytes < self._large_bytes:
            return
        new = [v for v in self._late if v in values]
        if sum(v.local_bytes for v in new) < self._large_bytes:
            return
        self._late = [v for v in self._late if v not in values]
        tied = [i.inputs[0], *new]
        arrays = lax.optimization_barrier(tuple(values[v] for v in tied))
        values.update(zip(tied, arrays, strict=True))

    # ------------------------------------------------------------ moves

    def move(self, i: Move, inputs: Sequence[Array]) -> list[Array]:
        if isinstance(i, Widen):
            return [_widened(i, inputs[0], self.context)]
        if i.outputs[0].margins:
            return [_cut_wide(i.inputs[0], i.outputs[0], inputs[0], self.context)]
        return [move(step, x, self.context) for step, x in zip(i.steps, inputs, strict=True)]

    # ------------------------------------------------------------ loops

    def sliced(self, x: Array, trip: int, axis: int) -> Array:
        raise AssertionError("loops are one lax.scan")

    def stacked(self, i: Loop, n: int, parts: Sequence[Array]) -> Array:
        raise AssertionError("loops are one lax.scan")

    def goes_on(self, going: Array) -> bool:
        raise AssertionError("loops with a condition are one lax.while_loop")

    def loop(self, i: Loop, inputs: Sequence[Array], context: TraceContext) -> list[Array]:
        """All trips in one lax.scan or lax.while_loop, for which the loop's body is traced once."""
        if i.splits_branch:
            return self._branch(i, inputs, context)
        trip = LoopTrip(i, inputs, context, self.run)
        return trip.run_while() if i.going is not None else trip.run_all()

    def _branch(self, i: Loop, inputs: Sequence[Array], context: TraceContext) -> list[Array]:
        """One trip in a lax.cond, skipped by devices on which the branch's index is idle."""
        body, record = i.body, i.record
        given = dict(zip(body.inputs.values(), inputs, strict=True))
        for name in i.slices:  # of the only trip
            v = body.inputs[name]
            given[v] = lax.index_in_dim(given[v], 0, i.slice_axis(name), keepdims=False)
        assert record.working is not None
        begin = [given[body.inputs[name]] for name, _ in i.carries]
        inside = Reported()

        def run() -> tuple[list[Array], list[Array], list[Array]]:
            nonlocal inside
            inside = Reported()
            values = self.run(body, dict(given), replace(context.in_trip(jnp.int32(0)), reported=inside))
            ends = [values[body.outputs[end]] for _, end in i.carries]
            return ends, [values[body.outputs[name]][None] for name in i.stacks], inside.checks

        _, stacks, checks = jax.eval_shape(run)
        if inside.prints:
            raise ProgramError(f"{i.operation}: a branch that shows values does not run on JAX")

        def leave_out() -> tuple[list[Array], list[Array], list[Array]]:
            return begin, [jnp.zeros(s.shape, s.dtype) for s in stacks], passed_checks(len(checks))

        works = given[body.inputs[record.working.operation.name]].reshape(-1)[0]  # of its only index; all indices agree
        finals, stacked, checks = lax.cond(works, run, leave_out)
        context.reported.add(inside.checked, checks)
        return [*finals, *stacked]

    # ------------------------------------------------------------ computations

    def compute(self, program: Program, i: Compute, inputs: Sequence[Array], context: TraceContext) -> Sequence[Array]:
        op = i.operation
        if i.opcode == "cast" and op.outputs[0].dtype is BFLOAT16 and inputs[0].dtype == jnp.float32:
            self._wide[i.outputs[0]] = inputs[0]
        elif op.opdef.reads_part and not i.exchanges and i.inputs[0] in self._wide:
            inputs = [self._wide[i.inputs[0]], *inputs[1:]]  # the result is rounded; XLA would cast a whole table
        if op.opdef.show is not None and len(inputs) > 1:
            context.reported.prints.append(list(inputs[1:]))
        factors = op.opdef.roles(op)
        axes = i.factor_axes
        split, moving = summary_factor(factors, axes), run_factors(factors, axes)
        part = RowContext(
            op,
            tuple(x.tensor.shape.names for x in i.inputs),
            tuple(y.local for y in i.outputs),
            _Offsets(i, factors, axes, context),
            context,
            ({},) * len(inputs),
            (None,) * len(inputs),
        )
        if any(v.margins for v in (*i.inputs, *i.outputs)):
            return _within_margins(i, part, factors, axes, inputs)
        if split is not None:
            return _summarised(i, part, split, axes[split.name], inputs)
        if moving:
            return _with_halos(i, part, moving, axes, inputs)
        if i in context.stacks:
            stack = context.stacks[i]
            stack.array = row_of(op).local(part, stack.array, *inputs[1:], trip=stack.trip)
            return (lax.dynamic_index_in_dim(stack.array, stack.trip, 0, keepdims=False),)
        return run_row(part, row_of(op).local, inputs)


class _Offsets(Mapping[str, Index]):
    """Factor -> global index at which this device's block begins; for windows, in the dim of `Halo.length`.

    Computed where a row reads it: most rows read none, and each index takes several operations of the trace.
    """

    def __init__(self, i: Compute, factors: Sequence[Factor], axes: Axes, context: TraceContext) -> None:
        self._factors = {f.name: f for f in factors}
        self._operation, self._axes, self._context = i.operation, axes, context

    def __getitem__(self, name: str) -> Index:
        f, over = self._factors[name], self._axes.get(name, ())
        if not over:
            return 0
        size = Halo.length(self._operation, f) if f.role in RUNS else f.size
        return self._context.index(over) * (size // self._context.mesh.group_size(over))

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)


def _with_halos(
    i: Compute, part: RowContext, moving: Sequence[Factor], axes: Axes, inputs: Sequence[Array]
) -> tuple[Array, ...]:
    """Run an operation on windows of its operands, gathered dim by dim, as this device's block of the result needs."""
    op, context = i.operation, part.context
    lower = op.opdef.lower
    assert isinstance(lower, Halo)
    received = {(e.operand, e.dim) for e in i.exchanges}
    arrays: list[Array] = []
    runs_of_operands: list[dict[str, BlockRuns]] = []
    for n, x in enumerate(inputs):
        shape, runs = op.inputs[n].shape, {}
        for f in moving:
            dim = f.operands[n]
            if dim is None:
                continue
            spans = _spans(op, lower, f, n, context.mesh.group_size(axes[f.name]))
            x = gathered_run(
                x,
                shape.index(dim),
                axes[f.name],
                context,
                spans.__getitem__,
                shape.dim(dim).size,
                lower.wrap(op),
                (n, dim) in received,
            )
            runs[dim] = BlockRuns(tuple(begin for (begin, _), _ in spans), context.index(axes[f.name]))
        arrays.append(x)
        runs_of_operands.append(runs)
    return run_row(replace(part, runs=tuple(runs_of_operands)), row_of(op).local, arrays)


def _spans(
    op: Operation, lower: Halo, f: Factor, operand: int, count: int
) -> list[tuple[tuple[int, int], Sequence[tuple[int, int]]]]:
    """For each of `count` blocks: the window that it needs of an operand's dim, and the parts of it that are read."""
    rows_per_block = lower.length(op, f) // count
    blocks = [(op, f, operand, j * rows_per_block, (j + 1) * rows_per_block) for j in range(count)]
    return [(lower.needs(*block), lower.parts(*block)) for block in blocks]


def _block_runs(first: int, block: int, count: int, index: Index) -> BlockRuns:
    """The first rows of all blocks' runs, each a block after the one before."""
    return BlockRuns(tuple(first + j * block for j in range(count)), index)


def _own_part(array: Array, own: Mapping[int, slice]) -> tuple[slice, ...] | None:
    """The device's own block in an array with margins along some axes; None where there are none."""
    if all(cut == slice(0, array.shape[axis]) for axis, cut in own.items()):
        return None
    return tuple(own.get(axis, slice(None)) for axis in range(array.ndim))


def _within_margins(
    i: Compute, part: RowContext, factors: Sequence[Factor], axes: Axes, inputs: Sequence[Array]
) -> tuple[Array, ...]:
    """Compute a result including its margins, from operands cut to the windows it needs."""
    op, (y, *_) = i.operation, i.outputs
    lower = op.opdef.lower
    wide = {m.dim: m for m in y.margins}
    offsets, before = dict(part.offsets), {}
    for f in factors:
        margin = wide.get(f.outputs[0] or "")
        before[f.name] = 0 if margin is None else margin.before
        offsets[f.name] = offsets[f.name] - before[f.name]
    arrays: list[Array] = []
    runs_of_operands: list[dict[str, BlockRuns]] = []
    own: list[tuple[slice, ...] | None] = []
    for n, (x, array) in enumerate(zip(i.inputs, inputs, strict=True)):
        held = {m.dim: m for m in x.margins}
        runs: dict[str, BlockRuns] = {}
        mine = {}
        for f in factors:
            dim, out = f.operands[n], f.outputs[0]
            over = axes.get(f.name, ())
            if dim is None or (out is None and not over):
                continue
            axis, size = x.tensor.shape.index(dim), x.tensor.shape.dim(dim).size
            start = -held[dim].before if dim in held else 0  # beginning of this device's data, relative to its block
            if f.role in RUNS and over and isinstance(lower, Halo):
                count = part.context.mesh.group_size(over)
                length = lower.length(op, f) // count if out is None else y.local_shape.dim(out).size
                begin, end = lower.needs(op, f, n, -before[f.name], length - before[f.name])
                runs[dim] = _block_runs(begin + before[f.name], size // count, count, part.context.index(over))
                if lower.wrap(op):
                    begin, end = start + (begin - start) % size, start + (begin - start) % size + end - begin
            elif out is not None and (out in wide or dim in held):
                begin, end = -before[f.name], y.local_shape.dim(out).size - before[f.name]
            else:
                continue
            array = _cut(array, axis, begin - start, end - start)
            mine[axis] = slice(-begin, x.sharding.local_shape.dim(dim).size - begin)
        arrays.append(array)
        runs_of_operands.append(runs)
        own.append(_own_part(array, mine))
    part = replace(part, offsets=offsets, runs=tuple(runs_of_operands), own=tuple(own))
    return run_row(part, row_of(op).local, arrays)


def _cut(x: Array, axis: int, begin: int, end: int) -> Array:
    """Elements [begin, end) along an axis; beyond the array, which is beyond the dim, they are undefined."""
    size = x.shape[axis]
    if (begin, end) == (0, size):
        return x
    if begin >= 0 and end <= size:
        return lax.slice_in_dim(x, begin, end, axis=axis)
    return jnp.take(x, jnp.clip(jnp.arange(begin, end), 0, size - 1), axis=axis)


def _summarised(
    i: Compute, part: RowContext, factor: Factor, axes: tuple[str, ...], inputs: Sequence[Array]
) -> tuple[Array, ...]:
    """Run an operation whose blocks exchange summaries first."""
    op, mesh = i.operation, part.context.mesh
    row = row_of(op)
    split, lower = row.split, op.opdef.lower
    assert split is not None, f"{op} has no row for a split dim"
    assert isinstance(lower, Summary)
    arrays = list(inputs)
    types = lower.types(tuple(x.local for x in i.inputs), op.attrs)
    summary_part = replace(part, outs=types)
    count = mesh.group_size(axes)
    summaries = run_row(summary_part, split.summarise, arrays)
    if factor.shares is not None:
        places = [t.shape.index(factor.shares) for t in types]
        received = tuple(shared_summaries(x, axes, dim, count) for x, dim in zip(summaries, places, strict=True))
    elif split.combine is not None:
        received = combined_summaries(summaries, axes, count, split.combine)
    else:
        received = tuple(all_summaries(x, axes) for x in summaries)
    return run_row(part, split.finish, arrays, received, part.context.index(axes))


# ---------------------------------------------------------------- margins


def _widened(i: Widen, x: Array, context: TraceContext) -> Array:
    """The block with one more margin, received from other devices."""
    (before,), (after,) = i.inputs, i.outputs
    (margin,) = (m for m in after.margins if m not in before.margins)
    shape = before.tensor.shape
    axis, size = shape.index(margin.dim), shape.dim(margin.dim).size
    block = x.shape[axis]

    def needs(j: int) -> tuple[tuple[int, int], Sequence[tuple[int, int]]]:
        run = j * block - margin.before, (j + 1) * block + margin.after
        return run, [run]

    return gathered_run(x, axis, i.steps[0].axes, context, needs, size, margin.wrap)


def _cut_wide(x: Value, y: Value, array: Array, context: TraceContext) -> Array:
    """The part of the block, with margins, that belongs to this device under the new sharding."""
    held, wanted = {m.dim: m for m in x.margins}, {m.dim: m for m in y.margins}
    for axis, d in enumerate(y.tensor.shape):
        old, new = x.sharding.of(d.name), y.sharding.of(d.name)
        length = y.local_shape.dim(d.name).size
        before = (held[d.name].before if d.name in held else 0) - (wanted[d.name].before if d.name in wanted else 0)
        if old == new:
            array = _cut(array, axis, before, before + length)
            continue
        sizes = (context.mesh.group_size(a) for a in (old, new))
        start_old, start_new = (context.index(a) * (d.size // n) for a, n in zip((old, new), sizes, strict=True))
        places = start_new - start_old + before + jnp.arange(length)
        array = jnp.take(array, places, axis=axis, mode="wrap")  # past the ends of a whole dim, indices wrap round
    return array
