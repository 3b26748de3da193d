"""Deferred operations of a graph: run later in another graph, such as gradients of weights in pipelines.

A backward pass computes gradients of its inputs, which other stages wait for, and of weights. Operations that only the
latter need can be copied to another graph, which receives the values that they read from the first.
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
    """Context in which the gradient of a loop is two loops: for carries, and for weights, which can be deferred."""
    token = _separate.set(True)
    try:
        yield
    finally:
        _separate.reset(token)


def weights_are_separate() -> bool:
    """True in the context of `separate_weights`."""
    return _separate.get()


@dataclass(frozen=True, eq=False)
class Deferred:
    """Deferred operations of a graph, in order, with the outer values `inputs` that they read."""

    operations: tuple[Operation, ...]
    inputs: tuple[Tensor, ...]
    known: Mapping[Tensor, Tensor]

    def written(self, graph: Graph, given: Mapping[Tensor, Tensor], results: Sequence[Tensor]) -> list[Tensor]:
        """Copy the operations to `graph` and return the copies of `results`; `given` has a tensor per input."""
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
    """The operations that `later` needs and `first` does not.

    Args:
      is_kept: (value needed by both) -> True if it can be passed on; otherwise it is recomputed.
      beside: values that are always passed on.
    """
    later_ops = {op for op in needed(graph.known.get(y, y).operation for y in later) if op.opdef.kind not in RESIDENT}
    passed_on = {graph.known[x].operation for op in later_ops for x in op.inputs if x in graph.known}
    later_ops -= needed([*(graph.known.get(y, y).operation for y in first), *passed_on, *(x.operation for x in beside)])
    read, known = _values_read(graph, later_ops, is_kept)
    # Operands that a loop does not read must still be given.
    unread = {x for op in later_ops for x in op.inputs if x.operation not in later_ops and x not in known}
    read.update(dict.fromkeys(x for x in unread if x.operation.opdef.kind in RESIDENT))
    operations = tuple(op for op in graph.operations if op in later_ops)
    return Deferred(operations, tuple(read), known)


def _values_read(
    graph: Graph, operations: set[Operation], is_kept: Callable[[Tensor], bool]
) -> tuple[dict[Tensor, None], dict[Tensor, Tensor]]:
    """The values read by these operations, and known values of their inputs; recomputed operations are added to
    `operations`."""
    read: dict[Tensor, None] = {}
    known: dict[Tensor, Tensor] = {}
    waiting = list(operations)
    while waiting:
        op = waiting.pop()
        for x in (op.inputs[n] for n in op.needs):
            value = graph.known.get(x, x)
            if value is not x:
                known[x] = value
            if value.operation in operations:
                continue
            if value.operation.opdef.kind in RESIDENT or is_kept(value):
                read[value] = None
            else:
                operations.add(value.operation)
                waiting.append(value.operation)
    return read, known
