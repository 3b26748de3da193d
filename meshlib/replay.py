"""Operations written once more with other operands: what recomputation and the gradient of a loop are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshlib.graph import Graph, Operation, Rewrite, Tensor
from meshlib.origin import written_at


def replay(
    source: Graph, start: int, stop: int, given: Mapping[Tensor, Tensor], graph: Graph, of: Rewrite | None = None
) -> dict[Tensor, Tensor]:
    """Add copies of `source.operations[start:stop]` to `graph`, in the current region: `of` a rewrite, or of a body.

    Copies keep their names, so that random numbers stay the same, their source lines, their gradient rules, and what is
    known of them.
    Tensors in `given` are replaced; others that the operations do not make stay as they are.
    Returns: what stands for each tensor.
    """
    made = dict(given)
    places: dict[int, int] = {}  # position in source -> position of the copy
    for n in range(start, stop):
        op = source.operations[n]
        places[n] = len(graph.operations)
        if op.outputs and op.outputs[0] in made:
            continue
        inputs = [graph.adopt(made.get(x, x)) for x in op.inputs]
        places[n] = len(graph.operations)
        with written_at(op.source):
            copy = graph.add(op.kind, inputs, [y.type for y in op.outputs], op.attrs, exact_name=op.name)
        made.update(zip(op.outputs, copy.outputs, strict=True))
        for y in op.outputs:
            if y in source.known:
                graph.known[made[y]] = graph.adopt(made.get(source.known[y], source.known[y]))
    places[stop] = len(graph.operations)
    inner = source.rewrites[: source.rewrites.index(of)] if of is not None else source.rewrites
    for rewrite in tuple(inner):
        if start <= rewrite.start and rewrite.stop <= stop:
            inputs = [graph.adopt(made.get(x, x)) for x in rewrite.inputs]
            first, last = places[rewrite.start], places[rewrite.stop]
            kept = tuple((made.get(y, y), made.get(where, where)) for y, where in rewrite.kept)
            graph.rewrites.append(Rewrite(first, last, tuple(inputs), rewrite.gradient, kept))
    return made


def needed(roots: Iterable[Operation]) -> set[Operation]:
    """The operations that the roots need, and these; not those whose results are known already."""
    found: set[Operation] = set()
    waiting = list(roots)
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [op.graph.known.get(op.inputs[n], op.inputs[n]).operation for n in op.needs]
    return found
