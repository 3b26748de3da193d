"""Parts of the configs of models: the base of all, mixtures of experts, and latent attention."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any, Self

from hardware.unknown_names import Attributes
from layouts import Dimension
from layouts.checking import some
from meshlib.core.arguments import at, choice, whole
from meshlib.core.errors import GraphError, nearest
from meshlib.layers.experts import FORMS
from meshlib.layers.latent import LatentDims
from meshlib.layers.numerics import Numerics
from meshlib.layers.routing import Routing

# Fields of Hugging Face's and others' configs -> the name here.
_OF_OTHERS = {
    "hidden_size": "d_model", "n_embd": "d_model", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "intermediate_size": "d_ff", "ffn_dim": "d_ff", "dtype": "activation_dtype",
    "weight_dtype": "variable_dtype", "max_position_embeddings": "max_length", "seq_len": "max_length",
}  # fmt: skip


@dataclass(frozen=True)
class Config(Attributes):
    """A frozen record with the configuration of a model."""

    def __new__(cls, *values: object, **given: object) -> Self:
        """A config; an unknown field is an error with the nearest name."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                further = [f.name for f in fields(Numerics)] if "numerics" in known else []
                hint = nearest(_OF_OTHERS.get(name, name), [*known, *further]) or f"; there are {some(known, 20)}"
                raise GraphError(f"{at(cls.__name__)}: no field {name!r}{hint}")
        return super().__new__(cls)

    @classmethod
    def checked(cls, value: object, what: str) -> Self:
        """`value`, which must be a config of this class. Raises: GraphError otherwise."""
        if isinstance(value, cls):
            return value
        raise GraphError(f"{at(what)}: expected a {cls.__name__}, got {type(value).__name__} {value!r:.80}")

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of some fields.

        >>> import meshlib as mtf
        >>> mtf.models.preset("gpt2").replace(vocab=50304).vocab
        50304
        """
        return replace(self, **changes)

    def not_positive(self, *names: str) -> list[str]:
        """The sizes below 1 among these fields, for an error. Raises: GraphError for a size that is not an integer."""
        sizes = {name: whole(getattr(self, name), type(self).__name__, name) for name in names}
        return [f"{name}={size}" for name, size in sizes.items() if size < 1]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixtures of experts of a model, in place of the feed-forward blocks of some layers.

    Args:
      count, d_ff: experts per layer, and hidden features of each.
      routing: assignment of tokens to experts.
      shared: number of shared experts of that width, used by all tokens.
      first_dense: number of layers at the front with a dense feed-forward block.
      every: after those, the last of each `every` layers has experts.
      form: form of dispatch, see `mtf.layers.moe`.
    Raises: GraphError with all faults at once.
    Example:
      >>> import meshlib as mtf
      >>> eight = mtf.models.Experts(count=8, d_ff=256, routing=mtf.layers.Routing(gating="switch"), every=2)
      >>> [eight.in_layer(n) for n in range(4)]
      [False, True, False, True]
    """

    count: int
    d_ff: int
    routing: Routing = field(default_factory=Routing)
    shared: int = 0
    first_dense: int = 0
    every: int = 1
    form: str | None = None

    def __post_init__(self) -> None:
        what = "Experts"
        least = {"count": 1, "d_ff": 1, "shared": 0, "first_dense": 0, "every": 1}
        faults = [
            f"{name} must be at least {low}, got {getattr(self, name)}"
            for name, low in least.items()
            if whole(getattr(self, name), what, name) < low
        ]
        if faults:
            raise GraphError.listing(at(what), faults)
        if not isinstance(self.routing, Routing):
            raise GraphError(f"{at(what)}: routing must be an mtf.layers.Routing, got {self.routing!r:.80}")
        self.routing.check_experts(self.count, what)
        if self.form is not None:
            choice(self.form, what, "form", FORMS)
        if self.form == "grouped":
            self.routing.check_grouped(what)

    def in_layer(self, number: int) -> bool:
        """True if layer `number`, counted from 0, has experts."""
        return number >= self.first_dense and (number - self.first_dense + 1) % self.every == 0

    @property
    def active(self) -> int:
        """Mean number of experts per token, including shared ones."""
        return self.routing.choices + self.shared

    def reduced(self) -> Experts:
        """The same mixture with few small experts."""
        r = self.routing
        groups = min(r.expert_groups, 4)
        count = min(self.count, 8)
        small = replace(
            r,
            top_k=min(r.top_k, 3 if count >= 4 else 1),
            ntlb_top_k=min(r.ntlb_top_k, 2),
            expert_groups=groups,
            groups_per_token=min(r.groups_per_token, max(1, groups // 2)),
            group_size=None,
            expert_shards=None if r.expert_shards is None else gcd(count, r.expert_shards),
        )
        return replace(self, count=count, d_ff=16, first_dense=min(self.first_dense, 1), routing=small)


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
