"""Multi-head latent attention: keys and values of all heads from one low-rank vector per token.

`latent_memory` computes the cached values, a latent vector per token and the rotary key shared by all heads;
`latent_queries` the two parts of the queries. `latent_attention` expands the latents to keys and values of all heads,
which is the least work if many queries see each key.
"""

from __future__ import annotations

from dataclasses import dataclass

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, flag, number
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, scope
from meshlib.layers.attention import Cache, Held
from meshlib.layers.norms import rms_norm
from meshlib.layers.numerics import DEFAULT, Numerics, as_numerics
from meshlib.layers.positions import rotary
from meshlib.layers.projection import projection
from meshlib.ops.building import as_dim, floats
from meshlib.ops.fused_attention.attention import attention
from meshlib.ops.movement.runs import concat
from meshlib.ops.movement.runs import slice as part_of
from meshlib.ops.movement.shape import broadcast, rename_dimension


@dataclass(frozen=True)
class LatentDims:
    """The dims of latent attention.

    Args:
      heads: heads of queries, keys and values.
      kv_rank: latent vector from which keys and values are computed.
      nope: part of a head without rotary positions; has the name of `rope` and of their concatenation.
      rope: part with rotary positions: of a query head, and of the key shared by all heads.
      value: one head of values.
      q_rank: latent vector from which queries are computed; None: they are computed from the input.
    Raises: ShapeError for arguments that are not dims, and for names that do not fit.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> nope, rope = D("head_dim", 6), D("head_dim", 2)
      >>> dims = mtf.layers.LatentDims(D("heads", 2), D("kv_rank", 4), nope, rope, D("value", 6))
      >>> dims.kv_rank.size, dims.q_rank
      (4, None)
    """

    heads: Dimension
    kv_rank: Dimension
    nope: Dimension
    rope: Dimension
    value: Dimension
    q_rank: Dimension | None = None

    def __post_init__(self) -> None:
        what = "LatentDims"
        for name, value in vars(self).items():
            if value is not None or name != "q_rank":
                as_dim(value, f"{what} {name}")
        if self.nope.name != self.rope.name:
            raise ShapeError(f"{at(what)}: nope and rope need one name, got '{self.nope.name}' and '{self.rope.name}'")

    @property
    def key(self) -> Dimension:
        """A whole head of queries or keys."""
        return Dimension(self.nope.name, self.nope.size + self.rope.size)


def latent_queries(
    x: Tensor,
    dims: LatentDims,
    rotary_base: float,
    epsilon: float = 1e-6,
    numerics: Numerics = DEFAULT,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries [..., length, heads, nope] and rotated queries [..., length, heads, rope] of x [..., length, d_model].

    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> nope, rope = D("head_dim", 6), D("head_dim", 2)
      >>> dims = mtf.layers.LatentDims(D("heads", 2), D("kv_rank", 4), nope, rope, D("value", 6))
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "length:8;d_model:16")
      ...     print(*[q.shape for q in mtf.layers.latent_queries(x, dims, rotary_base=1e4)])
      [length:8, heads:2, head_dim:6] [length:8, heads:2, head_dim:2]
    """
    x, rotary_base, epsilon = _checked(x, dims, rotary_base, epsilon, numerics, "latent_queries")
    length, features = x.shape[-2:]
    narrow = features
    if dims.q_rank is not None:
        x = projection(x, dims.q_rank, [features], False, None, numerics, "q_latent", "q_latent")
        x = rms_norm(x, dims.q_rank, epsilon, numerics, "q_latent_norm")
        narrow = dims.q_rank
    plain, turned = (
        projection(x, [dims.heads, part], [narrow], False, None, numerics, name, name)
        for name, part in (("q_nope", dims.nope), ("q_rope", dims.rope))
    )
    return plain, rotary(turned, length, dims.rope, rotary_base, positions)


def latent_memory(
    x: Tensor,
    dims: LatentDims,
    rotary_base: float,
    epsilon: float = 1e-6,
    numerics: Numerics = DEFAULT,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The cached values: normalised latents [..., length, kv_rank] and the rotated shared key [..., length, rope].

    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> nope, rope = D("head_dim", 6), D("head_dim", 2)
      >>> dims = mtf.layers.LatentDims(D("heads", 2), D("kv_rank", 4), nope, rope, D("value", 6))
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "length:8;d_model:16")
      ...     print(*[y.shape for y in mtf.layers.latent_memory(x, dims, rotary_base=1e4)])
      [length:8, kv_rank:4] [length:8, head_dim:2]
    """
    x, rotary_base, epsilon = _checked(x, dims, rotary_base, epsilon, numerics, "latent_memory")
    length, features = x.shape[-2:]
    latent = projection(x, dims.kv_rank, [features], False, None, numerics, "latent", "latent")
    latent = rms_norm(latent, dims.kv_rank, epsilon, numerics, "latent_norm")
    shared = projection(x, dims.rope, [features], False, None, numerics, "k_rope", "k_rope")
    return latent, rotary(shared, length, dims.rope, rotary_base, positions)


def latent_attention(
    x: Tensor,
    dims: LatentDims,
    causal: bool = True,
    rotary_base: float = 10_000.0,
    scale: float | None = None,
    epsilon: float = 1e-6,
    numerics: Numerics = DEFAULT,
    name: str = "latent_attention",
    positions: Tensor | None = None,
    cache: Cache | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Self-attention with keys and values computed from a low-rank latent vector per token.

    Args:
      x: [..., length, d_model], float.
      dims: of heads and latent vectors.
      causal: whether a query sees only its own and preceding positions.
      rotary_base: base of the rotary positions, see `rotary`.
      scale: factor of the scores; by default 1 / sqrt(nope + rope).
      epsilon: of the norms of the latent vectors.
      numerics: dtypes of variables and activations, precision of the products with variables.
      positions: int32 positions of the tokens, in place of 0, 1, ...
      cache: called with the latents concatenated with the shared keys, [..., memory, kv_rank + rope], as keys and as
        values; if it returns a `Held`, queries attend to that in the latent space (absorbed projections, without
        keys and values per head), which is the least work for few queries.
      segments: int32 segment ids [..., length]: a token sees those of its segment, see `mtf.attention`.
      name: scope of the variables `q_latent`, `q_nope`, `q_rope`, `latent`, `k_rope`, `k_nope`, `v`, `out`, each with
        a `kernel`, and of the norms.
    Returns: the type of x, in the dtype of `numerics` if it has one. Values in the scope are named q, k, v (the
      kernel's operands), context (its result) and out.
    Raises: ShapeError for dims that clash.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> nope, rope = D("head_dim", 6), D("head_dim", 2)
      >>> dims = mtf.layers.LatentDims(D("heads", 2), D("kv_rank", 4), nope, rope, D("value", 6))
      >>> with mtf.Graph() as graph:
      ...     y = mtf.layers.latent_attention(mtf.input("x", [D("batch", 2), D("length", 8), D("d_model", 16)]), dims)
      >>> print(y.shape, graph.variables["latent_attention/k_nope/kernel"].output.shape)
      [batch:2, length:8, d_model:16] [kv_rank:4, heads:2, head_dim:6]

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    what = "latent_attention"
    x, base, epsilon = _checked(x, dims, rotary_base, epsilon, numerics, what)
    length, features = x.shape[-2:]
    memory = f"memory_{length.name}"
    with scope(name):
        parts = latent_queries(x, dims, base, epsilon, numerics, positions)
        latent, shared = latent_memory(x, dims, base, epsilon, numerics, positions)
        latent, shared = (rename_dimension(t, length.name, memory) for t in (latent, shared))
        held = None
        if cache is not None:
            together = concat([rename_dimension(shared, dims.rope.name, dims.kv_rank.name), latent], dims.kv_rank.name)
            held = cache(together, together)
        by = dims.key.size**-0.5 if scale is None else scale
        if held is None:
            pair = None if segments is None else (segments, rename_dimension(segments, length.name, memory))
            seen = flag(causal, what, "causal")
            context = _expanded(parts, latent, shared, dims, memory, seen, by, numerics, pair)
        else:
            context = _absorbed(parts, held, dims, length, by, numerics)
        value_dims = [dims.heads, dims.value]
        start = initializers.scaled_normal(value_dims)
        return projection(context, features, value_dims, False, start, numerics, "out", "out")


def _expanded(
    queries: tuple[Tensor, Tensor],
    latent: Tensor,
    shared: Tensor,
    dims: LatentDims,
    memory: str,
    causal: bool,
    scale: float,
    numerics: Numerics,
    segments: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention with keys and values per head, computed from the latents."""
    q = concat(queries, dims.key.name, "q")
    plain, v = (
        projection(latent, [dims.heads, part], [dims.kv_rank], False, None, numerics, name, name)
        for name, part in (("k_nope", dims.nope), ("v", dims.value))
    )
    per_head = Shape([*shared.shape[:-1], dims.heads, dims.rope])
    k = concat([plain, broadcast(shared, per_head)], dims.key.name, "k")
    return attention(q, k, v, q.shape[-3], memory, dims.key, dims.value, causal, None, scale, None, "context", segments)


def _absorbed(
    queries: tuple[Tensor, Tensor], held: Held, dims: LatentDims, length: Dimension, scale: float, numerics: Numerics
) -> Tensor:
    """Attention in the latent space: (q Wk) c = q (Wk c), and the weighted sum of values is that of latents, times Wv.
    Keys and values are one array; values are all of it except the shared rotary keys."""
    plain, turned = queries
    rank = dims.kv_rank
    weights = []
    for name, part in (("k_nope", dims.nope), ("v", dims.value)):
        with scope(name):
            start = initializers.scaled_normal([rank])
            weights.append(numerics.weights("kernel", [rank, dims.heads, part], [rank], start, plain.dtype))
    batch = [d for d in plain.shape if d != dims.nope]
    moved = numerics.unquantised.product(plain, weights[0], Shape([*batch, rank]), "q_absorbed")
    q = concat([rename_dimension(turned, dims.rope.name, rank.name), moved], rank.name, "q")
    name = rank.name
    context = attention(q, held.keys, held.values, length, held.length, name, None, False, None, scale, held.mask)
    latent = part_of(context, dims.rope.size, rank.size, name)
    return numerics.unquantised.product(latent, weights[1], Shape([*batch, dims.value]), "context")


def _checked(
    x: object, dims: object, rotary_base: object, epsilon: object, numerics: Numerics, what: str
) -> tuple[Tensor, float, float]:
    """x in the dtype of `numerics`, and the checked numbers."""
    operand = as_numerics(numerics, what).cast(floats(x, what))
    if not isinstance(dims, LatentDims):
        raise ShapeError(f"{at(what)}: dims must be mtf.layers.LatentDims(...), got {dims!r:.80}")
    if len(operand.shape) < 2:
        raise ShapeError(f"{at(what)}: needs [..., length, channels], got {operand}")
    return operand, number(rotary_base, what, "rotary_base"), number(epsilon, what, "epsilon")
