"""Attention: the layer with its projections, and the materialised kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, choice, flag, number, whole
from meshlib.core.dtypes import as_dtype
from meshlib.core.errors import GraphError, LayoutError, ShapeError
from meshlib.core.foreign_names import OF_ARGUMENTS
from meshlib.core.graph import Tensor, scope
from meshlib.layers.norms import rms_norm, widened
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.layers.positions import RotaryScaling, check_scaling, rotary
from meshlib.layers.projection import drop, projection
from meshlib.ops.building import as_dim, as_dims, tensor
from meshlib.ops.contraction.einsum import einsum
from meshlib.ops.control.state import identity
from meshlib.ops.fused_attention.attention import arguments, attention, attention_type, checked_mask, visible
from meshlib.ops.movement.shape import rename_dimension
from meshlib.ops.pointwise.arithmetic import equal, logical_and, where
from meshlib.ops.pointwise.casts import cast
from meshlib.ops.pointwise.reductions import softmax


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
    """softmax over memory_length of (scale q k + bias), times v, with materialised scores.

    Slower and larger than `mtf.attention`, whose other arguments it shares; additional arguments:

    Args:
      bias: added to the scaled scores; has dims of q and k.
      dropout: probability of dropping a weight; 0 for evaluation.
      dropout_broadcast_dims: dims along which all weights share one draw.
      extra_logit: an additional score per query whose weight attends to nothing.
      softmax_dtype: dtype in which the softmax is computed and kept for the gradient, if wider than the operands:
        float32, or "bfloat16" as in TensorFlow's mixed_bfloat16 policy.
    Returns: [..., length, value_dim] in the order of q, dtype of q. Scores and weights have that dtype too.
    Raises: ShapeError for dims that do not fit, GraphError for a dim that an operand lacks.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     q = mtf.input("q", "length:4;d:8")
      ...     k, v = (mtf.input(name, "memory_length:4;d:8") for name in ("k", "v"))
      ...     y = mtf.layers.dot_product_attention(q, k, v, "length", "memory_length", "d", "d")
      >>> y.shape
      Shape('length:4;d:8')
    """
    what = "dot_product_attention"
    attrs = arguments(what, q, k, v, (length, memory_length, key_dim, value_dim), causal, window, scale)
    operands = [q, k, v, *([] if mask is None else [checked_mask(mask, q, k, what)])]
    try:
        result_type = attention_type(tuple(x.type for x in operands), attrs)
    except (ShapeError, LayoutError) as fault:
        raise ShapeError(f"{at(what)}: {fault}", *operands) from None
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
            raise ShapeError(f"{at(what)}: the bias has {', '.join(stray)}, which q and k lack", bias, q, k)
        scores = scores + cast(bias, scores.dtype)
    with scores.graph:
        seen = visible(rows, memory, attrs["causal"], attrs["window"])
    for allowed in (seen, mask):
        if allowed is not None:
            scores = where(allowed, scores, -1e30)
    weights = softmax(scores, memory, extra_logit)
    if mask is not None:
        weights = where(mask, weights, 0.0)  # queries that see no key yield zeros
    weights = drop(cast(weights, q.dtype), dropout, dropout_broadcast_dims, what)
    return einsum([weights, v], output_shape=result_type.shape, name=name)


@dataclass(frozen=True)
class Scores:
    """Options of attention: scores, masking, rotation and kernel.

    Args:
      causal, window, scale: as in `mtf.attention`.
      bias: added to the scores, such as `relative_position_bias`.
      rotary_base: base of rotary position embeddings, see `rotary`; None: not applied.
      rotary_scaling: scaling of rotary frequencies, see `RotaryScaling`.
      qk_norm: RMS norm of queries and keys per head, before rotation; qk_norm_over_heads: over all heads together.
      kernel: "flash", one fused operation, or "materialised", see `dot_product_attention`.
      positions: int32 rotary positions of queries and keys of one sequence, in place of 0, 1, ...
      segments: int32 segment ids of the queries' tokens and of the memory's, [..., length] each: a query sees only
        tokens of its segment, see `mtf.attention`.
    Raises: GraphError for an invalid value.
    Example:
      >>> import meshlib as mtf
      >>> scores = mtf.layers.Scores(causal=True, window=128, rotary_base=10_000.0)
      >>> scores.kernel, scores.window
      ('flash', 128)
    """

    causal: bool = False
    window: int | None = None
    scale: float | None = None
    bias: Tensor | None = None
    rotary_base: float | None = None
    qk_norm: bool = False
    kernel: str = "flash"
    positions: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None
    rotary_scaling: RotaryScaling | None = None
    qk_norm_over_heads: bool = False

    def __post_init__(self) -> None:
        what = "Scores"
        check_scaling(self.rotary_scaling, what, "rotary_scaling")
        flag(self.causal, what, "causal"), flag(self.qk_norm, what, "qk_norm")
        flag(self.qk_norm_over_heads, what, "qk_norm_over_heads")
        choice(self.kernel, what, "kernel", ("flash", "materialised"))
        if self.window is not None:
            whole(self.window, what, "window")
        for name in ("scale", "rotary_base"):
            if getattr(self, name) is not None:
                number(getattr(self, name), what, name)
        if self.bias is not None:
            tensor(self.bias, what)

    def check_materialised(self, what: str, given: str) -> None:
        """Raise ShapeError unless the kernel materialises scores."""
        if self.kernel == "flash":
            raise ShapeError(
                f"{at(what)}: kernel='flash' never has the scores and can't take {given}; use 'materialised'"
            )


ALL = Scores()


@dataclass(frozen=True)
class Held:
    """Existing keys and values, such as those of a cache.

    Args:
      keys, values: kernel operands [..., length, channels], with the batch dims of the queries.
      length: name of the dim that is attended to.
      mask: bool, with dims of queries and keys: False hides a key.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     keys, values = (mtf.input(n, "batch:2;heads:2;memory_length:6;head_dim:4") for n in ("keys", "values"))
      ...     held = mtf.layers.Held(keys, values, "memory_length")
      >>> print(held.keys.shape)
      [batch:2, heads:2, memory_length:6, head_dim:4]
    """

    keys: Tensor
    values: Tensor
    length: str
    mask: Tensor | None = None


# (keys, values) of a sequence, before their length is renamed -> `Held` that its queries attend to instead, or None.
Cache = Callable[[Tensor, Tensor], Held | None]


@dataclass(frozen=True)
class _Operands:
    """Computation of q, k and v: projection, norm, rotation; lengths are (name in the source, name in the kernel)."""

    scores: Scores
    channels: Dimension
    use_bias: bool
    numerics: Numerics
    query_length: tuple[str, str]
    memory_length: tuple[str, str]

    def projected(self, source: Tensor, dims: list[Dimension], part: str, last: str) -> Tensor:
        """The projection of a source to heads; `last` names the result."""
        return projection(source, dims, [source.shape[-1]], self.use_bias, None, self.numerics, part, last)

    def operand(self, source: Tensor, dims: list[Dimension], part: str, given: Tensor | None = None) -> Tensor:
        """q, k or v as the kernel's operand. The last computing operation gets the name, so that a policy keeps its
        result and not the value under the renamed dim.
        """
        scores = self.scores
        before, after = self.query_length if part == "q" else self.memory_length
        normed, base = (scores.qk_norm, scores.rotary_base) if part != "v" else (False, None)
        bare = base is None and (normed or given is not None)  # computed by a differently named operation
        last = part if not normed and base is None else f"{part}/projected"
        y = self.projected(source, dims, part, last) if given is None else given
        if normed:
            over = dims if scores.qk_norm_over_heads else self.channels
            y = rms_norm(y, over, numerics=self.numerics, name=f"{part}_norm")
        if base is not None:
            y = rotary(y, before, self.channels, base, scores.positions, part, scores.rotary_scaling)
        y = identity(y, part) if bare else y
        return y if before == after else rename_dimension(y, before, after, f"{part}/renamed")


@dataclass(frozen=True)
class _VisibleKeys:
    """The keys that queries attend to: dims, causal mask, window, and segment numbers of queries and of keys."""

    length: str
    channels: Dimension
    causal: bool
    window: int | None
    segments: tuple[Tensor, Tensor] | None

    def context(
        self,
        q: Tensor,
        memory: Held,
        scores: Scores,
        dropout: float,
        dropout_broadcast_dims: Sequence[Dimension] | None,
        numerics: Numerics,
    ) -> Tensor:
        """The weighted mean of values for each query, by the kernel in `scores`."""
        dims, seen = (self.length, memory.length, self.channels), memory.mask
        if scores.kernel == "flash":
            return attention(
                q, memory.keys, memory.values, *dims, None, self.causal, self.window, scores.scale, seen, "context",
                self.segments, scores.bias,
            )  # fmt: skip
        if self.segments is not None:
            same = equal(*self.segments)
            seen = same if seen is None else logical_and(seen, same)
        return dot_product_attention(
            q, memory.keys, memory.values, *dims, None, seen, scores.bias, dropout, dropout_broadcast_dims, None,
            self.causal, self.window, scores.scale, numerics.softmax_dtype, "context",
        )  # fmt: skip


def multihead_attention(
    query_antecedent: Tensor,
    memory_antecedent: Tensor | Held | None,
    mask: Tensor | None,
    kv_channels: Dimension,
    heads: Dimension | Sequence[Dimension],
    dropout: float = 0.0,
    dropout_broadcast_dims: Sequence[Dimension] | None = None,
    memory_heads: Dimension | Sequence[Dimension] | None = None,
    share_kv: bool = False,
    scores: Scores = ALL,
    use_bias: bool = False,
    numerics: Numerics = DEFAULT,
    name: str = "multihead_attention",
    cache: Cache | None = None,
    use_out_bias: bool | None = None,
) -> Tensor:
    """Attention of `query_antecedent` to `memory_antecedent`, or to itself, in several heads.

    Args:
      query_antecedent: [..., length, d_model], float.
      memory_antecedent: [..., memory_length, channels]; None: self-attention. If its length has the name of the
        queries' length, it is renamed to `memory_length` (prefix `memory_`) for keys and values; without a layout rule
        for that name they are gathered. `Held`: existing keys and values, for which no variables are created.
      mask: bool, with dims batch, length, memory_length (and heads): False hides a key. For padded sequences:
        `mtf.rename_dimension(mtf.not_equal(ids, 0), "length", "memory_length")`.
      kv_channels: the dim of one head of queries, keys and values.
      heads: dim or dims of the query heads.
      dropout, dropout_broadcast_dims: dropout of the weights; only with the materialised kernel.
      memory_heads: the `heads` dims of keys and values, by default all: only heads of [group, heads] is grouped-query
        attention; [] is a single head of keys and values (multi-query).
      share_kv: values are the keys before norm and rotation; then there is no `v/kernel`.
      scores: masking, window, scale, bias, rotation, norm, kernel: see `Scores`.
      use_bias: whether the four projections add biases; use_out_bias: whether the last one does, by default the same.
      numerics: dtypes of variables and activations, precision of projections; products of the kernel have the
        precision of `mtf.lower`.
      cache: called with keys and values after norm and rotation; if it returns a `Held`, queries attend to that,
        subject to its mask alone.
      name: scope of the variables `q/kernel`, `k/kernel`, `v/kernel`, `out/kernel`.
    Returns: the type of query_antecedent, in the dtype of `numerics` if it has one. Values in the scope are named q, k,
      v (the kernel's operands), context (its result) and out.
    Raises: ShapeError for dims that clash or do not fit.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> head, group, heads = D("head_dim", 4), D("group", 2), D("heads", 2)
      >>> with mtf.Graph() as graph:
      ...     x = mtf.input("x", [D("batch", 2), D("length", 8), D("d_model", 16)])
      ...     y = mtf.layers.multihead_attention(x, None, None, head, [group, heads], memory_heads=heads)
      >>> print(y.shape, graph.variables["multihead_attention/k/kernel"].output.shape)
      [batch:2, length:8, d_model:16] [d_model:16, heads:2, head_dim:4]

    Source: Vaswani et al., arXiv:1706.03762; grouped: Ainslie et al., arXiv:2305.13245; one head of keys and values:
      Shazeer, arXiv:1911.02150.
    """
    what = "multihead_attention"
    x = as_numerics(numerics, what).cast(tensor(query_antecedent, what))
    held = memory_antecedent if isinstance(memory_antecedent, Held) else None
    memory = x if held or memory_antecedent is None else numerics.cast(tensor(memory_antecedent, what))
    _check_arguments(x, memory, scores, dropout, what)
    channels = as_dim(kv_channels, what)
    of_queries, of_memory = ([*dims, channels] for dims in _head_dims(heads, memory_heads, what))
    length, own = x.shape[-2].name, memory.shape[-2].name
    renamed = own if own != length else f"memory_{length}"

    operands = _Operands(scores, channels, use_bias, numerics, (length, length), (own, renamed))

    with scope(name):
        shared = flag(share_kv, what, "share_kv") and held is None
        same = operands.projected(memory, of_memory, "k", "k/projected") if shared else None
        q, causal, window = operands.operand(x, of_queries, "q"), False, None
        if held is None:
            k, v = (operands.operand(memory, of_memory, part, same) for part in ("k", "v"))
            held = None if cache is None else cache(k, v)
            if held is None:
                held, causal, window = Held(k, v, renamed, mask), scores.causal, scores.window
        numbers = None
        if scores.segments is not None:
            of_keys = scores.segments[1]
            numbers = scores.segments[0], of_keys if own == renamed else rename_dimension(of_keys, own, renamed)
        visible = _VisibleKeys(length, channels, causal, window, numbers)
        context = visible.context(q, held, scores, dropout, dropout_broadcast_dims, numerics)
        start = initializers.scaled_normal(of_queries)
        biased = use_bias if use_out_bias is None else flag(use_out_bias, what, "use_out_bias")
        return projection(context, x.shape[-1], of_queries, biased, start, numerics, "out", "out")


def _head_dims(
    heads: Dimension | Sequence[Dimension], memory_heads: Dimension | Sequence[Dimension] | None, what: str
) -> tuple[tuple[Dimension, ...], tuple[Dimension, ...]]:
    """Dims of the query heads, and of the heads of keys and values."""
    of_queries = as_dims(heads, f"{what} heads")
    of_memory = of_queries if memory_heads is None else as_dims(memory_heads, f"{what} memory_heads")
    strange = [str(d) for d in of_memory if d not in of_queries]
    if strange:
        raise ShapeError(f"{at(what)}: memory_heads {', '.join(strange)} are not in heads {Shape(of_queries)}")
    return of_queries, of_memory


def _check_arguments(x: Tensor, memory: Tensor, scores: object, dropout: float, what: str) -> None:
    for t in (x, memory):
        if len(t.shape) < 2:
            raise ShapeError(f"{at(what)}: needs [..., length, channels], got {t}")
    if not isinstance(scores, Scores):
        raise GraphError(
            f"{at(what)}: scores must be mtf.layers.Scores(...), got {type(scores).__name__} {scores!r:.80}"
        )
    if isinstance(dropout, bool):
        raise GraphError(f"{at(what)}: dropout must be a number, got {dropout}; {OF_ARGUMENTS['is_training']}")
    if number(dropout, what, "dropout"):
        scores.check_materialised(what, f"dropout {dropout} of the weights")
