"""Dynamic loss scaling, for gradients too small for a narrow format.

Source: Micikevicius et al., "Mixed precision training", 2018, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from layouts import Shape
from meshlib.core.arguments import at, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import UPDATE, Operation, Tensor, absolute_scope, region
from meshlib.ops.control.sources import make_variable
from meshlib.ops.control.state import assign
from meshlib.ops.pointwise.arithmetic import greater_equal, logical_and, logical_not, maximum, minimum, where
from meshlib.ops.pointwise.casts import cast


class DynamicLossScale:
    """A loss scale that grows while all gradients are finite, and shrinks on an overflow.

    A step with an infinite or NaN gradient is skipped: variables and slots are unchanged, and the scale is divided by
    `factor` (never below 1). After `growth_steps` good steps in a row it is multiplied by `factor` (never above
    `maximum`). Skipped steps do not count for schedules and Adam's bias corrections; `mtf.step()` counts them.

    Args:
      initial: initial scale; a power of two is exact unless gradients over- or underflow.
      growth_steps: good steps in a row after which the scale grows.
      factor: factor of growth and of shrinking.
      maximum: largest scale.
    Variables: `loss_scale/scale`, `loss_scale/good_steps` (in a row), `loss_scale/applied_steps`.
    Raises: GraphError for invalid values.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 3.0)
      ...     scale = mtf.optimize.DynamicLossScale(initial=2.0**127)  # 2 * 3 * 2^127 overflows
      ...     train = mtf.optimize.SgdOptimizer(0.5).minimize(w * w, loss_scale=scale)
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> for _ in range(3):
      ...     _ = sim.step()
      ...     print(sim.state["w"], sim.state["loss_scale/scale"] == 2.0**125)
      3.0 False
      3.0 True
      0.0 True
    """

    def __init__(
        self, initial: float = 2.0**15, growth_steps: int = 2000, factor: float = 2.0, maximum: float = 2.0**127
    ) -> None:
        what = "DynamicLossScale"
        self.initial, self.maximum = number(initial, what, "initial"), number(maximum, what, "maximum")
        self.factor, self.growth_steps = number(factor, what, "factor"), whole(growth_steps, what, "growth_steps", 1)
        if not 1 <= self.initial <= self.maximum <= 2.0**127:
            raise GraphError(
                f"{at(what)}: needs 1 <= initial <= maximum <= 2**127, got initial {self.initial:g}, "
                f"maximum {self.maximum:g}"
            )
        if self.factor <= 1:
            raise GraphError(f"{at(what)}: factor must be larger than 1, got {factor}")

    def open(self) -> ScaledLoss:
        """The variables of this scale in the current graph."""

        def variable(name: str, start: float, dtype: str) -> Tensor:
            return make_variable(name, Shape([]), start, dtype, trainable=False)

        with absolute_scope("loss_scale"):
            counts = (variable(name, 0, "int32") for name in ("good_steps", "applied_steps"))
            return ScaledLoss(self, variable("scale", self.initial, "float32"), *counts)


@dataclass(frozen=True)
class ScaledLoss:
    """A loss scale in a program: its rule and its three variables."""

    rule: DynamicLossScale
    scale: Tensor
    in_a_row: Tensor
    applied: Tensor

    def close(self, good: Tensor) -> list[Operation]:
        """The updates of the scale after a step; `good` is true if the step was applied."""
        rule = self.rule
        with region(UPDATE), absolute_scope("loss_scale"):
            in_a_row = self.in_a_row + 1
            grows = logical_and(good, greater_equal(in_a_row, rule.growth_steps))
            larger = minimum(self.scale * rule.factor, rule.maximum)
            smaller = maximum(self.scale / rule.factor, 1.0)
            scale = where(good, where(grows, larger, self.scale), smaller)
            good_steps = where(logical_and(good, logical_not(grows)), in_a_row, 0)
            return [
                assign(self.scale, scale),
                assign(self.in_a_row, good_steps),
                assign(self.applied, self.applied + cast(good, "int32")),
            ]
