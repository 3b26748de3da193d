"""Copies of operations on other operands, for recomputation and gradients of loops; walks over operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.source_lines import written_at


@dataclass(frozen=True, eq=False)
class Rewrite:
    """Operations of a graph, in its order, whose gradient is `gradient(inputs, results, cotangents)`.

    With None they are computed again for it, except for the values `kept`, each with where it is kept. With `residuals`
    it is `gradient(residuals, cotangents)`, of which there is one for each result, None where there is none; there
    are no second derivatives.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    gradient: Callable[..., Any] | None
    kept: tuple[tuple[Tensor, Tensor], ...] = ()
    residuals: tuple[Tensor, ...] | None = None
    # what `gradient` has written so far, of which no further gradient is taken
    written: list[Operation] = field(default_factory=list)


def replay(
    operations: Sequence[Operation], rewrites: Iterable[Rewrite], given: Mapping[Tensor, Tensor], graph: Graph
) -> dict[Tensor, Tensor]:
    """Add copies of `operations` to `graph`, in the current region, and of those `rewrites` that are all among them.

    Copies keep their names, so that random numbers stay the same, their source lines, their gradient rules, and what is
    known of them.
    Tensors in `given` are replaced; others that the operations do not make stay as they are.
    Returns: what stands for each tensor.
    """
    replayed = dict(given)
    copies: dict[Operation, Operation] = {}
    for op in operations:
        if op.outputs and op.outputs[0] in replayed:
            continue
        taken = op.inputs if op.opdef.show is None else op.inputs[:1]  # what was shown is not shown again
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
            kept = tuple((replayed.get(y, y), replayed.get(where, where)) for y, where in rewrite.kept)
            read = rewrite.residuals
            residuals = None if read is None else tuple(graph.adopt(replayed.get(x, x)) for x in read)
            graph.rewrites.append(
                Rewrite(run, tuple(inputs), tuple(results), rewrite.gradient, kept, residuals, rewrite.written)
            )
    return replayed


def all_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The operations and those of the loop bodies among them."""
    for op in operations:
        yield op
        if op.loop is not None:
            yield from all_operations(op.loop.body.operations)


def needed(roots: Iterable[Operation]) -> set[Operation]:
    """The operations that the roots need, and these; not those whose results are known already."""
    needed_operations: set[Operation] = set()
    waiting = list(roots)
    while waiting:
        op = waiting.pop()
        if op not in needed_operations:
            needed_operations.add(op)
            waiting += [op.graph.known.get(op.inputs[n], op.inputs[n]).operation for n in op.needs]
    return needed_operations
