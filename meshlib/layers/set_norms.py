"""Norms over sets of elements: batch norm (global, per group, conditional) and group norm.

Sums are first reduced to few dims, [channels] or [batch, channels], and the small result is cut into groups: nothing of
the size of the input is sent or reshaped. The gradient is hand-written, so that backward sends as much as forward: two
numbers per mean and variance, which are also the gradients of scale and bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, number, whole
from meshlib.core.dtypes import INT32
from meshlib.core.errors import GraphError, ShapeError
from meshlib.core.graph import UPDATE, Operation, Tensor, find_dim, region, scope
from meshlib.core.names import free_name
from meshlib.layers.norms import checked_norm, widened
from meshlib.layers.numerics import DEFAULT, Numerics
from meshlib.layers.projection import projection
from meshlib.ops.building import as_dims, tensor
from meshlib.ops.control.custom_gradients import custom_gradient
from meshlib.ops.control.sources import variable
from meshlib.ops.control.state import assign, stored
from meshlib.ops.movement.indexing import gather
from meshlib.ops.movement.shape import broadcast, reshape, transpose
from meshlib.ops.pointwise.arithmetic import add, maximum, multiply, rsqrt, square
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import reduce_mean, reduce_sum

Updates = list[Operation]
Groups = int | Dimension | Sequence[Dimension]


@dataclass(frozen=True)
class NormSets:
    """Partition of a tensor's elements into sets with a common mean and variance: one per index along `apart`.

    The dim `cut` of these, if any, is divided into `group.size` consecutive ranges instead of single indices.
    """

    whole: Shape
    apart: Shape
    cut: Dimension | None = None
    group: Dimension | None = None

    @classmethod
    def of(cls, x: Tensor, apart: Sequence[Dimension], cut: Dimension | None, groups: int) -> NormSets:
        """The sets, with dims in the order of x."""
        set_dims = Shape([d for d in x.shape if d in apart or (d == cut and groups > 1)])
        if cut is None or groups in (1, cut.size):
            return cls(x.shape, set_dims)
        return cls(x.shape, set_dims, cut, Dimension(free_name(f"{cut.name}_group", x.shape.names), groups))

    def _shapes(self, shape: Shape) -> tuple[Shape, Shape]:
        """A shape with the dim `cut` split in two, and the shape of one number per set."""
        if self.cut is None or self.group is None:
            return shape, Shape([d for d in shape if d in self.apart])
        # Renamed, since rules for the cut dim need not divide it.
        inside = Dimension(free_name(f"{self.cut.name}_in_group", self.whole.names), self.cut.size // self.group.size)
        parts = Shape([p for d in shape for p in ((self.group, inside) if d == self.cut else (d,))])
        return parts, Shape([d for d in parts if d != inside and (d in self.apart or d == self.group)])

    def mean(self, sums: Tensor) -> Tensor:
        """The mean of each set, from sums that have at least its dims."""
        parts, sets = self._shapes(sums.shape)
        return reduce_sum(reshape(sums, parts), output_shape=sets) * (sets.size / self.whole.size)

    def spread(self, mean: Tensor) -> Tensor:
        """A number per set broadcast to dims of the tensor."""
        return reshape(broadcast(mean, self._shapes(self.apart)[0]), self.apart)


# ---------------------------------------------------------------- (x - mean) / deviation * scale + bias


def _moments(x: Tensor, sets: NormSets, fast: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance of each set: the variance as the mean of (x - mean)^2, or from sums of x and x^2 reduced
    together."""
    wide = widened(x)
    mean = sets.mean(reduce_sum(wide, output_shape=sets.apart))
    if fast:
        mean_square = sets.mean(reduce_sum(square(wide), output_shape=sets.apart))
        return mean, maximum(mean_square - square(mean), 0.0)
    return mean, sets.mean(reduce_sum(square(wide - sets.spread(mean)), output_shape=sets.apart))


def _affine(sets: NormSets, scaled: bool, x: Tensor, mean: Tensor, inverse: Tensor, *scale_bias: Tensor) -> Tensor:
    """x * factor + shift: one product and one sum per element, with factor and shift of few dims."""
    factor, centre = sets.spread(inverse), sets.spread(mean)
    if scaled:
        factor = factor * scale_bias[0]
    moved = centre * factor
    shift = scale_bias[-1] - moved if len(scale_bias) > scaled else -moved
    return cast(add(widened(x) * factor, shift, x.shape), x.dtype)


def _affine_gradient(
    sets: NormSets, scaled: bool, inputs: Sequence[Tensor], results: Any, cotangents: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradient of x through mean and variance: dx = (g - mean(g) - y mean(g y)) / deviation, g = dy scale, y =
    normalised x.

    Computed as dy a - (x b + c) with a, b and c per set, so that no tensor of the size of x is kept for it; the sum of
    dy y is that of dy (x - mean), which is accurate for large means.
    Source: Ioffe and Szegedy, arXiv:1502.03167, section 3.
    """
    x, mean, inverse, *scale_bias = inputs
    dy, wide = widened(cotangents[0]), widened(x)
    along = {d for t in scale_bias for d in t.shape} | set(sets.apart)
    shared = Shape([d for d in x.shape if d in along])
    centre, deviation = sets.spread(mean), sets.spread(inverse)
    sums = reduce_sum(dy, output_shape=shared)
    products = multiply(reduce_sum(dy * (wide - centre), output_shape=shared), deviation, shared)
    scale = scale_bias[0] if scaled else 1.0
    mean_g, mean_gy = (sets.spread(sets.mean(multiply(s, scale, shared))) for s in (sums, products))
    of_x = mean_gy * square(deviation)
    dx = dy * (deviation * scale) - (wide * of_x + (mean_g * deviation - centre * of_x))
    operand_gradients: list[Tensor | None] = [cast(transpose(dx, x.shape), x.dtype), None, None]
    for parameter, total in zip(scale_bias, (products, sums) if scaled else (sums,), strict=False):
        operand_gradients.append(reduce_sum(total, output_shape=parameter.shape))
    return operand_gradients


def _normalised(
    x: Tensor, sets: NormSets, epsilon: float, scale: Tensor | None, bias: Tensor | None, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the mean and variance of each set without gradients."""
    mean, variance = _moments(x, sets, fast)
    given = [t for t in (scale, bias) if t is not None]
    scaled = scale is not None
    y: Tensor = custom_gradient(
        partial(_affine, sets, scaled),
        partial(_affine_gradient, sets, scaled),
        [x, mean, rsqrt(variance + epsilon), *given],
    )
    return y, mean, variance


# ---------------------------------------------------------------- layers


def batch_norm(
    x: Tensor,
    channels: Dimension | Sequence[Dimension],
    is_training: bool,
    groups: Groups = 1,
    decay: float = 0.9,
    epsilon: float = 1e-5,
    use_scale: bool = True,
    use_bias: bool = True,
    scale_initializer: initializers.Initializer | float = 1.0,
    numerics: Numerics = DEFAULT,
    name: str = "batch_norm",
    use_fast_variance: bool = False,
) -> tuple[Tensor, Updates]:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; mean and variance over all dims except `channels`.

    Mean and variance do not depend on the layout: if the batch is split, the two sums of each channel are reduced over
    the devices (distributed batch norm). For statistics per core, or per group of cores, use `groups`: with n
    consecutive parts of a batch that is split over n cores, nothing is sent.

    Args:
      x: float, with `channels`; the batch is its first dim.
      channels: the dim or dims with separate statistics.
      is_training: whether to use statistics of x instead of their moving averages.
      groups: 1, a number of consecutive parts of the batch with separate statistics, or dims of x whose indices have
        separate statistics. For groups of several cores dims send least: a batch with dims [replicas, batch], laid out
        as "replicas:group;batch:core", with groups=replicas.
      decay: of the moving averages: moving <- decay moving + (1 - decay) of this step, the mean over groups.
      epsilon: added to the variance.
      use_scale, use_bias: whether there are `scale` and `bias`.
      scale_initializer: initializer of `scale`; 0 for the last norm of a residual branch (Goyal et al.,
        arXiv:1706.02677).
      numerics: dtypes of the variables and of the result.
      name: scope of `scale`, `bias` (initially zeros), and the untrained `moving_mean` and `moving_variance`.
      use_fast_variance: whether the variance is the mean of squares minus the squared mean: one pass over x less, and
        one collective instead of two if x is split, but inaccurate if the mean exceeds some hundred deviations. The
        default is the mean of (x - mean)^2.
    Returns: the type of x, or that of `numerics`, and the updates of the moving averages, empty unless training: add
      them to those of the optimizer. All arithmetic is float32.
    Raises: GraphError if x lacks a dim, ShapeError if groups do not divide the batch.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [D("batch", 4), D("width", 2), D("channels", 1)])
      ...     y, updates = mtf.layers.batch_norm(x, D("channels", 1), is_training=True)
      >>> sim = mtf.simulate(mtf.lower({"y": y}, updates, mesh="data:2", layout="batch:data"))
      >>> sim.step(x=[[[0.0], [2.0]]] * 4)["y"][0].round(2).ravel().tolist()
      [-1.0, 1.0]
      >>> round(float(sim.state["batch_norm/moving_mean"][0]), 3)  # 0.9 * 0 + 0.1 * 1
      0.1

    Source: Ioffe and Szegedy, arXiv:1502.03167; over groups of cores: Ying et al., "Image classification at
      supercomputer scale", arXiv:1811.06992, section 3.
    """
    what = "batch_norm"
    x, along, epsilon = checked_norm(x, channels, epsilon, numerics, what)
    with scope(name):
        wide = widened(x).dtype
        scale = (
            numerics.variable("scale", along, scale_initializer, wide) if flag(use_scale, what, "use_scale") else None
        )
        bias = numerics.variable("bias", along, 0.0, wide) if flag(use_bias, what, "use_bias") else None
        return _batch_norm(
            x, along, is_training, groups, decay, epsilon, scale, bias, numerics, use_fast_variance, what
        )


def conditional_batch_norm(
    x: Tensor,
    channels: Dimension | Sequence[Dimension],
    condition: Tensor,
    condition_dim: Dimension,
    is_training: bool,
    groups: Groups = 1,
    decay: float = 0.9,
    epsilon: float = 1e-5,
    kernel_transform: Callable[[Tensor], Tensor] | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "conditional_batch_norm",
    use_fast_variance: bool = False,
) -> tuple[Tensor, Updates]:
    """Batch norm with scale and bias per example, from its class or from a vector such as a GAN's latent.

    scale = 1 + condition times `scale/kernel`, bias = condition times `bias/kernel`; int32 classes select rows of the
    kernels.

    Args:
      x, channels, is_training, groups, decay, epsilon, numerics: as in `batch_norm`.
      condition: int32 classes without `condition_dim`, or floats with it; its other dims are dims of x.
      condition_dim: the dim of the classes, or of the vector.
      kernel_transform: applied to both kernels, for example spectral norm.
      name: scope of `scale/kernel` and `bias/kernel`, [condition_dim, channels], and of the moving averages.
      use_fast_variance: as in `batch_norm`.
    Returns: as in `batch_norm`.
    Raises: as in `batch_norm`; ShapeError if the condition has a dim that x lacks.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph() as graph:
      ...     x, classes = mtf.input("x", "batch:8;width:2;channels:4"), mtf.input("classes", "batch:8", "int32")
      ...     y, updates = mtf.layers.conditional_batch_norm(x, D("channels", 4), classes, D("classes", 10), True)
      >>> print(y.shape, graph.variables["conditional_batch_norm/scale/kernel"].output.shape, len(updates))
      [batch:8, width:2, channels:4] [classes:10, channels:4] 2

    Source: Dumoulin et al., arXiv:1610.07629; for vectors: Brock et al. (BigGAN), arXiv:1809.11096, appendix B.
    """
    what = "conditional_batch_norm"
    x, along, epsilon = checked_norm(x, channels, epsilon, numerics, what)
    own = tensor(condition, what).shape
    stray = [str(d) for d in own if d not in x.shape and d != condition_dim]
    if stray or any(d in own for d in along):
        clash = stray or [str(d) for d in along if d in own]
        raise ShapeError(
            f"{at(what)}: the condition's dims other than {condition_dim} must be dims of x without channels; it has "
            f"{', '.join(clash)}",
            x,
            condition,
        )

    def chosen(part: str) -> Tensor:
        if condition.dtype is not INT32:
            kernel = kernel_transform
            return widened(projection(condition, along, [condition_dim], False, None, numerics, part, part, kernel))
        with scope(part):
            table = numerics.variable("kernel", [condition_dim, *along], initializers.random_normal(0.0, 0.02), x.dtype)
            table = table if kernel_transform is None else kernel_transform(table)
        return widened(gather(table, condition, condition_dim))

    with scope(name):
        return _batch_norm(
            x, along, is_training, groups, decay, epsilon, chosen("scale") + 1.0, chosen("bias"), numerics,
            use_fast_variance, what,
        )  # fmt: skip


def group_norm(
    x: Tensor,
    channels: Dimension,
    groups: int = 32,
    epsilon: float = 1e-5,
    batch_dims: Dimension | Sequence[Dimension] | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "group_norm",
    use_fast_variance: bool = False,
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; statistics per example and group of channels.

    Args:
      x: float, with `channels`.
      channels: the dim divided into `groups` of consecutive channels; 1 group is layer norm over the image, one group
        per channel instance norm.
      epsilon: added to the variance.
      batch_dims: dims of the examples; by default the first of x.
      numerics: dtypes of the variables and of the result.
      name: scope of `scale`, initially ones, and `bias`, initially zeros.
      use_fast_variance: as in `batch_norm`.
    Returns: the type of x, or that of `numerics`; all arithmetic is float32.
    Raises: GraphError if x lacks a dim, ShapeError if groups do not divide the channels.
    Source: Wu and He, arXiv:1803.08494.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.group_norm(mtf.input("x", "b:1;c:2"), mtf.Dimension("c", 2), groups=1)
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 3.0]])["y"].round(4))
      [[-1.  1.]]
    """
    what = "group_norm"
    x, along, epsilon = checked_norm(x, channels, epsilon, numerics, what)
    if len(along) != 1:
        raise ShapeError(f"{at(what)}: channels must be one dim, got {Shape(along)}")
    examples = x.shape.dims[:1] if batch_dims is None else [find_dim(x, d, what) for d in as_dims(batch_dims, what)]
    if along[0] in examples:
        raise ShapeError(f"{at(what)}: '{along[0].name}' can't be the channels and a dim of the batch", x)
    count = _divided(along[0], groups, what, x)
    sets, fast = NormSets.of(x, examples, along[0], count), flag(use_fast_variance, what, "use_fast_variance")
    with scope(name):
        wide = widened(x).dtype
        scale, bias = (numerics.variable(n, along, start, wide) for n, start in (("scale", 1.0), ("bias", 0.0)))
        return _normalised(x, sets, epsilon, scale, bias, fast)[0]


def _batch_norm(
    x: Tensor,
    along: Sequence[Dimension],
    is_training: bool,
    groups: Groups,
    decay: float,
    epsilon: float,
    scale: Tensor | None,
    bias: Tensor | None,
    numerics: Numerics,
    use_fast_variance: bool,
    what: str,
) -> tuple[Tensor, Updates]:
    fast = flag(use_fast_variance, what, "use_fast_variance")
    if not 0 <= number(decay, what, "decay") <= 1:
        raise GraphError(f"{at(what)}: decay must be in [0, 1], got {decay}")
    sets = _batch_sets(x, along, groups, what)
    if len(sets.apart) == len(x.shape):
        raise ShapeError(f"{at(what)}: no dim of x is left to take the mean over", x)
    wide = widened(x).dtype
    moving = [
        variable(n, along, start, numerics.variable_dtype, activation_dtype=wide, trainable=False)
        for n, start in (("moving_mean", 0.0), ("moving_variance", 1.0))
    ]
    if not flag(is_training, what, "is_training"):
        y = multiply(widened(x) - moving[0], rsqrt(moving[1] + epsilon), x.shape)
        y = y if scale is None else y * scale
        return cast(y if bias is None else y + bias, x.dtype), []
    y, *statistics = _normalised(x, sets, epsilon, scale, bias, fast)
    updates = []
    for old, statistic in zip(moving, statistics, strict=True):
        with region(UPDATE, stored(old)):
            new = reduce_mean(statistic, output_shape=along)
            updates.append(assign(old, old * decay + new * (1 - decay)))
    return y, updates


def _batch_sets(x: Tensor, along: Sequence[Dimension], groups: Groups, what: str) -> NormSets:
    if isinstance(groups, Dimension | list | tuple | Shape):
        return NormSets.of(x, [*along, *(find_dim(x, d, what) for d in as_dims(groups, what))], None, 1)
    first = next((d for d in x.shape if d not in along), None)
    if first is None:
        raise ShapeError(f"{at(what)}: x has no dim but its channels", x)
    return NormSets.of(x, along, first, _divided(first, groups, what, x))


def _divided(dim: Dimension, groups: object, what: str, x: Tensor) -> int:
    count = whole(groups, what, "groups")
    if count < 1 or dim.size % count:
        rest = f": {dim.size} % {count} = {dim.size % count}" if count > 0 else ""
        raise ShapeError(f"{at(what)}: groups={count} does not divide dim '{dim.name}' of size {dim.size}{rest}", x)
    return count
