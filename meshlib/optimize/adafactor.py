"""Adafactor: second moments factored into a row and a column, steps relative to the size of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from layouts import Dimension, Shape
from meshlib.core.arguments import FRACTION, POSITIVE, at, bounded, flag, whole
from meshlib.core.dtypes import DType
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.ops.pointwise.arithmetic import maximum, minimum, pow, rsqrt, square
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean
from meshlib.optimize.base import LearningRate, Optimizer, OptimizerOptions, Scalars, Update, reduce_rms
from meshlib.optimize.schedules import Schedule


def adafactor_decay_rate_adam(beta2: float) -> Schedule:
    """Decay beta2 (1 - beta2^(t-1)) / (1 - beta2^t) at update t, from 1: Adam's mean with bias correction in the rate.

    Raises: GraphError unless beta2 is in [0, 1).
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.adafactor_decay_rate_adam(0.999)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.9799
    """
    beta2 = bounded(beta2, "adafactor_decay_rate_adam", "beta2", FRACTION)

    def rate(done: Tensor) -> Tensor:
        t = cast(done, "float32")
        return (1 - pow(beta2, t)) * beta2 / (1 - pow(beta2, t + 1))

    return rate


def adafactor_decay_rate_pow(exponent: float, offset: int = 0) -> Schedule:
    """Schedule 1 - (t - offset)^-exponent at update t, from 1: the averaging horizon grows with the number of updates.

    Up to update offset + 1 it is 0: fine-tuning from a checkpoint of that update forgets earlier statistics.
    Raises: GraphError if offset is negative.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.adafactor_decay_rate_pow(0.8)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.957
    """
    what = "adafactor_decay_rate_pow"
    exponent, first = bounded(exponent, what, "exponent"), whole(offset, what, "offset")
    if first < 0:
        raise GraphError(f"{at(what)}: offset must not be negative, got {first}")
    return lambda done: 1 - pow(cast(maximum(done - (first - 1), 1), "float32"), -exponent)


class AdafactorOptimizer(Optimizer):
    """Adafactor: the running mean of g^2 is stored as its means over the two largest dims, d0 and d1.

    vr <- decay vr + (1 - decay) mean over d0 of (g^2 + epsilon1); vc the same over d1
    u = g / sqrt(vr vc / mean over d1 of vr);  u <- u / max(1, rms(u) / clipping_threshold)
    w <- w - learning_rate max(rms(w), epsilon2) u

    A variable with fewer than two dims of at least `min_dim_size_to_factor` stores the full mean v instead.
    With beta1 > 0 steps are averaged with that rate.

    Args:
      multiply_by_parameter_scale: whether steps are relative to rms(w); otherwise max(rms(w), epsilon2) is omitted.
      learning_rate: by default min(1 / sqrt(t), 0.01), or a twentieth of it without multiply_by_parameter_scale.
      decay_rate: of the means, in [0, 1); by default 1 - t^-0.8. A number, a tensor or a schedule.
      beta1: of the running mean of steps, in [0, 1); 0: none.
      clipping_threshold: of the rms of u; None: no clipping.
      factored: whether to factor second moments.
      epsilon1: added to g^2.
      epsilon2: the least scale of the weights.
      min_dim_size_to_factor: least size of the second largest dim.
      exclude_from_parameter_scale: regular expressions; variables with a matching name take steps that are not relative
        to rms(w), at the same learning rate.
    Slots: `slot_vr` (dims of the variable without d0) and `slot_vc` (without d1), or `slot_v`; `slot_m` with beta1.
      They keep the names of the dims, so rules under `slots/` apply.
    If a variable is split, its means and root mean squares cost reductions of rows, columns and numbers.
    Source: Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", 2018, algorithms 4, 5;
      options and defaults of the optimizer of this name in Mesh TensorFlow.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph() as graph:
      ...     w = mtf.variable("w", [mtf.Dimension("rows", 256), mtf.Dimension("cols", 128)])
      ...     train = mtf.optimize.AdafactorOptimizer().minimize(mtf.reduce_sum(mtf.square(w)))
      >>> for name in ("w/slot_vr", "w/slot_vc"):
      ...     print(graph.variables[name].output.shape)
      [cols:128]
      [rows:256]
    """

    def __init__(
        self,
        multiply_by_parameter_scale: bool = True,
        learning_rate: LearningRate | None = None,
        decay_rate: LearningRate | None = None,
        beta1: float = 0.0,
        clipping_threshold: float | None = 1.0,
        factored: bool = True,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
        min_dim_size_to_factor: int = 128,
        exclude_from_parameter_scale: Sequence[str] | None = None,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        what = type(self).__name__
        if not isinstance(multiply_by_parameter_scale, bool):
            raise GraphError(
                f"{at(what)}: multiply_by_parameter_scale, the first argument, must be True or False, got "
                f"{multiply_by_parameter_scale!r:.80}; name the others, as in learning_rate=0.01"
            )
        factor = 1.0 if multiply_by_parameter_scale else 0.05
        super().__init__(_default_rate(factor) if learning_rate is None else learning_rate, **kept)
        self.relative = multiply_by_parameter_scale
        decay = adafactor_decay_rate_pow(0.8) if decay_rate is None else decay_rate
        self.decay_rate = self.rate_like(decay, "decay_rate")
        if isinstance(self.decay_rate, float):
            self.bounded(self.decay_rate, "decay_rate", FRACTION)
        self.beta1 = self.bounded(beta1, "beta1", FRACTION)
        self.clipping_threshold = clipping_threshold
        if clipping_threshold is not None:
            self.clipping_threshold = self.bounded(clipping_threshold, "clipping_threshold", POSITIVE)
        self.factored = flag(factored, what, "factored")
        self.epsilon1 = self.bounded(epsilon1, "epsilon1", POSITIVE)
        self.epsilon2 = self.bounded(epsilon2, "epsilon2", POSITIVE)
        self.min_dim_size = whole(min_dim_size_to_factor, what, "min_dim_size_to_factor", low=1)
        self.absolute = self.patterns(exclude_from_parameter_scale, "exclude_from_parameter_scale")

    def factored_dims(self, shape: Shape) -> tuple[Dimension, Dimension] | None:
        """The two largest dims, in order on ties, if the moments of a variable are factored."""
        if not self.factored or len(shape) < 2:
            return None
        d0, d1, *_ = sorted(shape, key=lambda d: -d.size)
        return (d0, d1) if d1.size >= self.min_dim_size else None

    def scalars(self, done: Tensor, dtype: DType) -> Scalars:
        """Learning rate, decay of the means, and one minus the decay."""
        decay = self.number_at(self.decay_rate, done, dtype)
        return {**super().scalars(done, dtype), "decay": decay, "mixing": 1 - decay}

    def rule(self, u: Update) -> Tensor:
        """The clipped step, relative to the weights."""
        along = self._normalised(u)
        if self.clipping_threshold is not None:
            along = along / maximum(reduce_rms(along) * (1 / self.clipping_threshold), 1.0)
        relative = self.relative and not u.matches(self.absolute)
        rate = maximum(reduce_rms(u.value), self.epsilon2) * u.lr if relative else u.lr
        along = along * rate
        if self.beta1:
            m = u.slot("slot_m")
            along = m * self.beta1 + along * (1 - self.beta1)
            u.write(m, along)
        return u.value - along

    def _normalised(self, u: Update) -> Tensor:
        """The gradient divided by the root of its mean square."""
        decay, mixing = u.scalars["decay"], u.scalars["mixing"]
        squared = square(u.grad) + self.epsilon1
        shape = u.variable.output.shape
        dims = self.factored_dims(shape)
        if dims is None:
            v = u.slot("slot_v")
            new = v * decay + squared * mixing
            u.write(v, new)
            return u.grad * rsqrt(new)
        d0, d1 = dims
        means = []
        for name, gone in (("slot_vr", d0), ("slot_vc", d1)):
            remaining = Shape([d for d in shape if d != gone])
            slot = u.slot(name, remaining)
            means.append(slot * decay + reduce_mean(squared, output_shape=remaining) * mixing)
            u.write(slot, means[-1])
        vr, vc = means
        return u.grad * rsqrt(vr / reduce_mean(vr, reduced_dim=d1)) * rsqrt(vc)


def _default_rate(factor: float) -> Schedule:
    return lambda done: minimum(rsqrt(cast(done, "float32") + 1), 0.01) * factor
