"""Initial values and random distributions: functions of a key and global positions.

Initializers are callable dataclasses, so that programs can be compared, copied and pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, fitting, items, stored
from meshlib.core.arguments import number as finite
from meshlib.core.dtypes import FLOAT32, FLOAT64, DType, kind_of
from meshlib.core.errors import GraphError
from meshlib.core.explained_calls import explain_module
from meshlib.core.random import threefry2x32

__all__ = [
    "Initializer", "constant", "glorot_uniform", "ones", "random_normal", "random_uniform", "scaled_normal",
    "truncated_normal", "variance_scaling", "zeros",
]  # fmt: skip

Array = np.ndarray[Any, Any]
Key = tuple[int, int]
# (key, global shape, dtype) -> the whole initial value
Initializer = Callable[[Key, Shape, DType], Array]


def make_key(*parts: object) -> Key:
    """A 64-bit Threefry key from seed, name, step, trip: changing any of them gives an independent stream."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def fold(key: Key, *numbers: int) -> Key:
    """The key of one step, or of one trip in it: each number is encrypted under the key derived from those before it.

    It uses Threefry alone, so that a device can derive the key of a step at run time.
    """
    for n in numbers:
        x, y = threefry2x32(key, np.zeros(1, np.uint32), np.array([n & 0xFFFFFFFF], np.uint32))
        key = int(x[0]), int(y[0])
    return key


def draw(
    law: tuple[str, float, float],
    key: Key,
    whole: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    dtype: DType,
) -> Array:
    """The block at `offsets` of size `sizes` of the random array of shape `whole`: counter = global position."""
    positions = np.zeros((1,) * len(whole), np.uint64)
    stride = 1
    for axis in reversed(range(len(whole))):
        index = np.arange(offsets[axis], offsets[axis] + sizes[axis], dtype=np.uint64) * np.uint64(stride)
        positions = positions + index.reshape([-1 if a == axis else 1 for a in range(len(whole))])
        stride *= whole[axis]
    high = (positions >> np.uint64(32)).astype(np.uint32)
    x, y = threefry2x32(key, high, positions.astype(np.uint32))
    kind, a, b = law
    if kind == "uniform":
        # 24 bits fill a float32's significand: every value is a multiple of 2**-24 below 1.
        unit = (x >> np.uint32(8)).astype(np.float64) * 2.0**-24
        value = a + (b - a) * unit
    else:
        # Box-Muller; the radius' uniform is in (0, 1], so that its logarithm is finite.
        radius = np.sqrt(-2.0 * np.log(((x >> np.uint32(8)).astype(np.float64) + 1) * 2.0**-24))
        value = a + b * radius * np.cos(2 * np.pi * 2.0**-24 * (y >> np.uint32(8)).astype(np.float64))
    out = np.asarray(value, dtype.storage)
    out = dtype.rounded(out)
    return np.clip(out, *limits(a, b, dtype), out=out) if kind == "uniform" and a < b else out


def limits(low: float, high: float, dtype: DType) -> tuple[np.generic, np.generic]:
    """The first value of `dtype` from `low` on and the last one below `high`: rounding must not leave this range."""
    number = dtype.public.type
    first, last = number(low), number(high)
    top = number(dtype.largest)  # e4m3 has no infinity
    if float(first) < low:
        first = np.nextafter(first, top)
    if float(last) >= high:
        last = np.nextafter(last, -top)
    return dtype.storage.type(first), dtype.storage.type(last)


@dataclass(frozen=True)
class _Drawn:
    """Independent random numbers of the distribution `law`, in the format of `draw`."""

    law: tuple[str, float, float]

    def __call__(self, key: Key, shape: Shape, dtype: DType) -> Array:
        if not dtype.is_float:
            raise GraphError(f"random initial values are floats, not {dtype.name}; give a number or an array")
        for bound in self.law[1:]:
            fitting(bound, dtype, f"initializers.random_{self.law[0]}")
        return draw(self.law, key, shape.sizes, [0] * len(shape), shape.sizes, dtype)


@dataclass(frozen=True)
class _Constant:
    value: bool | int | float

    def __call__(self, key: Key, shape: Shape, dtype: DType) -> Array:
        out = np.full(shape.sizes, fitting(self.value, dtype, "initializers.constant"), dtype.storage)
        return dtype.rounded(out)


@dataclass(frozen=True)
class _WholeNumbers:
    """Uniform integers over the symmetric range of the type, as quantised weights have."""

    def __call__(self, key: Key, shape: Shape, dtype: DType) -> Array:
        _, most = dtype.bounds
        drawn = draw(("uniform", -most, most + 1), key, shape.sizes, [0] * len(shape), shape.sizes, FLOAT64)
        return np.asarray(np.floor(drawn), dtype.storage)


@dataclass(frozen=True)
class _Stacked:
    each: Initializer
    dims: int

    def __call__(self, key: Key, shape: Shape, dtype: DType) -> Array:
        inner = Shape(shape.dims[self.dims :])
        count = prod(shape.sizes[: self.dims])
        return np.stack([self.each(make_key(*key, n), inner, dtype) for n in range(count)]).reshape(shape.sizes)


@dataclass(frozen=True, eq=False)
class _Given:
    value: Array

    def __call__(self, key: Key, shape: Shape, dtype: DType) -> Array:
        return self.value.copy()


def constant(value: float) -> Initializer:
    """The same number everywhere.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", mtf.initializers.constant(0.5))
      >>> print(mtf.simulate(mtf.lower({"w": w})).state["w"])
      [0.5 0.5]
    """
    return _Constant(value if isinstance(value, bool) else finite(value, "initializers.constant", "value"))


def zeros() -> Initializer:
    """Zeros.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", mtf.initializers.zeros())
      >>> print(mtf.simulate(mtf.lower({"w": w})).state["w"])
      [0. 0.]
    """
    return constant(0)


def ones() -> Initializer:
    """Ones.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", mtf.initializers.ones())
      >>> print(mtf.simulate(mtf.lower({"w": w})).state["w"])
      [1. 1.]
    """
    return constant(1)


def random_uniform(minval: float = -0.05, maxval: float = 0.05) -> Initializer:
    """Uniform on [minval, maxval).

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:1000", mtf.initializers.random_uniform(0, 2))
      >>> values = mtf.simulate(mtf.lower({"w": w}), seed=0).state["w"]
      >>> print(0 <= values.min() < 0.1, 1.9 < values.max() < 2)
      True True
    """
    what = "initializers.random_uniform"
    return _Drawn(("uniform", finite(minval, what, "minval"), finite(maxval, what, "maxval")))


def random_normal(mean: float = 0.0, stddev: float = 0.05) -> Initializer:
    """Normal with this mean and standard deviation.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:1000", mtf.initializers.random_normal(stddev=2))
      >>> values = mtf.simulate(mtf.lower({"w": w}), seed=0).state["w"]
      >>> print(abs(values.mean()) < 0.2, 1.8 < values.std() < 2.2)
      True True
    """
    what = "initializers.random_normal"
    return _Drawn(("normal", finite(mean, what, "mean"), finite(stddev, what, "stddev")))


def glorot_uniform(input_dims: Sequence[Dimension] | None = None) -> Initializer:
    """Uniform with variance 2 / (fan_in + fan_out). Fan-in: `input_dims`, or all dims but the last.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d_in:20;d_out:30", mtf.initializers.glorot_uniform())
      >>> values = mtf.simulate(mtf.lower({"w": w}), seed=0).state["w"]
      >>> print(0.03 < values.var() < 0.05)  # 2 / (20 + 30)
      True
    """
    dims = None if input_dims is None else tuple(_dims(input_dims, "initializers.glorot_uniform"))
    return _VarianceScaling(1.0, "fan_avg", "uniform", dims)


def scaled_normal(input_dims: Sequence[Dimension], scale: float = 1.0) -> Initializer:
    """Normal with variance scale / fan_in, where fan-in is the product of `input_dims`.

    Example:
      >>> import meshlib as mtf
      >>> d_in = mtf.Dimension("d_in", 20)
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [d_in, mtf.Dimension("d_out", 50)], mtf.initializers.scaled_normal([d_in]))
      >>> values = mtf.simulate(mtf.lower({"w": w}), seed=0).state["w"]
      >>> print(0.04 < values.var() < 0.06)  # 1 / 20
      True
    """
    what = "initializers.scaled_normal"
    if finite(scale, what, "scale") < 0:
        raise GraphError(f"{at(what)}: scale must not be negative, got {scale}")
    return random_normal(0.0, sqrt(scale / prod(d.size for d in _dims(input_dims, what))))


def stacked(each: Initializer, dims: int) -> Initializer:
    """Values drawn independently for each index of the first `dims` dims, as if each were a separate variable."""
    return _Stacked(each, dims)


def _dims(dims: object, what: str) -> list[Dimension]:
    given = [dims] if isinstance(dims, Dimension) else items(dims, what, "input_dims")
    for d in given:
        if not isinstance(d, Dimension):
            raise GraphError(f"{at(what)}: expected Dimensions, got {type(d).__name__} {d!r:.80}")
    return given


def _given(value: Array, name: str, shape: Shape, dtype: DType) -> Initializer:
    if value.shape != shape.sizes:
        raise GraphError(
            f"{at('variable')} '{name}': the initial array has shape {list(value.shape)}, but its dims are {shape}"
        )
    kinds = {"flag": "b", "integer": "iu", "float": "biuf"}[dtype.kind]
    if kind_of(value.dtype) not in kinds:
        raise GraphError(
            f"{at('variable')} '{name}': the initial array has dtype {value.dtype}, "
            f"but the variable stores {dtype.name}"
        )
    return _Given(np.array(stored(value, dtype, f"{at('variable')} '{name}', initial array", GraphError)))


def as_initializer(value: object, name: str, shape: Shape, stored: DType) -> Initializer:
    """An `Initializer` from None, a number, an array or a function."""
    if value is None:
        if stored.is_narrow_integer:
            return _WholeNumbers()
        if not stored.is_float:
            raise GraphError(f"{at('variable')} '{name}': {stored.name} needs an initial value: a number or an array")
        return glorot_uniform()
    if isinstance(value, bool | int | float | np.generic):
        return constant(fitting(value, stored, f"variable '{name}'"))
    if isinstance(value, np.ndarray):
        return _given(value.copy(), name, shape, stored)
    if callable(value):
        return value
    raise GraphError(
        f"{at('variable')} '{name}': expected an initializer, a number or an array, got {type(value).__name__} "
        f"{value!r:.80}"
    )


# Truncation of normal numbers in standard deviations, and the standard deviation that remains.
_CUT, _CUT_STDDEV = 2.0, 0.8796256610342398


@dataclass(frozen=True)
class _TruncatedNormal:
    mean: float
    stddev: float

    def __call__(self, key: Key, shape: Shape, dtype: DType) -> Array:
        def drawn(key: Key) -> Array:
            return random_normal(0.0, 1.0)(key, shape, dtype if dtype is FLOAT64 else FLOAT32)

        values, tries = drawn(key), 0
        while (far := np.abs(values) > _CUT).any():
            tries += 1
            values = np.where(far, drawn(make_key(*key, tries)), values)
        out = np.asarray(self.mean + self.stddev * values, dtype.storage)
        return dtype.rounded(out)


@dataclass(frozen=True)
class _VarianceScaling:
    scale: float
    mode: str
    distribution: str
    input_dims: tuple[Dimension, ...] | None

    def __call__(self, key: Key, shape: Shape, dtype: DType) -> Array:
        ins = shape.sizes[:-1] if self.input_dims is None else [d.size for d in shape if d in self.input_dims]
        fan_in = prod(ins)
        fan_out = shape.size // fan_in
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        stddev, limit = sqrt(self.scale / fan), sqrt(3 * self.scale / fan)
        law = {
            "normal": truncated_normal(0.0, stddev / _CUT_STDDEV),
            "untruncated_normal": random_normal(0.0, stddev),
            "uniform": random_uniform(-limit, limit),
        }
        return law[self.distribution](key, shape, dtype)


def truncated_normal(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal, with values further than 2 `stddev` from `mean` drawn again; the standard deviation becomes 0.88
    `stddev`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:1000", mtf.initializers.truncated_normal())
      >>> values = mtf.simulate(mtf.lower({"w": w}), seed=0).state["w"]
      >>> print(abs(values).max() < 2, 0.8 < values.std() < 0.95)
      True True
    """
    what = "initializers.truncated_normal"
    if finite(stddev, what, "stddev") < 0:
        raise GraphError(f"{at(what)}: stddev must not be negative, got {stddev}")
    return _TruncatedNormal(finite(mean, what, "mean"), float(stddev))


def variance_scaling(
    scale: float = 1.0,
    mode: str = "fan_in",
    distribution: str = "normal",
    input_dims: Sequence[Dimension] | None = None,
) -> Initializer:
    """Variance scale / n, where n is the fan-in or fan-out of the variable, or their mean.

    Args:
      scale: positive; 2 for ReLU.
      mode: n is "fan_in", the product of `input_dims`; "fan_out", that of all others; or "fan_avg", their mean.
      distribution: "normal" (truncated at 2 standard deviations, rescaled to the variance), "untruncated_normal" or
        "uniform".
      input_dims: by default all dims but the last.
    Raises: GraphError for an unknown mode or distribution, or a scale that is not positive.
    Example:
      >>> import meshlib as mtf
      >>> rows, cols = mtf.Dimension("rows", 4), mtf.Dimension("cols", 400)
      >>> start = mtf.initializers.variance_scaling(2.0, "fan_out", "uniform", [rows])
      >>> with mtf.Graph():
      ...     program = mtf.lower({"w": mtf.variable("w", [rows, cols], start)})
      >>> round(float(mtf.simulate(program).state["w"].std()), 3)  # sqrt(2 / 400) = 0.071
      0.072

    Source: He et al., arXiv:1502.01852; names as in Mesh TensorFlow's and TensorFlow's.
    """
    what = "initializers.variance_scaling"
    if finite(scale, what, "scale") <= 0:
        raise GraphError(f"{at(what)}: scale must be positive, got {scale}")
    choice(mode, what, "mode", ("fan_in", "fan_out", "fan_avg"))
    choice(distribution, what, "distribution", ("normal", "untruncated_normal", "uniform"))
    dims = None if input_dims is None else tuple(_dims(input_dims, what))
    return _VarianceScaling(float(scale), mode, distribution, dims)


explain_module(__name__)
