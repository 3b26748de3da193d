"""Results that take their assigned sharding as soon as they are computed (rule 1)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache

from layouts import Sharding
from meshlib.core.graph import UPDATE, Operation, Tensor
from meshlib.core.opdef import Home
from meshlib.lowering.assigned import Homes
from meshlib.lowering.simplification import Simplified


class Binding(enum.Enum):
    """Whether a result is brought to its assigned sharding at once."""

    ALWAYS = "always"
    IF_LARGER = "if larger"  # until it is used it must not take more memory than assigned
    NEVER = "never"

    def settled(self, made: Sharding, home: Sharding) -> Sharding:
        """Where a result computed under `made` is brought at once; `made` itself if nowhere."""
        if self is Binding.ALWAYS:
            return home
        if self is Binding.IF_LARGER and made.local_size > home.local_size:
            return stored(made, home)
        return made


def binding(t: Tensor, graph: Simplified, homes: Homes, fetched: set[Tensor]) -> Binding:
    """The binding of a tensor: what is fetched, gradients and constrained tensors are bound.

    A gradient that is scaled and added to others before the update is not, so that two losses share one reduction,
    unless it takes more memory until then; nor is one that nobody uses: a loop's running sum, in a trial.
    """
    if t in fetched or t.operation.opdef.home is Home.GIVEN:
        return Binding.ALWAYS
    uses = graph.uses.get(t, ())
    if t in homes.graph.gradient_of:
        pending = all(_is_linear(op, i) and op.region != UPDATE for op, i in uses)
        return Binding.IF_LARGER if pending else Binding.ALWAYS
    return Binding.NEVER


@lru_cache(maxsize=1 << 14)
def stored(made: Sharding, home: Sharding) -> Sharding:
    """Under what to keep a value that takes more memory than assigned: a slice of it, if possible, else `home`.

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
    """Whether an operation is linear in operand `n`, rounding aside."""
    return n in op.opdef.linear(op).operands or op.opdef.home is Home.OPERAND


def least_memory(placements: Sequence[Sharding], home: Sharding) -> Sharding:
    """Of the placements of a tensor the assigned one, else that of the smallest blocks; `home` if all are pending."""
    complete = [s for s in placements if not s.pending]
    return min(complete, key=lambda s: (s != home, s.local_size)) if complete else home
