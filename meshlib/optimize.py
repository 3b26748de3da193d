"""Optimizers and learning rates, written in operations; every one is `gradients` plus `apply_grads`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np

from layouts import Shape
from meshlib import initializers
from meshlib.checks import at, items, number, whole
from meshlib.errors import GraphError
from meshlib.gradients import gradients
from meshlib.graph import UPDATE, Operation, Tensor, absolute_scope, region
from meshlib.operation import tensor
from meshlib.ops.elementwise import cast, maximum, minimum, pow, sqrt, square
from meshlib.ops.sources import make_variable, step
from meshlib.ops.state import assign, stored

Schedule = Callable[[Tensor], Tensor | float]
LearningRate = float | Tensor | Schedule


def constant(lr: float) -> Schedule:
    """The same learning rate at every step."""
    rate = number(lr, "optimize.constant", "lr")
    return lambda done: rate


def warmup_then_decay(peak: float, warmup_steps: int, decay: float = 0.5) -> Schedule:
    """Linear from 0 to `peak` over `warmup_steps`, then peak * (warmup_steps / step) ** decay.

    With decay = 0.5 this is the schedule of "Attention is all you need" (Vaswani et al. 2017, section 5.3).
    Raises: GraphError unless warmup_steps >= 1.
    """
    what = "warmup_then_decay"
    peak, decay = number(peak, what, "peak"), number(decay, what, "decay")
    if whole(warmup_steps, what, "warmup_steps") < 1:
        raise GraphError(f"{at(what)}: warmup_steps must be at least 1, got {warmup_steps}")

    def rate(before: Tensor) -> Tensor:
        done = cast(before, "float32") + 1
        return minimum(done / warmup_steps, pow(maximum(done, 1) / warmup_steps, -decay)) * peak

    return rate


class Optimizer(abc.ABC):
    """Turns gradients into updates of variables.

    `lr` is a float, a tensor without dims, or a schedule: a function of the step tensor.
    """

    def __init__(self, lr: LearningRate) -> None:
        if isinstance(lr, str | bool | None) or not (isinstance(lr, int | float | np.generic | Tensor) or callable(lr)):
            raise GraphError(
                f"{at(type(self).__name__)}: the learning rate must be a number, a tensor or a schedule (a function of "
                f"the step), got {type(lr).__name__} {lr!r:.80}"
            )
        self.lr = lr if callable(lr) and not isinstance(lr, Tensor) else self._rate(lr)

    def _rate(self, lr: object) -> Tensor | float:
        what = type(self).__name__
        if not isinstance(lr, Tensor):
            return number(lr, what, "the learning rate")
        if len(lr.shape) or not lr.dtype.is_float:
            raise GraphError(f"{at(what)}: a learning rate is a float without dims, got {lr}; cast or reduce it")
        return lr

    def minimize(self, loss: Tensor, variables: Sequence[Tensor] | None = None) -> list[Operation]:
        """The updates of one step that lowers `loss`: what `mtf.lower(updates=...)` takes.

        Args:
          loss: a float tensor; its elements are summed.
          variables: to train; all trainable ones of the graph that the loss depends on, unless given.
        Raises: GraphError if the loss depends on none of them.
        """
        tensor(loss, "minimize")
        wanted = [stored(v).output for v in variables] if variables is not None else loss.graph.trainable_variables
        grads = gradients([loss], list(wanted))
        pairs = [(g, v) for g, v in zip(grads, wanted, strict=True) if g is not None]
        if not pairs:
            known = ", ".join(f"'{v.name}'" for v in wanted) or "none declared"
            raise GraphError(
                f"{at('minimize')}: {loss} ({loss.operation.source}) depends on no trainable variable; known: {known}"
            )
        return self.apply_grads([g for g, _ in pairs], [v for _, v in pairs])

    def apply_grads(self, grads: Sequence[Tensor], variables: Sequence[Tensor]) -> list[Operation]:
        """The updates of `variables` for given gradients."""
        grads, variables = items(grads, "apply_grads", "grads"), items(variables, "apply_grads", "variables")
        if len(grads) != len(variables):
            raise GraphError(f"{at('apply_grads')}: {len(grads)} gradients for {len(variables)} variables")
        updates: list[Operation] = []
        for grad, v in zip(grads, variables, strict=True):
            op = stored(v)
            tensor(grad, "apply_grads")
            if set(grad.shape) != set(op.output.shape):
                raise GraphError(f"{at('apply_grads')}: gradient {grad} does not have the dims of {op.output}")
            with op.graph, absolute_scope(op.name), region(UPDATE, op):
                updates += self.apply_grad(cast(grad, "float32"), op)
        return updates

    @abc.abstractmethod
    def apply_grad(self, grad: Tensor, variable: Operation) -> list[Operation]:
        """The updates of one variable and its slots."""

    def learning_rate(self) -> Tensor | float:
        """The learning rate of this step."""
        if isinstance(self.lr, Tensor) or not callable(self.lr):
            return self.lr
        return self._rate(self.lr(step()))

    def slot(self, variable: Operation, name: str, shape: Shape | None = None) -> Tensor:
        """A float32 variable that accompanies `variable`, zeros at first; layout rules reach it under `slots/`."""
        return make_variable(
            name,
            variable.output.shape if shape is None else shape,
            initializers.zeros(),
            trainable=False,
            slot_of=variable.name,
        )

    def write(self, variable: Operation, value: Tensor) -> Operation:
        """The update of a variable, or of a slot, with a float32 value."""
        return assign(variable.output, value)


def _value(variable: Operation) -> Tensor:
    return cast(variable.output, "float32")


class SgdOptimizer(Optimizer):
    """Stochastic gradient descent: w <- w - lr g.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [mtf.Dimension("d", 2)], 1.0)
      ...     train = mtf.optimize.SgdOptimizer(lr=0.25).minimize(mtf.reduce_sum(w * w))
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> _ = sim.step()
      >>> sim.state["w"].tolist()
      [0.5, 0.5]
    """

    def apply_grad(self, grad: Tensor, variable: Operation) -> list[Operation]:
        """w <- w - lr g."""
        return [self.write(variable, _value(variable) - grad * self.learning_rate())]


class MomentumOptimizer(Optimizer):
    """Momentum: m <- momentum m + g; w <- w - lr m.

    Slot `momentum`. Source: Sutskever et al., "On the importance of initialization and momentum", 2013.
    """

    def __init__(self, lr: LearningRate, momentum: float = 0.9) -> None:
        super().__init__(lr)
        self.momentum = number(momentum, "MomentumOptimizer", "momentum")

    def apply_grad(self, grad: Tensor, variable: Operation) -> list[Operation]:
        """m <- momentum m + g; w <- w - lr m."""
        m = self.slot(variable, "momentum")
        new = m * self.momentum + grad
        return [assign(m, new), self.write(variable, _value(variable) - new * self.learning_rate())]


class AdamOptimizer(Optimizer):
    """Adam: m and v are running means of g and g^2, both corrected for their start at zero.

    w <- w - lr m' / (sqrt(v') + epsilon), m' = m / (1 - beta_1^t), v' = v / (1 - beta_2^t).
    Slots `adam_m`, `adam_v`. Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.
    """

    def __init__(self, lr: LearningRate, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8) -> None:
        super().__init__(lr)
        what = "AdamOptimizer"
        self.beta_1, self.beta_2 = number(beta_1, what, "beta_1"), number(beta_2, what, "beta_2")
        self.epsilon = number(epsilon, what, "epsilon")
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not 0 <= beta < 1:
                raise GraphError(f"{at(what)}: {name} must be in [0, 1), got {beta}")

    def apply_grad(self, grad: Tensor, variable: Operation) -> list[Operation]:
        """The running means, and the step they give."""
        m, v = self.slot(variable, "adam_m"), self.slot(variable, "adam_v")
        new_m = m * self.beta_1 + grad * (1 - self.beta_1)
        new_v = v * self.beta_2 + square(grad) * (1 - self.beta_2)
        count = cast(step(), "float32") + 1
        # m' / (sqrt(v') + epsilon), with the corrections taken out of the large tensors.
        root_of_v = sqrt(1 - pow(self.beta_2, count))
        scale = root_of_v / (1 - pow(self.beta_1, count)) * self.learning_rate()
        new = _value(variable) - new_m / (sqrt(new_v) + root_of_v * self.epsilon) * scale
        return [assign(m, new_m), assign(v, new_v), self.write(variable, new)]


__all__ = [
    "AdamOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "SgdOptimizer",
    "constant",
    "warmup_then_decay",
]
