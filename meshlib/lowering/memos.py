"""What lowering learns about one graph that holds under every layout.

    per operation      its signature: what the record says of it      (graph)
    per signature      what an assignment of axes means               (mesh)
                       what an assignment comes to                    (mesh, home, balance)
                       its options                                    (the same, shardings of operands)
    per graph, body    dead code and common subexpressions            (results)
                       sums that follow from others                   (results, which sums are over split dims)
    per computation    that the checker found it sound                (shardings, assignment)

Nothing here knows the layout: a key names the shardings that a layout led to, so what two layouts lay alike is found
once. Reshard plans and `LayoutRules.sharding` know no graph; `layouts` itself remembers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layouts import Sharding
from meshlib.graph import Graph, Tensor
from meshlib.lowering.balance import Balance
from meshlib.lowering.choose import Option
from meshlib.lowering.endings import Binding, Endings, Near
from meshlib.lowering.shared_sums import Sharing, shared_sums
from meshlib.lowering.simplification import Simplified, simplify
from meshlib.program.signature import Signature, Signatures

MOST = 1 << 16  # options, and computations found sound: a search meets thousands of layouts


@dataclass(eq=False)
class Found:
    """What was found out about operations at one balance."""

    balance: Balance
    options: dict[object, tuple[Option, ...]] = field(default_factory=dict)
    _endings: dict[object, Endings] = field(default_factory=dict)

    def endings(self, signature: Signature, home: Sharding, binding: Binding, near: Near) -> Endings:
        """What operations come to that are alike."""
        key = (signature, home, binding, near)
        found = self._endings.get(key)
        if found is None:
            found = self._endings[key] = Endings(signature, home, binding, self.balance, near)
        return found


@dataclass(eq=False)
class Memos:
    """See above."""

    signatures: Signatures = field(default_factory=Signatures)
    _found: dict[Balance, Found] = field(default_factory=dict)
    computations: set[object] = field(default_factory=set)
    _simplified: dict[object, Simplified] = field(default_factory=dict)
    _sharings: dict[object, Sharing | None] = field(default_factory=dict)

    def found(self, balance: Balance) -> Found:
        """What was found out at a balance."""
        return self._found.setdefault(balance, Found(balance))

    def simplified(self, graph: Graph, results: Sequence[Tensor], taken: bool) -> Simplified:
        """The body of a loop, simplified; `taken`: its results are needed wherever they lie."""
        key = (graph, tuple(results), taken)
        if key not in self._simplified:
            simple = self._simplified[key] = simplify(graph, results, ())
            simple.taken.update(simple.of(t) for t in results if taken)
        return self._simplified[key]

    def sharing(
        self, simple: Simplified, split: Mapping[Tensor, frozenset[str]], fetched: Sequence[Tensor]
    ) -> Sharing | None:
        """What need not be reduced of the sums over split dims."""
        key = (simple, tuple(split.items()), tuple(fetched))
        if key not in self._sharings:
            self._sharings[key] = shared_sums(simple, split, fetched)
        return self._sharings[key]

    def trim(self) -> None:
        """Start anew with what grows from layout to layout, where that has become too much to hold."""
        if sum(len(found.options) for found in self._found.values()) > MOST or len(self.computations) > MOST:
            self._found.clear()
            self.computations.clear()
            self.signatures.forget_assignments()
