"""Facts about one graph that hold under every layout, computed once.

    per operation      its signature: the contents of its record        (graph)
    per signature      the meaning of an assignment of axes             (mesh)
                       its strategies and their prices                  (mesh, home, balance, splittable dims)
    per graph, body    dead code and common subexpressions              (results)
                       sums derived from others                         (results, the sums over split dims)
    per computation    validity, as verified by the checker             (shardings, assignment)

Nothing here depends on the layout: keys contain the shardings that a layout led to, so layouts share all results that
they have in common. Reshard prices and `LayoutRules.sharding` are independent of graphs; `layouts` caches them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layouts import Sharding
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.lowering.assigned import Traits
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import Binding
from meshlib.lowering.copies import CopyTables
from meshlib.lowering.expected_halos import Near
from meshlib.lowering.repetition import Repetition, repetition
from meshlib.lowering.shared_sums import Sharing, shared_sums
from meshlib.lowering.simplification import Simplified, simplify
from meshlib.lowering.strategies import Choice
from meshlib.lowering.strategy_costs import Pricing
from meshlib.lowering.values import SharedValues, Values, ValuesKey
from meshlib.program.signature import Signature, Signatures

MOST = 1 << 13  # cached priced operations, and 8 times as many checked computations


@dataclass(eq=False)
class Prices:
    """The priced strategies of operations at one balance."""

    balance: Balance
    _of: dict[object, Pricing] = field(default_factory=dict)
    tables: dict[object, CopyTables] = field(default_factory=dict)  # tables of the copies of alike tensors
    blockwise: dict[tuple[Signature, Sharding], Choice | None] = field(default_factory=dict)
    interned: SharedValues = field(default_factory=SharedValues)
    alike: dict[object, Values] = field(default_factory=dict)  # values of alike operations
    _values: dict[ValuesKey, Values] = field(default_factory=dict)

    def of(self, signature: Signature, home: Sharding, binding: Binding, near: Near, again: bool) -> Pricing:
        """The strategies of alike operations."""
        key = (signature, home, binding, near, again)
        pricing = self._of.get(key)
        if pricing is None:
            pricing = self._of[key] = Pricing(*key, self.balance)
        return pricing

    def values(self, op: Operation, signature: Signature, key: ValuesKey) -> Values:
        """The values of the variables of alike operations."""
        values = self._values.get(key)
        if values is None:
            values = self._values[key] = Values(op, signature, key, self.interned, self.balance)
        return values

    def __len__(self) -> int:
        return len(self._of) + len(self.tables)  # everything else grows with these


@dataclass(eq=False)
class Memos:
    """Caches of one graph: see above."""

    signatures: Signatures = field(default_factory=Signatures)
    _prices: dict[Balance, Prices] = field(default_factory=dict)
    computations: set[object] = field(default_factory=set)
    traits: dict[Tensor, Traits] = field(default_factory=dict)  # see `Homes`
    _simplified: dict[object, Simplified] = field(default_factory=dict)
    _sharings: dict[object, Sharing | None] = field(default_factory=dict)
    _repetitions: dict[object, Repetition | None] = field(default_factory=dict)

    def sibling(self) -> Memos:
        """Caches of another graph, sharing everything independent of the graph."""
        return Memos(self.signatures.sibling(), self._prices, self.computations)

    def prices(self, balance: Balance) -> Prices:
        """The priced strategies at a balance."""
        return self._prices.setdefault(balance, Prices(balance))

    def simplified(self, graph: Graph, results: Sequence[Tensor], taken: bool) -> Simplified:
        """A loop's body, simplified; `taken`: whether its results are needed under any sharding."""
        key = (graph, tuple(results), taken)
        if key not in self._simplified:
            simple = self._simplified[key] = simplify(graph, results, ())
            simple.taken.update(simple.of(t) for t in results if taken)
        return self._simplified[key]

    def sharing(
        self, simple: Simplified, split: Mapping[Tensor, frozenset[str]], fetched: Sequence[Tensor]
    ) -> Sharing | None:
        """The sums over split dims that need no reduction of their own."""
        key = (simple, tuple(split.items()), tuple(fetched))
        if key not in self._sharings:
            self._sharings[key] = shared_sums(simple, split, fetched)
        return self._sharings[key]

    def repetition(self, simple: Simplified, fetched: Sequence[Tensor]) -> Repetition | None:
        """The alike layers of a graph."""
        key = (simple, tuple(fetched))
        if key not in self._repetitions:
            self._repetitions[key] = repetition(simple, self.signatures, fetched)
        return self._repetitions[key]

    def trim(self) -> None:
        """Clear caches that grow with each layout once they are too large."""
        if sum(map(len, self._prices.values())) > MOST or len(self.computations) > 8 * MOST:
            self._prices.clear()
            self.computations.clear()
            self.signatures.forget_assignments()
