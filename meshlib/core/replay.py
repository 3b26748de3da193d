"""Copies of operations on other operands, for recomputation and gradients of loops; graph traversals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.source_lines import written_at


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A group of operations, in graph order, with the custom gradient `gradient(inputs, results, cotangents)`.

    If `gradient` is None they are recomputed in the backward pass, except for the values in `kept`, pairs of a value
    and its stored copy. With `residuals` it is `gradient(residuals, cotangents)`, with one cotangent or None per
    result; there are no second derivatives.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    gradient: Callable[..., Any] | None
    kept: tuple[tuple[Tensor, Tensor], ...] = ()
    residuals: tuple[Tensor, ...] | None = None
    # operations that `gradient` has added so far; these have no further gradient
    written: list[Operation] = field(default_factory=list)


def replay(
    operations: Sequence[Operation], rewrites: Iterable[Rewrite], given: Mapping[Tensor, Tensor], graph: Graph
) -> dict[Tensor, Tensor]:
    """Add copies of `operations` to `graph`, in the current region, with the `rewrites` that lie entirely among them.

    Copies keep their names, and so their random numbers, their source lines, gradient rules and known results.
    Tensors in `given` are replaced; other tensors from outside the operations stay unchanged.
    Returns: tensor -> its replacement.
    """
    replayed = dict(given)
    copies: dict[Operation, Operation] = {}
    for op in operations:
        if op.outputs and op.outputs[0] in replayed:
            continue
        taken = op.inputs if op.opdef.show is None else op.inputs[:1]  # a shown value is not shown again
        inputs = [graph.adopt(replayed.get(x, x)) for x in taken]
        with written_at(op.source):
            copy = graph.add(op.opdef, inputs, [y.type for y in op.outputs], op.attrs, exact_name=op.name)
        copies[op] = copy
        graph.again.add(copy)
        replayed.update(zip(op.outputs, copy.outputs, strict=True))
        known = op.graph.known
        for y in op.outputs:
            if y in known:
                graph.known[replayed[y]] = graph.adopt(replayed.get(known[y], known[y]))
    among = set(operations)
    for rewrite in tuple(rewrites):
        run = tuple(copies[op] for op in rewrite.operations if op in copies)
        if run and among.issuperset(rewrite.operations):
            inputs = [graph.adopt(replayed.get(x, x)) for x in rewrite.inputs]
            results = [replayed.get(y, y) for y in rewrite.results]
            saved = tuple((replayed.get(y, y), replayed.get(where, where)) for y, where in rewrite.kept)
            read = rewrite.residuals
            residuals = None if read is None else tuple(graph.adopt(replayed.get(x, x)) for x in read)
            graph.rewrites.append(
                Rewrite(run, tuple(inputs), tuple(results), rewrite.gradient, saved, residuals, rewrite.written)
            )
    return replayed


def all_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The operations, each followed by those of its loop body."""
    for op in operations:
        yield op
        if op.loop is not None:
            yield from all_operations(op.loop.body.operations)


def needed(roots: Iterable[Operation]) -> set[Operation]:
    """The operations that the roots depend on, and the roots; without those whose results are known."""
    needed_operations: set[Operation] = set()
    waiting = list(roots)
    while waiting:
        op = waiting.pop()
        if op not in needed_operations:
            needed_operations.add(op)
            waiting += [op.graph.known.get(op.inputs[n], op.inputs[n]).operation for n in op.needs]
    return needed_operations
