"""Operations of a graph that are run later, elsewhere, from the values that they take: gradients of weights, say.

A backward pass computes gradients of its inputs, which other stages wait for, and of weights. What only the latter need
can be written again in another graph, which is given what it takes of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.opdef import RESIDENT
from meshlib.core.replay import needed, replay

_separate: ContextVar[bool] = ContextVar("separate_weights", default=False)


@contextmanager
def separate_weights() -> Iterator[None]:
    """Gradients of loops in here are two loops: of what is carried, and then of weights, which can be deferred."""
    token = _separate.set(True)
    try:
        yield
    finally:
        _separate.reset(token)


def weights_are_separate() -> bool:
    """Whether gradients of loops are two loops."""
    return _separate.get()


@dataclass(frozen=True, eq=False)
class Deferred:
    """Operations of one graph in its order, and the values of others that they take, with what each is known as."""

    operations: tuple[Operation, ...]
    taken: tuple[Tensor, ...]
    known: Mapping[Tensor, Tensor]

    def written(self, graph: Graph, given: Mapping[Tensor, Tensor], results: Sequence[Tensor]) -> list[Tensor]:
        """The operations in another graph, and what stands there for `results`; `given` has each of `taken`."""
        inside = {x: given[value] for x, value in self.known.items() if value in given}
        copies = replay(self.operations, (), {**inside, **given}, graph)
        return [copies[y] for y in results]


def deferred(
    graph: Graph,
    first: Sequence[Tensor],
    later: Sequence[Tensor],
    is_kept: Callable[[Tensor], bool],
    beside: Sequence[Tensor] = (),
) -> Deferred:
    """What `later` needs that `first` does not.

    Args:
      is_kept: of a value that both need, whether it can be given; what cannot is computed again.
      beside: values that are given as they are, whoever needs them.
    """
    apart = {op for op in needed(graph.known.get(y, y).operation for y in later) if op.opdef.kind not in RESIDENT}
    there = {graph.known[x].operation for op in apart for x in op.inputs if x in graph.known}  # kept: given as it is
    apart -= needed([*(graph.known.get(y, y).operation for y in first), *there, *(x.operation for x in beside)])
    taken: dict[Tensor, None] = {}
    known: dict[Tensor, Tensor] = {}
    waiting = list(apart)
    while waiting:
        op = waiting.pop()
        for x in (op.inputs[n] for n in op.needs):
            value = graph.known.get(x, x)
            if value is not x:
                known[x] = value
            if value.operation in apart:
                continue
            if value.operation.opdef.kind in RESIDENT or is_kept(value):
                taken[value] = None
            else:
                apart.add(value.operation)
                waiting.append(value.operation)
    # What a loop does not need of its operands still has to be something.
    spare = {x for op in apart for x in op.inputs if x.operation not in apart and x not in known}
    taken.update(dict.fromkeys(x for x in spare if x.operation.opdef.kind in RESIDENT))
    operations = tuple(op for op in graph.operations if op in apart)
    return Deferred(operations, tuple(taken), known)
