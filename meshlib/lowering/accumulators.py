"""Accumulators: loop carries that add one term per trip, and the tensors that become such terms.

A sum over a split dim is reduced once for a whole accumulator, after the last trip of the outermost loop: terms, and
the accumulators of all loops around them, stay pending. So do the stacked outputs of an inner loop, such as one
gradient per layer, where the pending stack takes no more memory than the variable of the gradient, or than the
gradient's assigned sharding. Where it would take more, as with fully sharded weights, each trip of the inner loop
reduces its term over the axes that split the gradient; sums over other axes stay pending. Stacked gradients of two
loops that share their weights stay pending until they are added up, too.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from math import inf

from layouts import Sharding
from meshlib.core.graph import Operation, Tensor
from meshlib.core.loop_record import LoopRecord
from meshlib.core.opdef import Home, Kind
from meshlib.core.replay import needed
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified
from meshlib.ops.control.sources import is_zero

_KEEPS_DIMS = (Kind.ELEMENTWISE, Kind.VIEW, Kind.INDEXED)


@dataclass(frozen=True)
class Destination:
    """The gradient or accumulator that a tensor becomes, or is added to; shardings are in terms of that tensor's dims.

    home          the assigned sharding of the gradient
    most_elements that a device may hold of a pending sum
    accumulator   the sharding of an accumulator, to which pending terms may be added; None for gradients
    is_term       whether it is one of several terms: of an accumulator, or of a sum of several tensors
    """

    home: Sharding
    most_elements: float
    accumulator: Sharding | None = None
    is_term: bool = False

    def of(self, t: Tensor) -> Destination:
        """This destination for a tensor that becomes this one."""
        most = self.most_elements * t.shape.size / self.home.shape.size
        return Destination(_alike(self.home, t), most, self.accumulator and _alike(self.accumulator, t), self.is_term)

    def of_sum(self, made: Sharding) -> Sharding:
        """The sharding of a sum of terms computed under `made`: pending like them if memory allows, otherwise reduced
        over the axes that split the gradient."""
        if made.local_size <= self.most_elements:
            return made
        split = self.home.split_axes
        return self.home.with_pending([p for p in made.pending if p[0] not in split])


def _alike(sharding: Sharding, t: Tensor) -> Sharding:
    """A sharding that splits dims of the same name alike, with the same pending axes."""
    axes = [sharding.of(d.name) if d.name in sharding.shape else () for d in t.shape]
    return Sharding(t.shape, sharding.mesh, axes, sharding.pending)


def destination(t: Tensor, graph: Simplified, homes: Homes, fetched: Container[Tensor]) -> Destination | None:
    """The gradient or accumulator that a tensor becomes by casts, transposes, masks, sums and the like; None if none.

    Every operation in between is linear in it, keeps its dims, and is its only user.
    """
    end, is_term = t, False
    while (there := homes.destinations.get(end) or _gradient(end, homes)) is None:
        uses = graph.uses.get(end, ())
        if len(uses) != 1 or end in fetched or not _passes(*uses[0]):
            return None
        add = uses[0][0]
        end, is_term = add.output, is_term or (len(add.inputs) > 1 and add.opdef.linear(add).together)
    return replace(there.of(t), is_term=is_term or there.accumulator is not None)


def _gradient(t: Tensor, homes: Homes) -> Destination | None:
    variable = homes.graph.gradient_of.get(t)
    if variable is None:
        return None
    home = homes.of(t)
    most = max(home.local_size, homes.of(variable.output).local_size) if homes.regather else inf
    return Destination(home, most)


def _passes(op: Operation, n: int) -> bool:
    """True if an operation only casts, moves, masks or scales operand `n`, or adds to it, up to rounding."""
    linear = n in op.opdef.linear(op).operands or op.opdef.home is Home.OPERAND
    return linear and op.opdef.kind in _KEEPS_DIMS and set(op.inputs[n].shape) <= set(op.output.shape)


def accumulated_terms(
    op: Operation, loop: LoopRecord, graph: Simplified, of_branch: Callable[[Tensor], bool] = lambda y: False
) -> dict[int, Tensor]:
    """The carries of a loop that only accumulate from zero, by number, each with the term that a trip adds.

    Where a branch of the body adds to a carry, the term is the branch's result. `of_branch`: if `op` is a branch,
    whether the enclosing loop accumulates a result of it; the carry is that accumulator then, and may begin anywhere.
    """
    results, befores = loop.results, loop.outputs(op.outputs).befores
    begun = [
        n
        for n in range(len(loop.given.inits))
        if not graph.uses.get(befores[n])  # a gradient that reads the carry before each trip needs it complete
        and (is_zero(graph.inputs[op][n].operation) or (loop.branch is not None and of_branch(op.outputs[n])))
    ]
    operations = needed(loop.body.known.get(y, y).operation for y in results) if begun else ()
    terms: dict[int, Tensor] = {}
    for n in begun:
        carry, end = loop.given.inits[n], loop.made.finals[n]
        uses = sum(x is carry for other in operations for x in other.inputs) + results.count(carry)
        alone = results.count(end) == 1 and not any(end in x.inputs for x in operations)
        term = _term(end.operation, carry, end) if uses == 1 and alone else None
        if term is not None:
            terms[n] = term
    return terms


def _term(add: Operation, carry: Tensor, end: Tensor) -> Tensor | None:
    """The tensor that an operation adds to a carry; None if it does anything else."""
    others = [x for x in add.inputs if x is not carry]
    linear = add.opdef.linear(add)
    adds = linear.together and linear.operands == (0, 1)
    if adds and len(others) == 1 == len(add.inputs) - 1 and others[0].shape == end.shape:
        return others[0]
    in_branch = add.loop is not None and add.loop.branch is not None and _adds_in_branch(add, carry, end)
    return end if in_branch else None


def _adds_in_branch(op: Operation, carry: Tensor, end: Tensor) -> bool:
    """True if a branch's only use of an outer carry is to add to it."""
    assert op.loop is not None
    number = op.outputs.index(end)
    if number >= op.loop.carries or op.inputs[number] is not carry:
        return False
    inner, after = op.loop.given.inits[number], op.loop.made.finals[number]
    add = after.operation
    linear = add.opdef.linear(add)
    uses = sum(x is inner for other in op.loop.body.operations for x in other.inputs)
    return uses == 1 and inner in add.inputs and linear.together and linear.operands == (0, 1)


def bind_terms(graph: Simplified, homes: Homes, fetched: Container[Tensor]) -> None:
    """Bind tensors that are added up in another region to the sharding of their accumulator."""
    homes.destinations.update({graph.of(t): there for t, there in homes.destinations.items()})
    for op in graph.operations if homes.destinations else ():
        for t in op.outputs:
            if any(user.region != op.region for user, _ in graph.uses.get(t, ())):
                there = destination(t, graph, homes, fetched)
                if there is not None and there.accumulator is not None:
                    homes.bind(t, there.accumulator)
