"""The fewest bytes with which a small program can be lowered: a search over every way to run it.

Written apart from the partitioner, as its judge. Every assignment of mesh axes to dims that strategies split,
every pending sum reduced at every point where it can be, every value brought from wherever it already is: dynamic
programming in the order of the program over where each live value lies. States that are equal are merged, and one is
dropped if another costs no more after bringing values to wherever this one has them. So what is found is the least,
unless there are too many states; then the pair is given up.

    run an operation   any assignment; sums are reduced by whoever uses them; where an operation is linear in several
                       operands jointly, one that is whole counts on one device
    bring an operand   `layouts.reshard` from anywhere it is; it is there from then on, a sum taken on the way too
    make it again      wherever it is wanted, of nothing, of smaller operands or of such as it: no work is counted then,
                       only what it takes to bring its operands
    keep a value       what is larger than at home serves the region that made it alone
    end                outputs, gradients and what is written back lie at home; a gradient that is only added to others
                       need not, unless it is larger

Sums are made of others where the library's program has them so, and nowhere else.
Not looked at: ways of one value by a third place other than its home, sums of sums of sums, and axes on dims where
nothing but a step of a reshard had them. What it costs is bytes sent and what the work is worth by `mtf.Balance`; or
bytes alone, with no more work than the library's program does.

    spots.py    where one value is to be had, and what it costs to have it elsewhere
    ways.py     the ways to run each operation
    steps.py    what can follow from where operands lie
    search.py   the search over states
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from layouts import LayoutRules, Mesh
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.lowering import lower
from meshlib.lowering.assigned import Homes
from meshlib.lowering.shared_sums import shared_sums, split_sums
from meshlib.lowering.simplification import simplify
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Compute
from tests.lowering.optimum.search import Optimum, Search, TooMany
from tests.lowering.optimum.spots import INFINITE
from tests.lowering.optimum.steps import EPS, Steps
from tests.lowering.optimum.ways import BALANCE, Ways

BEAM = 64  # states of the search that finds what it can cost at most


@dataclass(frozen=True)
class Comparison:
    """What the library's program costs, and the least: by cost, and by bytes with no more work. None: given up.

    beaten   the library's program costs less than the least: the search does not know what it does
    """

    sent: float
    work: float
    least: Optimum | None
    fewest: Optimum | None
    beaten: bool = False

    @property
    def known(self) -> bool:
        """Whether the search by cost came to an end."""
        return self.least is not None

    @property
    def least_bytes(self) -> float:
        """The fewest bytes with no more work than the library does, as far as is known."""
        if self.fewest is not None:
            return self.fewest.bytes
        assert self.least is not None
        return min(self.sent, self.least.bytes) if self.least.work <= self.work + EPS else self.sent

    @property
    def bytes_ratio(self) -> float:
        """The library's bytes over the fewest."""
        if self.sent <= self.least_bytes + EPS:
            return 1.0
        return self.sent / self.least_bytes if self.least_bytes else INFINITE

    @property
    def cost_ratio(self) -> float:
        """The library's cost over the least."""
        assert self.least is not None
        return (self.sent + self.work) / self.least.cost if self.least.cost else 1.0


@dataclass(frozen=True)
class Subject:
    """A program under one mesh and layout."""

    outputs: Mapping[str, Tensor]
    updates: Sequence[Operation]
    mesh: str
    layout: str

    @property
    def graph(self) -> Graph:
        """What it is written in."""
        return next(iter(self.outputs.values())).graph if self.outputs else self.updates[0].graph

    def ways(self, shared: bool = False) -> Ways:
        """The ways to run its operations, as they are written or with sums made of others."""
        simple = simplify(self.graph, self.outputs.values(), self.updates)
        homes = Homes(self.graph, Mesh(self.mesh), LayoutRules(self.layout))
        if shared:
            ends = [simple.of(t) for t in self.outputs.values()]
            sharing = shared_sums(simple, split_sums(simple, homes), ends)
            assert sharing is not None
            simple, homes = sharing.graph, replace(homes, graph=sharing.graph.graph)
        return Ways(simple, homes)

    def best(self, ways: Ways, most: float, most_work: float = INFINITE, budget: float = INFINITE) -> Optimum | None:
        """The least by cost; with a limit to the work, by bytes. None if nothing costs so little. Raises: TooMany."""
        ends = frozenset(ways.simple.of(t) for t in self.outputs.values())
        steps = Steps(ways, ends, budget, most_work == INFINITE)
        some = Search(steps, most, most_work, BEAM).run()
        enough = most if some is None else steps.cost(some.bytes, some.work)[0]
        return Search(steps, enough, most_work).run()


def least(
    outputs: Mapping[str, Tensor], updates: Sequence[Operation] = (), mesh: str = "device:1", layout: str = ""
) -> Optimum | None:
    """The cheapest way through a program, whatever the library does. Raises: TooMany."""
    subject = Subject(outputs, updates, mesh, layout)
    return subject.best(subject.ways(), INFINITE)


def compare(outputs: Mapping[str, Tensor], updates: Sequence[Operation], mesh: str, layout: str) -> Comparison:
    """Lower a program and search for its optimum."""
    program = lower(outputs, updates, mesh, layout, balance=BALANCE)
    subject = Subject(outputs, updates, mesh, layout)
    computed = [i for i in program.instructions if isinstance(i, Compute)]
    ways = subject.ways(shared=any(i.operation.graph is not subject.graph for i in computed))
    sent = float(program.sent_bytes)
    # Sums that are made of others are made anew for each lowering: operations are the same by name.
    own = {op.name: op for op in ways.simple.operations}
    work = sum(ways.price(own.get(i.operation.name, i.operation), local_work(program, i)) for i in computed)
    budget = sent + work - ways.least_work  # all that is not work that has to be done
    try:
        by_cost = subject.best(ways, sent + work, budget=budget)
    except TooMany:
        return Comparison(sent, work, None, None)
    if by_cost is None:
        return Comparison(sent, work, None, None, beaten=True)
    if by_cost.cost > sent + work - EPS:
        return Comparison(sent, work, by_cost, by_cost)  # fewer bytes for as much work would cost less
    try:
        most = by_cost.bytes if by_cost.work <= work + EPS else sent
        by_bytes = subject.best(ways, most, work, budget)
    except TooMany:
        return Comparison(sent, work, by_cost, None)
    return Comparison(sent, work, by_cost, by_bytes, beaten=by_bytes is None)
