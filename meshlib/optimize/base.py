"""The base of all optimizers: from gradients to updates of variables and slots.

An optimizer is one rule for one variable; everything else is here: the precision of the computation, the master copy of
a variable stored in a narrower type, the dtype of slots, the clipping of gradients, the learning rate, and the loss
scale, which may skip a step.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypedDict, Unpack

import numpy as np

from hardware.unknown_names import Attributes
from layouts import Shape
from meshlib.core import initializers
from meshlib.core.arguments import NOT_NEGATIVE, POSITIVE, at, bounded, flag, items
from meshlib.core.dtypes import FLOAT32, FLOAT64, DType, as_dtype
from meshlib.core.errors import ArgumentError, GraphError, nearest
from meshlib.core.graph import UPDATE, Operation, Tensor, absolute_scope, region
from meshlib.core.public_calls import public
from meshlib.core.text import counted
from meshlib.ops.building import tensor
from meshlib.ops.control.remat import from_host, to_host
from meshlib.ops.control.sources import make_variable, step
from meshlib.ops.control.state import assign, stored
from meshlib.ops.gradients import gradients
from meshlib.ops.movement.shape import broadcast
from meshlib.ops.pointwise.arithmetic import add_n, equal, maximum, sqrt, square, where
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum
from meshlib.optimize.loss_scale import DynamicLossScale, ScaledLoss
from meshlib.optimize.schedules import Schedule

LearningRate = float | Tensor | Schedule
Scalars = Mapping[str, Tensor | float]


def compute_dtype(stored: DType) -> DType:
    """The dtype in which updates of a variable are computed: float32, or float64 for float64 variables."""
    return FLOAT64 if stored is FLOAT64 else FLOAT32


@dataclass(eq=False)
class Update:
    """The update of one variable in one step, as seen by an optimizer's rule.

    `value` and `grad` are in the compute dtype, `scalars` are numbers shared by all variables, including "lr".

    Example:
      >>> import meshlib as mtf
      >>> class Sign(mtf.optimize.Optimizer):
      ...     def rule(self, update):
      ...         return update.value - update.lr * mtf.sign(update.grad)
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", 1.0)
      ...     sim = mtf.simulate(mtf.lower({}, Sign(0.5).minimize(mtf.reduce_sum(w))))
      >>> _ = sim.step()
      >>> sim.state["w"].tolist()
      [0.5, 0.5]
    """

    variable: Operation
    value: Tensor
    grad: Tensor
    scalars: Scalars
    good: Tensor | None = None  # whether this step is applied; None: always
    slot_dtype: DType | None = None  # dtype of stored slots; None: the compute dtype
    slots_on_host: bool = False  # whether slots are stored in host memory
    writes: list[Operation] = field(default_factory=list)

    @property
    def lr(self) -> Tensor | float:
        """The learning rate of this step."""
        return self.scalars["lr"]

    def slot(self, name: str, shape: Shape | None = None, dtype: DType | None = None) -> Tensor:
        """A slot of this variable, initially zeros, in the compute dtype.

        It is stored in `dtype`, by default that of all slots; layout rules under `slots/` apply. A slot on the host is
        copied to HBM for the update.
        """
        slot_variable = make_variable(
            name,
            self.variable.output.shape if shape is None else shape,
            initializers.zeros(),
            dtype or self.slot_dtype or self.value.dtype,
            trainable=False,
            slot_of=self.variable.name,
            on_host=self.slots_on_host,
        )
        return cast(from_host(slot_variable) if self.slots_on_host else slot_variable, self.value.dtype)

    def write(self, target: Tensor, new: Tensor) -> None:
        """Write the new value of a slot, or of the variable itself, unless the step is skipped."""
        target = stored(target).output
        on_host = target.on_host
        if self.good is not None:
            new = where(self.good, cast(new, target.dtype), from_host(target) if on_host else target)
        if on_host:
            new = to_host(cast(new, target.dtype))
        self.writes.append(assign(target, new))

    def matches(self, patterns: Sequence[str]) -> bool:
        """True if one of the regular expressions matches the variable's name."""
        return any(re.search(p, self.variable.name) for p in patterns)


class OptimizerOptions(TypedDict, total=False):
    """Keyword arguments common to all optimizers: see `Optimizer`."""

    slot_dtype: object
    master_dtype: object
    slots_on_host: bool


class Optimizer(Attributes, abc.ABC):
    """Maps gradients to updates of variables; a subclass defines the `rule`.

    `lr` is a float, a tensor without dims, or a schedule: a function of the int32 number of previous updates.

    Updates are computed in float32 (in float64 for float64 variables), whatever the gradients are. A variable stored as
    bfloat16 or fp8 gets a float32 slot `master`, from which it is rounded, so that small updates accumulate. The master
    is used wherever it rounds to the stored value, and the stored value elsewhere: before the first step, and after
    other values were assigned or loaded.

    Every optimizer also takes, by name:
      slot_dtype: dtype of stored slots, such as "bfloat16", to which they are rounded after each step; by default the
        compute dtype. In bfloat16 a mean that changes by less than 2^-9 of itself in a step does not change at all.
      master_dtype: dtype of `master`, by default "float32"; variables that are no narrower have none, so "bfloat16"
        saves the masters of bfloat16 variables, whose small updates are lost then.
      slots_on_host: store slots, including `master`, in host memory, where they take no HBM. Each update copies them to
        the device and back over PCIe, one variable after the other.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:1024")
      ...     optimizer = mtf.optimize.AdamOptimizer(0.1, slots_on_host=True)
      ...     program = mtf.lower({}, optimizer.minimize(mtf.reduce_sum(mtf.square(w))))
      >>> program.memory.host_bytes, program.from_host_bytes, program.memory.by_kind["slots"]
      (8192, 8192, 0)
    """

    weight_decay = 0.0
    exclude: tuple[str, ...] = ()

    def __init__(self, lr: LearningRate, **kept: Unpack[OptimizerOptions]) -> None:
        self.lr = self.rate_like(lr, "the learning rate")
        unknown = [name for name in kept if name not in OptimizerOptions.__annotations__]
        if unknown:
            known = [name for name in signature(type(self)).parameters if name != "kept"] + [
                *OptimizerOptions.__annotations__
            ]
            raise ArgumentError(
                f"{at(type(self).__name__)}: no argument {unknown[0]!r:.80}"
                + (nearest(unknown[0], known) or f"; it has {', '.join(known)}")
            )
        slots = kept.get("slot_dtype")
        self.slot_dtype = None if slots is None else self._float(slots, "slot_dtype")
        self.master_dtype = self._float(kept.get("master_dtype", FLOAT32), "master_dtype")
        self.slots_on_host = flag(kept.get("slots_on_host", False), type(self).__name__, "slots_on_host")

    def _float(self, value: object, argument: str) -> DType:
        compute_dtype = as_dtype(value)
        if not compute_dtype.is_wide_float:
            raise GraphError(
                f"{at(type(self).__name__)}: {argument} must be a float dtype to compute in, got {compute_dtype.name}"
            )
        return compute_dtype

    def rate_like(self, value: object, argument: str) -> LearningRate:
        """`value`, which must be a number, a tensor without dims, or a schedule."""
        if isinstance(value, Tensor):
            return self._checked(value, argument)
        if callable(value):
            return value
        if isinstance(value, str | bool | None) or not isinstance(value, int | float | np.generic):
            raise GraphError(
                f"{at(type(self).__name__)}: {argument} must be a number, a tensor or a schedule (a function of "
                f"the step), got {type(value).__name__} {value!r:.80}"
            )
        return self.bounded(value, argument)

    def _checked(self, rate: Tensor, argument: str) -> Tensor:
        if len(rate.shape) or not rate.dtype.is_wide_float:
            raise GraphError(
                f"{at(type(self).__name__)}: {argument} must be a float without dims, got {rate}; cast or reduce it"
            )
        return rate

    def bounded(self, value: object, argument: str, rule: str = NOT_NEGATIVE) -> float:
        """`value`, which must be a finite number within bounds."""
        return bounded(value, type(self).__name__, argument, rule)

    def patterns(self, value: Sequence[str] | None, argument: str) -> tuple[str, ...]:
        """`value`, which must be regular expressions to search for in variables' names."""
        what = type(self).__name__
        checked_patterns = tuple(items(value, what, argument)) if value is not None else ()
        for p in checked_patterns:
            if not isinstance(p, str):
                raise GraphError(
                    f"{at(what)}: {argument} must be regular expressions, got {type(p).__name__} {p!r:.80}"
                )
            try:
                re.compile(p)
            except re.error as fault:
                raise GraphError(
                    f"{at(what)}: {argument}: {p!r:.80} is not a valid regular expression: {fault}"
                ) from None
        return checked_patterns

    def decayed(self, u: Update, along: Tensor) -> Tensor:
        """A step with `weight_decay` of the variable added, unless its name is excluded."""
        return along + u.value * self.weight_decay if self.weight_decay and not u.matches(self.exclude) else along

    @public
    def minimize(
        self,
        loss: Tensor,
        variables: Sequence[Tensor] | None = None,
        max_norm: float | None = None,
        loss_scale: DynamicLossScale | None = None,
    ) -> list[Operation]:
        """The updates of one step that lowers `loss`, for `mtf.lower(updates=...)`.

        Args:
          loss: a float tensor; its elements are summed.
          variables: variables to train; by default all trainable ones that the loss depends on.
          max_norm: clip the global norm of the gradients: see `clip_by_global_norm`.
          loss_scale: multiply the loss for the gradients, and skip steps in which they overflow.
        Raises: GraphError if the loss depends on none of them.
        """
        tensor(loss, "minimize")
        wanted = [stored(v).output for v in variables] if variables is not None else loss.graph.trainable_variables
        if loss_scale is not None and not isinstance(loss_scale, DynamicLossScale):
            raise GraphError(
                f"{at('minimize')}: loss_scale must be an mtf.optimize.DynamicLossScale, got {loss_scale!r:.80}"
            )
        scaling = None
        seeds = None
        if loss_scale is not None and loss.dtype.is_float:
            with loss.graph:
                scaling = loss_scale.open()
                seeds = [broadcast(cast(scaling.scale, loss.dtype), loss.shape)]
        grads = gradients([loss], list(wanted), seeds)
        pairs = [(g, v) for g, v in zip(grads, wanted, strict=True) if g is not None]
        if not pairs:
            known = ", ".join(f"'{v.name}'" for v in wanted) or "none declared"
            raise GraphError(
                f"{at('minimize')}: {loss} ({loss.operation.source}) depends on no trainable variable; known: {known}"
            )
        return self._apply(pairs, max_norm, scaling)

    @public
    def apply_grads(self, grads: Sequence[Tensor | None], variables: Sequence[Tensor]) -> list[Operation]:
        """The updates of `variables` for given gradients; variables with gradient None are unchanged."""
        grads, variables = items(grads, "apply_grads", "grads"), items(variables, "apply_grads", "variables")
        if len(grads) != len(variables):
            raise GraphError(
                f"{at('apply_grads')}: {counted(len(grads), 'gradient')} for {counted(len(variables), 'variable')}"
            )
        return self._apply([(g, v) for g, v in zip(grads, variables, strict=True) if g is not None], None, None)

    def apply_grad(self, grad: Tensor | None, variable: Tensor) -> list[Operation]:
        """The updates of one variable and its slots."""
        return self.apply_grads([grad], [variable])

    @abc.abstractmethod
    def rule(self, u: Update) -> Tensor:
        """The new value of one variable, in its compute dtype; also writes its slots."""

    def scalars(self, done: Tensor, dtype: DType) -> Scalars:
        """Numbers that the rule needs for every variable, computed once, after `done` (int32) previous updates."""
        return {"lr": self.number_at(self.lr, done, dtype)}

    def number_at(self, value: LearningRate, done: Tensor, dtype: DType) -> Tensor | float:
        """The value of a number, tensor or schedule in this step, in the compute dtype."""
        if callable(value) and not isinstance(value, Tensor):
            scheduled = value(done)
            value = self._checked(scheduled, "the schedule's result") if isinstance(scheduled, Tensor) else scheduled
        if isinstance(value, Tensor):
            return cast(value, dtype)
        return self.bounded(value, "the schedule's result")

    def _apply(
        self, pairs: Sequence[tuple[Tensor, Tensor]], max_norm: float | None, scaling: ScaledLoss | None
    ) -> list[Operation]:
        owners, grads = [], []
        for grad, v in pairs:
            op = stored(v)
            tensor(grad, "apply_grads")
            if set(grad.shape) != set(op.output.shape):
                raise GraphError(f"{at('apply_grads')}: gradient {grad} does not have the dims of {op.output}")
            if grad.graph is not op.graph:
                raise GraphError(f"{at('apply_grads')}: gradient {grad} belongs to another graph than {op.output}")
            if not op.output.dtype.is_float:
                raise GraphError(f"{at('apply_grads')}: {op.output} is not a float variable and can't be trained")
            owners.append(op)
            grads += _map_like_slots(lambda g, d: cast(g, d), [grad], [op], compute_dtype(op.output.dtype))
        if not owners:
            return []
        good = None
        if scaling is not None:
            grads = _map_like_slots(lambda g, scale: g / cast(scale, g.dtype), grads, owners, scaling.scale)
            good = _all_finite(grads, owners)
        if max_norm is not None:
            grads, _ = _clip(grads, owners, max_norm, "minimize")
        with owners[0].graph:
            scalars = {
                d: self._scalars(d, scaling) for d in dict.fromkeys(compute_dtype(op.output.dtype) for op in owners)
            }
            updates: list[Operation] = []
            for grad, op in zip(grads, owners, strict=True):
                updates += self._update(op, grad, scalars[grad.dtype], good)
            return updates + (scaling.close(good) if scaling is not None and good is not None else [])

    def _scalars(self, dtype: DType, scaling: ScaledLoss | None) -> Scalars:
        with region(UPDATE), absolute_scope("optimizer"):
            return self.scalars(step() if scaling is None else scaling.applied, dtype)

    def _update(self, op: Operation, grad: Tensor, scalars: Scalars, good: Tensor | None) -> list[Operation]:
        with absolute_scope(op.name), region(UPDATE, op):
            u = Update(op, cast(op.output, grad.dtype), grad, scalars, good, self.slot_dtype, self.slots_on_host)
            if op.output.dtype.bits >= self.master_dtype.bits:
                u.write(op.output, self.rule(u))
                return u.writes
            master = u.slot("master", dtype=self.master_dtype)
            u.value = where(equal(cast(master, op.output.dtype), op.output), master, u.value)
            new = self.rule(u)
            u.write(master, new)
            u.write(op.output, cast(new, self.master_dtype))  # the value to which `master` will be rounded
            return u.writes


@public
def clip_by_global_norm(grads: Sequence[Tensor | None], max_norm: float | Tensor) -> tuple[list[Tensor | None], Tensor]:
    """Scale all gradients by a common factor so that their global norm is at most `max_norm`.

    norm = sqrt(sum of all squares);  g <- g * max_norm / max(norm, max_norm)

    For replicated gradients the norm takes no communication; otherwise one number is reduced for each distinct set of
    axes that split them.

    Args:
      grads: gradients, may include None.
      max_norm: positive, a number or a tensor without dims.
    Returns: the clipped gradients in their dtypes, and the norm before clipping: float32 without dims (float64 if all
      gradients are).
    Raises: GraphError for no gradients, or a max_norm that is not positive.
    Source: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     grads = [mtf.constant(3.0, [mtf.Dimension("d", 1)]), mtf.constant(4.0)]
      ...     clipped, norm = mtf.optimize.clip_by_global_norm(grads, 1.0)
      >>> result = mtf.simulate(mtf.lower({"a": clipped[0], "b": clipped[1], "norm": norm})).step()
      >>> [round(float(result[n].sum()), 6) for n in ("a", "b", "norm")]
      [0.6, 0.8, 5.0]
    """
    what = "clip_by_global_norm"
    given = items(grads, what, "grads")
    present = [tensor(g, what) for g in given if g is not None]
    if not present:
        raise GraphError(f"{at(what)}: needs at least one gradient, got {len(given)} times None")
    for g in present:
        if not g.dtype.is_float:
            raise GraphError(f"{at(what)}: {g} is not a float tensor and has no norm")
    owners = [g.graph.gradient_of.get(g) for g in present]
    clipped, norm = _clip(present, owners, max_norm, what)
    left = iter(clipped)
    return [None if g is None else next(left) for g in given], norm


def _map_like_slots(
    function: Callable[[Tensor, Any], Tensor],
    grads: Sequence[Tensor],
    owners: Sequence[Operation | None],
    argument: object,
) -> list[Tensor]:
    """function(gradient, argument) of each gradient, in the sharding of its variable's slots."""
    results = []
    for g, op in zip(grads, owners, strict=True):
        with region(UPDATE, op), absolute_scope("gradient" if op is None else op.name):
            results.append(function(g, argument))
    return results


def _clip(
    grads: Sequence[Tensor], owners: Sequence[Operation | None], max_norm: float | Tensor, what: str
) -> tuple[list[Tensor], Tensor]:
    if isinstance(max_norm, Tensor):
        if len(max_norm.shape) or not max_norm.dtype.is_wide_float:
            raise GraphError(f"{at(what)}: max_norm must be a positive number or a float without dims, got {max_norm}")
    else:
        bounded(max_norm, what, "max_norm", POSITIVE)
    dtype = FLOAT64 if all(g.dtype is FLOAT64 for g in grads) else FLOAT32
    squares = _map_like_slots(lambda g, d: reduce_sum(square(cast(g, d))), grads, owners, dtype)
    with region(UPDATE), absolute_scope("clip_by_global_norm"):
        norm = sqrt(add_n(squares))
        limit = cast(max_norm, dtype) if isinstance(max_norm, Tensor) else float(max_norm)
        factor = limit / maximum(norm, limit)
    return _map_like_slots(lambda g, f: cast(cast(g, f.dtype) * f, g.dtype), grads, owners, factor), norm


def _all_finite(grads: Sequence[Tensor], owners: Sequence[Operation]) -> Tensor:
    """True if every element is finite: 0 times an infinity or NaN is NaN, which every sum propagates."""
    zeros = _map_like_slots(lambda g, d: cast(reduce_sum(g * 0.0), d), grads, owners, FLOAT32)
    with region(UPDATE), absolute_scope("loss_scale"):
        return equal(add_n(zeros), 0.0)


def reduce_rms(x: Tensor) -> Tensor:
    """The root mean square of all elements."""
    return sqrt(reduce_mean(square(x), output_shape=[]))
