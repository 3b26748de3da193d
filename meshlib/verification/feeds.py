"""Default inputs, cotangents and variables for verification, chosen not to hide faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from meshlib.core.dtypes import BOOL
from meshlib.core.errors import FeedError, GraphError, nearest
from meshlib.core.graph import BACKWARD, Graph, Operation, Tensor
from meshlib.core.opdef import RESIDENT, Kind
from meshlib.core.replay import all_operations
from meshlib.lowering.simplification import simplify
from meshlib.ops.control.sources import STEP
from meshlib.ops.control.sources import input as declare_input
from meshlib.ops.gradients import gradients
from meshlib.ops.movement.indexing import index_count
from meshlib.program.instructions import Move
from meshlib.program.records import Program
from meshlib.simulation.state import State, to_storage

Array = np.ndarray[Any, Any]

COTANGENT = "verify_cotangent_"  # inputs of the program being verified


def draw_feeds(
    program: Program, known: Iterable[str], given: Mapping[str, Any], seed: int, narrow: int
) -> dict[str, Array]:
    """The given feeds, and random ones for the others."""
    own = [n for n in known if not n.startswith(COTANGENT)]
    unknown = [f"unknown input '{n}'{nearest(n, own)}" for n in given if n not in own]
    if unknown:
        raise FeedError(f"verify: {'; '.join(unknown)}; the graph's inputs: {', '.join(own) or 'none'}")
    operations = [i.operation for i in program.instructions if not isinstance(i, Move)]
    all_feeds = {}
    for n, (name, v) in enumerate(sorted(program.inputs.items())):
        op, t = v.tensor.operation, v.tensor
        x = given[name] if name in given else _drawn(op, np.random.default_rng([seed, 0, n]), operations, narrow)
        all_feeds[name] = to_storage(x, t.shape, t.dtype, f"input '{name}' ({op.source})")
    return all_feeds


def initial_state(program: Program, given: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """The given variables, and initial values of the others, with noise on constant trainable ones."""
    state = State(seed)
    operations = {n: v.tensor.operation for n, v in program.variables.items() if n != STEP}
    state.declare(operations)
    for name, op in sorted(operations.items()):
        x = state.arrays[name]
        if name not in given and op.attrs["trainable"] and x.dtype.kind == "f" and np.all(x == x.flat[0]):
            rng = np.random.default_rng([seed, 3, *name.encode()])
            noisy, y = x + 0.1 * rng.normal(size=x.shape), op.output
            state.arrays[name] = to_storage(noisy, y.shape, y.dtype, f"variable '{name}'")
    for name, x in given.items():
        state[name] = x
    return dict(state.arrays)


def _drawn(op: Operation, rng: np.random.Generator, operations: Sequence[Operation], narrow: int) -> Array:
    """Random values of an input; `narrow` halves the range of integers that many times."""
    shape, dtype = op.attrs["shape"].sizes, op.attrs["dtype"]
    if dtype.is_float:
        return np.asarray(rng.normal(size=shape))
    if dtype is BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.integers(0, max(1, (_index_bound(op.output, operations) or 8) >> narrow), shape))


def _index_bound(x: Tensor, operations: Sequence[Operation]) -> int | None:
    """The smallest dim indexed by an integer, or by a value derived from it."""
    reached, bounds = {x}, []
    for op in all_operations(operations):
        if op.loop is not None:
            reached |= {b for a, b in zip(op.inputs, op.loop.stand_ins, strict=True) if a in reached}
        elif op.opdef.indices is not None and op.inputs[op.opdef.indices] in reached:
            bounds.append(index_count(op))
        elif any(y in reached for y in op.inputs):
            reached |= {y for y in op.outputs if not y.dtype.is_float and y.dtype is not BOOL}
    return min(bounds, default=None)


class Borrowed:
    """A context that adds operations to a graph and removes them on exit.

    A class instead of a generator, because the user's source line is looked up in frames outside this package.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        g = self.graph
        self.lists = [(held, len(held)) for held in (g.operations, g.rewrites)]
        of_loop = () if g.loop_body is None else (g.loop_body.captured, g.loop_body.outside)
        tables: tuple[dict[Any, Any], ...] = (g.gradient_of, g.inputs, g.variables, *of_loop, g._counts)
        self.tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(held, dict(held)) for held in tables]

    def __exit__(self, *exc: object) -> None:
        for held, count in self.lists:
            del held[count:]
        for table, before in self.tables:
            table.clear()
            table.update(before)


def all_gradients(graph: Graph, fetched: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Gradients of the float outputs by name."""
    ys = [y for y in dict.fromkeys(fetched.values()) if y.dtype.is_float and y.operation.region != BACKWARD]
    xs = [
        op.output
        for op in simplify(graph, ys, ()).operations
        if op.opdef.kind in RESIDENT and op.output.dtype.is_float and op.attrs.get("trainable", True)
    ]
    if not xs:
        return {}
    try:
        return _gradients(graph, ys, xs)
    except GraphError as fault:
        notes.append(f"gradients are not compared: {str(fault).splitlines()[0]}")
        return {}


def _gradients(graph: Graph, ys: Sequence[Tensor], xs: Sequence[Tensor]) -> dict[str, Tensor]:
    with graph:
        # Ones would hide faults: the rows of a softmax sum to one whatever it computes.
        seeds = [declare_input(f"{COTANGENT}{n}", y.shape, y.dtype.of_cotangents) for n, y in enumerate(ys)]
        cotangents = gradients(ys, xs, seeds)
    order = sorted(zip(xs, cotangents, strict=True), key=lambda pair: pair[0].operation.opdef.kind is not Kind.VARIABLE)
    return {f"d {x.operation.name}": dx for x, dx in order if dx is not None}
