"""Arithmetic of layers as one record: dtypes of variables and activations, and the precision of products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hardware.unknown_names import Attributes
from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice
from meshlib.core.dtypes import FLOAT64, as_dtype
from meshlib.core.errors import GraphError
from meshlib.core.graph import Tensor
from meshlib.core.initializers import Initializer
from meshlib.ops.contraction.einsum import PRECISIONS, einsum
from meshlib.ops.contraction.quantized import checked_bound, quantized_einsum
from meshlib.ops.control.sources import variable
from meshlib.ops.pointwise.casts import cast

_FULL = "fp8_full"  # MaxText's name
# Eight-bit precision -> dtype of operands, and of cotangents in the products of the gradient.
EIGHT_BIT_PRODUCTS = {"int8": ("int8", "int8"), "fp8": ("fp8", "fp8"), _FULL: ("fp8", "fp8_e5m2")}


@dataclass(frozen=True)
class Numerics(Attributes):
    """Dtypes of variables and activations, and precision of products, of layers.

    Every layer with variables takes it as `numerics`, by default `mtf.Numerics()`. The first three fields are Mesh
    TensorFlow's `VariableDType(master_dtype, slice_dtype, activation_dtype)`. Norms and softmax always compute
    statistics in float32.

    Args:
      variable_dtype: dtype of variables in `sim.state` and checkpoints.
      slice_dtype: dtype stored on devices; by default `variable_dtype`.
      activation_dtype: dtype of a layer's computation and result, to which inputs and variables are cast. None: the
        dtype of the input, and for lookups that of the table's slices.
      precision: of products with variables: "default" or "highest" as in `mtf.einsum`; "int8" or "fp8" for quantised
        products, also in the gradient, see `mtf.quantized_einsum`; "fp8_full" for fp8 with cotangents in e5m2.
      bound: the largest magnitude of operands in eight-bit products, in place of the maxima that their scales follow
        otherwise; MaxText's recipes have 224 (`act_quantization_calibration_method="fixed,-224,224"`).
      softmax_dtype: dtype in which materialised attention computes its softmax and keeps it for the gradient, if wider
        than the operands: float32, or "bfloat16" as in TensorFlow's mixed_bfloat16 policy.
      kernel_dtype: dtype of the kernels of products, for inference: "int8", "int4", "float8_e4m3fn" or "float8_e5m2",
        each with a float32 variable `kernel_scale`, see `mtf.quantize`; they aren't trained. None: as other variables.
    Raises: GraphError for a dtype that is not float, or an unknown precision.
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
    bound: float | None = None
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
        checked_bound(self.bound, "Numerics")
        if self.kernel_dtype is not None:
            choice(self.kernel_dtype, "Numerics", "kernel_dtype", ("int8", "int4", "float8_e4m3fn", "float8_e5m2"))

    @property
    def unquantised(self) -> Numerics:
        """This record without eight-bit products."""
        return replace(self, precision="default") if self.precision in EIGHT_BIT_PRODUCTS else self

    def wide(self, x: Tensor) -> Numerics:
        """This record with activations in the dtype of statistics of `x`: float32, or float64 for float64."""
        return replace(self, activation_dtype="float64" if x.dtype is FLOAT64 else "float32")

    def cast(self, x: Tensor) -> Tensor:
        """`x` in `activation_dtype`; unchanged if that is None or `x` is not float."""
        return x if self.activation_dtype is None or not x.dtype.is_float else cast(x, self.activation_dtype)

    def variable(
        self, name: str, shape: Sequence[Dimension], initializer: Initializer | float, dtype: object | None = None
    ) -> Tensor:
        """A trained variable, cast to `dtype`, by default `activation_dtype`."""
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
        """The weights of a product over `reduced`, in `kernel_dtype` with one scale per index of the other dims."""
        if self.kernel_dtype is None:
            return self.variable(name, shape, initializer, dtype)
        used = self.activation_dtype if dtype is None else dtype
        rest = [d for d in shape if d not in reduced]
        stored = variable(name, shape, 0, self.kernel_dtype, trainable=False)
        scale = variable(f"{name}_scale", rest, 1.0, "float32", trainable=False)
        return cast(stored, "float32" if used is None else used) * cast(scale, "float32" if used is None else used)

    def product(self, x: Tensor, weights: Tensor, output_shape: Shape, name: str | None = None) -> Tensor:
        """The product of `x` and a variable, in `precision`."""
        if self.precision in EIGHT_BIT_PRODUCTS:
            dtype, gradient_dtype = EIGHT_BIT_PRODUCTS[self.precision]
            return quantized_einsum([x, weights], output_shape, dtype, name, gradient_dtype, self.bound)
        return einsum([x, weights], output_shape=output_shape, precision=self.precision, name=name)


DEFAULT = Numerics()
MIXED = Numerics(activation_dtype="bfloat16")


def as_numerics(value: object, what: str) -> Numerics:
    """`value`, which must be a `Numerics`; a single dtype would be ambiguous."""
    if isinstance(value, Numerics):
        return value
    raise GraphError(
        f"{at(what)}: numerics must be an mtf.Numerics such as mtf.Numerics(activation_dtype='bfloat16'), "
        f"got {type(value).__name__} {value!r:.80}"
    )
