"""What an operation comes to under each assignment of axes, wherever its operands come from.

A search asks for the ways to run an operation again and again, with operands that lie here or there: what that does not
change is worked out once for all operations that are alike and have the same home.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from layouts import Sharding
from meshlib.lowering.arrivals import Price, Source, axes_price, least_cost, obtain, parks, price, total
from meshlib.lowering.balance import Balance
from meshlib.program.exchange import busiest_bytes
from meshlib.program.signature import Assigned, Signature

Axes: TypeAlias = tuple[str, ...]
Near: TypeAlias = frozenset[tuple[int, str]]  # operands and dims of which others bring what lies elsewhere
Lies: TypeAlias = tuple[Sharding, ...]  # where something is to be had


class Binding(enum.Enum):
    """Whether a result is brought home as soon as it is made."""

    ALWAYS = "always"
    IF_LARGER = "if larger"  # another region needs it: until then it must not take more memory than its home
    NEVER = "never"

    def binds(self, made: Sharding, home: Sharding) -> bool:
        """Whether a result that was made so is brought home."""
        return self is Binding.ALWAYS or (self is Binding.IF_LARGER and made.local_size > home.local_size)


class Ending(NamedTuple):
    """One assignment of axes to the factors of an operation, wherever its operands come from."""

    axes: Mapping[str, Axes]
    passed: tuple[Axes, ...]
    made: Assigned
    work: float  # more than what the home means, in bytes
    cost: float  # of all but the operands
    collectives: int
    lies: Lies  # where the result lies then, home included if it is bound there


class Endings:
    """What an operation comes to that does not depend on where its operands lie.

    Args:
      binding: whether the result is brought home.
      near: the operands, and their dims, of which another operation brings what this one needs of its neighbours.
    """

    def __init__(
        self, signature: Signature, home: Sharding, binding: Binding, balance: Balance, near: Near = frozenset()
    ) -> None:
        self.signature, self.home, self.binding, self.balance, self.near = signature, home, binding, balance, near
        self.blank = Source((), signature.op.output.dtype.itemsize, balance.axis_prices)
        # Item size of all results but the first, which lie as that was made.
        self._beside = sum(y.dtype.itemsize for y in signature.op.outputs[1:])
        self._plain = self._plain_work()
        self._of: dict[object, Ending | None] = {}
        self._least: dict[tuple[Lies, Lies], float] = {}
        self._between: dict[tuple[Lies, Lies], Price] = {}

    def _plain_work(self) -> float:
        """The work of a device that makes its block of the home; what others do is counted from there."""
        counts = dict(zip(self.home.shape.names, self.home.block_counts, strict=True))
        own = (f.outputs[0] if f.shares is None else None for f in self.signature.factors)
        plain = self.signature.cut(tuple(counts.get(name or "", 1) for name in own))
        return 0 if plain is None else self.balance.bytes_of(plain.work)

    def of(self, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Ending | None:
        """What an assignment comes to; None where it cannot be."""
        key = (tuple(axes.items()), passed)
        if key not in self._of:
            self._of[key] = self._found(axes, passed)
        return self._of[key]

    def _found(self, axes: Mapping[str, Axes], passed: tuple[Axes, ...]) -> Ending | None:
        signature, mesh = self.signature, self.home.mesh
        blocks = signature.cut(tuple([mesh.group_size(axes.get(name, ())) for name in signature.names]))
        made = None if blocks is None else signature.under(mesh, axes, passed)
        if blocks is None or made is None:
            return None
        exchanges = [e for e in made.exchanges if (e.operand, e.dim) not in self.near]
        work = self.balance.bytes_of(blocks.work) - self._plain
        cost, collectives = work, len(exchanges)
        lies: Lies = (made.out,)
        for over in dict.fromkeys(e.axes for e in exchanges):
            cost += busiest_bytes((e, 1) for e in exchanges if e.axes == over) * axes_price(over, self.blank.prices)
        if self.binding.binds(made.out, self.home):
            way = obtain(self.blank._replace(lies=lies), self.home)
            cost += way.cost
            collectives += way.collectives
            lies += tuple([s for _, s in way.new])
        return Ending(axes, passed, made, work, cost, collectives, lies)

    def between(self, here: Lies, there: Lies, limit: float) -> Price | None:
        """The results that lie in some places, to others; None where that exceeds the limit, or nobody would do so.

        The first place is where they were made.
        """
        key = (here, there)
        least = self._least.get(key)
        if least is None:
            result = self.blank._replace(lies=here)
            parked = parks(there[0], (*here, self.home))
            least = self._least[key] = float("inf") if parked else max([least_cost(result, s) for s in there])
        if least > limit:
            return None
        found = self._between.get(key)
        if found is None:
            result = self.blank._replace(lies=here)
            prices = [price(result, s) for s in there]
            if self._beside:
                prices.append(price(self.blank._replace(lies=here[:1], itemsize=self._beside), there[0]))
            found = self._between[key] = total(prices)
        return found
