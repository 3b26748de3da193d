"""The layers of a Transformer that are mixtures of experts."""

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
      count, d_ff: experts of a layer, and the inner features of each.
      routing: how tokens find them.
      shared: experts of that width that all tokens take besides.
      first_dense: how many layers at the front have a feed-forward block as other models have.
      every: of the layers after those, the last of each `every` has experts.
      form: how tokens move, see `mtf.layers.moe`.
    Raises: GraphError with all that is wrong at once.
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
        """Whether that layer, counted from 0, has experts."""
        return number >= self.first_dense and (number - self.first_dense + 1) % self.every == 0

    @property
    def active(self) -> int:
        """How many experts a token goes through on average, shared ones too."""
        return self.routing.choices + self.shared

    def reduced(self) -> Experts:
        """The same kind of mixture with few small experts."""
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
