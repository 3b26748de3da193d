"""Losses."""

from __future__ import annotations

from layouts import Dimension
from meshlib.checks import at, number
from meshlib.dtypes import INT32
from meshlib.errors import ShapeError
from meshlib.graph import Tensor, find_dim
from meshlib.layers.norms import widened
from meshlib.ops.activations import softplus
from meshlib.ops.building import tensor
from meshlib.ops.elementwise import square, subtract
from meshlib.ops.index import gather
from meshlib.ops.reduce import reduce_logsumexp, reduce_mean, reduce_sum


def softmax_cross_entropy_with_logits(
    logits: Tensor, targets: Tensor, vocab_dim: Dimension, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """-sum over vocab of targets * log_softmax(logits).

    Labels as int32 are cheaper than a one-hot: of a split vocab every device looks up its own, and no value of the
    size of the logits is made for them but the gradient.

    Args:
      logits: float, with `vocab_dim`.
      targets: the wanted distribution, same dims and dtype; or int32 labels, the dims of logits but `vocab_dim`.
      vocab_dim: the dim of the classes.
      z_loss: adds z_loss * log(sum(exp(logits)))^2, which keeps the logits from drifting.
      label_smoothing: the share of the wanted distribution that is spread evenly over all classes.
    Returns: the loss of each example: the dims of logits but `vocab_dim`; float32 if the logits are bfloat16.
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
        raise ShapeError(f"{at(what)}: {rule}\n  {logits}\n  {targets}")
    if not by_label and targets.dtype is not logits.dtype:
        raise ShapeError(
            f"{at(what)}: targets must be int32 labels or a distribution in the dtype of the logits"
            f"\n  {logits}\n  {targets}"
        )
    wide = widened(logits)
    log_z = reduce_logsumexp(wide, vocab)
    if by_label:
        wanted_logit = gather(wide, targets, vocab)
        if smoothing:  # of a split vocab both are sums over its parts, which are reduced as one
            wanted_logit = wanted_logit * (1 - smoothing) + reduce_mean(wide, reduced_dim=vocab) * smoothing
        loss = log_z - wanted_logit
    else:
        even = widened(targets) * (1 - smoothing) + smoothing / vocab.size if smoothing else widened(targets)
        loss = reduce_sum((log_z - wide) * even, reduced_dim=vocab)
    return loss + square(log_z) * z_loss if z_loss else loss


def sigmoid_cross_entropy_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """-targets * log(sigmoid(logits)) - (1 - targets) * log(1 - sigmoid(logits)), each element by itself.

    Computed as log(1 + exp(logits)) - logits * targets, which no logit lets overflow.

    Args:
      logits: float.
      targets: the wanted probabilities, same dims and dtype.
    Returns: the loss of each element: the dims of logits; float32 if the logits are bfloat16.
    Raises: ShapeError if dims or dtypes differ.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     loss = mtf.layers.sigmoid_cross_entropy_with_logits(mtf.constant(0.0), mtf.constant(1.0))
      >>> round(float(mtf.simulate(mtf.lower({"loss": loss})).step()["loss"]), 4)  # log 2
      0.6931
    """
    what = "sigmoid_cross_entropy_with_logits"
    same = set(tensor(logits, what).shape) == set(tensor(targets, what).shape)
    if not same or not logits.dtype.is_wide_float or targets.dtype is not logits.dtype:
        rule = "logits and targets must be floats of the same dims and dtype"
        raise ShapeError(f"{at(what)}: {rule}\n  {logits}\n  {targets}")
    wide = widened(logits)
    return subtract(softplus(wide), wide * widened(targets), logits.shape)
