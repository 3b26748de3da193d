"""Construction of the dataflow of a program lowered for one device.

Each value has the nodes that it depends on without a product in between, with the values on the path to it. Loops are
nodes with a dataflow of their own; a loop's carries have the sharding that the layout gives them, and so have the
gradients of variables that it stacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Factor, Kind, Role, Total
from meshlib.estimation.work.products import attention_of
from meshlib.estimation.work.stored_values import Origins, held_values
from meshlib.lowering.assigned import is_weight, scope_of
from meshlib.ops.contraction.einsum import EIGHT_BIT
from meshlib.program.analysis.work import local_types
from meshlib.program.instructions import Compute, Instruction, Loop, Resident, Value
from meshlib.program.records import Program
from meshlib.searching.bounds.dataflow import Bytes, Edge, Flow, HbmUse, Node, Placed, Split, ValueUse
from meshlib.searching.bounds.elements import Temporaries, temporaries_of
from meshlib.searching.bounds.products import Contraction, ProductKernel
from meshlib.searching.bounds.slot_splits import SlotSplits
from meshlib.searching.renamed_dims import Passages

MOST_EDGES = 4  # edges followed per value: those of the most bytes


def flow_of(whole: Program, passages: Passages) -> Flow:
    """The dataflow of a program lowered for one device."""
    given = {v: Placed(v.tensor.shape, scope_of(v.tensor)) for v in _resident(whole)}
    outputs, updates = whole.asked
    maker = _Maker(whole, passages, SlotSplits(outputs.values(), updates), given, temporaries_of(whole))
    maker.run()
    for name, v in whole.updates.items():
        held = whole.variables.get(name)
        if held is not None:
            maker.bring(v, given[held])
    return maker.flow


def _resident(program: Program) -> Iterable[Value]:
    return (v for v in (*program.variables.values(), *program.inputs.values()) if not v.tensor.on_host)


@dataclass(frozen=True)
class _Reach:
    """A value's dependency on a node, with the values in between."""

    source: int
    sizes: Bytes
    linear: bool
    values: frozenset[Value]
    pure: bool  # whether they depend on no product but the source
    summed: frozenset[Value]  # those that may be a pending sum of the source

    @property
    def least_bytes(self) -> float:
        return min(self.sizes.values())


@dataclass(eq=False)
class _Maker:
    """Builds the flow of a program or body; the layout fixes the sharding of `given` values."""

    program: Program
    passages: Passages
    of_slots: SlotSplits
    given: Mapping[Value, Placed]
    temporaries: Mapping[Instruction, Temporaries]  # of each product
    nodes: list[Node] = field(default_factory=list)
    edges: list[list[Edge]] = field(default_factory=list)
    reached: dict[Value, list[_Reach]] = field(default_factory=dict)
    full: set[Value] = field(default_factory=set)  # values that no product of smaller values can replace
    # values that may be present at the start, or depend on such values alone
    early: set[Value] = field(default_factory=set)
    still: set[Value] = field(default_factory=set)  # values that depend on no product, attention or loop
    leads: set[Value] = field(default_factory=set)  # values that a product or loop depends on
    uses: dict[Value, list[ValueUse]] = field(default_factory=dict)
    derived: dict[Value, list[tuple[Value, bool]]] = field(default_factory=dict)
    origins: Origins = field(init=False)

    def __post_init__(self) -> None:
        self.origins = Origins(self.program)
        self.early.update(held_values(self.program))
        self.still.update(self.program.variables.values(), self.program.inputs.values())
        for i in reversed(self.program.instructions):
            if _is_large(i) or not self.leads.isdisjoint(i.outputs):
                self.leads.update(i.inputs)

    @property
    def flow(self) -> Flow:
        """The flow built so far."""
        inside = (node.loop.full for node in self.nodes if node.loop is not None)
        return Flow(self.nodes, self.edges, frozenset(self.full).union(*inside), self.uses, self.derived)

    def run(self) -> None:
        for v, placed in self.given.items():
            self._start(v, self._add(Node(placed=placed)))
        for i in self.program.instructions:
            if isinstance(i, Resident) or not i.outputs:
                continue
            for values in () if _is_large(i) else (self.early, self.still):
                if values.issuperset(i.inputs):
                    values.update(i.outputs)
            if isinstance(i, Loop):
                self._loop(i)
            elif isinstance(i, Compute) and i.operation.opdef.kind is Kind.CONTRACTION:
                self._product(i)
            elif isinstance(i, Compute) and _keeps_elements(i.operation):
                self._pass_on(i)
            elif not isinstance(i.operation.opdef.form(i.operation), Total):
                self._other(i)
            else:
                self._use(i.inputs, ValueUse())
        for v in self.program.outputs.values():
            self._use([v], ValueUse(home=_home(v.tensor)))

    def bring(self, value: Value, home: Placed) -> None:
        """Require a value under its home sharding at the end."""
        if self.reached.get(value):
            self._add(Node(placed=home), [(0, value, home)])

    # ------------------------------------------------------------ nodes

    def _add(
        self, node: Node, needs: Iterable[tuple[int, Value, Placed | None]] = (), linear: Sequence[int] = ()
    ) -> int:
        number = len(self.nodes)
        self.nodes.append(node)
        needs = [*needs]
        for operand, x, home in needs:
            self._use([x], ValueUse(number, operand, home))
        reaches = [(operand, x, home, reach) for operand, x, home in needs for reach in self.reached.get(x, ())]
        self.edges.append([
            Edge(
                reach.source, number, operand, reach.sizes, reach.linear, operand in linear, home, reach.values,
                self._is_beside(reach, node), reach.summed, value=x,
            )
            for operand, x, home, reach in reaches
        ])  # fmt: skip
        return number

    def _is_beside(self, reach: _Reach, target: Node) -> bool:
        """True if an edge from a product to a home, or from a variable to a product, is `beside`."""
        if self.nodes[reach.source].product is None:
            placed = self.nodes[reach.source].placed
            of_variable = placed is not None and placed.scope == "variables"
            return of_variable and reach.values <= self.still and target.splits is not None
        return reach.pure and target.placed is not None and self.leads.isdisjoint(reach.values)

    def _use(self, values: Iterable[Value], use: ValueUse) -> None:
        for x in values:
            self.uses.setdefault(x, []).append(use)

    def _start(self, value: Value, source: int, full: bool = True) -> None:
        self.reached[value] = [_Reach(source, self._sizes(value), True, frozenset({value}), True, frozenset({value}))]
        if full:
            self.full.add(value)

    def _product(self, i: Compute) -> None:
        # If an operand is composed of factors that lack some of its dims, its sums may be computed from smaller ones.
        full = all(x in self.full for x in i.inputs)
        op = i.operation
        laid = bool(self.passages.laid(x.shape for x in (*op.inputs, *op.outputs)))
        splits = tuple(
            Split(None, 0, f.operands, f.outputs[0], True) if laid  # every size divides 0
            else self._split(op, n, f, f.role is Role.PARALLEL or (f.role is Role.SUM and full))
            for n, f in enumerate(op.opdef.roles(op))
        )  # fmt: skip
        if op.attrs.get("precision") in EIGHT_BIT:  # rounded before they are sent
            for x in i.inputs[:2]:
                least = {self.passages.split(x.tensor.shape): float(x.local_size)}
                self.reached[x] = [replace(r, sizes=_smaller(r.sizes, least)) for r in self.reached.get(x, ())]
        read = self.temporaries[i]
        product = Contraction.of(self.program, i, self.origins, self.early, read.largest_bytes)
        held = [] if laid else self._held(i)
        node = Node(
            splits=splits, product=product, reads=self._reads(i), held=held, smaller=not full, laid=laid,
            beside=[HbmUse({None: size}, False) for size in read.further_bytes(self.full)],
            elements_per_flop=_elements_per_flop(i),
        )  # fmt: skip
        number = self._add(node, ((n, x, None) for n, x in enumerate(i.inputs)), op.opdef.linear(op).operands)
        summed = any(f.role is not Role.PARALLEL for f in op.opdef.roles(op))
        for y in i.outputs:
            self._start(y, number, summed or self._is_full(i, y))

    def _reads(self, i: Compute) -> list[HbmUse]:
        """For each operand that comes from outside the product's kernel, its HBM use, unless both are the same."""
        uses: list[HbmUse] = []
        seen: set[Value] = set()
        for x in i.inputs[:2]:
            stored = [r for r in self.reached.get(x, ()) if self.nodes[r.source].is_apart]
            if stored:
                most = max(stored, key=lambda r: r.least_bytes)
                if seen.isdisjoint(most.values):
                    uses.append(HbmUse(most.sizes, x in self.early))
                    seen |= most.values
        return uses

    def _held(self, i: Compute) -> list[tuple[int, Placed]]:
        """The operands that are weights, with where the layout places them."""
        weights = ((n, x) for n, x in enumerate(i.inputs) if is_weight(x.tensor))
        sources = ((n, self.nodes[r.source].placed) for n, x in weights for r in self.reached.get(x, ()))
        return [(n, placed) for n, placed in sources if placed is not None]

    def _split(self, op: Operation, number: int, f: Factor, known: bool) -> Split:
        names = [name for name in (*f.operands, *f.outputs) if name is not None]
        of_slots = self.of_slots.may_split(op, number)
        return Split(self.passages.reached(names), f.size, f.operands, f.outputs[0], not known, of_slots)

    def _other(self, i: Instruction) -> None:
        node, op = Node(), i.operation
        if isinstance(i, Compute) and op.opdef.scores:
            known = (Role.PARALLEL, Role.SUM, Role.SHARE, Role.SUMMARY)
            splits = tuple(
                self._split(op, n, f, f.role in known and f.shares is None)
                for n, f in enumerate(op.opdef.roles(op)) if f.role is not Role.WHOLE
            )  # fmt: skip
            names = self.passages.split(*(v.tensor.shape for v in (*i.inputs, *i.outputs)))
            kernel = ProductKernel(names, "bf16", attention_of(self.program, i))
            node = Node(splits=splits, attention=kernel, elements_per_flop=_elements_per_flop(i))
        number = self._add(node, ((n, x, None) for n, x in enumerate(i.inputs)), op.opdef.linear(op).operands)
        for y in i.outputs:
            self._start(y, number)

    def _pass_on(self, i: Compute) -> None:
        linear = i.operation.opdef.linear(i.operation).operands
        for y in i.outputs:
            for n, x in enumerate(i.inputs):
                self.derived.setdefault(x, []).append((y, n in linear))
            own = self._sizes(y)
            reach_of_source: dict[int, _Reach] = {}
            for n, x in enumerate(i.inputs):
                for r in self.reached.get(x, ()):
                    pure = r.pure and all(z in self.still for z in i.inputs if z is not x)
                    passes = r.linear and n in linear
                    summed = r.summed | {y} if passes else r.summed
                    extended = _Reach(r.source, _smaller(r.sizes, own), passes, r.values | {y}, pure, summed)
                    before = reach_of_source.get(r.source)
                    if before is None or extended.least_bytes > before.least_bytes:
                        reach_of_source[r.source] = extended
                    if before is not None and extended.linear != before.linear:  # reduced for one of two users
                        summed = before.summed if extended.linear else extended.summed
                        reach_of_source[r.source] = replace(reach_of_source[r.source], linear=False, summed=summed)
            most = sorted(reach_of_source.values(), key=lambda r: (-r.least_bytes, -r.source))
            self.reached[y] = most[:MOST_EDGES]
            if self._is_full(i, y):
                self.full.add(y)

    def _is_full(self, i: Compute, y: Value) -> bool:
        """True if an operand has all dims of the result, maybe renamed, so that the result has no smaller factors."""
        names = set(y.tensor.shape.names)
        return any(
            x in self.full and (x.local_size == y.local_size or names <= set(x.tensor.shape.names)) for x in i.inputs
        )

    # ------------------------------------------------------------ loops

    def _loop(self, loop: Loop) -> None:
        body = loop.body
        given: dict[Value, Placed] = {}
        for inner, outer in zip(body.inputs.values(), loop.inputs, strict=True):
            if outer in self.given:
                given[inner] = self.given[outer]
        carried: dict[str, Placed] = {}
        for before, after in loop.carries:
            if not _adds_up(body, body.inputs[before], body.outputs[after]):
                carried[before] = _home(body.inputs[before].tensor)
                given[body.inputs[before]] = carried[before]
        maker = _Maker(body, self.passages, self.of_slots, given, temporaries_of(body, loop))
        maker.full.update(body.inputs.values())  # the body does not see how its inputs are composed
        maker.run()
        for before, after in loop.carries:
            if before in carried:
                maker.bring(body.outputs[after], carried[before])
        for name, y in zip(loop.stacks, loop.outputs[len(loop.carries) :], strict=True):
            if not self.program.is_body and is_gradient(y):  # each trip reduces its own
                maker.bring(body.outputs[name], _home(y.tensor))
        homes = [carried.get(name) for name in body.inputs]
        node = self._add(
            Node(loop=maker.flow, trips=float(loop.trips * loop.share)),
            ((n, x, home) for n, (x, home) in enumerate(zip(loop.inputs, homes, strict=True))),
            range(len(loop.inputs)),
        )
        for n, y in enumerate(loop.outputs):
            at_home = _home(y.tensor) if not self.program.is_body and is_gradient(y) else None
            if n < len(loop.carries):
                at_home = carried.get(loop.carries[n][0])
            self._start(y, node if at_home is None else self._after(node, at_home))

    def _after(self, loop: int, home: Placed) -> int:
        """A node for a carry that a loop leaves under its home sharding."""
        node = self._add(Node(placed=home))
        self.edges[node].append(Edge(loop, node, 0, {}, True, True))
        return node

    def _sizes(self, v: Value) -> Bytes:
        return {self.passages.split(v.tensor.shape): float(v.local_bytes)}


def _is_large(i: Instruction) -> bool:
    """True if it is a loop, or a kernel without a product."""
    return not isinstance(i, Compute) or i.operation.opdef.kind is Kind.CONTRACTION or bool(i.operation.opdef.scores)


def _elements_per_flop(i: Compute) -> float:
    """Elements of operands and results per flop of a product or attention, as a lowering prices it."""
    work = i.operation.opdef.work(*local_types(i), i.operation.attrs)
    return sum(v.local_size for v in (*i.inputs, *i.outputs)) / max(1, work.mxu_flops)


def _keeps_elements(op: Operation) -> bool:
    """True if each operand element appears in the result at the same position along every dim."""
    kind = op.opdef
    if kind.kind not in (Kind.ELEMENTWISE, Kind.VIEW) or kind.reads_part or kind.writes_part:
        return False
    return all(f.role is Role.PARALLEL and f.outputs[0] is not None for f in kind.roles(op))


def is_gradient(y: Value) -> bool:
    """True if a result of a loop is the gradient of a variable."""
    op = y.tensor.operation
    return y.tensor in op.graph.gradient_of and y.tensor in op.public_outputs


def _home(t: Tensor) -> Placed:
    return Placed(t.shape, scope_of(t))


def _smaller(a: Bytes, b: Bytes) -> Bytes:
    """The smaller size for each set of dims."""
    sizes = dict(a)
    for names, size in b.items():
        sizes[names] = min(size, sizes.get(names, size))
    return sizes


def _adds_up(body: Program, before: Value, after: Value) -> bool:
    """True if a carry may be a pending sum: its only user computes its next value."""
    users = [i for i in body.instructions if before in i.inputs]
    return not users or (len(users) == 1 and after in users[0].outputs)
