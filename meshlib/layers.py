"""Layers, written in operations alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layouts import Dimension, Shape
from meshlib import initializers
from meshlib.checks import at
from meshlib.errors import ShapeError
from meshlib.graph import Tensor, scope
from meshlib.operation import as_dims, tensor
from meshlib.ops.einsum import einsum
from meshlib.ops.elementwise import square
from meshlib.ops.reduce import reduce_logsumexp, reduce_sum
from meshlib.ops.sources import variable


def dense(
    x: Tensor,
    new_dims: Dimension | Sequence[Dimension],
    reduced_dims: Sequence[Dimension] | None = None,
    use_bias: bool = True,
    activation: Callable[[Tensor], Tensor] | None = None,
    variable_dtype: object = "float32",
    slice_dtype: object | None = None,
    kernel_initializer: initializers.Initializer | None = None,
    name: str = "dense",
) -> Tensor:
    """activation(x W + b).

    Args:
      x: [..., reduced_dims], float.
      new_dims: dims of the result in place of `reduced_dims`.
      reduced_dims: dims of x to contract; its last one unless given.
      use_bias: whether to add b, of dims `new_dims`, zeros at first.
      activation: applied to the result.
      variable_dtype, slice_dtype: of the variables; they are used in the dtype of x.
      kernel_initializer: of W; normal with variance 1 / (size of reduced_dims) unless given.
      name: scope of the variables `kernel` and `bias`.
    Returns: [..., new_dims], dtype of x.
    Raises: ShapeError if a new dim is in x already or a reduced one is not.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("inner", 4)])
      ...     y = mtf.layers.dense(x, mtf.Dimension("outer", 2))
      >>> print(y.shape)
      [batch:8, outer:2]
    """
    tensor(x, "dense")
    new = as_dims(new_dims, "dense new_dims")
    if reduced_dims is None:
        if not len(x.shape):
            raise ShapeError(f"{at('dense')}: {x} has no dim to contract")
        reduced: tuple[Dimension, ...] = (x.shape[-1],)
    else:
        reduced = as_dims(reduced_dims, "dense reduced_dims")
    missing = [str(d) for d in reduced if d not in x.shape]
    if missing:
        raise ShapeError(f"{at('dense')} '{name}': reduced_dims {', '.join(missing)} are not in {x}")
    kept = [d for d in x.shape if d not in reduced]
    clashing = [str(d) for d in new if d.name in x.shape]
    if clashing:
        raise ShapeError(f"{at('dense')} '{name}': new_dims {', '.join(clashing)} are in {x} already; rename one side")
    with scope(name):
        init = kernel_initializer or initializers.scaled_normal(reduced)
        kernel = variable("kernel", [*reduced, *new], init, variable_dtype, slice_dtype, x.dtype)
        y = einsum([x, kernel], output_shape=Shape([*kept, *new]))
        if use_bias:
            y = y + variable("bias", new, initializers.zeros(), variable_dtype, slice_dtype, x.dtype)
        return y if activation is None else activation(y)


def softmax_cross_entropy_with_logits(
    logits: Tensor, targets: Tensor, vocab_dim: Dimension, z_loss: float = 0.0
) -> Tensor:
    """-sum over vocab of targets * log_softmax(logits).

    Args:
      logits: float, with `vocab_dim`.
      targets: the wanted distribution, same dims and dtype; a one-hot for labels.
      vocab_dim: the dim of the classes.
      z_loss: adds z_loss * log(sum(exp(logits)))^2, which keeps the logits from drifting.
    Returns: the loss of each example: the dims of logits but `vocab_dim`.
    Raises: ShapeError if shapes differ or lack `vocab_dim`.
    """
    tensor(logits, "softmax_cross_entropy_with_logits"), tensor(targets, "softmax_cross_entropy_with_logits")
    if set(logits.shape) != set(targets.shape):
        raise ShapeError(
            f"{at('softmax_cross_entropy_with_logits')}: logits and targets must have the same dims"
            f"\n  {logits}\n  {targets}"
        )
    if vocab_dim not in logits.shape:
        raise ShapeError(f"{at('softmax_cross_entropy_with_logits')}: {logits} has no dim {vocab_dim}")
    log_z = reduce_logsumexp(logits, vocab_dim)
    loss = reduce_sum((log_z - logits) * targets, reduced_dim=vocab_dim)
    return loss + square(log_z) * z_loss if z_loss else loss
