"""Dispatch of tokens to the slots of experts, and the weighted sum of what experts return.

Where tokens choose, a choice has at most one slot, and a slot at most one choice. So both sums over choices, the
combined values and the gradient of dispatched tokens, are lookups by choice that are added up; the gradient of either
is a lookup by slot. TPUs look rows up several times as fast as they add rows at positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layouts import Dimension, Shape
from meshlib.core.graph import Tensor
from meshlib.layers.expert_assignment import SlotOfChoice, Slots
from meshlib.layers.norms import widened
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.control.custom_gradients import gradient_of_residuals
from meshlib.ops.movement.indexing import gather, one_hot, scatter_add
from meshlib.ops.movement.inverse_lookup import gather_places, gather_with_inverse
from meshlib.ops.pointwise.arithmetic import multiply
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum

Back = Callable[[Tensor], Tensor]


def by_product(x: Tensor, tokens: Dimension, slots: Slots, row_sums: str) -> tuple[Tensor, Back]:
    """Dispatch and combine by products with one-hot masks of the tokens in all slots."""
    ordered = [*slots.token.shape, x.shape[-1]]
    mask = one_hot(slots.token, tokens, dtype=x.dtype, out_of_range="zero")

    def back(y: Tensor) -> Tensor:
        weighed = multiply(mask, cast(slots.gate, x.dtype), mask.shape)
        return einsum([weighed, y], output_shape=x.shape, name="combine")

    return einsum([mask, x], output_shape=ordered, name="dispatch"), back


def by_lookup(x: Tensor, tokens: Dimension, slots: Slots, row_sums: str) -> tuple[Tensor, Back]:
    """Dispatch by a lookup of the token in each slot; combine by a lookup of the slot of each choice.

    Tokens do not know the experts that choose them: these sums are scatter-adds.
    """
    chosen = slots.chosen
    if chosen is not None and row_sums == "gather":
        dispatched = gather_with_inverse(x, slots.token, tokens, chosen.slot, chosen.slots, "dispatch")
    else:
        dispatched = gather(x, slots.token, tokens, name="dispatch", out_of_range="zero")

    def back(y: Tensor) -> Tensor:
        if chosen is not None:
            return _combined(y, x.shape, tokens, slots, chosen, row_sums)
        weighed = multiply(widened(y), cast(slots.gate, widened(y).dtype), y.shape)
        token_sums = scatter_add(weighed, slots.token, tokens, x.shape, "combine", out_of_range="zero")
        return cast(token_sums, x.dtype)

    return dispatched, back


def _combined(y: Tensor, shape: Shape, tokens: Dimension, slots: Slots, chosen: SlotOfChoice, row_sums: str) -> Tensor:
    """The sum over the choices of each token of gate x the row of `y` in the slot."""
    places = tuple(slots.token.shape)

    def summed(y: Tensor, gate: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        rows = widened(gather_places(y, places, chosen.slot, chosen.slots))
        sums = reduce_sum(multiply(rows, cast(gate, rows.dtype), rows.shape), output_shape=shape, name="combine")
        return [cast(sums, y.dtype)], [y, slots.token, slots.gate, chosen.slot]

    def gradient(residuals: Sequence[Tensor], dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (y, token, gate, slot), (dy,) = residuals, dys
        assert dy is not None
        rows = widened(gather(dy, token, tokens, out_of_range="zero"))
        of_rows = multiply(rows, cast(gate, rows.dtype), y.shape)
        of_gates = reduce_sum(multiply(rows, widened(y), y.shape), output_shape=gate.shape)
        return [cast(of_rows, y.dtype), cast(gather_places(of_gates, places, slot, chosen.slots), gate.dtype)]

    if row_sums == "scatter":
        return summed(y, chosen.gate)[0][0]
    return gradient_of_residuals(summed, gradient, [y, chosen.gate])[0]
