"""Attention: the layer with its projections, and the materialised kernel."""

from __future__ import annotations

from collections.abc import Sequence

from layouts import Dimension, Shape
from meshlib import initializers
from meshlib.checks import at, choice, flag, number
from meshlib.dtypes import as_dtype
from meshlib.errors import LayoutError, ShapeError
from meshlib.graph import Tensor, scope
from meshlib.layers.norms import rms_norm, widened
from meshlib.layers.positions import rotary
from meshlib.layers.projection import drop, projection
from meshlib.operation import as_dim, tensor
from meshlib.ops.attention import arguments, attention, attention_type, visible
from meshlib.ops.einsum import einsum
from meshlib.ops.elementwise import cast, where
from meshlib.ops.reduce import softmax
from meshlib.ops.shape import rename_dimension
from meshlib.ops.state import identity


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: Dimension | str,
    memory_length: Dimension | str,
    key_dim: Dimension | str,
    value_dim: Dimension | str | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    dropout_broadcast_dims: Sequence[Dimension] | None = None,
    extra_logit: float | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softmax_dtype: object = "float32",
    name: str | None = None,
) -> Tensor:
    """softmax over memory_length of (scale q k + bias), times v, with the scores as a value of the program.

    Slower and larger than `mtf.attention`, whose other arguments it shares; it takes what that does not:

    Args:
      bias: added to the scaled scores; of dims of q and k.
      dropout: probability with which a weight is dropped; 0 for evaluation.
      dropout_broadcast_dims: dims along which one draw serves all weights.
      extra_logit: one more score per query, which leads nowhere.
      softmax_dtype: in which the softmax is computed and kept for the gradient, if it is wider than the operands:
        float32, or "bfloat16" as TensorFlow's is under its policy of that name.
    Returns: [..., length, value_dim] in the order of q, dtype of q. Scores and weights have that dtype, too.
    Raises: ShapeError for dims that do not fit, GraphError for a dim that an operand lacks.
    """
    what = "dot_product_attention"
    attrs = arguments(what, q, k, v, length, memory_length, key_dim, value_dim, causal, window, scale)
    operands = [q, k, v, *([] if mask is None else [tensor(mask, what)])]
    try:
        made = attention_type(tuple(x.type for x in operands), attrs)
    except (ShapeError, LayoutError) as fault:
        raise ShapeError(f"{at(what)}: {fault}" + "".join(f"\n  {x}" for x in operands)) from None
    rows, memory = q.shape.dim(attrs["length"]), k.shape.dim(attrs["memory_length"])
    shared = [d for d in q.shape if d in k.shape and d.name != attrs["key_dim"]]
    pairs = Shape([*shared, *(d for d in q.shape if d not in k.shape), memory])
    scores = einsum([q, k], output_shape=pairs, name="scores")
    if as_dtype(softmax_dtype).itemsize > scores.dtype.itemsize:
        scores = widened(scores)
    scores = scores * attrs["scale"]
    if bias is not None:
        stray = [str(d) for d in tensor(bias, what).shape if d not in pairs]
        if stray:
            raise ShapeError(f"{at(what)}: the bias has {', '.join(stray)}, which q and k lack\n  {bias}\n  {q}\n  {k}")
        scores = scores + cast(bias, scores.dtype)
    with scores.graph:
        seen = visible(rows, memory, attrs["causal"], attrs["window"])
    for allowed in (seen, mask):
        if allowed is not None:
            scores = where(allowed, scores, -1e30)
    weights = softmax(scores, memory, extra_logit)
    if mask is not None:
        weights = where(mask, weights, 0.0)  # a query that sees none gets zeros
    weights = drop(cast(weights, q.dtype), dropout, dropout_broadcast_dims, what)
    return einsum([weights, v], output_shape=made.shape, name=name)


def multihead_attention(
    query_antecedent: Tensor,
    memory_antecedent: Tensor | None,
    mask: Tensor | None,
    kv_channels: Dimension,
    heads: Dimension,
    group: Dimension | None = None,
    multi_query: bool = False,
    share_kv: bool = False,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    rotary_base: float | None = None,
    qk_norm: bool = False,
    use_bias: bool = False,
    dropout: float = 0.0,
    dropout_broadcast_dims: Sequence[Dimension] | None = None,
    kernel: str = "flash",
    softmax_dtype: object = "float32",
    matmul_dtype: str | None = None,
    variable_dtype: object = "float32",
    slice_dtype: object | None = None,
    name: str = "multihead_attention",
) -> Tensor:
    """Attention of `query_antecedent` to `memory_antecedent`, or to itself, in several heads.

    Args:
      query_antecedent: [..., length, d_model], float.
      memory_antecedent: [..., memory_length, channels]; None: attention of the queries' sequence to itself. A length
        under the queries' name is renamed to `memory_length` (of another name: `memory_` before it) for keys and
        values; a layout rule without that name gathers them.
      mask: bool, of dims batch, length, memory_length (and heads): False hides a key; None: nothing hidden so. Of
        padded sequences: `mtf.rename_dimension(mtf.not_equal(ids, 0), "length", "memory_length")`.
      kv_channels: the dim of the elements of one head of queries, keys and values.
      heads: heads of keys and values; queries have as many, or `group` times as many.
      group: queries' heads that share a head of keys and values (grouped-query attention).
      multi_query: one head of keys and values for all `heads` of queries.
      share_kv: values are what keys are before norm and rotation; then there is no `v/kernel`.
      causal, window, scale: as of `mtf.attention`.
      bias: added to the scores, as `relative_position_bias` makes it; the materialised kernel alone takes it.
      rotary_base: turns queries and keys by their positions, see `rotary`; None: does not.
      qk_norm: RMS norm of queries and keys over their elements, before they are turned.
      use_bias: whether the four products add biases.
      dropout, dropout_broadcast_dims: of the weights; the materialised kernel alone has it.
      kernel: "flash", one fused operation, or "materialised", see `dot_product_attention`.
      softmax_dtype: as of `dot_product_attention`; the fused kernel's is float32.
      matmul_dtype: "int8" or "fp8" for quantised products with variables, as of `dense`; not those of the kernel.
      variable_dtype, slice_dtype: of the variables; they are used in the dtype of query_antecedent.
      name: scope of the variables `q/kernel`, `k/kernel`, `v/kernel`, `out/kernel`.
    Returns: the type of query_antecedent. Within the scope the values are called q, k, v (as the kernel takes them),
      context (what it makes) and out.
    Raises: ShapeError for dims that clash or do not fit.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [D("batch", 2), D("length", 8), D("d_model", 16)])
      ...     y = mtf.layers.multihead_attention(x, None, None, D("head_dim", 4), D("heads", 2), D("group", 2))
      >>> print(y.shape, graph.variables["multihead_attention/k/kernel"].output.shape)
      [batch:2, length:8, d_model:16] [d_model:16, heads:2, head_dim:4]

    Source: Vaswani et al., arXiv:1706.03762; grouped: Ainslie et al., arXiv:2305.13245; one head of keys and values:
      Shazeer, arXiv:1911.02150.
    """
    what = "multihead_attention"
    x = tensor(query_antecedent, what)
    memory = x if memory_antecedent is None else tensor(memory_antecedent, what)
    _check_arguments(x, memory, kernel, bias, dropout, what)
    (length, d_model), memory_length = x.shape[-2:], memory.shape[-2]
    heads, channels = as_dim(heads, what), as_dim(kv_channels, what)
    shared = flag(multi_query, what, "multi_query")
    if shared and group is not None:
        raise ShapeError(f"{at(what)}: give multi_query or group, not both; group is {group}")
    of_queries = [*([] if group is None else [as_dim(group, what)]), heads, channels]
    of_memory = [channels] if shared else [heads, channels]
    renamed = memory_length.name if memory_length.name != length.name else f"memory_{length.name}"

    def projected(source: Tensor, dims: list[Dimension], part: str, last: str) -> Tensor:
        channels = [source.shape[-1]]
        return projection(source, dims, channels, use_bias, variable_dtype, slice_dtype, None, matmul_dtype, part, last)

    def made(source: Tensor, dims: list[Dimension], part: str, given: Tensor | None = None) -> Tensor:
        """q, k or v as the kernel takes it; the last operation bears its name."""
        final, own = length.name if part == "q" else renamed, source.shape[-2]
        normed, base = (flag(qk_norm, what, "qk_norm"), rotary_base) if part != "v" else (False, None)
        last = part if not normed and base is None and final == own.name else f"{part}/projected"
        y = projected(source, dims, part, last) if given is None else given
        if normed:
            y = rms_norm(y, channels, variable_dtype=variable_dtype, slice_dtype=slice_dtype, name=f"{part}_norm")
        if base is not None:
            y = rotary(y, own, channels, base, name=part if final == own.name else f"{part}/turned")
        if final != own.name:
            return rename_dimension(y, own.name, final, part)
        return y if base is not None or (given is None and not normed) else identity(y, part)

    with scope(name):
        same = projected(memory, of_memory, "k", "k/projected") if flag(share_kv, what, "share_kv") else None
        q, k, v = made(x, of_queries, "q"), made(memory, of_memory, "k", same), made(memory, of_memory, "v", same)
        dims = length, renamed, channels
        if kernel == "flash":
            context = attention(q, k, v, *dims, None, causal, window, scale, mask, "context")
        else:
            context = dot_product_attention(
                q,
                k,
                v,
                *dims,
                mask=mask,
                bias=bias,
                dropout=dropout,
                dropout_broadcast_dims=dropout_broadcast_dims,
                causal=causal,
                window=window,
                scale=scale,
                softmax_dtype=softmax_dtype,
                name="context",
            )
        start = initializers.scaled_normal(of_queries)
        return projection(
            context, d_model, of_queries, use_bias, variable_dtype, slice_dtype, start, matmul_dtype, "out", "out"
        )


def _check_arguments(x: Tensor, memory: Tensor, kernel: str, bias: object, dropout: float, what: str) -> None:
    for t in (x, memory):
        if len(t.shape) < 2:
            raise ShapeError(f"{at(what)}: needs [..., length, channels], got {t}")
    choice(kernel, what, "kernel", ("flash", "materialised"))
    if kernel == "flash" and (bias is not None or number(dropout, what, "dropout")):
        given = "a bias of the scores" if bias is not None else f"dropout {dropout} of the weights"
        raise ShapeError(f"{at(what)}: kernel='flash' never has the scores and can't take {given}; use 'materialised'")
