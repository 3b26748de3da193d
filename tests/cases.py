"""One row or more per operation: how to build it, what NumPy says it is, and what to feed it.

References are plain NumPy in float64 and never call the library. Inputs have no zeros and no symmetries, and stay
away from kinks and ties, so that neither a lost sign nor a swapped index cancels out and differences exist.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import meshlib as mtf
from layouts import Dimension, Shape
from meshlib.core.graph import Operation, Tensor
from meshlib.ops.control.remat import from_host, to_host
from meshlib.ops.pointwise.random import drawn_from
from tests.oracle import normal, uniform

Array = np.ndarray[Any, Any]
Sampler = Callable[[np.random.Generator, tuple[int, ...]], Array]


def dims(text: str) -> tuple[Dimension, ...]:
    """Dims from "a:4;b:6"."""
    return tuple(Shape(text))


# ---------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Input:
    """One operand: its dims, its dtype (None: the float type of the test), what its values are like."""

    shape: Shape
    sampler: Sampler
    dtype: str | None = None


def _signed(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    # 0.3 to 1.5 in magnitude, more positive than negative.
    return rng.uniform(0.3, 1.5, shape) * np.where(rng.random(shape) < 0.35, -1.0, 1.0)


def _distinct(shift: float) -> Sampler:
    """Values at least 0.03 apart from each other, and from those of another shift, none within 0.01 of 0."""

    def sample(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        n = int(np.prod(shape))
        return ((rng.permutation(n) - n // 3) * 0.0625 + 0.015625 + shift).reshape(shape)

    return sample


def signed(text: str) -> Input:
    """Floats of both signs, away from 0."""
    return Input(Shape(text), _signed)


def positive(text: str) -> Input:
    """Floats in [0.4, 1.9)."""
    return Input(Shape(text), lambda rng, shape: rng.uniform(0.4, 1.9, shape))


def distinct(text: str, shift: float = 0.0) -> Input:
    """Floats without ties; operands with shifts 0 and 0.03125 have none between them either."""
    return Input(Shape(text), _distinct(shift))


def whole(text: str, low: int = -5, high: int = 9, dtype: str = "int32") -> Input:
    """Integers in [low, high) without 0."""
    return Input(Shape(text), lambda rng, shape: rng.choice([i for i in range(low, high) if i], shape), dtype)


def words(text: str) -> Input:
    """int32 of any bits."""
    return Input(Shape(text), lambda rng, shape: rng.integers(-(2**31), 2**31, shape), "int32")


def _low_word(value: int) -> int:
    """The low 32 bits, with a sign."""
    return (value + 2**31) % 2**32 - 2**31


def index(text: str, below: int) -> Input:
    """int32 in [0, below)."""
    return Input(Shape(text), lambda rng, shape: rng.integers(0, below, shape), "int32")


def group_sizes(text: str, most: int) -> Input:
    """int32 sizes of groups along the last dim, `most` together; some are 0."""

    def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        chosen = np.where(rng.random((*shape[:-1], most)) < 0.4, 0, rng.integers(0, shape[-1], (*shape[:-1], most)))
        return (chosen[..., None] == np.arange(shape[-1])).sum(-2)

    return Input(Shape(text), drawn, "int32")


def flags(text: str) -> Input:
    """Booleans, more true than false."""
    return Input(Shape(text), lambda rng, shape: rng.random(shape) < 0.6, "bool")


def single(text: str, dtype: str) -> Input:
    """Floats of a dtype of their own: eighths, which every float type holds."""
    return Input(Shape(text), lambda rng, shape: rng.choice([-1.75, -0.625, 0.375, 0.5, 1.25, 2.5], shape), dtype)


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, eq=False)
class Case:
    """A row.

    op              the registered operation it is about
    variant         what is special; with `op` it names the row
    inputs          operands by name
    build           (float dtype, *operands) -> a tensor, or the update of a variable
    reference       (*arrays) -> array
    differentiable  operands with a gradient that differences can check; None: gradients exist, differences do not
    tolerance       relative, of values and gradients in float64
    bitwise         whether no layout may change a bit
    has_gradient    False: asking for one is an error
    """

    op: str
    variant: str
    inputs: dict[str, Input]
    build: Callable[..., Tensor | Operation]
    reference: Callable[..., Array]
    differentiable: tuple[str, ...] | None = ()
    tolerance: float = 1e-10
    bitwise: bool = False
    has_gradient: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{self.variant}"

    def rng(self, salt: int = 0) -> np.random.Generator:
        """Random numbers that depend on the row's name alone."""
        return np.random.default_rng([zlib.crc32(str(self).encode()), salt])

    def values(self, salt: int = 0) -> list[Array]:
        """Arrays for the operands: float64, int32 or bool."""
        rng = self.rng(salt)
        made = [x.sampler(rng, x.shape.sizes) for x in self.inputs.values()]
        return [np.asarray(v, v.dtype if v.dtype == bool else np.int32 if v.dtype.kind == "i" else float) for v in made]


@dataclass
class Table:
    """Rows, added one by one; names must differ."""

    rows: dict[str, Case] = field(default_factory=dict)

    def add(
        self,
        op: str,
        variant: str,
        inputs: dict[str, Input],
        build: Callable[..., Tensor | Operation],
        reference: Callable[..., Array],
        differentiable: Sequence[str] | str | None = "",
        **more: Any,
    ) -> None:
        """Add a row; `differentiable` may be the operands' one-letter names in one string."""
        wrt = None if differentiable is None else tuple(differentiable)
        case = Case(op, variant, inputs, build, reference, wrt, **more)
        assert str(case) not in self.rows
        assert set(wrt or ()) <= set(inputs)
        self.rows[str(case)] = case


TABLE = Table()
row = TABLE.add


# ---------------------------------------------------------------- element-wise, one operand

for _name, _function, _input, _wrt in (
    ("negative", np.negative, signed, "x"),
    ("exp", np.exp, signed, "x"),
    ("log", np.log, positive, "x"),
    ("sqrt", np.sqrt, positive, "x"),
    ("rsqrt", lambda x: 1 / np.sqrt(x), positive, "x"),
    ("square", lambda x: x**2, signed, "x"),
    ("reciprocal", lambda x: 1 / x, signed, "x"),
    ("tanh", np.tanh, signed, "x"),
    ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), signed, "x"),
    ("relu", lambda x: np.where(x > 0, x, 0), signed, "x"),
    ("abs", np.abs, signed, "x"),
    ("sign", np.sign, signed, ""),
    ("sin", np.sin, signed, "x"),
    ("cos", np.cos, signed, "x"),
    ("logical_not", np.logical_not, flags, ""),
):
    row(_name, "plain", {"x": _input("a:4;b:6")}, lambda f, x, n=_name: getattr(mtf, n)(x), _function, _wrt)

for _name, _function in (("negative", np.negative), ("square", np.square), ("abs", np.abs), ("sign", np.sign)):
    row(_name, "int32", {"x": whole("a:4;b:6")}, lambda f, x, n=_name: getattr(mtf, n)(x), _function)

row(
    "sigmoid",
    "far out",
    {"x": Input(Shape("a:4"), lambda rng, shape: np.array([-900.0, -31.0, 33.0, 800.0]))},
    lambda f, x: mtf.sigmoid(x),
    lambda x: np.exp(-np.logaddexp(0, -x)),
    None,
)
row(
    "relu_grad",
    "plain",
    {"x": signed("a:4;b:6"), "d": signed("a:4;b:6")},
    lambda f, x, d: mtf.gradients([mtf.relu(x)], [x], [d])[0],
    lambda x, d: np.where(x > 0, d, 0),
    "d",
)


# ---------------------------------------------------------------- element-wise, two operands

# name -> dims of x and of y, and how their arrays line up in the result
BROADCASTS: dict[str, tuple[str, str, Callable[[Array, Array], tuple[Array, Array]]]] = {
    "same": ("a:4;b:6", "a:4;b:6", lambda x, y: (x, y)),
    "reversed": ("a:4;b:6", "b:6;a:4", lambda x, y: (x, y.T)),
    "larger second": ("b:6", "a:4;b:6", lambda x, y: (x, y)),
    "column": ("a:4;b:6;c:2", "b:6", lambda x, y: (x, y[:, None])),
    "union": ("a:4;b:6", "c:2;b:6", lambda x, y: (x[:, :, None], y.T[None])),
    "outer": ("a:4", "b:6", lambda x, y: (x[:, None], y)),
    "scalar": ("a:4;b:6", "", lambda x, y: (x, y)),
}

for _name, _function, _x, _y, _wrt in (
    ("add", np.add, signed, signed, "xy"),
    ("subtract", np.subtract, signed, signed, "xy"),
    ("multiply", np.multiply, signed, signed, "xy"),
    ("divide", np.divide, signed, signed, "xy"),
    ("maximum", np.maximum, distinct, lambda s: distinct(s, 0.03125), "xy"),
    ("minimum", np.minimum, distinct, lambda s: distinct(s, 0.03125), "xy"),
    ("pow", np.power, positive, signed, "xy"),
    ("less", np.less, signed, signed, ""),
    ("less_equal", np.less_equal, whole, whole, ""),
    ("greater", np.greater, signed, signed, ""),
    ("greater_equal", np.greater_equal, whole, whole, ""),
    ("equal", np.equal, lambda s: whole(s, 1, 4), lambda s: whole(s, 1, 4), ""),
    ("not_equal", np.not_equal, lambda s: whole(s, 1, 4), lambda s: whole(s, 1, 4), ""),
    ("logical_and", np.logical_and, flags, flags, ""),
    ("logical_or", np.logical_or, flags, flags, ""),
):
    for _variant, (_a, _b, _line_up) in BROADCASTS.items():
        if not _wrt and _variant not in ("reversed", "union", "scalar"):
            continue
        row(
            _name,
            _variant,
            {"x": _x(_a), "y": _y(_b)},
            lambda f, x, y, n=_name: getattr(mtf, n)(x, y),
            lambda x, y, g=_function, line_up=_line_up: g(*line_up(x, y)),
            _wrt,
        )

row("add", "int32", {"x": whole("a:4"), "y": whole("b:6")}, lambda f, x, y: x + y, lambda x, y: x[:, None] + y)
row("subtract", "number first", {"x": signed("a:4;b:6")}, lambda f, x: 1.5 - x, lambda x: 1.5 - x, "x")
row("multiply", "itself", {"x": signed("a:4;b:6")}, lambda f, x: x * x, lambda x: x * x, "x")
row("divide", "number first", {"x": signed("a:4;b:6")}, lambda f, x: 2 / x, lambda x: 2 / x, "x")
row("pow", "number", {"x": positive("a:4;b:6")}, lambda f, x: x**3, lambda x: x**3, "x")
row(
    "multiply",
    "output shape",
    {"x": signed("a:4"), "y": signed("b:6")},
    lambda f, x, y: mtf.multiply(x, y, output_shape=Shape("c:2;b:6;a:4")),
    lambda x, y: np.broadcast_to(y[:, None] * x, (2, 6, 4)),
    "xy",
)


# ---------------------------------------------------------------- where, cast, add_n

row(
    "where",
    "same",
    {"c": flags("a:4;b:6"), "x": signed("a:4;b:6"), "y": signed("a:4;b:6")},
    lambda f, c, x, y: mtf.where(c, x, y),
    np.where,
    "xy",
)
row(
    "where",
    "broadcast",
    {"c": flags("a:4"), "x": signed("b:6;a:4"), "y": signed("c:2;b:6")},
    lambda f, c, x, y: mtf.where(c, x, y),
    lambda c, x, y: np.where(c[:, None], x[:, :, None], y.T[:, None, :]),
    "xy",
)
row(
    "where",
    "number",
    {"c": flags("b:6;a:4"), "x": signed("a:4;b:6")},
    lambda f, c, x: mtf.where(c, x, -2.5),
    lambda c, x: np.where(c.T, x, -2.5),
    "x",
)
row(
    "cast",
    "widening",
    {"x": single("a:4;b:6", "float32")},
    lambda f, x: mtf.cast(x, "float64"),
    lambda x: x,
    "x",
    tolerance=1e-6,
)
row("cast", "bfloat16 up", {"x": single("a:4;b:6", "bfloat16")}, lambda f, x: mtf.cast(x, "float32"), lambda x: x, None)
row(
    "cast",
    "narrowing",
    {"x": signed("a:4;b:6")},
    lambda f, x: mtf.cast(x, "float32"),
    lambda x: x.astype(np.float32),
    None,
    tolerance=1e-7,
)
row(
    "cast",
    "to bfloat16",
    {"x": single("a:4;b:6", "float32")},
    lambda f, x: mtf.cast(x * 1.0009765625, "bfloat16"),
    lambda x: x,  # 2**-10 is below half a unit of bfloat16's 8 bits
    None,
)
row("cast", "to int32", {"x": signed("a:4;b:6")}, lambda f, x: mtf.cast(x * 7, "int32"), lambda x: np.trunc(x * 7))
row("cast", "from int32", {"x": whole("a:4;b:6")}, lambda f, x: mtf.cast(x, f), lambda x: x)
row("cast", "from bool", {"x": flags("a:4;b:6")}, lambda f, x: mtf.cast(x, f), lambda x: x)
# The narrow types: what they hold, and beyond it the nearest there is, NaN in e4m3, the low bits of wider integers.
_FAR = Input(Shape("a:4;b:6"), lambda rng, shape: rng.choice([-1e4, -130.5, -7.75, 0.375, 6.5, 100.25, 300.0], shape))
for _name, _most in (("int8", 127), ("int4", 7)):
    row(
        "cast",
        f"to {_name}",
        {"x": _FAR},
        lambda f, x, n=_name: mtf.cast(x, n),
        lambda x, m=_most: np.trunc(np.clip(x, -m - 1, m)),
    )
    row(
        "cast",
        f"int32 to {_name}",
        {"x": whole("a:4;b:6", -400, 400)},
        lambda f, x, n=_name: mtf.cast(x, n),
        lambda x, m=_most: (x + m + 1) % (2 * m + 2) - m - 1,
    )
    row("cast", f"from {_name}", {"x": whole("a:4;b:6", -8, 8, _name)}, lambda f, x: mtf.cast(x, f), lambda x: x)
for _name, _narrow in (("float8_e4m3fn", ml_dtypes.float8_e4m3fn), ("float8_e5m2", ml_dtypes.float8_e5m2)):
    row(
        "cast",
        f"to {_name}",
        {"x": signed("a:4;b:6")},
        lambda f, x, n=_name: mtf.cast(x, n),
        lambda x, n=_narrow: x.astype(n).astype(np.float64),
        None,
    )
    row("cast", f"from {_name}", {"x": single("a:4;b:6", _name)}, lambda f, x: mtf.cast(x, f), lambda x: x, None)
row(
    "add_n",
    "same",
    {"x": signed("a:4;b:6"), "y": signed("a:4;b:6"), "z": signed("a:4;b:6")},
    lambda f, x, y, z: mtf.add_n([x, y, z]),
    lambda x, y, z: x + y + z,
    "xyz",
)
row(
    "add_n",
    "broadcast",
    {"x": signed("b:6"), "y": signed("a:4;b:6"), "z": signed("b:6;a:4"), "w": signed("")},
    lambda f, x, y, z, w: mtf.add_n([x, y, z, w, x]),
    lambda x, y, z, w: 2 * x + y + z.T + w,
    "xyzw",
)
row(
    "add_n",
    "partial sums",
    {"x": signed("a:4;b:6"), "y": signed("b:6;a:4"), "z": signed("a:4"), "w": signed("a:4;c:2")},
    lambda f, x, y, z, w: mtf.add_n([mtf.reduce_sum(t, output_shape=dims("a:4")) for t in (x, y, w)] + [z]),
    lambda x, y, z, w: x.sum(1) + y.sum(0) + w.sum(1) + z,
    "xyzw",
)
row(
    "add_n",
    "views of one value",
    {"x": signed("a:4;b:4")},
    lambda f, x: _views_added(x),
    lambda x: np.sin(x) + np.tanh(np.sin(x)) + np.sin(x).T + np.sin(x),
    "x",
)


def _views_added(x: Tensor) -> Tensor:
    y = mtf.sin(x)
    turned = mtf.rename_dimension(mtf.rename_dimension(mtf.rename_dimension(y, "a", "n"), "b", "a"), "n", "b")
    return mtf.add_n([y, mtf.tanh(y), turned, mtf.identity(y)])


# ---------------------------------------------------------------- reductions

for _name, _function, _input in (
    ("reduce_sum", np.sum, signed),
    ("reduce_max", np.max, distinct),
    ("reduce_min", np.min, distinct),
):
    row(
        _name,
        "all",
        {"x": _input("a:4;b:6")},
        lambda f, x, n=_name: getattr(mtf, n)(x),
        lambda x, g=_function: g(x),
        "x",
    )
    row(
        _name,
        "middle",
        {"x": _input("a:4;b:6;c:2")},
        lambda f, x, n=_name: getattr(mtf, n)(x, reduced_dim=dims("b:6")),
        lambda x, g=_function: g(x, axis=1),
        "x",
    )
    row(
        _name,
        "several, transposed",
        {"x": _input("a:4;b:6;c:2;d:3")},
        lambda f, x, n=_name: getattr(mtf, n)(x, output_shape=dims("c:2;a:4")),
        lambda x, g=_function: g(x, axis=(1, 3)).T,
        "x",
    )
    row(
        _name,
        "int32",
        {"x": whole("a:4;b:6;c:2")},
        lambda f, x, n=_name: getattr(mtf, n)(x, output_shape=dims("c:2;a:4")),
        lambda x, g=_function: g(x, axis=1).T,
    )

row(
    "reduce_max",
    "ties",
    {"x": Input(Shape("a:4;b:6"), lambda rng, shape: np.repeat(rng.choice([0.5, 1.25, 2.0], (1, 6)), 4, axis=0))},
    lambda f, x: mtf.gradients([mtf.reduce_max(x, reduced_dim=dims("a:4"))], [x])[0],
    lambda x: np.full((4, 6), 0.25),
    None,
)
row(
    "reduce_sum",
    "mean",
    {"x": signed("a:4;b:6;c:2")},
    lambda f, x: mtf.reduce_mean(x, reduced_dim=dims("a:4;c:2")),
    lambda x: x.mean(axis=(0, 2)),
    "x",
)
row(
    "reduce_max",
    "logsumexp",
    {"x": distinct("a:4;b:6"), "y": distinct("a:4", 0.03125)},
    lambda f, x, y: mtf.reduce_logsumexp(x, dims("b:6")[0], extra_logit=y),
    lambda x, y: np.log(np.exp(x).sum(1) + np.exp(y)),
    "xy",
)
row(
    "reduce_max",
    "softmax",
    {"x": distinct("a:4;b:6"), "y": signed("b:6")},
    lambda f, x, y: mtf.softmax(x, dims("b:6")[0]) * y,
    lambda x, y: np.exp(x) / np.exp(x).sum(1, keepdims=True) * y,
    "xy",
)
row(
    "reduce_max",
    "cross entropy",
    {"x": distinct("a:4;b:6"), "i": index("a:4", 6)},
    lambda f, x, i: mtf.layers.softmax_cross_entropy_with_logits(
        x, mtf.one_hot(i, dims("b:6")[0], dtype=f), dims("b:6")[0], z_loss=0.1
    ),
    lambda x, i: np.log(np.exp(x).sum(1)) - x[np.arange(4), i] + 0.1 * np.log(np.exp(x).sum(1)) ** 2,
    "x",
)


# ---------------------------------------------------------------- dims, not values

row(
    "transpose",
    "cycle",
    {"x": signed("a:4;b:6;c:2")},
    lambda f, x: mtf.transpose(x, dims("c:2;a:4;b:6")),
    lambda x: x.transpose(2, 0, 1),
    "x",
)
row(
    "rename_dimension",
    "one",
    {"x": signed("a:4;b:6")},
    lambda f, x: mtf.rename_dimension(x, "a", "n"),
    lambda x: x,
    "x",
)
row(
    "rename_dimension",
    "meets itself",
    {"x": signed("a:4;b:6")},
    lambda f, x: mtf.einsum([x, mtf.rename_dimension(x, "a", "n")], output_shape=dims("a:4;n:4")),
    lambda x: x @ x.T,
    "x",
)
for _variant, _old, _new in (
    ("merge", "a:4;b:6", "n:24"),
    ("split", "n:24", "a:4;b:6"),
    ("regroup", "a:4;b:6", "n:8;m:3"),
    ("merge the last", "a:4;b:6;c:2", "a:4;n:12"),
    ("merge the first", "a:4;b:6;c:2", "n:24;c:2"),
    ("split the middle", "a:4;n:12;c:2", "a:4;b:3;d:4;c:2"),
    ("same sizes", "a:4;b:6", "n:4;b:6"),
    ("names swapped", "a:6;b:6", "b:6;a:6"),
    ("one name, another size", "a:4;b:6", "a:12;b:2"),
    ("drop ones", "u:1;a:4;v:1;b:6;w:1", "a:4;b:6"),
    ("add ones", "a:4;b:6", "u:1;a:4;v:1;b:6;w:1"),
    ("merge with ones", "a:4;u:1;b:6", "v:1;n:24"),
    ("to a scalar", "u:1;v:1", ""),
    ("odd", "a:3;b:8", "n:2;m:12"),
):
    row(
        "reshape",
        _variant,
        {"x": signed(_old)},
        lambda f, x, new=_new: mtf.reshape(x, dims(new)),
        lambda x, new=_new: x.reshape(Shape(new).sizes),
        "x",
    )
row(
    "reshape",
    "heads",
    {"x": signed("a:4;n:12"), "w": signed("n:12;m:6")},
    lambda f, x, w: mtf.reshape(
        mtf.einsum([x, w], output_shape=dims("a:4;m:6"), precision="highest"), dims("a:4;h:2;k:3")
    ),
    lambda x, w: (x @ w).reshape(4, 2, 3),
    "xw",
)
row(
    "broadcast",
    "before, between, after",
    {"x": signed("a:4;b:3")},
    lambda f, x: mtf.broadcast(x, dims("c:2;b:3;d:2;a:4;e:3")),
    lambda x: np.broadcast_to(x.T[None, :, None, :, None], (2, 3, 2, 4, 3)),
    "x",
)
row(
    "broadcast",
    "scalar",
    {"x": signed("")},
    lambda f, x: mtf.broadcast(x, dims("a:4;b:6")),
    lambda x: np.full((4, 6), x),
    "x",
)
for _variant, _begin, _size in (("first", 0, 4), ("middle", 2, 6), ("last", 8, 4), ("one", 5, 1)):
    row(
        "slice",
        _variant,
        {"x": signed("a:4;n:12;b:2")},
        lambda f, x, begin=_begin, size=_size: mtf.slice(x, begin, size, "n"),
        lambda x, begin=_begin, size=_size: x[:, begin : begin + size],
        "x",
    )
row(
    "slice",
    "two parts",
    {"x": signed("a:4;n:12")},
    lambda f, x: mtf.slice(x, 0, 6, "n") * mtf.slice(x, 6, 6, "n"),
    lambda x: x[:, :6] * x[:, 6:],
    "x",
)
for _variant, _before, _after, _value in (("zeros", 2, 4, 0.0), ("value", 4, 0, -1.3), ("after", 0, 6, 0.0)):
    row(
        "pad",
        _variant,
        {"x": signed("a:4;n:6;b:2")},
        lambda f, x, sides=(_before, _after), value=_value: mtf.pad(x, sides, "n", value),
        lambda x, sides=(_before, _after), value=_value: np.pad(x, ((0, 0), sides, (0, 0)), constant_values=value),
        "x",
    )
row(
    "pad",
    "of a sum",
    {"x": signed("a:4;n:6;b:4")},
    lambda f, x: mtf.pad(mtf.reduce_sum(x, output_shape=dims("a:4;n:6")), [2, 4], "n"),
    lambda x: np.pad(x.sum(2), ((0, 0), (2, 4))),
    "x",
)


# ---------------------------------------------------------------- einsum

for _variant, _shapes, _out, _formula in (
    ("matmul", ("a:4;k:6", "k:6;c:8"), "a:4;c:8", "ak,kc->ac"),
    ("transposed output", ("a:4;k:6", "k:6;c:8"), "c:8;a:4", "ak,kc->ca"),
    ("transposed operands", ("k:6;a:4", "c:8;k:6"), "a:4;c:8", "ka,ck->ac"),
    ("batch", ("b:2;a:4;k:6", "k:6;b:2;c:4"), "b:2;a:4;c:4", "bak,kbc->bac"),
    ("batch inside", ("a:4;b:2;k:6", "k:6;b:2;c:4"), "a:4;b:2;c:4", "abk,kbc->abc"),
    ("batch last", ("b:2;a:4;k:6", "b:2;k:6;c:4"), "c:4;a:4;b:2", "bak,bkc->cab"),
    ("two contracted", ("a:4;j:2;k:6", "k:6;c:4;j:2"), "a:4;c:4", "ajk,kcj->ac"),
    ("outer", ("a:4", "b:6"), "b:6;a:4", "a,b->ba"),
    ("inner", ("k:6;j:4", "j:4;k:6"), "", "kj,jk->"),
    ("vector", ("a:4;k:6", "k:6"), "a:4", "ak,k->a"),
    ("element-wise", ("a:4;b:6", "b:6"), "b:6;a:4", "ab,b->ba"),
    ("summed away", ("a:4;s:2;k:6", "k:6;c:2;t:3"), "a:4;c:2", "ask,kct->ac"),
    ("summed and batch", ("b:2;s:3;a:4", "b:2;c:4"), "a:4;b:2;c:4", "bsa,bc->abc"),
    ("nothing contracted", ("a:4;s:6", "c:2"), "c:2;a:4", "as,c->ca"),
    ("three", ("a:4;j:2", "j:2;k:6", "k:6;c:4"), "a:4;c:4", "aj,jk,kc->ac"),
    ("three, shared", ("b:2;a:4", "b:2;a:4;c:4", "c:4;b:2;d:2"), "d:2;b:2;a:4", "ba,bac,cbd->dba"),
    ("ones", ("u:1;a:4;k:6", "k:6;v:1"), "v:1;a:4;u:1", "uak,kv->vau"),
):
    _names = "xyz"[: len(_shapes)]
    row(
        "einsum",
        _variant,
        {n: signed(s) for n, s in zip(_names, _shapes, strict=True)},
        lambda f, *xs, out=_out: mtf.einsum(xs, output_shape=dims(out)),
        lambda *xs, formula=_formula: np.einsum(formula, *xs),
        _names,
    )
row(
    "einsum",
    "itself",
    {"x": signed("a:4;k:6")},
    lambda f, x: mtf.einsum([x, x], output_shape=dims("k:6")),
    lambda x: np.einsum("ak,ak->k", x, x),
    "x",
)
row(
    "einsum",
    "reduced dims",
    {"x": signed("a:4;b:2;k:6"), "y": signed("k:6;a:4")},
    lambda f, x, y: mtf.einsum([x, y], reduced_dims=dims("k:6"), precision="highest"),
    lambda x, y: np.einsum("abk,ka->ab", x, y),
    "xy",
)
row(
    "einsum",
    "int8",
    {"x": whole("b:2;a:4;k:6", -127, 128), "y": whole("k:6;c:8", -127, 128)},
    lambda f, x, y: mtf.einsum([mtf.cast(x, f), mtf.cast(y, f)], dims("b:2;c:8;a:4"), precision="int8"),
    lambda x, y: np.einsum("bak,kc->bca", x, y, dtype=np.float64),
)
for _left, _right in (("int8", "int8"), ("int4", "int8"), ("int4", "int4")):
    row(
        "einsum",
        f"of {_left} and {_right}",
        {"x": whole("b:2;a:4;k:6", -8, 8, _left), "y": whole("k:6;c:8", -8, 8, _right)},
        lambda f, x, y: mtf.einsum([x, y], dims("b:2;c:8;a:4")),
        lambda x, y: np.einsum("bak,kc->bca", x, y),
        bitwise=True,
    )
row(
    "einsum",
    "of fp8",
    {"x": single("b:2;a:4;k:6", "float8_e4m3fn"), "y": single("k:6;c:8", "float8_e5m2")},
    lambda f, x, y: mtf.einsum([x, y], dims("b:2;c:8;a:4")),
    lambda x, y: np.einsum("bak,kc->bca", x, y),
    None,
    tolerance=0.02,  # its gradients are bfloat16
)
row(
    "einsum",
    "rounded to float32",
    {"x": signed("a:4;k:6"), "y": signed("k:6;c:8")},
    lambda f, x, y: mtf.einsum([x, y], dims("c:8;a:4"), precision="highest", dtype="float32"),
    lambda x, y: np.einsum("ak,kc->ca", x, y),
    None,
    tolerance=1e-6,
)
row(
    "einsum",
    "weights of a byte",
    {"x": signed("a:4;k:6"), "w": whole("k:6;c:8", -128, 128, "int8"), "s": positive("c:8")},
    lambda f, x, w, s: mtf.einsum([x, mtf.cast(w, f)], dims("a:4;c:8"), precision="highest") * s,
    lambda x, w, s: (x @ w) * s,
    "xs",
)
for _grid, _largest, _to_grid in (
    ("int8", 127, np.rint),
    ("fp8", 448, lambda x: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)),
):
    row(
        "quantized_einsum",
        _grid,
        {"x": signed("b:2;a:4;k:6"), "y": signed("k:6;b:2;c:8")},
        lambda f, x, y, grid=_grid: mtf.quantized_einsum([x, y], dims("b:2;c:8;a:4"), grid),
        lambda x, y, m=_largest, q=_to_grid: quantised_product(x, y, m, q),
        differentiable=None,  # as if nothing had been rounded: see test_quantized
    )


def _grouped(x: Array, w: Array, sizes: Array) -> Array:
    """x[n, r, d], w[g, d, f], sizes[n, g] -> y[n, r, f], row by row; beyond the last group zero."""
    y = np.zeros((*x.shape[:2], w.shape[2]))
    for n, r in np.ndindex(*y.shape[:2]):
        group = np.searchsorted(np.cumsum(sizes[n]), r, side="right")
        y[n, r] = x[n, r] @ w[group] if group < len(w) else 0
    return y


def _by_group(x: Array, y: Array, sizes: Array) -> Array:
    """x[r, d], y[r, f], sizes[g] -> w[g, d, f]."""
    ends = np.cumsum(sizes)
    return np.stack([x[e - s : e].T @ y[e - s : e] for s, e in zip(sizes, ends, strict=True)])


row("ragged_dot", "rows",
    {"x": signed("r:8;d:4"), "w": signed("g:4;d:4;f:6"), "n": group_sizes("g:4", 8)},
    lambda f, x, w, n: mtf.ragged_dot(x, w, n, "r", "g"),
    lambda x, w, n: _grouped(x[None], w, n[None])[0], "xw")  # fmt: skip
row("ragged_dot", "rows of each batch",
    {"x": signed("b:2;r:8;d:4"), "w": signed("g:4;d:4;f:2"), "n": group_sizes("b:2;g:4", 6)},
    lambda f, x, w, n: mtf.ragged_dot(x, w, n, "r", "g"), _grouped, "xw")  # fmt: skip
row("ragged_dot", "shards of groups",
    {"x": signed("s:2;b:2;r:4;d:2"), "w": signed("s:2;g:2;d:2;f:2"), "n": group_sizes("s:2;b:2;g:2", 3)},
    lambda f, x, w, n: mtf.ragged_dot(x, w, n, "r", "g", dims("b:2;s:2;r:4;f:2")),
    lambda x, w, n: np.stack([_grouped(*of) for of in zip(x, w, n, strict=True)], 1), "xw")  # fmt: skip
row("ragged_dot", "rows summed",
    {"x": signed("r:8;d:4"), "y": signed("r:8;f:2"), "n": group_sizes("g:4", 7)},
    lambda f, x, y, n: mtf.ragged_dot(x, y, n, "r", "g", dims("g:4;d:4;f:2")), _by_group, "xy")  # fmt: skip
row("ragged_dot", "rows of each batch summed",
    {"x": signed("b:2;r:4;d:4"), "y": signed("b:2;r:4;f:2"), "n": group_sizes("b:2;g:4", 4)},
    lambda f, x, y, n: mtf.ragged_dot(x, y, n, "r", "g", dims("d:4;g:4;f:2")),
    lambda x, y, n: sum(_by_group(*of) for of in zip(x, y, n, strict=True)).swapaxes(0, 1), "xy")  # fmt: skip


def _in_eight_bits(x: Array, w: Array, sizes: Array) -> Array:
    """x[r, d], w[g, d, f], rows and columns of each matrix rounded to whole numbers of 127ths of their largest."""
    x_unit = np.abs(x).max(1, keepdims=True) / 127
    w_unit = np.abs(w).max(1, keepdims=True) / 127
    scaled = np.rint(w / w_unit) * w_unit
    return _grouped((np.rint(x / x_unit) * x_unit)[None], scaled, sizes[None])[0]


row("quantized_ragged_dot", "rows in int8",
    {"x": signed("r:8;d:4"), "w": signed("g:4;d:4;f:6"), "n": group_sizes("g:4", 8)},
    lambda f, x, w, n: mtf.quantized_ragged_dot(x, w, n, "r", "g"), _in_eight_bits,
    differentiable=None)  # as if nothing had been rounded: see test_experts  # fmt: skip


def quantised_product(x: Array, y: Array, largest: float, to_grid: Callable[[Array], Array]) -> Array:
    """x[b, a, k], y[k, b, c] -> [b, c, a], each row along k rounded in units of its own."""
    x_unit = np.abs(x).max(2, keepdims=True) / largest
    y_unit = np.abs(y).max(0, keepdims=True) / largest
    found = np.einsum("bak,kbc->bca", to_grid(x / x_unit), to_grid(y / y_unit))
    return found * x_unit[:, :, 0][:, None, :] * y_unit[0][:, :, None]


row(
    "einsum",
    "network",
    {"x": signed("b:4;i:6"), "w": signed("i:6;h:8"), "v": signed("h:8;o:2"), "i": index("b:4", 2)},
    lambda f, x, w, v, i: _network(f, x, w, v, i),
    lambda x, w, v, i: _network_reference(x, w, v, i),
    "xwv",
    tolerance=1e-9,
)


def _network(f: str, x: Tensor, w: Tensor, v: Tensor, i: Tensor) -> Tensor:
    hidden = mtf.tanh(mtf.matmul(x, w, output_shape=dims("b:4;h:8")))
    logits = mtf.matmul(hidden, v, output_shape=dims("b:4;o:2"))
    (o,) = dims("o:2")
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(i, o, dtype=f), o))


def _network_reference(x: Array, w: Array, v: Array, i: Array) -> Array:
    logits = np.tanh(x @ w) @ v
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(4), i])


# ---------------------------------------------------------------- by index

row(
    "gather",
    "bytes",
    {"w": whole("n:12;k:6", -128, 128, "int8"), "i": index("a:4", 12)},
    lambda f, w, i: mtf.gather(w, i, dims("n:12")[0]),
    lambda w, i: w[i],
    bitwise=True,
)
row(
    "gather",
    "fp8",
    {"w": single("n:12;k:6", "float8_e4m3fn"), "i": index("a:4", 12)},
    lambda f, w, i: mtf.gather(w, i, dims("n:12")[0]),
    lambda w, i: w[i],
    None,
    bitwise=True,
)
row(
    "reduce_sum",
    "einsum of integers",
    {"x": whole("a:4;b:6;e:2"), "y": whole("b:6;c:2"), "z": whole("d:4;a:4")},
    lambda f, x, y, z: mtf.einsum([x, y, z], output_shape=dims("c:2;a:4")),
    lambda x, y, z: np.einsum("abe,bc,da->ca", x, y, z),
)
row(
    "multiply",
    "einsum of integers",
    {"x": whole("a:4;b:6"), "y": whole("c:2;a:4")},
    lambda f, x, y: mtf.einsum([x, y], output_shape=dims("b:6;c:2;a:4")),
    lambda x, y: np.einsum("ab,ca->bca", x, y),
)
for _variant, _dtype, _held in (
    ("whole numbers", "int32", np.arange(24).reshape(4, 6) * 7 % 24 - 5),
    ("flags", "bool", np.arange(24).reshape(4, 6) % 5 < 2),
):
    row(
        "table",
        _variant,
        {},
        lambda f, held=_held, dtype=_dtype: mtf.constant(held, dims("a:4;b:6"), dtype),
        lambda held=_held: held,
        bitwise=True,
    )
row(
    "table",
    "beside others",
    {"x": signed("b:6;c:2")},
    lambda f, x: mtf.einsum([x, mtf.constant(np.arange(24.0).reshape(4, 6) / 8, dims("a:4;b:6"), f)]),
    lambda x: np.einsum("bc,ab->ca", x, np.arange(24.0).reshape(4, 6) / 8),
    "x",
)
row("range", "int32", {}, lambda f: mtf.range(dims("n:12")[0]), lambda: np.arange(12), bitwise=True)
row(
    "range",
    "float",
    {"x": signed("n:300")},
    lambda f, x: x * mtf.range(dims("n:300")[0], f) * 0.01,
    lambda x: x * np.arange(300) * 0.01,
    "x",
)
row(
    "one_hot",
    "vector",
    {"i": index("a:4", 12)},
    lambda f, i: mtf.one_hot(i, dims("n:12")[0], dtype=f),
    lambda i: np.eye(12)[i],
)
row(
    "one_hot",
    "values",
    {"i": index("a:4;b:6", 8)},
    lambda f, i: mtf.one_hot(i, dims("n:8")[0], 0.7, -0.3, dtype=f),
    lambda i: np.where(np.eye(8)[i] > 0, 0.7, -0.3),
)
row(
    "one_hot",
    "embedding",
    {"i": index("a:4", 12), "w": signed("n:12;k:6")},
    lambda f, i, w: mtf.einsum([mtf.one_hot(i, dims("n:12")[0], dtype=f), w], output_shape=dims("a:4;k:6")),
    lambda i, w: w[i],
    "w",
)
row(
    "gather",
    "rows",
    {"w": signed("n:12;k:6"), "i": index("a:4", 12)},
    lambda f, w, i: mtf.gather(w, i, dims("n:12")[0]),
    lambda w, i: w[i],
    "w",
)
row(
    "gather",
    "middle dim, two of indices",
    {"w": signed("k:4;n:6;c:2"), "i": index("a:4;b:2", 6)},
    lambda f, w, i: mtf.gather(w, i, dims("n:6")[0]),
    lambda w, i: np.take(w, i, axis=1).transpose(1, 2, 0, 3),
    "w",
)
row(
    "gather",
    "shared dim",
    {"w": signed("a:4;n:6;k:2"), "i": index("a:4", 6)},
    lambda f, w, i: mtf.gather(w, i, dims("n:6")[0]),
    lambda w, i: w[np.arange(4), i],
    "w",
)
row(
    "gather",
    "shared and own",
    {"w": signed("k:2;n:6;a:4"), "i": index("b:4;a:4", 6)},
    lambda f, w, i: mtf.gather(w, i, dims("n:6")[0]),
    lambda w, i: np.take_along_axis(w, i[None], axis=1).transpose(1, 2, 0),
    "w",
)
row(
    "gather",
    "scalar index",
    {"w": signed("n:6;k:4"), "i": index("", 6)},
    lambda f, w, i: mtf.gather(w, i, dims("n:6")[0]),
    lambda w, i: w[int(i)],
    "w",
)
row(
    "gather",
    "int32",
    {"w": whole("n:12"), "i": index("a:4", 12)},
    lambda f, w, i: mtf.gather(w, i, dims("n:12")[0]),
    lambda w, i: w[i],
)
row(
    "gather",
    "flags",
    {"w": flags("n:12;k:6"), "i": index("a:4", 12)},
    lambda f, w, i: mtf.gather(w, i, dims("n:12")[0]),
    lambda w, i: w[i],
)


def _outside(x: Array, i: Array) -> Array:
    return np.where(((i < 0) | (i >= len(x))).reshape(i.shape + (1,) * (x.ndim - 1)), 0, x[i.clip(0, len(x) - 1)])


row(
    "gather",
    "zeros out of range",
    {"w": signed("n:6;k:4"), "i": whole("a:8;b:2", -3, 9)},
    lambda f, w, i: mtf.gather(w, i, dims("n:6")[0], out_of_range="zero"),
    _outside,
    "w",
)
row(
    "gather",
    "no flag out of range",
    {"w": flags("n:6"), "i": whole("a:8", -3, 9)},
    lambda f, w, i: mtf.gather(w, i, dims("n:6")[0], out_of_range="zero"),
    _outside,
)
row(
    "one_hot",
    "off out of range",
    {"i": whole("a:12", -3, 9)},
    lambda f, i: mtf.one_hot(i, dims("n:6")[0], 0.75, -0.5, f, out_of_range="zero"),
    lambda i: np.where(i[:, None] == np.arange(6), 0.75, -0.5),
)
row(
    "scatter_add",
    "nowhere out of range",
    {"x": signed("a:12;k:4"), "i": whole("a:12", -3, 9)},
    lambda f, x, i: mtf.scatter_add(x, i, dims("n:6")[0], Shape("n:6;k:4"), out_of_range="zero"),
    lambda x, i: (i[:, None] == np.arange(6)).T.astype(float) @ x,
    "x",
)
row(
    "scatter_add",
    "rows, repeated",
    {"x": signed("a:8;k:6"), "i": index("a:8", 4)},
    lambda f, x, i: mtf.scatter_add(x, i, dims("n:4")[0], Shape("n:4;k:6")),
    lambda x, i: np.eye(4)[i].T @ x,
    "x",
)
row(
    "scatter_add",
    "transposed",
    {"x": signed("a:8;k:6"), "i": index("a:8", 12)},
    lambda f, x, i: mtf.scatter_add(x, i, dims("n:12")[0], Shape("k:6;n:12")),
    lambda x, i: x.T @ np.eye(12)[i],
    "x",
)
row(
    "scatter_add",
    "shared dim",
    {"x": signed("b:4;a:6;k:2"), "i": index("a:6;b:4", 4)},
    lambda f, x, i: mtf.scatter_add(x, i, dims("n:4")[0], Shape("b:4;n:4;k:2")),
    lambda x, i: np.einsum("bak,abn->bnk", x, np.eye(4)[i]),
    "x",
)
row(
    "scatter_add",
    "broadcast updates",
    {"x": signed("k:4"), "i": index("a:8", 4)},
    lambda f, x, i: mtf.scatter_add(x, i, dims("n:4")[0], Shape("n:4;k:4")),
    lambda x, i: np.eye(4)[i].sum(0)[:, None] * x,
    "x",
)
row(
    "scatter_add",
    "summed dim",
    {"x": signed("a:8;s:2;k:4"), "i": index("a:8", 4)},
    lambda f, x, i: mtf.scatter_add(x, i, dims("n:4")[0], Shape("n:4;k:4")),
    lambda x, i: np.einsum("ask,an->nk", x, np.eye(4)[i]),
    "x",
)


# ---------------------------------------------------------------- functions of the user's own


def _rows_by_their_largest(x: Array, y: Array) -> Array:
    return x * np.max(y, axis=-1, keepdims=True)


def _its_gradient(op: Operation, dys: Sequence[Tensor]) -> list[Tensor | None]:
    return [dys[0] * mtf.reduce_max(op.inputs[1], reduced_dim=dims("c:2")[0]), None]


row(
    "slicewise",
    "rows",
    {"x": signed("a:4;b:6"), "y": distinct("a:4;c:2")},
    lambda f, x, y: mtf.slicewise(
        _rows_by_their_largest, [x, y], splittable_dims=dims("a:4"), grad_function=_its_gradient
    ),
    _rows_by_their_largest,
    "x",
)
row(
    "slicewise",
    "another type",
    {"x": signed("a:4;b:6;c:2")},
    lambda f, x: mtf.slicewise(lambda x: np.argsort(x, axis=1).sum(axis=2), [x], dims("a:4;b:6"), "int32", dims("a:4")),
    lambda x: np.argsort(x, axis=1).sum(axis=2),
)
row(
    "slicewise",
    "whole",
    {"x": signed("a:4;b:6")},
    lambda f, x: mtf.slicewise(lambda x: np.cumsum(x.T.ravel())[::2], [x], dims("n:12")),
    lambda x: np.cumsum(x.T.ravel())[::2],
    has_gradient=False,
)


row(
    "print",
    "beside others",
    {"x": signed("a:4;b:6"), "y": signed("b:6;c:2"), "i": whole("a:4")},
    lambda f, x, y, i: mtf.Print(x, [y, i, x], "now: "),
    lambda x, y, i: x,
    "x",
)


# ---------------------------------------------------------------- sources and state

row(
    "constant",
    "several",
    {"x": signed("a:4")},
    lambda f, x: (x * mtf.constant(0.7, dims("b:6"), f) + mtf.ones(dims("b:6"), f)) - mtf.zeros(dims("a:4"), f),
    lambda x: np.repeat(x[:, None] * 0.7 + 1, 6, axis=1),
    "x",
)
row(
    "constant",
    "alone",
    {},
    lambda f: mtf.constant(-3, dims("a:4;b:6"), "int32"),
    lambda: np.full((4, 6), -3),
    bitwise=True,
)
row("input", "itself", {"x": signed("a:4;b:6")}, lambda f, x: x, lambda x: x, "x", bitwise=True)
row(
    "variable",
    "times input",
    {"x": signed("a:4;b:6")},
    lambda f, x: x * mtf.variable("v", dims("b:6;c:2"), np.arange(1.0, 13).reshape(6, 2), f),
    lambda x: x[:, :, None] * np.arange(1.0, 13).reshape(6, 2),
    "x",
)
row(
    "variable",
    "step",
    {"x": signed("a:4")},
    lambda f, x: x + mtf.cast(mtf.step() + 3, f),
    lambda x: x + 3,
    "x",
)
row(
    "assign",
    "transposed",
    {"x": signed("a:4;b:6")},
    lambda f, x: mtf.assign(mtf.variable("v", dims("b:6;a:4"), 1.0, f), x * 2),
    lambda x: 2 * x.T,
)
row(
    "assign",
    "from itself",
    {"x": signed("a:4;b:6")},
    lambda f, x: _moved(f, x),
    lambda x: np.arange(6.0) / 4 + x.sum(0),
)


def _moved(f: str, x: Tensor) -> Operation:
    v = mtf.variable("v", dims("b:6"), np.arange(6.0) / 4, f)
    return mtf.assign(v, v + mtf.reduce_sum(x, output_shape=dims("b:6")))


row("to_host", "there", {"x": signed("a:4;b:6")}, lambda f, x: to_host(mtf.sin(x)), np.sin, "x")
row("from_host", "there and back", {"x": signed("a:4;b:6")}, lambda f, x: from_host(to_host(x)) * x, np.square, "x")
row("identity", "plain", {"x": signed("a:4;b:6")}, lambda f, x: mtf.identity(x) * x, lambda x: x * x, "x")
row("stop_gradient", "alone", {"x": signed("a:4;b:6")}, lambda f, x: mtf.stop_gradient(x), lambda x: x)
row(
    "stop_gradient",
    "one side",
    {"x": signed("a:4;b:6"), "y": signed("a:4;b:6")},
    lambda f, x, y: x * mtf.stop_gradient(mtf.exp(y)),
    lambda x, y: x * np.exp(y),
    "x",
)
row(
    "constrain",
    "replicated",
    {"x": signed("a:12;b:4")},
    lambda f, x: mtf.constrain(mtf.sin(x), "") * x,
    lambda x: np.sin(x) * x,
    "x",
)
row(
    "constrain",
    "split",
    {"x": signed("a:4;n:12;b:4")},
    lambda f, x: mtf.exp(mtf.constrain(mtf.reduce_sum(x, output_shape=dims("n:12;b:4")), "n:p")),
    lambda x: np.exp(x.sum(0)),
    "x",
    tolerance=1e-9,
)


# ---------------------------------------------------------------- random

row(
    "random",
    "uniform",
    {},
    lambda f: mtf.random_uniform(dims("a:12;b:4"), -0.5, 1.5, f),
    lambda: uniform("random_uniform", (12, 4), -0.5, 1.5),
    bitwise=True,
)
row(
    "random",
    "normal",
    {},
    lambda f: mtf.random_normal(dims("a:4;b:6"), 0.5, 2.0, f, name="noise"),
    lambda: normal("noise", (4, 6), 0.5, 2.0),
    bitwise=True,
)
for _numbers in ("n", "nm"):
    row(
        "numbered_random",
        _numbers,
        {name: whole("") for name in _numbers},
        lambda f, *given: drawn_from(dims("a:12;b:4"), ("uniform", 0.0, 1.0), f, None, "drawn", "s", numbers=given),
        lambda *given: uniform("s", (12, 4), trips=[*map(int, given)]),
        bitwise=True,
    )
row(
    "random",
    "dropout",
    {"x": signed("a:4;b:6")},
    lambda f, x: mtf.dropout(x, True, keep_prob=0.625),
    lambda x: np.where(uniform("dropout", (4, 6)) < 0.625, x / 0.625, 0),
    "x",
    bitwise=True,
)
row(
    "random",
    "dropout of rows",
    {"x": signed("a:4;b:12;c:2")},
    lambda f, x: mtf.dropout(x, True, rate=0.5, noise_shape=dims("b:12")),
    lambda x: np.where((uniform("dropout", (12,)) < 0.5)[:, None], x * 2, 0),
    "x",
    bitwise=True,
)


# ---------------------------------------------------------------- loops

row(
    "scan",
    "recurrence",
    {"x": signed("a:4;k:6"), "w": signed("k:6;m:6")},
    lambda f, x, w: _recurrence(x, w),
    lambda x, w: _recurrence_reference(x, w),
    "xw",
)
row(
    "scan",
    "two carries",
    {"x": signed("a:4;b:6"), "y": signed("b:6;a:4")},
    lambda f, x, y: mtf.while_loop(
        3, lambda u, v: (mtf.transpose(v, u.shape), mtf.transpose(u * 0.5, v.shape) + 1), [x, y]
    )[1],
    lambda x, y: 0.5 * (0.5 * x.T + 1) + 1,
    "xy",
)
row(
    "scan",
    "noise",
    {"x": signed("a:4;b:6")},
    lambda f, x: mtf.while_loop(2, lambda v: v + mtf.random_uniform(x.shape, dtype=f), [x])[0],
    lambda x: x + sum(uniform("while_loop/random_uniform", (4, 6), trips=(n,)) for n in range(2)),
    "x",
    bitwise=True,
)


def _recurrence(x: Tensor, w: Tensor) -> Tensor:
    def body(v: Tensor) -> Tensor:
        product = mtf.einsum([v, w], output_shape=dims("a:4;m:6"))
        return mtf.rename_dimension(mtf.tanh(product), "m", "k") + mtf.reduce_mean(v, reduced_dim=dims("a:4"))

    return mtf.while_loop(3, body, [x])[0]


def _recurrence_reference(x: Array, w: Array) -> Array:
    for _ in range(3):
        x = np.tanh(x @ w) + x.mean(0)
    return x


# ---------------------------------------------------------------- activations and other element-wise functions

_erf = np.vectorize(math.erf, otypes=[float])


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.exp(x) - 1)


for _op, _variant, _build, _function in (
    ("erf", "plain", lambda x: mtf.erf(x), _erf),
    ("erf", "gelu", lambda x: mtf.gelu(x, approximate=False), lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2),
    (
        "tanh",
        "gelu",
        lambda x: mtf.gelu(x),
        lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    ),
    ("expm1", "plain", lambda x: mtf.expm1(x), lambda x: np.exp(x) - 1),
    ("log1p", "plain", lambda x: mtf.log1p(mtf.square(x)), lambda x: np.log(1 + x * x)),
    ("expm1", "elu", lambda x: mtf.elu(x), _elu),
    (
        "expm1",
        "selu",
        lambda x: mtf.selu(x),
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(x) - 1)),
    ),
    ("softplus", "plain", lambda x: mtf.softplus(x), lambda x: np.log(1 + np.exp(x))),
    ("sigmoid", "swish", lambda x: mtf.swish(x), lambda x: x / (1 + np.exp(-x))),
    ("sigmoid", "silu", lambda x: mtf.silu(x * 2), lambda x: 2 * x / (1 + np.exp(-2 * x))),
    ("minimum", "leaky relu", lambda x: mtf.leaky_relu(x), lambda x: np.where(x > 0, x, 0.2 * x)),
    ("minimum", "steep relu", lambda x: mtf.leaky_relu(x, 3), lambda x: np.where(x > 0, x, 3 * x)),
    ("minimum", "clip", lambda x: mtf.clip_by_value(x, -0.5, 0.75), lambda x: np.clip(x, -0.5, 0.75)),
):
    row(_op, _variant, {"x": signed("a:4;b:6")}, lambda f, x, g=_build: g(x), _function, "x")

for _op, _variant, _build, _given, _function in (
    ("erf", "far out", lambda x: mtf.erf(x), [-40.0, -2e-9, 5.9, 700.0], _erf),
    ("expm1", "near 0", lambda x: mtf.expm1(x) * 2.0**40, [-(2.0**-40), 2.0**-44, 0, 2.0**-42], lambda x: x * 2.0**40),
    ("log1p", "near 0", lambda x: mtf.log1p(x) * 2.0**40, [-(2.0**-40), 2.0**-44, 0, 2.0**-42], lambda x: x * 2.0**40),
    ("expm1", "elu far out", lambda x: mtf.elu(x), [-900.0, -40.0, 0, 800.0], lambda x: np.where(x > 0, x, np.sign(x))),
    ("softplus", "far out", lambda x: mtf.softplus(x), [-900.0, -60, 60.0, 800.0], lambda x: np.maximum(x, 0)),
    ("floor", "halves", lambda x: mtf.floor(x), [-1.5, -0.25, 0.5, 2.0], lambda x: np.array([-2, -1, 0, 2])),
    ("ceil", "halves", lambda x: mtf.ceil(x), [-1.5, -0.25, 0.5, 2.0], lambda x: np.array([-1, 0, 1, 2])),
    ("round", "halves", lambda x: mtf.round(x), [-1.5, -0.5, 0.5, 2.5], lambda x: np.array([-2, 0, 0, 2])),
):
    _values = Input(Shape("a:4"), lambda rng, shape, v=_given: np.array(v))
    row(_op, _variant, {"x": _values}, lambda f, x, g=_build: g(x), _function, None if _op[0] in "els" else "")

for _name, _function in (
    ("floor", lambda x: -(-x // 1) - (x % 1 > 0)),
    ("ceil", lambda x: x // 1 + (x % 1 > 0)),
    ("round", lambda x: np.sign(x) * (np.abs(x) + 0.5 - (np.abs(x) + 0.5) % 1)),
):
    row(
        _name,
        "plain",
        {"x": signed("a:4;b:6")},
        lambda f, x, n=_name: getattr(mtf, n)(x * 3),
        lambda x, g=_function: g(3 * x),
    )

for _name, _function, _wrt in (
    ("floordiv", lambda x, y: (x - x % y) / y, ""),
    ("mod", lambda x, y: x - y * np.floor(x / y), "xy"),
    ("subtract", lambda x, y: (x - y) ** 2, "xy"),
):
    for _variant in ("reversed", "union", "scalar"):
        _a, _b, _line_up = BROADCASTS[_variant]
        row(
            _name,
            f"squared {_variant}" if _name == "subtract" else _variant,
            {"x": signed(_a), "y": signed(_b)},
            lambda f, x, y, n=_name: getattr(mtf, "squared_difference" if n == "subtract" else n)(x, y),
            lambda x, y, g=_function, line_up=_line_up: g(*line_up(x, y)),
            _wrt,
        )
for _name, _function in (
    ("floordiv", lambda x, y: np.trunc(x / y) - ((x * y < 0) & (np.abs(x) % np.abs(y) > 0))),
    ("mod", lambda x, y: x - y * (np.trunc(x / y) - ((x * y < 0) & (np.abs(x) % np.abs(y) > 0)))),
):
    row(
        _name,
        "int32, both signs",
        {"x": whole("a:12"), "y": whole("b:6", -4, 4)},
        lambda f, x, y, n=_name: x // y if n == "floordiv" else x % y,
        lambda x, y, g=_function: g(x[:, None], y),
    )
for _name, _function in (
    ("bitwise_and", lambda x, y: x & y),
    ("bitwise_or", lambda x, y: x | y),
    ("bitwise_xor", lambda x, y: x ^ y),
    ("left_shift", lambda x, y: x << y if 0 <= y < 32 else 0),
    ("right_shift", lambda x, y: x >> (y if 0 <= y < 32 else 32)),
):
    row(
        _name,
        "union",
        {"x": words("a:4;b:6"), "y": whole("c:12;b:6", -3, 36) if _name.endswith("shift") else words("c:2;b:6")},
        lambda f, x, y, n=_name: getattr(mtf, n)(x, y),
        lambda x, y, g=_function: np.array(
            [[[_low_word(g(int(a[b]), int(c[b]))) for c in y] for b in range(6)] for a in x]
        ),
    )
row(
    "bitcast",
    "floats",
    {"x": single("a:4;b:6", "float32")},
    lambda f, x: mtf.bitcast(x),
    lambda x: np.array([[struct.unpack("i", struct.pack("f", v))[0] for v in of_a] for of_a in x]),
)
row(
    "bitcast",
    "words",
    {"x": whole("a:4;b:6", 0x3F000000, 0x3F000100)},
    lambda f, x: mtf.bitcast(x),
    lambda x: np.array([[struct.unpack("f", struct.pack("i", v))[0] for v in of_a] for of_a in x]),
)
row("floordiv", "number first", {"x": whole("a:4;b:6")}, lambda f, x: 20 // x, lambda x: np.floor(20 / x))
row("mod", "number", {"x": whole("a:4;b:6")}, lambda f, x: x % 4, lambda x: x - 4 * np.floor(x / 4))
row(
    "minimum",
    "clip by tensors",
    {"x": distinct("a:4;b:6"), "y": distinct("b:6", 0.03125)},
    lambda f, x, y: mtf.clip_by_value(x, y, y + 0.3),
    lambda x, y: np.minimum(np.maximum(x, y), y + 0.3),
    "xy",
)
row(
    "not_equal",
    "exclusive or",
    {"x": flags("a:4;b:6"), "y": flags("b:6;c:2")},
    lambda f, x, y: mtf.logical_xor(x, y),
    lambda x, y: x[:, :, None] ^ y,
)
row(
    "where",
    "output shape",
    {"c": flags("a:4"), "x": signed("a:4"), "y": signed("b:6")},
    lambda f, c, x, y: mtf.where(c, x, y, dims("b:6;c:2;a:4")),
    lambda c, x, y: np.repeat(np.where(c, x, y[:, None])[:, None], 2, axis=1),
    "xy",
)
row(
    "where",
    "branches",
    {"c": flags(""), "x": signed("a:4;b:6"), "y": signed("a:4;b:6")},
    lambda f, c, x, y: mtf.cond(c, lambda: x * x, lambda: mtf.sin(y)),
    lambda c, x, y: x * x if c else np.sin(y),
    "xy",
)
row(
    "where",
    "branches of two",
    {"i": index("", 4), "x": signed("a:4;b:6"), "y": signed("b:6")},
    lambda f, i, x, y: mtf.add_n(mtf.cond(mtf.less(i, 4), lambda: [x, y * y], lambda: [x * 2, y])),
    lambda i, x, y: x + y * y,
    "xy",
)
for _name, _dtype in (("to_float", "float32"), ("to_bfloat16", "bfloat16"), ("to_int32", "int32")):
    row(
        "cast",
        _name,
        {"x": single("a:4;b:6", "float64")},
        lambda f, x, n=_name: getattr(mtf, n)(x),
        lambda x, d=_dtype: np.trunc(x) if d == "int32" else x,
        None if _dtype != "int32" else "",
    )


# ---------------------------------------------------------------- reductions of flags, pooling

for _variant, _text, _how, _axes in (
    ("all", "a:4", {}, 0),
    ("middle", "a:4;b:2;c:6", {"reduced_dim": dims("b:2")}, 1),
    ("several, transposed", "a:4;b:2;c:3;d:2", {"output_shape": dims("c:3;a:4")}, (3, 1)),
):
    row(
        "reduce_all",
        _variant,
        {"x": flags(_text)},
        lambda f, x, how=_how: mtf.reduce_all(x, **how),
        lambda x, axes=_axes: x.all(axis=axes).T if axes == (3, 1) else x.all(axis=axes),
    )
    row(
        "reduce_any",
        _variant,
        {"x": flags(_text)},
        lambda f, x, how=_how: mtf.reduce_any(mtf.logical_not(x), **how),
        lambda x, axes=_axes: ~x.all(axis=axes).T if axes == (3, 1) else ~x.all(axis=axes),
    )
row(
    "reduce_max",
    "pool",
    {"x": distinct("a:4;n:12;b:2")},
    lambda f, x: mtf.pool(x, {"n": 3}),
    lambda x: x.reshape(4, 4, 3, 2).max(axis=2),
    "x",
)
row(
    "reduce_max",
    "pool of images",
    {"x": distinct("a:2;h:8;w:6;c:2")},
    lambda f, x: mtf.layers.max_pool2d(x, (2, 3)),
    lambda x: x.reshape(2, 4, 2, 2, 3, 2).max(axis=(2, 4)),
    "x",
)
row(
    "reduce_min",
    "pool",
    {"x": whole("n:12;a:4")},
    lambda f, x: mtf.pool(x, {"a": 2, "n": 6}, "min"),
    lambda x: x.reshape(2, 6, 2, 2).min(axis=(1, 3)),
)
row(
    "reduce_sum",
    "pool",
    {"x": signed("n:12;a:4")},
    lambda f, x: mtf.pool(x, {"n": 2}, "sum", {"n": 2}),
    lambda x: x.reshape(6, 2, 4).sum(axis=1),
    "x",
)
row(
    "reduce_sum",
    "pool of volumes",
    {"x": signed("d:2;h:4;w:3;c:2")},
    lambda f, x: mtf.layers.avg_pool3d(x, (1, 2, 3)),
    lambda x: x.reshape(2, 2, 2, 1, 3, 2).mean(axis=(2, 4)),
    "x",
)


# ---------------------------------------------------------------- replaced dims, shifts by amounts, changes of state

row(
    "reshape",
    "dims replaced",
    {"x": signed("c:2;a:4;b:6;e:2")},
    lambda f, x: mtf.replace_dimensions(x, list(dims("a:4;b:6")), list(dims("n:8;m:3"))),
    lambda x: x.reshape(2, 8, 3, 2),
    "x",
)
row("reshape", "anonymous", {"x": signed("a:4;b:6")}, lambda f, x: mtf.anonymize(x * 2), lambda x: 2 * x, "x")
for _variant, _wrap in (("round", True), ("out", False)):
    row(
        "gather",
        f"shift {_variant}",
        {"x": signed("a:4;n:6;b:2"), "i": whole("b:2;a:4", -5, 6)},
        lambda f, x, i, wrap=_wrap: mtf.dynamic_shift(x, i, dims("n:6")[0], wrap),
        lambda x, i, wrap=_wrap: _shifted(x, i, wrap),
        "x",
    )
row(
    "gather",
    "one number",
    {"w": signed("a:4;n:6;b:2")},
    lambda f, w: mtf.gather(w, 4, dims("n:6")[0], dims("b:2;c:3;a:4")),
    lambda w: np.repeat(w[:, 4].T[:, None], 3, axis=1),
    "w",
)
for _variant, _temperature in (("indices drawn", 0.75), ("largest", 0)):
    row(
        "random" if _temperature else "argmax",
        _variant,
        {"x": signed("a:4;n:12;b:2")},
        lambda f, x, t=_temperature: mtf.sample_with_temperature(x, dims("n:12")[0], t),
        lambda x, t=_temperature: (x - t * np.log(-np.log(uniform("gumbel", (4, 12, 2), 1e-9, 1.0)))).argmax(axis=1),
    )
row(
    "constant",
    "like others",
    {"x": signed("a:4;b:6"), "i": whole("a:4"), "c": flags("b:6")},
    lambda f, x, i, c: mtf.where(
        mtf.logical_or(c, mtf.zeros_like(c)), mtf.ones_like(x) + mtf.cast(mtf.ones_like(i), f), mtf.zeros_like(x)
    ),
    lambda x, i, c: np.broadcast_to(np.where(c, 2, 0), (4, 6)),
)
row(
    "assign",
    "added",
    {"x": signed("b:6")},
    lambda f, x: mtf.assign_add(mtf.variable("v", dims("a:4;b:6"), 1.5, f), x),
    lambda x: np.broadcast_to(1.5 + x, (4, 6)),
)
row(
    "assign",
    "subtracted",
    {"x": signed("b:6;a:4")},
    lambda f, x: mtf.assign_sub(mtf.variable("v", dims("a:4;b:6"), 1.5, f), x),
    lambda x: 1.5 - x.T,
)


def _shifted(x: Array, offset: Array, wrap: bool) -> Array:
    out = np.zeros(x.shape)
    for a, n, b in np.ndindex(*x.shape):
        to = n + offset[b, a]
        if wrap or 0 <= to < x.shape[1]:
            out[a, to % x.shape[1], b] = x[a, n, b]
    return out


# ---------------------------------------------------------------- work that a split leaves whole


def _summed_first(op: Operation) -> set[str]:
    """Dims of one operand of an einsum alone that the result lacks: summed before the product."""
    a, b = (x.shape for x in op.inputs)
    return {d.name for d in (*a, *b) if (d.name in a) != (d.name in b) and d.name not in op.output.shape}


# Per operation the factors whose split leaves each device all of the vector work (of einsum: the matrix work); of all
# others every split divides it.
IDLE: dict[str, Callable[[Operation], set[str]]] = {
    "update_slice": lambda op: {op.attrs["dim"].name},  # each device looks at all of the part
    "update_rows": lambda op: {op.attrs["dim"].name},  # and at all rows
    "gather": lambda op: {op.attrs["dim"].name},  # each runs through all indices, whichever it holds
    "slice": lambda op: {op.attrs["dim"] + "'"},  # by a mask each writes all of the part, most of them zeros
    # The same, and updates without a dim of the indices are added for each index.
    "scatter_add": lambda op: {op.attrs["dim"].name} | ({*op.inputs[1].shape.names} - {*op.inputs[0].shape.names}),
    "einsum": _summed_first,
}

# More rows, which use the names above.
from tests import cases_along_dims, cases_attention, cases_images  # noqa: E402, F401

CASES: tuple[Case, ...] = tuple(TABLE.rows.values())
