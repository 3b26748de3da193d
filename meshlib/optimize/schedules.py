"""Learning rate schedules: composable functions of the step.

A schedule takes the number of previous updates as an int32 tensor (`t`, from 0) and returns the rate of this update, a
float32 tensor without dims or a plain number. So `lambda t: 0.1` is a schedule. Schedule arguments also accept numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshlib.core.arguments import POSITIVE, at, bounded, items, number, whole
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.core.text import counted
from meshlib.ops.control.sources import scalar
from meshlib.ops.pointwise.arithmetic import cos, less, maximum, minimum, pow, rsqrt, where
from meshlib.ops.pointwise.casts import cast

Schedule = Callable[[Tensor], Tensor | float]


def constant(lr: float) -> Schedule:
    """The same learning rate at every step.

    Example:
      >>> import meshlib as mtf
      >>> mtf.optimize.constant(0.1)(None)
      0.1
    """
    rate = bounded(lr, "optimize.constant", "lr")
    return lambda t: rate


def linear_warmup(peak: float, warmup_steps: int) -> Schedule:
    """Linear warm-up peak * min(1, (t + 1) / warmup_steps), which reaches `peak` at the last of `warmup_steps`, then
    constant.

    Raises: GraphError unless warmup_steps >= 1.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.linear_warmup(0.1, warmup_steps=100)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.051
    """
    what = "linear_warmup"
    peak, steps = bounded(peak, what, "peak"), whole(warmup_steps, what, "warmup_steps", low=1)
    return lambda t: minimum(_float(t + 1) / steps, 1.0) * peak


def linear_decay(lr: float, total_steps: int, offset: int = 0) -> Schedule:
    """Linear decay lr * (total_steps - t) / (total_steps - offset), at most lr and at least 0: constant up to `offset`.

    Args:
      lr: the rate of the first updates.
      total_steps: number of updates after which the rate is 0.
      offset: number of updates before the decay; for fine-tuning, that of the checkpoint.
    Raises: GraphError unless 0 <= offset < total_steps.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.linear_decay(0.1, total_steps=100)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.05
    """
    what = "linear_decay"
    lr, start, end = bounded(lr, what, "lr"), whole(offset, what, "offset"), whole(total_steps, what, "total_steps")
    if not 0 <= start < end:
        raise GraphError(f"{at(what)}: offset must be at least 0 and below total_steps, got {start} and {end}")
    return lambda t: minimum(maximum(_float(end - t) / (end - start), 0.0), 1.0) * lr


def polynomial_decay(lr: float, total_steps: int, power: float = 2.0, end: float = 0.0) -> Schedule:
    """Polynomial decay end + (lr - end) * (1 - t / total_steps)^power, then `end`.

    Raises: GraphError unless total_steps >= 1 and power > 0.
    Source: with power 2 and LARS for ResNet-50: Ying et al., arXiv:1811.06992; Kumar et al., arXiv:1909.09756.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.polynomial_decay(0.1, total_steps=100)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.025
    """
    what = "polynomial_decay"
    lr, steps, last = bounded(lr, what, "lr"), whole(total_steps, what, "total_steps", low=1), bounded(end, what, "end")
    exponent = bounded(power, what, "power", POSITIVE)
    return lambda t: pow(maximum(_float(steps - t) / steps, 0.0), exponent) * (lr - last) + last


def linear_scaling(
    base_lr: float,
    batch: int,
    steps_per_epoch: float,
    warmup_epochs: float = 5.0,
    decay_epochs: Sequence[float] = (30.0, 60.0, 80.0),
    decay: float = 0.1,
    base_batch: int = 256,
) -> Schedule:
    """Linear scaling rule for any batch: peak = base_lr * batch / base_batch, after a warm-up from base_lr.

    base_lr + (peak - base_lr) * t / warm-up steps, then peak * decay^(number of decay_epochs passed). A batch below
    base_batch needs no warm-up and has none.

    Args:
      base_lr: rate tuned for base_batch.
      batch: global number of examples per step.
      steps_per_epoch: positive, may be fractional.
      warmup_epochs: not negative.
      decay_epochs: increasing; after each the rate is multiplied by `decay`. (): none. To double the batch instead,
        continue with another program of that batch (`sim.run`), whose own schedule is at its peak.
      decay: positive.
    Raises: GraphError for numbers out of range.
    Source: Goyal et al., "Accurate, large minibatch SGD", arXiv:1706.02677, sections 2 and 5.1; batches instead of
      decay: Smith et al., arXiv:1711.00489.
    Example:
      >>> import meshlib as mtf
      >>> lr = mtf.optimize.linear_scaling(0.1, 1024, steps_per_epoch=2, warmup_epochs=2, decay_epochs=[3])
      >>> with mtf.Graph():
      ...     program = mtf.lower({"lr": lr(mtf.step())}, [mtf.assign(mtf.variable("w", [], 0.0), mtf.constant(0.0))])
      >>> sim = mtf.simulate(program)
      >>> [round(float(sim.step()["lr"]), 3) for _ in range(7)]
      [0.1, 0.175, 0.25, 0.325, 0.4, 0.4, 0.04]
    """
    what = "linear_scaling"
    start, factor = bounded(base_lr, what, "base_lr"), number(decay, what, "decay")
    per_epoch, warm = number(steps_per_epoch, what, "steps_per_epoch"), number(warmup_epochs, what, "warmup_epochs")
    ends = [number(e, what, "each of decay_epochs") for e in items(decay_epochs, what, "decay_epochs")]
    sizes = whole(batch, what, "batch"), whole(base_batch, what, "base_batch")
    if min(sizes) < 1 or per_epoch <= 0 or warm < 0 or factor <= 0 or ends != sorted(set(ends)):
        raise GraphError(
            f"{at(what)}: batch, base_batch, steps_per_epoch and decay must be positive, warmup_epochs not negative, "
            f"decay_epochs increase; got batch={batch}, base_batch={base_batch}, steps_per_epoch={per_epoch:g}, "
            f"decay={factor:g}, warmup_epochs={warm:g}, decay_epochs={ends}"
        )
    peak, rise = start * sizes[0] / sizes[1], math.ceil(warm * per_epoch) if sizes[0] > sizes[1] else 0

    def schedule(t: Tensor) -> Tensor:
        rate = scalar(peak, _float(t))
        if rise:
            rate = minimum(_float(t) * ((peak - start) / rise) + start, peak)
        for end in ends:
            rate = where(less(t, math.ceil(end * per_epoch)), rate, rate * factor)
        return rate

    return schedule


def exponential_decay(lr: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Schedule:
    """Exponential decay lr * decay_rate^(t / decay_steps); with `staircase` the exponent is rounded down.

    Args:
      lr: the rate of the first update.
      decay_steps: updates after which the rate has been multiplied by decay_rate.
      decay_rate: positive.
      staircase: whether the rate drops in steps every decay_steps.
    Raises: GraphError unless decay_steps >= 1 and decay_rate > 0.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.exponential_decay(0.1, decay_steps=50, decay_rate=0.5)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.05
    """
    what = "exponential_decay"
    lr, steps = bounded(lr, what, "lr"), whole(decay_steps, what, "decay_steps", low=1)
    rate = bounded(decay_rate, what, "decay_rate", POSITIVE)

    def schedule(t: Tensor) -> Tensor:
        # Adding half a step before truncation keeps a rounded quotient from falling below an integer.
        exponent = _float(cast((_float(t) + 0.5) / steps, "int32")) if staircase else _float(t) / steps
        return pow(scalar(rate, exponent), exponent) * lr

    return schedule


def cosine_decay(lr: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Cosine decay lr * (alpha + (1 - alpha) * (1 + cos(pi * min(t / decay_steps, 1))) / 2): from lr to alpha * lr.

    Raises: GraphError unless decay_steps >= 1.
    Source: Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017, without restarts.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.cosine_decay(0.1, decay_steps=100)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.05
    """
    what = "cosine_decay"
    lr, steps = bounded(lr, what, "lr"), whole(decay_steps, what, "decay_steps", low=1)
    alpha = bounded(alpha, what, "alpha")
    half = (1 - alpha) / 2
    return lambda t: (cos(minimum(_float(t) / steps, 1.0) * math.pi) * half + (alpha + half)) * lr


def inverse_square_root(peak: float, warmup_steps: int) -> Schedule:
    """Inverse square root peak * sqrt(warmup_steps / max(t + 1, warmup_steps)), constant up to `warmup_steps`.

    Multiplied by `linear_warmup(1.0, warmup_steps)` it is `warmup_then_decay(peak, warmup_steps)`.
    Raises: GraphError unless warmup_steps >= 1.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.inverse_square_root(0.1, warmup_steps=10)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.0443
    """
    what = "inverse_square_root"
    peak, steps = bounded(peak, what, "peak"), whole(warmup_steps, what, "warmup_steps", low=1)
    return lambda t: rsqrt(maximum(_float(t + 1), float(steps))) * (math.sqrt(steps) * peak)


def warmup_then_decay(peak: float, warmup_steps: int, decay: float = 0.5) -> Schedule:
    """Linear warm-up from 0 to `peak` over `warmup_steps`, then peak * (warmup_steps / (t + 1)) ** decay.

    With decay = 0.5 this is the schedule of "Attention is all you need" (Vaswani et al. 2017, section 5.3).
    Raises: GraphError unless warmup_steps >= 1.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.optimize.warmup_then_decay(0.1, warmup_steps=10)(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.0443
    """
    what = "warmup_then_decay"
    peak, decay = bounded(peak, what, "peak"), bounded(decay, what, "decay")
    steps = whole(warmup_steps, what, "warmup_steps", low=1)

    def rate(t: Tensor) -> Tensor:
        done = _float(t) + 1
        return minimum(done / steps, pow(maximum(done, 1) / steps, -decay)) * peak

    return rate


def piecewise(boundaries: Sequence[int], values: Sequence[float | Schedule]) -> Schedule:
    """Piecewise schedule: values[0] while t < boundaries[0], values[1] while t < boundaries[1], ..., then the last
    value.

    Args:
      boundaries: increasing numbers of updates.
      values: one more than boundaries; numbers, or schedules, each with t counted from its own boundary.
    Raises: GraphError if their numbers do not fit or boundaries do not increase.
    Example:
      >>> import meshlib as mtf
      >>> lr = mtf.optimize.piecewise([2], [mtf.optimize.linear_warmup(1.0, 2), mtf.optimize.cosine_decay(1.0, 4)])
      >>> with mtf.Graph():
      ...     program = mtf.lower({"lr": lr(mtf.step())}, [mtf.assign(mtf.variable("w", [], 0.0), mtf.constant(0.0))])
      >>> sim = mtf.simulate(program)
      >>> [round(float(sim.step()["lr"]), 3) for _ in range(5)]
      [0.5, 1.0, 1.0, 0.854, 0.5]
    """
    what = "piecewise"
    ends = [whole(b, what, "each of boundaries") for b in items(boundaries, what, "boundaries")]
    parts = [_as_schedule(v, what, "each of values") for v in items(values, what, "values")]
    if len(parts) != len(ends) + 1:
        raise GraphError(
            f"{at(what)}: needs one value more than boundaries, got {counted(len(parts), 'value')} for "
            f"{counted(len(ends), 'boundary', 'boundaries')}"
        )
    if any(b <= a for a, b in zip([0, *ends], ends, strict=False)):
        raise GraphError(f"{at(what)}: boundaries must be positive and increase, got {ends}")

    def schedule(t: Tensor) -> Tensor:
        rate = _rate(parts[0], t)
        for start, part in zip(ends, parts[1:], strict=True):
            # Before its start a part sees t = 0: its value is unused, but must not be a NaN that warns.
            rate = where(less(t, start), rate, _rate(part, maximum(t - start, 0)))
        return rate

    return schedule


def product(*factors: float | Schedule) -> Schedule:
    """The product of numbers and schedules: `product(0.1, linear_warmup(1.0, 100), cosine_decay(1.0, 10_000))`.

    Raises: GraphError if there is no factor, or one is neither a number nor a function of the step.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     schedule = mtf.optimize.product(0.5, mtf.optimize.linear_decay(0.1, total_steps=100))
      ...     y = schedule(mtf.input("t", [], "int32"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(t=50)["y"].round(4))
      0.025
    """
    parts = [_as_schedule(f, "product", "each factor") for f in factors]
    if not parts:
        raise GraphError(f"{at('product')}: needs at least one number or schedule")

    def schedule(t: Tensor) -> Tensor:
        result = _rate(parts[0], t)
        for part in parts[1:]:
            result = result * _rate(part, t)
        return result

    return schedule


def _float(t: Tensor) -> Tensor:
    return cast(t, "float32")


def _as_schedule(value: object, what: str, argument: str) -> Schedule:
    if callable(value):
        return value
    rate = bounded(value, what, f"{argument}, where it is not a schedule,")
    return lambda t: rate


def _rate(schedule: Schedule, t: Tensor) -> Tensor:
    """The value of a schedule at `t`, as a float32 tensor."""
    rate = schedule(t)
    if isinstance(rate, Tensor):
        return _float(rate)
    return scalar(bounded(rate, "a schedule", "its result"), _float(t))
