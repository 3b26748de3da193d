"""One way to run a program, as a guide for the search for a better one.

At any operation a state can be brought to where the guide is and go on with it. What that comes to is a price that can
really be had, so a search that goes by it finds nothing dearer than its guide; and it sees what the guide brings about
only later: who gathers a table early, for a use that comes much later, is given what the guide pays for it then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from layouts import Sharding
from meshlib.graph import Operation, Tensor
from meshlib.lowering.arrivals import Price, can_become, obtain
from meshlib.lowering.choose import Choice
from meshlib.lowering.course import Course, Where, is_fixed, known
from meshlib.lowering.homes import Region
from meshlib.lowering.ways import Lies


@dataclass(eq=False)
class Guide:
    """Follows `choices`, step by step."""

    course: Course
    choices: Mapping[Operation, Choice]
    _changes: list[Mapping[Tensor, int]] = field(default_factory=list)  # per operation, where things lie after it
    _lies: dict[Tensor, Lies] = field(default_factory=dict)  # where they lie now
    # Per tensor and place, the last operation at which it is read there; and what it costs to bring it there, when.
    _read: dict[tuple[Tensor, Sharding], int] = field(default_factory=dict)
    _later: dict[Tensor, list[tuple[int, Region, Sharding, float]]] = field(default_factory=dict)
    sent: float = 0.0  # bytes in all
    _now: int = -1

    def __post_init__(self) -> None:
        course, graph = self.course, self.course.graph
        numbers: dict[Tensor, int] = {}
        for n, op in enumerate(graph.operations):
            reads = course.reads[n]
            outcomes = course.outcomes(n, tuple([numbers[t] for t in reads]))
            where = {t: course.ways.lies[numbers[t]] for t in reads}
            if is_fixed(op):
                (outcome,) = outcomes
                taken: Iterable[tuple[Tensor, Sharding]] = course.takes(op, where)
            else:
                choice = self.choices[op]
                outcome = next(x for x in outcomes if x.choice is choice or x.choice == choice)
                taken = zip(graph.inputs[op], choice.operands, strict=True)
            for x, s in taken:
                self._note(x, s, n, op.region, where)
            self.sent += outcome.sent
            self._changes.append(outcome.ways)
            numbers.update(outcome.ways)
        where = {t: course.ways.lies[numbers[t]] for t in course.reads[-1]}
        for t in course.ends:
            self._note(t, course.homes.of(t), len(self._changes), t.operation.region, where)

    def _note(self, t: Tensor, wanted: Sharding, n: int, region: str, where: Where) -> None:
        """Operation `n` reads `t` at `wanted`."""
        source = self.course.source(where, t, region)
        way = obtain(source, wanted)
        self._read[t, wanted] = n
        if way.origin >= 0:
            self._read[t, source.lies[way.origin]] = n
        if way.cost > 0:
            self._later.setdefault(t, []).append((n, region, wanted, way.cost))

    def step(self, n: int) -> Iterable[Tensor]:
        """Go on over operation `n`; returns the tensors whose price may be another then."""
        changes = self._changes[n]
        self._lies.update({t: self.course.ways.lies[number] for t, number in changes.items()})
        self._now = n
        return (*changes, *self.course.graph.inputs[self.course.graph.operations[n]])

    def price(self, t: Tensor, lies: Lies, region: str) -> Price:
        """What it costs, and in how many collectives, to bring `t` to where the guide has it and needs it still."""
        needed = tuple([at for at in self._lies[t] if self._read.get((t, at[1]), -1) > self._now])
        have = known(lies, region)  # a maximum that was taken need not wait again: it goes where the guide brings it
        needed = tuple([at for at in needed if any(can_become(s, at[1]) for s in have)])
        cost, collectives = self.course.bringing(t, lies, needed, region)
        for n, r, s, saved in self._later.get(t, ()):
            if n > self._now and s in known(lies, r):
                cost -= saved
        return cost, collectives
