"""What lowering learns about one graph that holds under every layout.

    per operation      its signature: what the record says of it      (graph)
    per signature      what an assignment of axes means               (mesh)
                       its options                                    (mesh, shardings of operands and home, balance)
    per graph, body    dead code and common subexpressions            (results)
                       sums that follow from others                   (results, which sums are over split dims)
    per computation    that the checker found it sound                (shardings, assignment)

Nothing here knows the layout: a key names the shardings that a layout led to, so what two layouts lay alike is found
once. Reshard plans and `LayoutRules.sharding` know no graph; `layouts` itself remembers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshlib.graph import Graph, Tensor
from meshlib.lowering.choose import Balance, Option
from meshlib.lowering.shared_sums import Sharing, shared_sums
from meshlib.lowering.simplification import Simplified, simplify
from meshlib.program.signature import Signatures

MOST = 1 << 16  # options, and computations found sound: a search meets thousands of layouts


@dataclass(eq=False)
class Memos:
    """See above."""

    signatures: Signatures = field(default_factory=Signatures)
    options: dict[Balance, dict[object, tuple[Option, ...]]] = field(default_factory=dict)
    computations: set[object] = field(default_factory=set)
    _simplified: dict[object, Simplified] = field(default_factory=dict)
    _sharings: dict[object, Sharing | None] = field(default_factory=dict)

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
        if sum(map(len, self.options.values())) > MOST or len(self.computations) > MOST:
            self.options.clear()
            self.computations.clear()
            self.signatures.forget_assignments()
