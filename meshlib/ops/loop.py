"""while_loop with a fixed number of trips: one body, lowered once, that an instruction holds and repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshlib.dtypes import as_dtype
from meshlib.errors import GraphError, ShapeError
from meshlib.graph import Graph, Operation, Tensor, TensorType, absolute_scope, innermost
from meshlib.operation import (
    NONLINEAR,
    Array,
    Block,
    Factor,
    Kind,
    Role,
    Work,
    build_source,
    operation,
    tensor,
)
from meshlib.ops.sources import INPUT

Results = Tensor | Sequence[Tensor]


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    raise AssertionError("a loop has one output per carry: see while_loop")


def _roles(op: Operation) -> tuple[Factor, ...]:
    # The body is partitioned by itself; to the outside every operand must be where the body expects it.
    count = len(op.inputs)
    return tuple(
        Factor(f"{n}/{d.name}", d.size, tuple(d.name if k == n else None for k in range(count)), (None,), Role.WHOLE)
        for n, x in enumerate(op.inputs)
        for d in x.shape
    )


def _local(block: Block, *arrays: Array) -> Array:
    raise AssertionError("executors run the body's instructions")


def _grad(op: Operation, dy: Tensor) -> Sequence[Tensor | None]:
    raise GraphError(
        f"{op} has no gradient; stop it with mtf.stop_gradient, or write the trips out, as in Python's "
        f"`for _ in range({op.attrs['trips']})`"
    )


def _work(ins: tuple[TensorType, ...], out: TensorType, attrs: Mapping[str, Any]) -> Work:
    total = [0, 0, 0]
    for op in attrs["body"].operations:
        w = op.kind.work(tuple(x.type for x in op.inputs), op.output.type, op.attrs)
        total = [a + b for a, b in zip(total, (w.mxu_flops, w.vpu_ops, w.hbm_bytes), strict=True)]
    return Work(*(attrs["trips"] * n for n in total))


LOOP = operation(
    "while_loop",
    kind=Kind.LOOP,
    shape=_shape,
    roles=_roles,
    local=_local,
    grad=_grad,
    linear=lambda op: NONLINEAR,
    work=_work,
)


def while_loop(
    trips: int, body: Callable[..., Results], inputs: Sequence[Tensor], name: str | None = None
) -> tuple[Tensor, ...]:
    """Apply `body` `trips` times: inputs <- body(*inputs).

    Args:
      trips: how often, fixed when the program is written, so that shapes, collectives and costs are known.
      body: takes as many tensors as there are inputs, returns as many of the same shapes and dtypes. It may use
        tensors from outside; random numbers in it differ from trip to trip.
      inputs: the values before the first trip.
    Returns: the values after the last trip. Between trips they lie at home under the layout.
    Raises: GraphError, ShapeError for bad trips, or a body that changes types. It has no gradient.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("d", 2)])
      ...     (y,) = mtf.while_loop(3, lambda v: v * 2.0, [x])
      >>> mtf.simulate(mtf.lower({"y": y})).step(x=[1.0, 5.0])["y"].tolist()
      [8.0, 40.0]
    """
    if isinstance(trips, bool) or not isinstance(trips, int) or trips < 1:
        raise GraphError(f"while_loop: trips must be an integer of at least 1, got {trips!r}")
    if not callable(body):
        raise GraphError(f"while_loop: body must be a function of tensors, got {body!r:.80}")
    if not isinstance(inputs, list | tuple) or not inputs:
        raise GraphError(f"while_loop: inputs must be a non-empty list of tensors, got {inputs!r:.80}")
    outer = innermost([tensor(x, "while_loop") for x in inputs], "while_loop")
    full = outer.unique_name(name or "while_loop")
    inside = Graph(parent=outer)
    with inside, absolute_scope(full):
        carried = [_placeholder(inside, f"{full}/carry_{n}", x) for n, x in enumerate(inputs)]
        made = body(*carried)
    results = [made] if isinstance(made, Tensor) else list(made) if isinstance(made, list | tuple) else made
    if not isinstance(results, list) or len(results) != len(inputs):
        raise GraphError(f"while_loop '{full}': body must return {len(inputs)} tensors, as it takes, got {made!r:.80}")
    for before, after in zip(inputs, results, strict=True):
        if tensor(after, "while_loop body").type != before.type:
            raise ShapeError(f"while_loop '{full}': the body turns {before} into {after}; types must stay the same")
    results = [inside.adopt(y, f"{full}/same_{n}") for n, y in enumerate(results)]
    attrs = {
        "trips": trips,
        "body": inside,
        "carried": tuple(t.operation.name for t in carried),
        "results": tuple(results),
    }
    taken = [*inputs, *inside.captured]
    op = outer.add(LOOP, [outer.adopt(x) for x in taken], [x.type for x in inputs], attrs, exact_name=full)
    return op.outputs


def _placeholder(graph: Graph, name: str, like: Tensor) -> Tensor:
    attrs = {"shape": like.shape, "dtype": as_dtype(like.dtype)}
    op = build_source(graph, INPUT, attrs, exact_name=name)
    graph.inputs[name] = op
    return op.output
