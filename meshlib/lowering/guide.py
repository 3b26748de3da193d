"""One way to run a program, as a guide for the search for a better one.

At any operation a state can be brought to where the guide is and go on with it. What that comes to is a price that can
really be had, so a search that goes by it finds nothing dearer than its guide; and it sees what the guide brings about
only later: who gathers a table early, for a use that comes much later, is given what the guide pays for it then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layouts import Sharding
from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import obtain
from meshlib.lowering.choose import Choice
from meshlib.lowering.course import Course, Lies, Where, chosen_option, is_fixed, known
from meshlib.lowering.homes import Region


@dataclass(eq=False)
class Guide:
    """Follows `choices`, step by step. `lies` is where it has things now."""

    course: Course
    choices: Mapping[Operation, Choice]
    _changes: list[list[tuple[Tensor, Lies]]] = field(default_factory=list)  # per operation
    _lies: dict[Tensor, Lies] = field(default_factory=dict)
    # Per tensor and place, the last operation at which it is read there; and what it costs to bring it there, when.
    _read: dict[tuple[Tensor, Sharding], int] = field(default_factory=dict)
    _later: dict[Tensor, list[tuple[int, Region, Sharding, float]]] = field(default_factory=dict)
    sent: float = 0.0  # bytes in all
    _now: int = -1

    def __post_init__(self) -> None:
        where = Where({}, {})
        for n, op in enumerate(self.course.graph.operations):
            before = dict(where.own)
            if is_fixed(op):
                self._note_fixed(op, n, where)
                ways = self.course.fixed(op)[0](where)
                self.sent += sum(way.cost for way in ways if way is not None)
            else:
                choice = self.choices[op]
                option = chosen_option(self.course.options(op, n, where), choice)
                for x, s in zip(self.course.graph.inputs[op], choice.operands, strict=True):
                    self._note(x, s, n, op.region, where)
                more, _ = self.course.take(where, op, option)
                self.sent += option.sent + more
            self._changes.append([(t, lies) for t, lies in where.own.items() if before.get(t) is not lies])
        for t in self.course.ends:
            self._note(t, self.course.homes.of(t), len(self._changes), t.operation.region, where)

    def _note_fixed(self, op: Operation, n: int, where: Where) -> None:
        graph, homes = self.course.graph, self.course.homes
        if op.loop is not None:
            looped = self.course.loops.of(op)
            for x, s in zip(looped.operands, looped.wanted, strict=True):
                self._note(x, s, n, op.region, where)
        else:
            for x in graph.inputs[op]:
                self._note(x, homes.of(x), n, op.region, where)

    def _note(self, t: Tensor, wanted: Sharding, n: int, region: str, where: Where) -> None:
        """Operation `n` reads `t` at `wanted`."""
        source = self.course.source(where, t, region)
        way = obtain(source, wanted)
        self._read[t, wanted] = n
        if way.origin >= 0:
            self._read[t, source.lies[way.origin]] = n
        if way.cost > 0:
            self._later.setdefault(t, []).append((n, region, wanted, way.cost))

    def step(self, n: int) -> None:
        """Go on over operation `n`."""
        self._lies.update(self._changes[n])
        self._now = n

    def price(self, t: Tensor, lies: Lies, region: str) -> tuple[float, int]:
        """What it costs, and in how many collectives, to bring `t` to where the guide has it and needs it still."""
        needed = tuple([at for at in self._lies[t] if self._read.get((t, at[1]), -1) > self._now])
        cost, collectives = self.course.bringing(t, lies, needed, region)
        for n, r, s, saved in self._later.get(t, ()):
            if n > self._now and s in known(lies, r):
                cost -= saved
        return cost, collectives
