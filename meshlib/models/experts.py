"""Mixtures of experts in the layers of a Transformer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd

from meshlib.core.arguments import at, choice, whole
from meshlib.core.errors import GraphError
from meshlib.layers.experts import FORMS
from meshlib.layers.routing import Routing


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
