"""Results that are resharded to their assigned sharding as soon as they are computed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache

from layouts import Sharding, reshard
from layouts.step_kinds import STEP_KINDS
from meshlib.core.graph import UPDATE, Operation, Tensor
from meshlib.core.opdef import Home
from meshlib.lowering.assigned import Homes
from meshlib.lowering.balance import Balance
from meshlib.lowering.distances import distances
from meshlib.lowering.simplification import Simplified


class Binding(enum.Enum):
    """True if a result is resharded to its assigned sharding at once."""

    ALWAYS = "always"
    IF_LARGER = "if larger"  # it must not take more memory than assigned until it is used
    NEVER = "never"

    def settled(self, made: Sharding, home: Sharding) -> Sharding:
        """The sharding to which a result computed under `made` is resharded at once; `made` itself if none."""
        if self is Binding.ALWAYS:
            return home
        if self is Binding.IF_LARGER and made.local_size > home.local_size:
            return stored(made, home)
        return made


def binding(t: Tensor, graph: Simplified, homes: Homes, fetched: set[Tensor]) -> Binding:
    """The binding of a tensor: fetched tensors, gradients and constrained tensors are bound.

    A gradient that is scaled and added to others before the update is not bound, so that two losses share a reduction,
    unless it takes more memory until then; nor is one that nobody uses: a loop's running sum, in a trial.
    """
    if t in fetched or t.operation.opdef.home is Home.GIVEN:
        return Binding.ALWAYS
    uses = graph.uses.get(t, ())
    if t in homes.graph.gradient_of:
        pending = all(_is_linear(op, i) and op.region != UPDATE for op, i in uses)
        return Binding.IF_LARGER if pending else Binding.ALWAYS
    return Binding.NEVER


def settled(
    s: Sharding, binding: Binding, home: Sharding, itemsize: float, balance: Balance
) -> tuple[float, tuple[Sharding, ...]]:
    """Cost of resharding a result to its binding, and the placements under which it then exists, in order.

    Where a sum is reduced or blocks are rearranged on the way, the result also exists after that step.
    """
    bound = s if binding is Binding.NEVER else binding.settled(s, home)
    if bound == s:
        return 0.0, (s,)
    before_last = [step for step in reshard(s, bound, itemsize).steps[:-1] if not step.after.pending]
    passed = [step.after for step in before_last if step.before.pending or STEP_KINDS[step.kind].rearranges]
    return float(distances((s, bound), itemsize, balance)[0, 1]), (s, *passed, bound)


@lru_cache(maxsize=1 << 14)
def stored(made: Sharding, home: Sharding) -> Sharding:
    """The sharding under which to keep a value larger than assigned: a slice of it if possible, otherwise `home`.

    The slice splits each dim further by the axes that `home` has there: `n@y+x` of `n@y`, where `home` is `n@x+y`.
    """
    if made.pending:
        return home
    free = set(home.split_axes) - set(made.split_axes)
    axes = [(*own, *[a for a in to if a in free]) for own, to in zip(made.axes, home.axes, strict=True)]
    count = home.mesh.group_size
    if any(n % count(entry) for n, entry in zip(home.shape.sizes, axes, strict=True)):
        return home
    part = made.with_axes(axes)
    return part if part.local_size <= home.local_size else home


def _is_linear(op: Operation, n: int) -> bool:
    """True if an operation is linear in operand `n`, up to rounding."""
    return n in op.opdef.linear(op).operands or op.opdef.home is Home.OPERAND


def least_memory(placements: Sequence[Sharding], home: Sharding) -> Sharding:
    """Of a tensor's placements, the assigned one, otherwise the smallest; `home` if all are pending."""
    complete = [s for s in placements if not s.pending]
    return min(complete, key=lambda s: (s != home, s.local_size)) if complete else home
