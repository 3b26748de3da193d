"""Branches: parts of a loop's body that a device leaves out in trips in which none of its indices of a dim works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layouts import Dimension
from meshlib.core.graph import Operation, Tensor
from meshlib.core.loop_record import Active, Branch
from meshlib.core.names import free_name
from meshlib.ops.control.loops import make_loop
from meshlib.ops.control.remat import Policy
from meshlib.ops.movement.shape import reshape

Results = tuple[Sequence[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Taken:
    """What a branch has made, inside the body around: `ends` of its carries, `made` of its other results.

    `operation` is the branch itself, `saved` what its policy of rematerialisation keeps.
    """

    operation: Operation
    ends: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]


def branch(
    kind: str,
    body: Callable[[Sequence[Tensor]], Results],
    carries: Sequence[Tensor],
    mask: Tensor,
    active: Active,
    remat: Policy = "full",
) -> Taken:
    """Run `body` where `mask`, [active.dim], holds: a pair of what becomes of the carries, and of other results.

    Where it does not hold, the results are anything: of no use but under the same mask.
    """
    one = Dimension(free_name("branch", {d.name for x in carries for d in x.shape}), 1)

    def run(given: Sequence[Tensor], _: Sequence[Tensor]) -> Results:
        ends, made = body(given[:-1])
        return [*ends, given[-1]], made

    name = kind.replace(" ", "_")
    finals, stacks = make_loop(
        name, run, [*carries, mask], [], one, False, name, remat=remat, branch=Branch(kind, active)
    )
    op = finals[0].operation
    assert op.loop is not None
    saved = op.loop.outputs(op.outputs).saved
    return Taken(op, tuple(finals[:-1]), tuple(map(_alone, stacks)), tuple(map(_alone, saved)))


def _alone(x: Tensor) -> Tensor:
    """Of what the only trip has stacked, that trip's."""
    return reshape(x, x.shape.dims[1:])
