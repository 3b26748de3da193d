"""Loss functions."""

from __future__ import annotations

from layouts import Dimension
from meshlib.core.arguments import at, number
from meshlib.core.dtypes import INT32
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim
from meshlib.layers.norms import widened
from meshlib.ops.building import floats, tensor
from meshlib.ops.movement.indexing import gather
from meshlib.ops.pointwise.activations import softplus
from meshlib.ops.pointwise.arithmetic import abs, add, exp, maximum, minimum, multiply, square, subtract
from meshlib.ops.pointwise.reductions import reduce_logsumexp, reduce_mean, reduce_sum


def softmax_cross_entropy_with_logits(
    logits: Tensor, targets: Tensor, vocab_dim: Dimension, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """-sum over vocab of targets * log_softmax(logits).

    int32 labels are cheaper than one-hots: with a split vocab every device looks up labels in its block, and no tensor
    of the size of the logits is created except the gradient.

    Args:
      logits: float, with `vocab_dim`.
      targets: the target distribution, same dims and dtype; or int32 labels, the dims of logits except `vocab_dim`.
      vocab_dim: the dim of the classes.
      z_loss: adds z_loss * log(sum(exp(logits)))^2, which keeps the logits from drifting.
      label_smoothing: the share of the target distribution that is spread evenly over all classes.
    Returns: the loss per example: the dims of logits except `vocab_dim`; float32 if the logits are bfloat16.
    Raises: ShapeError if shapes differ, GraphError if the logits lack `vocab_dim`; FeedError at run time for a label
      out of range.
    Example:
      >>> import meshlib as mtf
      >>> batch, classes = mtf.Dimension("batch", 2), mtf.Dimension("classes", 4)
      >>> with mtf.Graph():
      ...     labels = mtf.input("labels", [batch], "int32")
      ...     loss = mtf.layers.softmax_cross_entropy_with_logits(mtf.zeros([batch, classes]), labels, classes)
      >>> mtf.simulate(mtf.lower({"loss": loss})).step(labels=[0, 3])["loss"].round(3).tolist()  # log 4
      [1.3860000371932983, 1.3860000371932983]

    Source: label smoothing: Szegedy et al., arXiv:1512.00567; z-loss: Chowdhery et al., arXiv:2204.02311, section 5.
    """
    what = "softmax_cross_entropy_with_logits"
    z_loss, smoothing = number(z_loss, what, "z_loss"), number(label_smoothing, what, "label_smoothing")
    if not 0 <= smoothing < 1:
        raise ShapeError(f"{at(what)}: label_smoothing must be in [0, 1), got {label_smoothing}")
    vocab = find_dim(tensor(logits, what), vocab_dim, what)
    by_label = tensor(targets, what).dtype is INT32
    wanted = {d for d in logits.shape if d != vocab} if by_label else set(logits.shape)
    if set(targets.shape) != wanted:
        rule = (
            "labels must have the dims of the logits but the vocab's"
            if by_label
            else "logits and targets must have the same dims"
        )
        raise ShapeError(f"{at(what)}: {rule}", logits, targets)
    if not by_label and targets.dtype is not logits.dtype:
        raise ShapeError(
            f"{at(what)}: targets must be int32 labels or a distribution in the dtype of the logits", logits, targets
        )
    wide = widened(logits)
    log_z = reduce_logsumexp(wide, vocab)
    if by_label:
        wanted_logit = gather(wide, targets, vocab)
        if smoothing:  # with a split vocab both are pending sums, reduced by one collective
            wanted_logit = wanted_logit * (1 - smoothing) + reduce_mean(wide, reduced_dim=vocab) * smoothing
        loss = log_z - wanted_logit
    else:
        even = widened(targets) * (1 - smoothing) + smoothing / vocab.size if smoothing else widened(targets)
        loss = reduce_sum((log_z - wide) * even, reduced_dim=vocab)
    return loss + square(log_z) * z_loss if z_loss else loss


def sigmoid_cross_entropy_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """-targets * log(sigmoid(logits)) - (1 - targets) * log(1 - sigmoid(logits)), element-wise.

    Computed as log(1 + exp(logits)) - logits * targets, without overflow.

    Args:
      logits: float.
      targets: the target probabilities, same dims and dtype.
    Returns: the loss per element: the dims of logits; float32 if the logits are bfloat16.
    Raises: ShapeError if dims or dtypes differ.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     loss = mtf.layers.sigmoid_cross_entropy_with_logits(mtf.constant(0.0), mtf.constant(1.0))
      >>> round(float(mtf.simulate(mtf.lower({"loss": loss})).step()["loss"]), 4)  # log 2
      0.6931
    """
    what = "sigmoid_cross_entropy_with_logits"
    wide, wanted = _wide_operands(logits, targets, what, "logits")
    return subtract(softplus(wide), wide * wanted, logits.shape)


def focal_loss(logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Element-wise cross entropy in which easy elements have little weight.

    -targets alpha (1 - p)^gamma log(p) - (1 - targets) (1 - alpha) p^gamma log(1 - p),  p = sigmoid(logits)

    Computed from softplus of the logits, without overflow; with gamma = 0 and alpha = 0.5 it is half of
    `sigmoid_cross_entropy_with_logits`.

    Args:
      logits: float.
      targets: the target probabilities, same dims and dtype.
      alpha: weight of positive elements, in [0, 1].
      gamma: how fast easy elements fade; not negative.
    Returns: the loss of each element: the dims of logits; float32 if the logits are bfloat16. RetinaNet divides the sum
      by the number of anchors assigned to an object.
    Raises: ShapeError if dims or dtypes differ, or alpha or gamma are out of range.
    Source: Lin et al., arXiv:1708.02002, equation 5.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     loss = mtf.layers.focal_loss(mtf.constant(0.0), mtf.constant(1.0))
      >>> round(float(mtf.simulate(mtf.lower({"loss": loss})).step()["loss"]), 4)  # 0.25 * 0.5^2 * log 2
      0.0433
    """
    what = "focal_loss"
    alpha, gamma = number(alpha, what, "alpha"), number(gamma, what, "gamma")
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ShapeError(f"{at(what)}: alpha must be in [0, 1] and gamma not negative, got {alpha:g} and {gamma:g}")
    wide, wanted = _wide_operands(logits, targets, what, "logits")
    pos, neg = softplus(-wide), softplus(wide)  # -log(p), -log(1 - p)
    if gamma:
        pos, neg = pos * exp(neg * -gamma), neg * exp(pos * -gamma)
    return add(wanted * pos * alpha, (1 - wanted) * neg * (1 - alpha), logits.shape)


def smooth_l1_loss(predictions: Tensor, targets: Tensor, beta: float = 1.0) -> Tensor:
    """d^2 / (2 beta) where d = |predictions - targets| is below beta, d - beta / 2 elsewhere, element-wise.

    Times beta it is the Huber loss of width beta. TensorFlow's RetinaNet uses the Huber loss of width 0.1.

    Args:
      predictions: float.
      targets: same dims and dtype.
      beta: bound of the quadratic part; positive.
    Returns: the loss of each element: the dims of predictions; float32 if they are bfloat16.
    Raises: ShapeError if dims or dtypes differ, or beta is not positive.
    Source: Girshick, "Fast R-CNN", arXiv:1504.08083, equation 3; Huber, "Robust estimation of a location parameter".
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.smooth_l1_loss(mtf.input("x", "d:2"), mtf.zeros("d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[0.5, 3.0])["y"])
      [0.125 2.5  ]
    """
    what = "smooth_l1_loss"
    beta = number(beta, what, "beta")
    if beta <= 0:
        raise ShapeError(f"{at(what)}: beta must be positive, got {beta:g}")
    wide, wanted = _wide_operands(predictions, targets, what, "predictions")
    distance = abs(subtract(wide, wanted, predictions.shape))
    near = minimum(distance, beta)
    return near * (distance - near * 0.5) * (1 / beta)


def hinge_loss(logits: Tensor, targets: Tensor | float) -> Tensor:
    """max(0, 1 - targets * logits), element-wise.

    A GAN's discriminator uses it with target 1.0 for real and -1.0 for generated examples; the generator's loss is the
    negative mean of the latter's logits.

    Args:
      logits: float.
      targets: 1 or -1: a tensor of the dims and dtype of the logits, or a number.
    Returns: the loss of each element: the dims of logits; float32 if they are bfloat16.
    Raises: ShapeError if dims or dtypes differ.
    Source: Lim and Ye, "Geometric GAN", arXiv:1705.02894, equations 20, 21.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.hinge_loss(mtf.input("x", "d:2"), 1.0)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[0.5, 3.0])["y"])
      [0.5 0. ]
    """
    what = "hinge_loss"
    if isinstance(targets, Tensor):
        wide, wanted = _wide_operands(logits, targets, what, "logits")
        return maximum(1 - multiply(wide, wanted, logits.shape), 0.0)
    return maximum(1 - widened(floats(logits, what)) * number(targets, what, "targets"), 0.0)


def _wide_operands(x: Tensor, targets: Tensor, what: str, first: str) -> tuple[Tensor, Tensor]:
    """Both operands in the dtype of sums, which must have the same type."""
    same = set(tensor(x, what).shape) == set(tensor(targets, what).shape)
    if not same or not x.dtype.is_wide_float or targets.dtype is not x.dtype:
        rule = f"{first} and targets must be floats of the same dims and dtype"
        raise ShapeError(f"{at(what)}: {rule}", x, targets)
    return widened(x), widened(targets)
