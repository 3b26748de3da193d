"""Loops: `scan` over a stacked dim with carries; `while_loop`, a scan without slices, optionally with a condition.

The body is lowered once, and one instruction repeats it. The gradient of a scan is a scan in reverse: it reads the
carries before each trip and the values kept by the rematerialisation policy, which the forward pass stacks if a
gradient is requested, and recomputes the rest of each trip's body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, flag, items, whole
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import (
    Graph,
    Operation,
    Tensor,
    TensorType,
    absolute_scope,
    checked_op_name,
    current_graph,
    current_scope,
    innermost,
)
from meshlib.core.loop_record import Active, Branch, LateCarry, LoopBody, LoopOperands, LoopRecord, LoopResults, Timing
from meshlib.core.names import free_name, relative_name
from meshlib.core.opdef import Array, Block, Factor, Kind, Role, Work, operation
from meshlib.core.replay import needed
from meshlib.ops.building import build_source, tensor
from meshlib.ops.control.remat import PartialPolicy, Policy, Remat, checked_policy, kept_values, to_host
from meshlib.ops.control.sources import INPUT, _constant
from meshlib.ops.movement.shape import rename_dimension
from meshlib.ops.movement.tables import table
from meshlib.ops.pointwise.arithmetic import add

Body = Callable[..., Any]


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    raise AssertionError("a loop's results have several shapes: see _add")


def _roles(op: Operation) -> tuple[Factor, ...]:
    # The body is partitioned by itself; the operands must have the shardings that it expects.
    count = len(op.inputs)
    return tuple(
        Factor(f"{n}/{d.name}", d.size, tuple(d.name if k == n else None for k in range(count)), (None,), Role.WHOLE)
        for n, x in enumerate(op.inputs)
        for d in x.shape
    )


def _local(block: Block, *arrays: Array) -> Array:
    raise AssertionError("executors run the body's instructions")


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    loop: LoopRecord = attrs["loop"]
    once = (op.opdef.work(tuple(x.type for x in op.inputs), op.output.type, op.attrs) for op in loop.body.operations)
    return Work.total(once, times=loop.dim.size)


def _grad(op: Operation, *dys: Tensor | None) -> Sequence[Tensor | None]:
    from meshlib.ops.control.loop_gradient import loop_gradient

    return loop_gradient(op, *dys)


LOOP = operation("scan", kind=Kind.LOOP, shape=_shape, roles=_roles, local=_local, grad=_grad, work=_work)


def scan(
    body: Body,
    carries: Sequence[Tensor],
    xs: Sequence[Tensor] = (),
    dim: Dimension | None = None,
    reverse: bool = False,
    name: str | None = None,
    stack_variables: bool = False,
    remat: Policy = "full",
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run `body` once per index of `dim`, passing carries from trip to trip.

    Args:
      body: takes a tuple of carries and a tuple of slices (each of `xs` at this index, without `dim`); returns new
        carries of the same types, and a tuple of tensors to stack. It may capture outer tensors; random numbers differ
        from trip to trip.
      carries: the values before the first trip. If a carry has `dim` itself, second derivatives rename it to
        `carried_<dim>`.
      xs: tensors with `dim`: weights of stacked layers, steps of a sequence. `dim` is gathered on every device.
      dim: the dim to iterate over.
      reverse: iterate from the last index to the first.
      stack_variables: whether each trip has its own variables: variables created in `body` get `dim` as their first
        dim, like the weights of stacked layers. Otherwise all trips share them.
      remat: values of each trip kept for the gradient, besides `xs` and the carries before it: "full" recomputes
        everything; "none" keeps all values that the gradient reads, except casts and constants; "matmuls" keeps
        products without batch dims (with weights, but not of queries with keys); `mtf.Remat` keeps named values.
        Values that have `dim` are recomputed.
    Returns: the carries after the last trip, and the stacked results, whose first dim is `dim`.
    Raises: GraphError, ShapeError for a body that changes types, or xs without `dim`.
    Gradient: a scan in reverse, which recomputes each trip from the kept values.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("time", 4)])
      ...     last, sums = mtf.scan(lambda c, s: ((c[0] + s[0],), (c[0] + s[0],)), [mtf.constant(0.0)], [x], x.shape[0])
      >>> mtf.simulate(mtf.lower({"sums": sums[0]})).step(x=[1.0, 2.0, 3.0, 4.0])["sums"].tolist()
      [1.0, 3.0, 6.0, 10.0]
    """
    begin = [tensor(x, "scan") for x in items(carries, "scan", "carries")]
    stacked = [tensor(x, "scan") for x in items(xs, "scan", "xs")]
    if not isinstance(dim, Dimension):
        raise ShapeError(f"{at('scan')}: expected a Dimension to go over, got {dim!r:.80}")
    if not begin and not stacked:
        raise GraphError(f"{at('scan')}: needs carries or xs, got none")
    for x in stacked:
        if dim not in x.shape:
            raise ShapeError(f"{at('scan')}: {x} has no dim {dim}")
    if not callable(body):
        raise GraphError(f"{at('scan')}: body must be a function of carries and slices, got {body!r:.80}")
    policy = checked_policy(remat, "scan")
    backwards, stack = flag(reverse, "scan", "reverse"), flag(stack_variables, "scan", "stack_variables")
    return make_loop("scan", body, begin, stacked, dim, backwards, name, stack=stack, remat=policy)


def while_loop(
    cond: int | Callable[..., Tensor],
    body: Body,
    inputs: Sequence[Tensor],
    name: str | None = None,
    has_accumulators: bool = False,
    most_trips: int | None = None,
) -> tuple[Tensor, ...]:
    """Repeat inputs <- body(*inputs) a fixed number of times, or while a condition holds.

    Args:
      cond: the number of trips; or a function of the current inputs that returns a bool tensor without dims: whether
        another trip runs, evaluated before each.
      body: takes the inputs, returns as many tensors of the same shapes and dtypes. It may capture outer tensors;
        random numbers differ from trip to trip.
      inputs: the values before the first trip.
      has_accumulators: further results of the body, beyond the number of inputs, are summed over the trips.
      most_trips: with a condition, the maximal number of trips. Memory, work and collectives of the program, and
        estimates, count this many; a run stops when the condition fails.
    Returns: the values after the last trip, then the sums. Between trips they have their assigned shardings.
    Raises: GraphError, ShapeError for an invalid number of trips or condition, or a body that changes types.
    Gradient: as for `scan`; none with a condition.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("d", 2)])
      ...     (y,) = mtf.while_loop(3, lambda v: v * 2.0, [x])
      ...     (z,) = mtf.while_loop(lambda v: mtf.less(mtf.reduce_sum(v), 40.0), lambda v: v * 2.0, [x], most_trips=9)
      >>> result = mtf.simulate(mtf.lower({"y": y, "z": z})).step(x=[1.0, 5.0])
      >>> result["y"].tolist(), result["z"].tolist()
      ([8.0, 40.0], [8.0, 40.0])
    """
    what = "while_loop"
    conditional = callable(cond)
    if conditional == (most_trips is None):
        wanted = "a condition needs most_trips, which bounds memory and work" if conditional else "has no condition"
        raise GraphError(f"{at(what)}: {wanted}, got most_trips={most_trips!r}")
    given, which = (most_trips, "most_trips") if conditional else (cond, "trips")
    trips = whole(given, what, which)
    if trips < 1:
        raise GraphError(f"{at(what)}: trips must be an integer of at least 1, got {given!r}")
    if not callable(body):
        raise GraphError(f"{at(what)}: body must be a function of tensors, got {body!r:.80}")
    begin = [tensor(x, what) for x in items(inputs, what, "inputs")]
    if not begin:
        raise GraphError(f"{at(what)}: inputs must be a non-empty list of tensors, got []")
    first_condition = [_condition(cond, begin)] if callable(cond) else []

    def step(carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[Any, tuple[()]]:
        next_carries = body(*carries[len(first_condition) :])
        if not callable(cond):
            return next_carries, ()
        results = _tensors(next_carries, f"{what} '{name or what}'")
        return [_condition(cond, results[: len(begin)]), *results], ()

    taken = {d.name for x in begin for d in x.shape}
    trip = Dimension(free_name("loop_trip", taken), trips)
    going = 0 if first_condition else None
    finals, _ = make_loop(what, step, [*first_condition, *begin], [], trip, False, name, has_accumulators, going=going)
    return finals[len(first_condition) :]


def _condition(cond: Callable[..., Tensor], values: Sequence[Tensor]) -> Tensor:
    """The condition evaluated on these values; must be a bool scalar."""
    condition = tensor(cond(*values), "while_loop")
    if condition.dtype is not BOOL or len(condition.shape):
        raise ShapeError(
            f"{at('while_loop')}: the condition must be bool without dims, got {condition}; mtf.reduce_all and "
            "mtf.reduce_any make one of many"
        )
    return condition


def _arguments(
    inside: Graph, full: str, carries: Sequence[Tensor], xs: Sequence[Tensor], dim: Dimension
) -> tuple[list[Tensor], list[Tensor]]:
    """The body's stand-ins for carries and for slices along `dim`."""
    carried = [_placeholder(inside, f"{full}/carry_{n}", x.type) for n, x in enumerate(carries)]
    sliced = [
        _placeholder(inside, label, TensorType(Shape([d for d in x.shape if d != dim]), x.dtype), x.on_host)
        for label, x in zip(_slice_names(full, xs), xs, strict=True)
    ]
    return carried, sliced


def _add_operation(
    outer: Graph, what: str, full: str, record: LoopRecord, carries: Sequence[Tensor], operands: Sequence[Tensor]
) -> Operation:
    """The loop as an operation of the graph around."""
    types = [*(x.type for x in carries), *(_stacked(y.type, record.dim, what, full) for y in record.stacked)]
    # as in "layers/scan:feed_forward/wi"
    names = [t.name.removeprefix(f"{full}/") for t in (*record.given.inits, *record.kept)]
    return outer.add(
        LOOP, [outer.adopt(x) for x in operands], types, {"loop": record}, exact_name=full, last_outputs=names
    )


def _add_accumulators(
    outer: Graph, inside: Graph, full: str, carries: list[Tensor], carried: list[Tensor], ends: list[Tensor]
) -> None:
    """Make sums over trips, which begin at zero, of the values that a body returns after its carries."""
    for n, y in enumerate(ends[len(carries) :], start=len(carries)):
        carries.append(_constant(outer, 0, y.shape, y.dtype, "zeros"))
        carried.append(_placeholder(inside, f"{full}/carry_{n}", y.type))
        with absolute_scope(full):
            ends[n] = add(carried[n], y)


def _add_late_carries(
    outer: Graph, inside: Graph, of_loop: LoopBody, carries: list[Tensor], carried: list[Tensor], ends: list[Tensor]
) -> None:
    """Append the carries that were added in the body; their initial values are zeros unless given."""
    for x, late in of_loop.late.items():
        carries.append(_constant(outer, 0, x.shape, x.dtype, "zeros") if late.begin is None else late.begin)
        carried.append(x)
        ends.append(inside.adopt(late.end))


def _needs(given: LoopOperands[Tensor], live: Collection[Operation]) -> tuple[int, ...]:
    """Numbers of the operands that the body computes with: all carries, and others that are live."""
    operands = [x for part in given for x in part]
    return tuple(n for n, t in enumerate(operands) if n < len(given.inits) or t.operation in live)


def make_loop(
    what: str,
    body: Body,
    carries: Sequence[Tensor],
    xs: Sequence[Tensor],
    dim: Dimension,
    reverse: bool,
    name: str | None,
    has_accumulators: bool = False,
    stack: bool = False,
    remat: Policy | PartialPolicy = "full",
    active: Active | None = None,
    going: int | None = None,
    branch: Branch | None = None,
    timing: Timing | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Trace the body into its own graph, and add the loop operation.

    The last carry of a `branch` is the mask of active indices. Carries added in the body (`late_carry`) follow those
    that it returns.
    """
    outer = innermost([*carries, *xs], what)
    checked_op_name(name, what)
    full = outer.unique_name(name or what)
    of_loop = LoopBody(outer, current_scope(), stacks=dim if stack else None)
    inside = Graph(loop_body=of_loop, scope=tuple(full.split("/")))
    if active is not None:
        with outer:
            xs = [*xs, works_table(active, dim)]
    with inside, absolute_scope(full):
        carried, sliced = _arguments(inside, full, carries, xs, dim)
        of_loop.outside.update(zip(sliced, xs, strict=True))
        of_loop.working = sliced[-1] if active is not None else carried[-1] if branch is not None else None
        returned = body(tuple(carried), tuple(sliced[:-1] if active is not None else sliced))
    ends, ys = _returned(returned, what, full)
    carries = list(carries)
    if flag(has_accumulators, "while_loop", "has_accumulators"):
        _add_accumulators(outer, inside, full, carries, carried, ends)
    _add_late_carries(outer, inside, of_loop, carries, carried, ends)
    _check_ends(carries, ends, f"{at(what)} '{full}'")
    xs, sliced = [*xs, *of_loop.stacked], [*sliced, *of_loop.stacked.values()]
    results = tuple(inside.adopt(y) for y in (*ends, *ys))
    live = needed(inside.known.get(y, y).operation for y in results)
    given = LoopOperands(tuple(carried), tuple(sliced), tuple(of_loop.captured.values()))
    with inside, absolute_scope(full):
        saved = _kept(inside, of_loop, live, dim, remat, f"{what} '{full}'")
        # For the gradient: the carries before each trip, and the values that the policy keeps.
        befores = [_stackable(t, dim) for t in carried]
        if isinstance(remat, Remat) and remat.offload_carries:
            befores = [to_host(t) for t in befores]
    record = LoopRecord(
        dim,
        reverse,
        inside,
        given,
        LoopResults(
            results[: len(carries)], results[len(carries) :], tuple(befores), tuple(where for _, where in saved)
        ),
        tuple(y for y, _ in saved),
        _needs(given, live),
        active,
        of_loop.working,
        going,
        branch,
        timing,
    )
    op = _add_operation(outer, what, full, record, carries, [*carries, *xs, *of_loop.captured])
    returned = record.outputs(op.outputs)
    return tuple(returned.finals), tuple(returned.stacks)


def late_carry(graph: Graph, t: TensorType, name: str, begin: Tensor | None = None) -> Tensor:
    """Add a carry to the loop whose body is being traced, initially zeros by default; `end_late` sets its new value."""
    assert graph.loop_body is not None
    with absolute_scope("/".join(graph.scope)):
        carry = _placeholder(graph, graph.unique_name(name), t)
    graph.loop_body.late[carry] = LateCarry(begin, carry)
    return carry


def end_late(carry: Tensor, end: Tensor) -> None:
    """Set the value of a late carry after a trip."""
    assert carry.graph.loop_body is not None
    carry.graph.loop_body.late[carry].end = end


def works_table(active: Active, trips: Dimension) -> Tensor:
    """Activity of each index in each trip: bool [trips, active.dim]."""
    works = np.zeros((trips.size, active.size), np.bool_)
    for trip, indices in enumerate(active.indices):
        works[trip, list(indices)] = True
    return table(current_graph("scan"), works, Shape([trips, Dimension(active.dim, active.size)]), BOOL, "works")


def _returned(returned: object, what: str, full: str) -> tuple[list[Tensor], list[Tensor]]:
    """The new carries and the tensors to stack, from the return value of a body."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise GraphError(
            f"{at(what)} '{full}': body must return a pair of carries and tensors to stack, got {returned!r:.80}"
        )
    ends, ys = (_tensors(part, f"{what} '{full}'") for part in returned)
    return ends, ys


def _check_ends(carries: Sequence[Tensor], ends: Sequence[Tensor], where: str) -> None:
    """Raise unless the carries of a trip keep their number and types."""
    if len(ends) != len(carries):
        raise GraphError(f"{where}: body must return {len(carries)} tensors, as it takes, got {list(ends)!r:.80}")
    for before, after in zip(carries, ends, strict=True):
        if after.type != before.type:
            raise ShapeError(f"{where}: the body turns {before} into {after}; types must stay the same")


def _slice_names(full: str, xs: Sequence[Tensor]) -> list[str]:
    """Names of the slices in listings: those of their variables, without the scopes of the loop."""
    names: list[str] = []
    for n, x in enumerate(xs):
        variable = x.operation.opdef.kind is Kind.VARIABLE
        name = f"{full}/{relative_name(x.name, full) if variable else f'slice_{n}'}"
        names.append(f"{name}_{n}" if name in names else name)
    return names


def _kept(
    body: Graph, of_loop: LoopBody, live: set[Operation], dim: Dimension, remat: Policy | PartialPolicy, what: str
) -> list[tuple[Tensor, Tensor]]:
    """The values that the policy keeps of each trip, with their stored copies; values with the loop's dim only by
    name."""
    chosen = set(of_loop.choices.values())  # slices of weights, which are available anyway
    saved = [
        (y, x) for y, x in kept_values([op for op in body.operations if op in live], remat, what) if y not in chosen
    ]
    return saved if isinstance(remat, Remat) else [(y, x) for y, x in saved if dim.name not in y.shape]


def _stackable(carry: Tensor, dim: Dimension) -> Tensor:
    """`carry` with a dim of the loop's name renamed, so that the values before each trip can be stacked."""
    if dim.name not in carry.shape:
        return carry
    return rename_dimension(carry, dim.name, free_name(f"carried_{dim.name}", carry.shape))


def _tensors(part: object, what: str) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    return [tensor(t, what) for t in items(part, what, "what the body returns")]


def _stacked(t: TensorType, dim: Dimension, what: str, full: str) -> TensorType:
    if dim.name in t.shape:
        raise ShapeError(f"{at(what)} '{full}': {t} has the dim {dim} of the loop already; rename it inside the body")
    return TensorType(Shape([dim, *t.shape]), t.dtype)


def _placeholder(graph: Graph, name: str, t: TensorType, on_host: bool = False) -> Tensor:
    attrs = {"shape": t.shape, "dtype": t.dtype, "on_host": on_host}
    op = build_source(graph, INPUT, attrs, exact_name=name)
    graph.inputs[name] = op
    return op.output
