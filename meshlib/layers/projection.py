"""Products with variables: dense, and the feed-forward layers composed of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, choice, flag, number
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, scope
from meshlib.layers.numerics import DEFAULT, EIGHT_BIT_PRODUCTS, Numerics, as_numerics
from meshlib.ops.building import as_dim, as_dims, tensor
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.contraction.quantized import quantized_grouped_product
from meshlib.ops.contraction.ragged import PRECISIONS, grouped_product
from meshlib.ops.control.sources import constant_like
from meshlib.ops.movement.shape import broadcast, rename_dimension, reshape
from meshlib.ops.pointwise.activations import gelu, silu
from meshlib.ops.pointwise.arithmetic import add, multiply, relu
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.random import dropout as dropped

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Grouping:
    """Rows sorted by expert, for a kernel per expert.

    Attributes:
      rows: the dim of the rows.
      sizes: int32 number of rows per expert: batch dims of the rows, then the experts.
      filled: mean share of filled rows; draws: number of tokens that choose them; members: experts that share them.
      parts: whether experts are divided into parts of equal size with separate rows: the first dim of `sizes`.
    """

    rows: Dimension
    sizes: Tensor
    filled: float
    draws: int
    members: int
    parts: bool = False

    def product(self, x: Tensor, weights: Tensor, output_shape: Shape, numerics: Numerics, name: str | None) -> Tensor:
        """Each row times the kernel of its expert; `weights` has all experts as one dim."""
        members = self.sizes.shape[-1]
        if self.parts:
            shards = self.sizes.shape[0]
            apart = [[shards, members] if d.name == shards.name else [d] for d in weights.shape]
            weights = reshape(weights, [d for dims in apart for d in dims])
        operands = x, weights, self.sizes, self.rows, members, output_shape, self.filled, self.draws, self.members
        if numerics.precision in PRECISIONS:
            return grouped_product(*operands, numerics.precision, name)
        dtype, gradient_dtype = EIGHT_BIT_PRODUCTS[numerics.precision]
        return quantized_grouped_product(*operands, dtype, gradient_dtype, numerics.bound, name)

    def of_rows(self, values: Tensor, x: Tensor) -> Tensor:
        """The values [experts, features...] of each row's expert, as a product with ones."""
        one = Dimension("one", 1)
        ones = broadcast(constant_like(1.0, x, x.dtype), [*x.shape[:-1], one])
        experts = (self.sizes.shape[0] if self.parts else self.sizes.shape[-1]).name
        features = [d for d in values.shape if d.name != experts and d not in x.shape]
        column = reshape(values, [*values.shape, one])
        return self.product(ones, column, Shape([*x.shape[:-1], *features]), Numerics(precision="highest"), None)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_exact": lambda x: gelu(x, approximate=False),
    "relu": relu,
    "silu": silu,
    "linear": lambda x: x,
}


def dense(
    x: Tensor,
    new_dims: Dimension | Sequence[Dimension],
    reduced_dims: Sequence[Dimension] | None = None,
    use_bias: bool = True,
    activation: str | Activation | None = None,
    numerics: Numerics = DEFAULT,
    kernel_initializer: initializers.Initializer | None = None,
    name: str = "dense",
    expert_dims: Sequence[Dimension] = (),
) -> Tensor:
    """A dense layer: activation(x W + b).

    Args:
      x: [..., reduced_dims], float.
      new_dims: dims of the result in place of `reduced_dims`; one with the name of a reduced dim is `d_model_out` (for
        example) in W, b and the sum, a name that layout rules may use, and has its own name in the result.
      reduced_dims: dims of x to contract; by default its last one.
      use_bias: whether to add b, with dims `new_dims`, initially zeros.
      activation: applied to the result: a function of a tensor, or a name as in `feed_forward`.
      numerics: dtypes of variables and activations, precision of the product.
      kernel_initializer: initializer of W; by default normal with variance 1 / (size of reduced_dims).
      name: scope of the variables `kernel` and `bias`, and name of x W + b.
      expert_dims: dims of x along which each index has its own W and b; the first dims of the variables.
    Returns: [..., new_dims] in the dtype of x, or that of `numerics`.
    Raises: ShapeError if a new dim is a remaining dim of x, or x lacks a reduced or expert dim.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("inner", 4)])
      ...     y = mtf.layers.dense(x, mtf.Dimension("outer", 2))
      >>> print(y.shape)
      [batch:8, outer:2]
    """
    act = None if activation is None else activation_of(activation, "dense")
    x = tensor(x, "dense")
    _check_there(x, as_dims(expert_dims, "dense expert_dims", [x]), f"{at('dense')} '{name}': expert_dims")
    y = projection(
        x, new_dims, reduced_dims, use_bias, kernel_initializer, numerics, name, name, expert_dims=expert_dims
    )
    return y if act is None else act(y)


def _check_there(x: Tensor, dims: Sequence[Dimension], which: str) -> None:
    missing = [str(d) for d in dims if d not in x.shape]
    if missing:
        raise ShapeError(f"{which} {', '.join(missing)} are not in {x}")


def projection(
    x: Tensor,
    new_dims: Dimension | Sequence[Dimension],
    reduced_dims: Sequence[Dimension] | None,
    use_bias: bool,
    kernel_initializer: initializers.Initializer | None,
    numerics: Numerics,
    name: str,
    result: str,
    kernel_transform: Callable[[Tensor], Tensor] | None = None,
    expert_dims: Sequence[Dimension] = (),
    gates: Tensor | None = None,
    grouping: Grouping | None = None,
) -> Tensor:
    """x W + b as in `dense`, or its sum over `expert_dims` weighted by `gates`, named `result`.

    If x lacks expert dims, all experts along these have the same input x, or their rows of `grouping`.
    """
    x = as_numerics(numerics, "dense").cast(tensor(x, "dense"))
    new = as_dims(new_dims, "dense new_dims")
    reduced = _reduced(x, reduced_dims, name)
    apart = as_dims(expert_dims, "dense expert_dims", [x] if grouping is None else ())
    own = {d.name: f"{d.name}_out" for d in new if d.name in [r.name for r in reduced]}  # a dim contracted to itself
    new = tuple(Dimension(own.get(d.name, d.name), d.size) for d in new)
    _check_distinct(x, new, reduced, apart, f"{at('dense')} '{name}'")
    biased = flag(use_bias, "dense", "use_bias")
    with scope(name):
        kernel = _kernel(x, apart, reduced, new, kernel_initializer, numerics)
        kernel = kernel if kernel_transform is None else kernel_transform(kernel)
        bias = numerics.variable("bias", [*apart, *new], initializers.zeros(), x.dtype) if biased else None
    summed = reduced if gates is None else (*apart, *reduced)
    result_shape = _result_shape(x, apart if grouping is None else (), new, summed)
    if gates is not None:
        x = multiply(x, cast(gates, x.dtype), x.shape)
        bias = None if bias is None else einsum([cast(gates, bias.dtype), bias], output_shape=result_shape)
    final = f"{name}/sum" if own else result
    unbiased = final if bias is None else f"{name}/product"
    if grouping is None:
        y = numerics.product(x, kernel, result_shape, unbiased)
    else:
        y = grouping.product(x, kernel, result_shape, numerics, unbiased)
        bias = None if bias is None else grouping.of_rows(bias, x)
    y = y if bias is None else add(y, bias, name=final)
    for n, (wanted, there) in enumerate(own.items(), start=1):
        y = rename_dimension(y, there, wanted, result if n == len(own) else f"{name}/renamed")
    return y


def _kernel(
    x: Tensor,
    expert_dims: Sequence[Dimension],
    reduced: Sequence[Dimension],
    new: Sequence[Dimension],
    initializer: initializers.Initializer | None,
    numerics: Numerics,
) -> Tensor:
    """The weights, one kernel for each expert."""
    init = initializers.scaled_normal(reduced) if initializer is None else initializer
    init = initializers.stacked(init, len(expert_dims)) if expert_dims else init
    return numerics.weights("kernel", [*expert_dims, *reduced, *new], reduced, init, x.dtype)


def _result_shape(
    x: Tensor, experts: Sequence[Dimension], new: Sequence[Dimension], summed: Sequence[Dimension]
) -> Shape:
    """The dims of the product: those of experts that x lacks first."""
    added = [e for e in experts if e not in x.shape]
    return Shape([d for d in (*added, *x.shape, *new) if d not in summed])


def _reduced(x: Tensor, reduced_dims: Sequence[Dimension] | None, name: str) -> tuple[Dimension, ...]:
    """The contracted dims of x; by default its last one."""
    if reduced_dims is None:
        if not len(x.shape):
            raise ShapeError(f"{at('dense')}: {x} has no dim to contract")
        return (x.shape[-1],)
    reduced = as_dims(reduced_dims, "dense reduced_dims", [x])
    _check_there(x, reduced, f"{at('dense')} '{name}': reduced_dims")
    return reduced


def _check_distinct(
    x: Tensor, new: Sequence[Dimension], reduced: Sequence[Dimension], expert_dims: Sequence[Dimension], what: str
) -> None:
    """Raise ShapeError if an expert dim is contracted, or x already has a new dim."""
    twice = [str(d) for d in expert_dims if d in reduced]
    if twice:
        raise ShapeError(f"{what}: {', '.join(twice)} can't be in both reduced_dims and expert_dims")
    clashing = [str(d) for d in new if d.name in x.shape]
    if clashing:
        raise ShapeError(f"{what}: new_dims {', '.join(clashing)} are in {x} already; rename one side")


def feed_forward(
    x: Tensor,
    hidden_channels: Dimension,
    activation: str | Activation = "gelu",
    gated: bool = False,
    use_bias: bool = False,
    dropout: float = 0.0,
    dropout_broadcast_dims: Sequence[Dimension] | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "feed_forward",
    expert_dims: Sequence[Dimension] = (),
    gates: Tensor | None = None,
    grouping: Grouping | None = None,
) -> Tensor:
    """A feed-forward layer: activation(x Wi) Wo; gated: (activation(x Wgate) * (x Wi)) Wo.

    Args:
      x: [..., d_model], float; its last dim is contracted, and is that of the result.
      hidden_channels: the hidden dim, usually called d_ff.
      activation: one of "gelu" (by tanh), "gelu_exact", "relu", "silu", "linear", or a function of a tensor.
      gated: whether the first product is scaled by the activation of a second one, `wi_gate`.
      use_bias: whether each product adds a bias.
      dropout: probability of dropping a hidden element; 0 for evaluation.
      dropout_broadcast_dims: dims along which all elements share one draw.
      numerics: dtypes of variables and activations, precision of the products.
      name: scope of `wi`, `wi_gate` and `wo`, which name the variables and the products.
      expert_dims: dims of x along which each index has its own variables, as in `dense`.
      gates: [expert_dims..., some dims of x]: x lacks `expert_dims`, and the result is the sum over them of each
        expert's result times its gate.
      grouping: rows of x are sorted by the index of the single dim of `expert_dims`, which x lacks.
    Returns: the type of x, in the dtype of `numerics` if it has one.
    Raises: ShapeError if `hidden_channels` is a remaining dim of x, and for gates with other dims.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("d_model", 4)])
      ...     y = mtf.layers.feed_forward(x, mtf.Dimension("d_ff", 16), "silu", gated=True)
      >>> print(y.shape, *graph.variables)
      [batch:8, d_model:4] feed_forward/wi_gate/kernel feed_forward/wi/kernel feed_forward/wo/kernel

    Source: Vaswani et al., arXiv:1706.03762, section 3.3; gated: Shazeer, arXiv:2002.05202.
    """
    what = "feed_forward"
    x = as_numerics(numerics, what).cast(tensor(x, what))
    if not len(x.shape):
        raise ShapeError(f"{at(what)}: {x} has no dim to contract")
    act = activation_of(activation, what)
    hidden, channels = [as_dim(hidden_channels, what)], [x.shape[-1]]
    experts = as_dims(expert_dims, f"{what} expert_dims", [x] if grouping is None else ())
    if grouping is None and gates is None:
        _check_there(x, experts, f"{at(what)} '{name}': expert_dims")
    elif gates is not None:
        _check_gates(x, experts, tensor(gates, what), what)

    def product(
        x: Tensor, new: Sequence[Dimension], reduced: Sequence[Dimension], part: str, gates: Tensor | None = None
    ) -> Tensor:
        return projection(x, new, reduced, use_bias, None, numerics, part, part, None, expert_dims, gates, grouping)

    with scope(name):
        if flag(gated, what, "gated"):
            gate = act(product(x, hidden, channels, "wi_gate"))
            h = multiply(gate, product(x, hidden, channels, "wi"))
        else:
            h = act(product(x, hidden, channels, "wi"))
        h = drop(h, dropout, dropout_broadcast_dims, what)
        return product(h, channels, hidden, "wo", gates)


def _check_gates(x: Tensor, experts: Sequence[Dimension], gates: Tensor, what: str) -> None:
    strange = [d for d in gates.shape if d not in (*experts, *x.shape[:-1])]
    if strange or any(d not in gates.shape or d in x.shape for d in experts):
        raise ShapeError(
            f"{at(what)}: gates must have the dims {Shape(experts)} of the experts, which x lacks, and else some of x "
            f"but its last",
            gates,
            x,
        )


def activation_of(activation: str | Activation, what: str) -> Activation:
    """The activation of that name, or the function itself."""
    if callable(activation):
        return activation
    return ACTIVATIONS[choice(activation, what, "activation", tuple(ACTIVATIONS))]


def drop(x: Tensor, rate: float, broadcast_dims: Sequence[Dimension] | None, what: str) -> Tensor:
    """`x` with dropout at `rate`; all elements along `broadcast_dims` share one draw."""
    if not number(rate, what, "dropout"):
        return x
    same = as_dims(broadcast_dims or (), f"{what} dropout_broadcast_dims")
    strange = [str(d) for d in same if d not in x.shape]
    if strange:
        raise ShapeError(f"{at(what)}: dropout_broadcast_dims {', '.join(strange)} are not in {x}")
    return dropped(x, True, rate=rate, noise_shape=[d for d in x.shape if d not in same])


def dense_relu_dense(
    x: Tensor,
    hidden_channels: Dimension,
    dropout: float = 0.0,
    dropout_broadcast_dims: Sequence[Dimension] | None = None,
    numerics: Numerics = DEFAULT,
    name: str = "dense_relu_dense",
) -> Tensor:
    """relu(x Wi) Wo, without biases: `feed_forward` under Mesh TensorFlow's name.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.layers.dense_relu_dense(mtf.input("x", "d:2"), mtf.Dimension("hidden", 8))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[1.0, 2.0])["y"].shape)
      (2,)
    """
    return feed_forward(x, hidden_channels, "relu", False, False, dropout, dropout_broadcast_dims, numerics, name)
