"""Recomputation of cheap values where they are needed, instead of sending them.

What is computed without operands, or from something smaller (a mask of positions, a one-hot of labels, a cast), may be
computed again. The price is almost nothing, and that of its operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layouts import Sharding
from meshlib.core.opdef import Role, Work
from meshlib.lowering.strategies import Choice
from meshlib.program.signature import Signature

# Recomputation nearly always pays off: a lane operation takes a thousandth of the time of a byte sent.
BYTES_PER_OPERATION = 1e-3


@dataclass(eq=False)
class Free:
    """A tensor recomputed locally wherever it is used; `operands` are those of its operation."""

    signature: Signature
    home: Sharding
    operands: tuple[Free, ...]
    _costs: dict[Sharding, float] = field(default_factory=dict)

    def cost(self, wanted: Sharding) -> float:
        """Work of computing it under a sharding, or whole where no block of it can be computed alone."""
        wanted = wanted.drop_pending()
        if wanted == self.home:
            return 0.0
        if wanted not in self._costs:
            axes = again_axes(self.signature, wanted)
            nothing = ((),) * len(self.operands)
            assigned = None if axes is None else self.signature.under(wanted.mesh, axes, nothing)
            if axes is None or assigned is None:
                self._costs[wanted] = self.cost(Sharding.replicated(wanted.shape, wanted.mesh))
                return self._costs[wanted]
            cost = run_cost(self.signature, axes, wanted)
            for x, s in zip(self.operands, assigned.operands, strict=True):
                cost += x.cost(s)
            self._costs[wanted] = cost
        return self._costs[wanted]


def run_cost(signature: Signature, axes: Any, out: Sharding) -> float:
    """Price of running an operation again: almost nothing."""
    blocks = signature.cut(tuple([out.mesh.group_size(axes.get(n, ())) for n in signature.names]))
    assert blocks is not None
    return price_again(blocks.work) + BYTES_PER_OPERATION


def price_again(work: Work) -> float:
    """Price of the work of an operation that may be recomputed, in bytes."""
    return BYTES_PER_OPERATION * work.vpu_ops


def blockwise_choice(signature: Signature, out: Sharding) -> Choice | None:
    """The choice that computes a result's sharding block by block; None if there is none."""
    if any(f.outputs[0] is not None and f.role is not Role.PARALLEL for f in signature.factors):
        return None
    axes, nothing = again_axes(signature, out), ((),) * len(signature.op.inputs)
    assigned = None if axes is None else signature.under(out.mesh, axes, nothing)
    if axes is None or assigned is None or assigned.out != out or assigned.exchanges:
        return None
    return Choice(axes, assigned.operands, out, (), nothing)


def again_axes(signature: Signature, wanted: Sharding) -> Mapping[str, tuple[str, ...]] | None:
    """The assignment under which an operation computes `wanted` block by block; None if it cannot."""
    if wanted.pending:
        return None
    axes: dict[str, tuple[str, ...]] = {}
    for f in signature.factors:
        name = f.outputs[0]
        over = wanted.of(name) if name is not None and name in wanted.shape else ()
        if over and f.role is not Role.PARALLEL:
            return None
        if over:
            axes[f.name] = over
    return axes
