"""Branches: parts of a loop body that a device skips in trips in which none of its indices of a dim is active."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layouts import Dimension
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.loop_record import Active, Branch
from meshlib.core.names import free_name
from meshlib.ops.control.loops import end_late, late_carry, make_loop
from meshlib.ops.control.remat import PartialPolicy, Policy
from meshlib.ops.movement.shape import reshape

Results = tuple[Sequence[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class BranchResults:
    """Results of a branch in the enclosing body: `carries` at its end, and `others`.

    `operation` is the branch itself; its carries before `mask` are those it was called with.
    """

    operation: Operation
    carries: tuple[Tensor, ...]
    others: tuple[Tensor, ...]

    @property
    def mask(self) -> int:
        """The number of the carry with the mask of active indices."""
        return len(self.carries)


def branch(
    kind: str,
    body: Callable[[Sequence[Tensor]], Results],
    carries: Sequence[Tensor],
    mask: Tensor,
    active: Active,
    remat: Policy | PartialPolicy = "full",
) -> BranchResults:
    """Run `body` at the indices where `mask`, [active.dim], is true; returns the carries and other results.

    At other indices the body should keep carries unchanged, and its other results are only valid under the same mask.
    The body may update late carries of the enclosing loop (`inner_carry`).
    """
    one = Dimension(free_name("branch", {d.name for x in carries for d in x.shape}), 1)

    def run(given: Sequence[Tensor], _: Sequence[Tensor]) -> Results:
        ends, results = body(given[:-1])
        return [*ends, given[-1]], results

    name = kind.replace(" ", "_")
    finals, stacks = make_loop(
        name, run, [*carries, mask], [], one, False, name, remat=remat, branch=Branch(kind, active)
    )
    op = finals[0].operation
    assert op.loop is not None
    inside = op.loop.body.loop_body
    for late, end in zip(inside.late.values() if inside else (), finals[len(carries) + 1 :], strict=True):
        assert late.around is not None
        end_late(late.around, end)
    return BranchResults(op, tuple(finals[: len(carries)]), tuple(map(_only_trip, stacks)))


def inner_carry(carry: Tensor, graph: Graph) -> Tensor:
    """The current value, in the body `graph` of a branch, of a late carry of the enclosing loop, which the branch
    updates."""
    around, inside = carry.graph.loop_body, graph.loop_body
    assert around is not None
    assert inside is not None
    inner = late_carry(graph, carry.type, carry.name.rpartition("/")[2], around.late[carry].end)
    inside.late[inner].around = carry
    return inner


def _only_trip(x: Tensor) -> Tensor:
    """The stacked value of a single trip, without the dim of trips."""
    return reshape(x, x.shape.dims[1:])
