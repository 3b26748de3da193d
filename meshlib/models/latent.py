"""Latent attention in a Transformer: training, prefill and decoding."""

from __future__ import annotations

from dataclasses import dataclass

from layouts import Dimension
from meshlib.core.arguments import at, whole
from meshlib.core.errors import GraphError
from meshlib.layers.latent import LatentDims


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """The ranks of a model's latent attention.

    Args:
      kv_rank: size of the latent vector from which keys and values of all heads are computed, and which is cached.
      q_rank: size of the latent vector of queries; None: they are computed from the layer's input.
      rope_dim: size of the rotary key shared by all heads, which is cached too, and of the rotary part of queries.
      nope_dim: size of each head's own key without rotation. The model's head_dim is the sum of both.
      value_dim: size of each head's values.
    Raises: GraphError with all faults at once.
    Example:
      >>> import meshlib as mtf
      >>> latent = mtf.models.preset("deepseek-v3").latent
      >>> latent.kv_rank + latent.rope_dim  # numbers a token has in the cache of a layer
      576

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None

    def __post_init__(self) -> None:
        what = "LatentAttention"
        faults = [
            f"{name} must be at least 1, got {value}"
            for name, value in vars(self).items()
            if value is not None and whole(value, what, name) < 1
        ]
        if self.rope_dim % 2:
            faults.append(f"rotary positions rotate pairs of features: rope_dim must be even, got {self.rope_dim}")
        if faults:
            raise GraphError.listing(at(what), faults)

    @property
    def head_dim(self) -> int:
        """Size of a query, and of a key."""
        return self.nope_dim + self.rope_dim

    def dims(self, heads: int) -> LatentDims:
        """The `LatentDims` for layers."""
        return LatentDims(
            Dimension("heads", heads),
            Dimension("kv_rank", self.kv_rank),
            Dimension("head_dim", self.nope_dim),
            Dimension("head_dim", self.rope_dim),
            Dimension("value_dim", self.value_dim),
            None if self.q_rank is None else Dimension("q_rank", self.q_rank),
        )

    def reduced(self) -> LatentAttention:
        """The same attention with small sizes."""
        return LatentAttention(
            kv_rank=8, rope_dim=4, nope_dim=8, value_dim=6, q_rank=None if self.q_rank is None else 12
        )

    def weights(self, d_model: int, heads: int) -> int:
        """Parameters of the matrices of a layer's attention."""
        queries = heads * self.head_dim
        query_weights = d_model * queries if self.q_rank is None else self.q_rank * (d_model + queries)
        keys = d_model * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return query_weights + keys + heads * self.value_dim * d_model

    @property
    def norm_scales(self) -> int:
        """Parameters of the norms of the latent vectors."""
        return self.kv_rank + (self.q_rank or 0)
