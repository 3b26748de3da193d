"""Optimizers with slots of the shape of their variable: SGD, momentum, the Adam family, LARS, Lion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from meshlib.core.arguments import FRACTION, POSITIVE, flag
from meshlib.core.dtypes import DType
from meshlib.core.graph import Tensor
from meshlib.ops.control.sources import scalar
from meshlib.ops.pointwise.arithmetic import greater, logical_and, pow, sign, sqrt, square, where
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_sum
from meshlib.optimize.base import LearningRate, Optimizer, OptimizerOptions, Scalars, Update

# Variables of layers to exclude from weight decay and trust ratios: scales and biases of norms, biases of products,
# gains of residual branches. Source: Goyal et al., arXiv:1706.02677, section 5.1; You et al. 2017.
NORMS_AND_BIASES = (r"(^|/)(scale|bias|gain)$",)


class SgdOptimizer(Optimizer):
    """Stochastic gradient descent: w <- w - lr g.

    Args:
      lr: learning rate.
    Slots: none (`master` for a bfloat16 variable, as for every optimizer).
    Source: Robbins and Monro, "A stochastic approximation method", 1951.
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

    def rule(self, u: Update) -> Tensor:
        """w - lr g."""
        return u.value - u.grad * u.lr


class MomentumOptimizer(Optimizer):
    """Momentum: m <- momentum m + g; w <- w - lr m, or with Nesterov momentum w <- w - lr (momentum m + g).

    With weight_decay g is the gradient + weight_decay w, the gradient of loss + weight_decay |w|^2 / 2.

    Args:
      lr: learning rate.
      momentum: in [0, 1).
      nesterov: whether to use Nesterov momentum, with the new m.
      weight_decay: of the weights, added to the gradient.
      exclude_from_weight_decay: regular expressions; variables with a matching name are not decayed; usually
        `mtf.optimize.NORMS_AND_BIASES`.
    Slots: `momentum`.
    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 0.0)
      ...     train = mtf.optimize.MomentumOptimizer(0.5, 0.5).apply_grads([mtf.constant(1.0)], [w])
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> for _ in range(2):
      ...     _ = sim.step()
      >>> float(sim.state["w"]), float(sim.state["w/momentum"])  # -(0.5 + 0.75), 0.5 + 1
      (-1.25, 1.5)
    """

    def __init__(
        self,
        lr: LearningRate,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = None,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(lr, **kept)
        self.momentum = self.bounded(momentum, "momentum", FRACTION)
        self.nesterov = flag(nesterov, type(self).__name__, "nesterov")
        self.weight_decay = self.bounded(weight_decay, "weight_decay")
        self.exclude = self.patterns(exclude_from_weight_decay, "exclude_from_weight_decay")

    def rule(self, u: Update) -> Tensor:
        """One step along the running sum of gradients."""
        m, grad = u.slot("momentum"), self.decayed(u, u.grad)
        new = m * self.momentum + grad
        u.write(m, new)
        along = new * self.momentum + grad if self.nesterov else new
        return u.value - along * u.lr


class AdamOptimizer(Optimizer):
    """Adam: m and v are running means of g and g^2 with bias correction.

    m <- beta_1 m + (1 - beta_1) g,  v <- beta_2 v + (1 - beta_2) g^2
    w <- w - lr m' / (sqrt(v') + epsilon),  m' = m / (1 - beta_1^t), v' = v / (1 - beta_2^t), t from 1

    Args:
      lr: learning rate.
      beta_1, beta_2: in [0, 1).
      epsilon: added to the root.
      mean_dtype: dtype of m, if different from other slots.
    Slots: `adam_m`, `adam_v`.
    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 0.0)
      ...     train = mtf.optimize.AdamOptimizer(0.5).apply_grads([mtf.constant(8.0)], [w])
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> _ = sim.step()
      >>> round(float(sim.state["w"]), 4)  # m' / sqrt(v') = 1, whatever the gradient
      -0.5
    """

    def __init__(
        self,
        lr: LearningRate,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        mean_dtype: object = None,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(lr, **kept)
        self.beta_1, self.beta_2 = self.bounded(beta_1, "beta_1", FRACTION), self.bounded(beta_2, "beta_2", FRACTION)
        self.epsilon = self.bounded(epsilon, "epsilon")
        self.mean_dtype = None if mean_dtype is None else self._float(mean_dtype, "mean_dtype")

    def scalars(self, done: Tensor, dtype: DType) -> Scalars:
        """The bias corrections of both means, as numbers instead of factors of the large tensors."""
        lr = super().scalars(done, dtype)["lr"]
        t = cast(done, dtype) + 1
        root_of_v = sqrt(1 - pow(self.beta_2, t))
        return {"lr": lr, "scale": root_of_v / (1 - pow(self.beta_1, t)) * lr, "epsilon": root_of_v * self.epsilon}

    def rule(self, u: Update) -> Tensor:
        """Update the running means; returns the new value."""
        m, v = self.means(u)
        return u.value - m / (sqrt(v) + u.scalars["epsilon"]) * u.scalars["scale"]

    def means(self, u: Update) -> tuple[Tensor, Tensor]:
        """The new running means of g and g^2, written to their slots."""
        m, v = u.slot("adam_m", dtype=self.mean_dtype), u.slot("adam_v")
        new_m = m * self.beta_1 + u.grad * (1 - self.beta_1)
        new_v = v * self.beta_2 + square(u.grad) * (1 - self.beta_2)
        u.write(m, new_m)
        u.write(v, new_v)
        return new_m, new_v


class AdamWOptimizer(AdamOptimizer):
    """Adam with decoupled weight decay: `AdamOptimizer`, and w <- w - lr weight_decay w.

    Args:
      lr, beta_1, beta_2, epsilon, mean_dtype: as in AdamOptimizer.
      weight_decay: fraction of w that a step at learning rate 1 takes away.
      exclude_from_weight_decay: regular expressions; a variable in whose name one is found is not decayed.
    Slots: `adam_m`, `adam_v`.
    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 4.0)
      ...     train = mtf.optimize.AdamWOptimizer(0.5, weight_decay=0.5).apply_grads([mtf.constant(0.0)], [w])
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> _ = sim.step()
      >>> float(sim.state["w"])
      3.0
    """

    def __init__(
        self,
        lr: LearningRate,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        exclude_from_weight_decay: Sequence[str] | None = None,
        mean_dtype: object = None,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(lr, beta_1, beta_2, epsilon, mean_dtype, **kept)
        self.weight_decay = self.bounded(weight_decay, "weight_decay")
        self.exclude = self.patterns(exclude_from_weight_decay, "exclude_from_weight_decay")

    def rule(self, u: Update) -> Tensor:
        """Adam's step, and the decay."""
        new = super().rule(u)
        if not self.weight_decay or u.matches(self.exclude):
            return new
        return new - u.value * (u.lr * self.weight_decay)


class AdamWeightDecayOptimizer(AdamOptimizer):
    """Adam without bias correction, with decoupled weight decay, as in the training of BERT.

    w <- w - lr (m / (sqrt(v) + epsilon) + weight_decay_rate w), with Adam's m and v.

    Args:
      learning_rate: learning rate.
      weight_decay_rate: fraction of w that a step at learning rate 1 takes away.
      beta_1, beta_2: in [0, 1).
      epsilon: added to the root.
      exclude_from_weight_decay: regular expressions; a variable in whose name one is found is not decayed.
    Slots: `adam_m`, `adam_v`.
    Source: Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2019, appendix A.2; the optimizer
      of this name in Mesh TensorFlow.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 4.0)
      ...     adam = mtf.optimize.AdamWeightDecayOptimizer(0.5, 0.5)
      ...     train = adam.apply_grads([mtf.constant(0.0)], [w])
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> _ = sim.step()
      >>> float(sim.state["w"])
      3.0
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Sequence[str] | None = None,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **kept)
        self.weight_decay = self.bounded(weight_decay_rate, "weight_decay_rate")
        self.exclude = self.patterns(exclude_from_weight_decay, "exclude_from_weight_decay")

    def scalars(self, done: Tensor, dtype: DType) -> Scalars:
        """The learning rate alone."""
        return Optimizer.scalars(self, done, dtype)

    def rule(self, u: Update) -> Tensor:
        """The step of the uncorrected means, and the decay."""
        m, v = self.means(u)
        return u.value - self.decayed(u, m / (sqrt(v) + self.epsilon)) * u.lr


class LionOptimizer(Optimizer):
    """Lion: steps by the sign of an interpolation of momentum and gradient.

    w <- w - lr (sign(beta_1 m + (1 - beta_1) g) + weight_decay w), then m <- beta_2 m + (1 - beta_2) g

    Args:
      lr: learning rate; every element changes by this much, so use 3 to 10 times less than for Adam.
      beta_1, beta_2: in [0, 1).
      weight_decay: fraction of w that a step at learning rate 1 takes away.
      exclude_from_weight_decay: regular expressions; a variable in whose name one is found is not decayed.
    Slots: `lion_m`.
    Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023, program 1.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 0.0)
      ...     train = mtf.optimize.LionOptimizer(0.25).apply_grads([mtf.constant(-7.0)], [w])
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> _ = sim.step()
      >>> float(sim.state["w"])
      0.25
    """

    def __init__(
        self,
        lr: LearningRate,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        weight_decay: float = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = None,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(lr, **kept)
        self.beta_1, self.beta_2 = self.bounded(beta_1, "beta_1", FRACTION), self.bounded(beta_2, "beta_2", FRACTION)
        self.weight_decay = self.bounded(weight_decay, "weight_decay")
        self.exclude = self.patterns(exclude_from_weight_decay, "exclude_from_weight_decay")

    def rule(self, u: Update) -> Tensor:
        """One step of equal length in every element."""
        m = u.slot("lion_m")
        along = sign(m * self.beta_1 + u.grad * (1 - self.beta_1))
        u.write(m, m * self.beta_2 + u.grad * (1 - self.beta_2))
        return u.value - self.decayed(u, along) * u.lr


class LarsOptimizer(Optimizer):
    """LARS: momentum with a learning rate scaled per variable to the norm of the weights.

    trust = trust_coefficient |w| / (|g| + weight_decay |w| + epsilon), 1 where |w| or |g| is 0
    m <- momentum m + lr trust (g + weight_decay w);  w <- w - m

    With scaled_momentum=False the learning rate is applied outside the sum:
    m <- momentum m + g + weight_decay w;  w <- w - lr trust m

    Args:
      lr: learning rate.
      momentum: in [0, 1).
      weight_decay: of the weights, added to the gradient.
      trust_coefficient: size of a step relative to |w|.
      epsilon: avoids division by zero.
      exclude: regular expressions; variables with a matching name have trust 1 and no weight decay; usually
        `mtf.optimize.NORMS_AND_BIASES`.
      scaled_momentum: whether the momentum accumulates scaled steps, as in the paper.
    Slots: `lars_momentum`.
    If a variable is split, its two norms cost one reduction of a number each.
    Source: You, Gitman, Ginsburg, "Large batch training of convolutional networks", 2017, algorithm 1; the two kinds of
      momentum: Kumar et al., "Scale MLPerf-0.6 models on Google TPU-v3 pods", arXiv:1909.09756.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 8.0)
      ...     lars = mtf.optimize.LarsOptimizer(1.0, trust_coefficient=0.125)
      ...     train = lars.apply_grads([mtf.constant(1000.0)], [w])
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> _ = sim.step()
      >>> float(sim.state["w"])  # one step takes an eighth, whatever the gradient
      7.0
    """

    def __init__(
        self,
        lr: LearningRate,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        exclude: Sequence[str] | None = None,
        scaled_momentum: bool = True,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(lr, **kept)
        self.scaled = flag(scaled_momentum, type(self).__name__, "scaled_momentum")
        self.momentum = self.bounded(momentum, "momentum", FRACTION)
        self.weight_decay = self.bounded(weight_decay, "weight_decay")
        self.trust_coefficient = self.bounded(trust_coefficient, "trust_coefficient", POSITIVE)
        self.epsilon = self.bounded(epsilon, "epsilon")
        self.exclude = self.patterns(exclude, "exclude")

    def rule(self, u: Update) -> Tensor:
        """Momentum at the rate times the trust ratio."""
        m = u.slot("lars_momentum")
        rate = u.lr if u.matches(self.exclude) else self._trust(u) * u.lr
        along = self.decayed(u, u.grad)
        new = m * self.momentum + (along * rate if self.scaled else along)
        u.write(m, new)
        return u.value - (new if self.scaled else new * rate)

    def _trust(self, u: Update) -> Tensor:
        w, g = norm(u.value), norm(u.grad)
        return trust_ratio(w * self.trust_coefficient, g + w * self.weight_decay + self.epsilon, w, g)


class LambOptimizer(AdamOptimizer):
    """LAMB: Adam with a step scaled per variable to the norm of the weights.

    along = m' / (sqrt(v') + epsilon) + weight_decay w, with Adam's corrected m' and v'
    w <- w - lr (|w| / |along|) along, with 1 for the ratio where |w| or |along| is 0

    Args:
      lr: learning rate.
      beta_1, beta_2, epsilon: as in AdamOptimizer.
      weight_decay: of the weights, added to the step before it is scaled.
      exclude: regular expressions; variables with a matching name have ratio 1 and no weight decay; usually
        `mtf.optimize.NORMS_AND_BIASES`.
    Slots: `adam_m`, `adam_v`.
    If a variable is split, its two norms cost one reduction of a number each.
    Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2,
      with the identity for phi.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 8.0)
      ...     train = mtf.optimize.LambOptimizer(0.125).apply_grads([mtf.constant(1000.0)], [w])
      >>> sim = mtf.simulate(mtf.lower(updates=train))
      >>> _ = sim.step()
      >>> round(float(sim.state["w"]), 4)  # one step takes an eighth, whatever the gradient
      7.0
    """

    def __init__(
        self,
        lr: LearningRate,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        exclude: Sequence[str] | None = None,
        **kept: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(lr, beta_1, beta_2, epsilon, **kept)
        self.weight_decay = self.bounded(weight_decay, "weight_decay")
        self.exclude = self.patterns(exclude, "exclude")

    def scalars(self, done: Tensor, dtype: DType) -> Scalars:
        """The learning rate separately from the bias corrections, which do not apply to the decay."""
        lr = Optimizer.scalars(self, done, dtype)["lr"]
        t = cast(done, dtype) + 1
        return {"lr": lr, "of_m": 1 / (1 - pow(self.beta_1, t)), "of_v": 1 / (1 - pow(self.beta_2, t))}

    def rule(self, u: Update) -> Tensor:
        """Adam's step with decay, scaled to lr times the norm of the weights."""
        m, v = self.means(u)
        along = self.decayed(u, m * u.scalars["of_m"] / (sqrt(v * u.scalars["of_v"]) + self.epsilon))
        if u.matches(self.exclude):
            return u.value - along * u.lr
        w, length = norm(u.value), norm(along)
        return u.value - along * (trust_ratio(w, length, w, length) * u.lr)


def norm(x: Tensor) -> Tensor:
    """The Euclidean norm over all elements."""
    return sqrt(reduce_sum(square(x)))


def trust_ratio(above: Tensor, below: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The trust ratio above / below; 1 if one of the norms is 0."""
    usable = logical_and(greater(first, 0), greater(second, 0))
    return where(usable, above / where(usable, below, 1.0), scalar(1.0, above))
