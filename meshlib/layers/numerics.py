"""The arithmetic of layers, as one record: dtypes of variables and of what is computed, and how products are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice
from meshlib.core.dtypes import FLOAT64, as_dtype
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.core.initializers import Initializer
from meshlib.ops.contraction.einsum import PRECISIONS, einsum
from meshlib.ops.contraction.quantized import quantized_einsum
from meshlib.ops.control.sources import variable
from meshlib.ops.pointwise.casts import cast

_FULL = "fp8_full"  # MaxText's word for it
# Of a precision in eight bits the dtype of operands, and of cotangents in the products of the gradient.
EIGHT_BIT_PRODUCTS = {"int8": ("int8", "int8"), "fp8": ("fp8", "fp8"), _FULL: ("fp8", "fp8_e5m2")}


@dataclass(frozen=True)
class Numerics:
    """What layers keep their variables in, what they compute in, and how they multiply.

    Every layer with variables takes it as `numerics`; unless given it is `mtf.Numerics()`. The first three are Mesh
    TensorFlow's `VariableDType(master_dtype, slice_dtype, activation_dtype)`. Norms and softmax take their statistics
    in float32 whatever it says.

    Args:
      variable_dtype: of the variables, as `sim.state` and checkpoints have them.
      slice_dtype: of what the devices store; `variable_dtype` unless given.
      activation_dtype: of what a layer computes and returns: its input is cast to it, and its variables are where they
        are used. None: the dtype of the input, and of a table that is looked up in, that of its slices.
      precision: of products with variables: "default" or "highest" as of `mtf.einsum`; "int8" or "fp8" for quantised
        ones, those of the gradient too, see `mtf.quantized_einsum`; "fp8_full" for fp8 with cotangents in e5m2.
      softmax_dtype: in which materialised attention computes its softmax and keeps it for the gradient, if it is wider
        than the operands: float32, or "bfloat16" as TensorFlow's is under its policy of that name.
      kernel_dtype: of the kernels of products, for inference: "int8", "int4", "float8_e4m3fn" or "float8_e5m2", with a
        float32 variable `kernel_scale` beside each `kernel`, see `mtf.quantize`; they aren't trained. None: as others.
    Raises: GraphError for a dtype that is no float, or another precision.
    Example:
      >>> import meshlib as mtf
      >>> mixed = mtf.Numerics(slice_dtype="bfloat16", activation_dtype="bfloat16")
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("inner", 4)])
      ...     y = mtf.layers.dense(x, mtf.Dimension("outer", 2), numerics=mixed)
      >>> print(y.type, graph.variables["dense/kernel"].output.type)
      bf16[batch:8, outer:2] bf16[inner:4, outer:2]
    """

    variable_dtype: str = "float32"
    slice_dtype: str | None = None
    activation_dtype: str | None = None
    precision: str = "default"
    softmax_dtype: str = "float32"
    kernel_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("variable_dtype", "slice_dtype", "activation_dtype", "softmax_dtype"):
            given = getattr(self, name)
            if given is None and name in ("slice_dtype", "activation_dtype"):
                continue
            dtype = as_dtype(given)
            computed = name in ("activation_dtype", "softmax_dtype")
            if not (dtype.is_wide_float if computed else dtype.is_float):
                what = "a float dtype to compute in" if computed else "a float dtype"
                raise GraphError(f"{at('Numerics')}: {name} must be {what}, got {dtype.name}")
            object.__setattr__(self, name, dtype.name)
        choice(self.precision, "Numerics", "precision", (*PRECISIONS, _FULL))
        if self.kernel_dtype is not None:
            choice(self.kernel_dtype, "Numerics", "kernel_dtype", ("int8", "int4", "float8_e4m3fn", "float8_e5m2"))

    @property
    def unquantised(self) -> Numerics:
        """The same, with products that are not rounded to eight bits."""
        return replace(self, precision="default") if self.precision in EIGHT_BIT_PRODUCTS else self

    def wide(self, x: Tensor) -> Numerics:
        """The same, computed in the dtype of statistics of `x`: float32, or float64 as it is."""
        return replace(self, activation_dtype="float64" if x.dtype is FLOAT64 else "float32")

    def cast(self, x: Tensor) -> Tensor:
        """`x` in `activation_dtype`; as it is where there is none, and where it is no float."""
        return x if self.activation_dtype is None or not x.dtype.is_float else cast(x, self.activation_dtype)

    def variable(
        self, name: str, shape: Sequence[Dimension], initializer: Initializer | float, dtype: object | None = None
    ) -> Tensor:
        """A trained variable, used in `dtype`; `activation_dtype` unless given."""
        used = self.activation_dtype if dtype is None else dtype
        return variable(name, shape, initializer, self.variable_dtype, self.slice_dtype, used)

    def weights(
        self,
        name: str,
        shape: Sequence[Dimension],
        reduced: Sequence[Dimension],
        initializer: Initializer | float,
        dtype: object | None = None,
    ) -> Tensor:
        """The variable of a product that sums over `reduced`, in `kernel_dtype` with a scale for each other index."""
        if self.kernel_dtype is None:
            return self.variable(name, shape, initializer, dtype)
        used = self.activation_dtype if dtype is None else dtype
        rest = [d for d in shape if d not in reduced]
        stored = variable(name, shape, 0, self.kernel_dtype, trainable=False)
        scale = variable(f"{name}_scale", rest, 1.0, "float32", trainable=False)
        return cast(stored, "float32" if used is None else used) * cast(scale, "float32" if used is None else used)

    def product(self, x: Tensor, weights: Tensor, output_shape: Shape, name: str | None = None) -> Tensor:
        """`x` times a variable, in `precision`."""
        if self.precision in EIGHT_BIT_PRODUCTS:
            dtype, gradient_dtype = EIGHT_BIT_PRODUCTS[self.precision]
            return quantized_einsum([x, weights], output_shape, dtype, name, gradient_dtype)
        return einsum([x, weights], output_shape=output_shape, precision=self.precision, name=name)


DEFAULT = Numerics()
MIXED = Numerics(activation_dtype="bfloat16")


def as_numerics(value: object, what: str) -> Numerics:
    """`value`, which must be a `Numerics`: of one dtype alone it would be a guess what is meant."""
    if isinstance(value, Numerics):
        return value
    raise GraphError(
        f"{at(what)}: numerics must be an mtf.Numerics such as mtf.Numerics(activation_dtype='bfloat16'), "
        f"got {type(value).__name__} {value!r:.80}"
    )
