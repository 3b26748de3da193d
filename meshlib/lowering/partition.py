"""From the unsharded graph to what one core runs: every value laid out, every reshard explicit and explained.

A sweep in program order. For each operation: choose the assignment of axes to factors, bring the operands there,
emit the operation, and bring the result home where it is bound or has several users. A pending sum with a single
user waits; the user's own choice decides whether it is reduced before or after it (rules 1 to 4, 7). Where operations
could have shared what later ones did, another sweep follows that knows what this one did, as long as that sends less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layouts import Dimension, Shape, Sharding
from meshlib.graph import UPDATE, Graph, Operation, Tensor
from meshlib.lowering.choose import Balance, Choice, Operand, Point, choice_key, choose
from meshlib.lowering.homes import Homes
from meshlib.lowering.places import Foresight, Pending, Places, blockwise
from meshlib.lowering.reasons import explain_exchange
from meshlib.lowering.simplification import Simplified
from meshlib.operation import Kind
from meshlib.ops.loop import LOOP
from meshlib.ops.sources import CONSTANT, INPUT, VARIABLE
from meshlib.ops.state import ASSIGN
from meshlib.program.records import Instruction, Program, Value
from meshlib.program.signature import Signatures
from meshlib.program.split import beside


@dataclass(eq=False)
class Partitioner:
    """The state of the sweep."""

    graph: Simplified
    homes: Homes
    balance: Balance
    signatures: Signatures
    choices: dict[object, Choice]  # at this balance
    fetched: set[Tensor]
    # lowers the body of a loop: (graph, homes, results, their shardings if bound, names of the inputs) -> Program
    lower_body: Callable[[Graph, Homes, Sequence[Tensor], Sequence[Sharding | None], Sequence[str]], Program]
    # partitions the body of a loop without finishing it: (graph, homes, results)
    sweep_body: Callable[[Graph, Homes, Sequence[Tensor]], Partitioner]
    ahead: Foresight = field(default_factory=Foresight)  # from an earlier sweep
    variables: dict[str, Value] = field(default_factory=dict)
    inputs: dict[str, Value] = field(default_factory=dict)
    updates: dict[str, Value] = field(default_factory=dict)
    places: Places = field(init=False)
    _points: dict[Tensor, tuple[Point, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = Places(self.graph, self.homes)

    def run(self) -> None:
        """Lower every operation, in order."""
        for op in self.graph.operations:
            if op.kind is INPUT or op.kind is VARIABLE:
                self.resident(op)
            elif op.kind is ASSIGN:
                self._assign(op)
            elif op.kind is LOOP:
                self._loop(op)
            elif op.kind.kind is Kind.COPY:
                self._copy(op)
            else:
                self._compute(op)

    def at_home(self, t: Tensor) -> Value:
        """The value of `t` at its home, brought there if need be: what fetches return."""
        return self.at(t, self.homes.of(t))

    def at(self, t: Tensor, wanted: Sharding) -> Value:
        """The value of `t` under a given sharding: what loops carry."""
        return self.places.bring(t, wanted, t.operation.region, None)

    def as_it_lies(self, t: Tensor) -> Value:
        """The value of `t` as it is there: at home, else in the smallest blocks; brought home if it is pending."""
        home = self.homes.of(t)
        whole = [v for _, v in self.places.instances[t] if not v.sharding.pending]
        return min(whole, key=lambda v: (v.sharding != home, v.local_bytes)) if whole else self.at_home(t)

    # ------------------------------------------------------------ operations

    def resident(self, op: Operation) -> None:
        """A value that is there before the first instruction: an input or a variable."""
        value = Value(op.output, self.homes.of(op.output))
        self.places.instances[op.output] = [(None, value)]
        # What is pending already is a loop's running sum.
        self.places.makers[op.output] = dict.fromkeys(value.sharding.pending_axes, (op, "trips"))
        (self.inputs if op.kind is INPUT else self.variables)[op.name] = value
        self.places.instructions.append(Instruction(op.kind.name, op, (), (value,), op.region))

    def _assign(self, op: Operation) -> None:
        (x,) = self.graph.inputs[op]
        name = op.attrs["variable"]
        if name not in self.variables:  # written but never read
            self.resident(self.homes.graph.variables[name])
        value = self.places.bring(x, self.variables[name].sharding, UPDATE, op)
        self.updates[name] = value
        self.places.instructions.append(Instruction("assign", op, (value,), (), UPDATE))

    def _copy(self, op: Operation) -> None:
        """Between the memories of device and host: every block as it lies."""
        (x,) = self.graph.inputs[op]
        value = self.as_it_lies(x)
        made = Value(op.output, value.sharding)
        split = blockwise(value.sharding)
        self.places.instructions.append(Instruction(op.kind.name, op, (value,), (made,), op.region, split))
        self.places.instances[op.output] = [(None, made)]
        self._settle(op.output)

    def _compute(self, op: Operation) -> None:
        inputs = self.graph.inputs[op]
        operands = [self._operand(x, op) for x in inputs]
        choice = self._choice(op, operands)
        if self.signatures.of(op).linear.terms:
            self._note_sum(op, inputs)
        if choice.regroup:
            values = self._grouped(op, inputs, choice)
        else:
            values = [self.places.use(x, s, op) for x, s in zip(inputs, choice.operands, strict=True)]
        made = tuple(Value(y, s) for y, s in zip(op.outputs, beside(op, choice.out), strict=True))
        self._note_makers(op, inputs, choice)
        self.places.instructions.append(
            Instruction(
                op.kind.name,
                op,
                tuple(values),
                made,
                op.region,
                choice.assignment,
                reasons=tuple(explain_exchange(e, op, self.homes) for e in choice.exchanges),
                exchanges=choice.exchanges,
            )
        )
        for y, value in zip(op.outputs, made, strict=True):
            self.places.instances[y] = [(None, value)]
            self._settle(y)

    def _note_sum(self, op: Operation, inputs: Sequence[Tensor]) -> None:
        """Remember what the terms of a sum still wait for; where some do and some don't, one may have missed it."""
        arrived = tuple(self.places.made(x).sharding.pending for x in inputs)
        if any(arrived):
            self.places.learnt.sums[op] = arrived
            self.places.learnt.missed |= not all(arrived)

    def _note_makers(self, op: Operation, inputs: Sequence[Tensor], choice: Choice) -> None:
        """Remember who is to blame for each pending axis of the result."""
        makers: dict[str, tuple[Operation, str]] = {}
        self.places.makers.update((y, makers) for y in op.outputs)
        if not choice.out.pending:
            return
        for x, s in zip(inputs, choice.operands, strict=True):
            makers.update({a: self.places.makers[x][a] for a in s.pending_axes})
        for name in self.signatures.of(op).reducing:
            makers.update(dict.fromkeys(choice.axes.get(name, ()), (op, name)))

    def _settle(self, t: Tensor) -> None:
        """Bring a value home if it is bound there or has several users; a pending one is then reduced, once."""
        uses = self.graph.uses.get(t, [])
        bound = t in self.fetched or t in self.homes.graph.gradient_of or t.operation.kind.name == "constrain"
        if bound or len(uses) > 1:
            home = self.places.bring(t, self.homes.of(t), t.operation.region, None)
            (_, made), *passed = self.places.instances[t]
            self.places.instances[t] = [(None, home), *(x for x in passed if x[1] is not home)]
            # A constrained value is to be had at its home alone: its users must not go round the constraint.
            constrained = t.operation.kind.name == "constrain"
            if made is not home and not made.sharding.pending and not constrained:
                # As it was made it serves other regions too, unless keeping it would take more memory than the home.
                small = made.local_bytes <= home.local_bytes
                self.places.instances[t].append((None if small else t.operation.region, made))

    def _grouped(self, op: Operation, inputs: Sequence[Tensor], choice: Choice) -> list[Value]:
        """Operands of an n-ary sum, equally pending ones added first and each group reduced once (rule 4)."""
        wanted = choice.out
        groups: dict[Pending, list[Tensor]] = {}
        for x in inputs:
            groups.setdefault(self.places.made(x).sharding.pending, []).append(x)
        result: list[Value] = []
        for pending, members in groups.items():
            if not pending or len(members) == 1:
                by_tensor = {id(x): s for x, s in zip(inputs, choice.operands, strict=True)}
                result += [self.places.use(x, by_tensor[id(x)], op) for x in members]
                continue
            waiting = {a for a, _ in pending}
            axes = {f: tuple(a for a in entry if a not in waiting) for f, entry in choice.axes.items()}
            values = []
            for x in members:
                names = [tuple(axes.get(d.name, ())) for d in x.shape]
                partial = Sharding(x.shape, wanted.mesh, names, pending)
                values.append(self.places.use(x, partial, op))
            names = [tuple(axes.get(d.name, ())) for d in op.output.shape]
            total = Value(op.output, Sharding(op.output.shape, wanted.mesh, names, pending))
            assignment = tuple((a, f) for f, entry in axes.items() for a in entry)
            added = Instruction(op.kind.name, op, tuple(values), (total,), op.region, assignment)
            self.places.instructions.append(added)
            self.places.makers[op.output] = self.places.makers[members[0]]
            result.append(self.places.walk(total, wanted, op)[-1])
        return result

    def _body_homes(
        self, op: Operation, inner: Sequence[Tensor], sums: Mapping[int, Sharding]
    ) -> tuple[Homes, list[Sharding]]:
        """Homes inside the body of a loop, and where each operand has to be; `sums` says where some carries lie."""
        body: Graph = op.attrs["body"]
        dim = op.attrs["dim"]
        count, stop = len(op.attrs["carried"]), len(op.attrs["carried"]) + len(op.attrs["sliced"])
        homes = Homes(body, self.homes.mesh, self.homes.rules)
        wanted = []
        for n, y in zip(op.needs, inner, strict=True):
            x = self.graph.inputs[op][n]
            if n < count:
                home = sums.get(n) or homes.of(y)
                homes.bind(y, home)
            elif n < stop:
                home = without_axes(self.homes.of(x), dim)
                homes.bind(y, without_dim(home, dim))
            else:
                home = self.homes.of(x)
                homes.bind(y, home)
            wanted.append(home)
            if self.homes.is_weight(x):
                homes.weights.add(y)
        for n, sharding in sums.items():
            homes.bind(op.attrs["results"][n], sharding)
        return homes, wanted

    def _accumulators(
        self, op: Operation, homes: Homes, inner: Sequence[Tensor]
    ) -> tuple[dict[int, Sharding], dict[int, dict[str, tuple[Operation, str]]]]:
        """Carries that only add something up, from zero: they lie as what is added does, pending sums included.

        So a gradient that every trip adds to is reduced once, after the loop. Found by lowering the body once as if
        there were none. Returned with who leaves each sum pending.
        """
        body: Graph = op.attrs["body"]
        results = op.attrs["results"]
        found: dict[int, Tensor] = {}
        for n in range(len(op.attrs["carried"])):
            first, add = self.graph.inputs[op][n].operation, results[n].operation
            zero = first.kind is CONSTANT and first.attrs["value"] == 0
            others = [x for x in add.inputs if x is not inner[n]]
            uses = sum(x is inner[n] for other in body.operations for x in other.inputs) + results.count(inner[n])
            # The carry before each trip is asked for by a gradient alone; then it has to be whole.
            stacked = self.graph.uses.get(op.outputs[len(results) + n])
            sums = add.kind.name == "add" or add.kind.linear(add).terms
            alone = results.count(results[n]) == 1 and not any(results[n] in x.inputs for x in body.operations)
            one = len(others) == 1 == len(add.inputs) - 1 and others[0].shape == results[n].shape
            if zero and sums and uses == 1 and alone and not stacked and one:
                found[n] = others[0]
        if not found:
            return {}, {}
        trial = self.sweep_body(body, homes, results)
        terms = {n: trial.graph.of(t) for n, t in found.items()}
        lies = {n: trial.places.made(t).sharding for n, t in terms.items()}
        sums = {
            n: s for n, s in lies.items() if s != homes.of(inner[n]) and all(kind == "sum" for _, kind in s.pending)
        }
        return sums, {n: trial.places.makers.get(terms[n], {}) for n in sums}

    def _loop(self, op: Operation) -> None:
        """Lower the body by itself: carries at home, slices where the stacked tensors lie, the rest where it lies."""
        body: Graph = op.attrs["body"]
        dim = op.attrs["dim"]
        operands = [self.graph.inputs[op][n] for n in op.needs]
        carried, sliced, results = op.attrs["carried"], op.attrs["sliced"], op.attrs["results"]
        given = [body.inputs[name].output for name in (*carried, *sliced)] + list(body.captured.values())
        inner = [given[n] for n in op.needs]
        homes, wanted = self._body_homes(op, inner, {})
        sums, makers = self._accumulators(op, homes, inner)
        if sums:
            homes, wanted = self._body_homes(op, inner, sums)
        values = [self.places.use(x, s, op) for x, s in zip(operands, wanted, strict=True)]
        # Finals always; of what could be stacked (results, and carries before each trip) only what is used.
        finals, others = op.outputs[: len(carried)], op.outputs[len(carried) :]
        inside = [*results[len(carried) :], *op.attrs["stacked"]]
        used = [(y, t) for y, t in zip(others, inside, strict=True) if self._is_used(y)]
        bound: list[Sharding | None] = [*wanted[: len(carried)]]
        for y, _ in used:
            public = y in op.public_outputs
            bound.append(without_dim(without_axes(self._stack_home(y), dim), dim) if public else None)
        program = self.lower_body(
            body, homes, [*results[: len(carried)], *(t for _, t in used)], bound, [x.operation.name for x in inner]
        )
        names = list(program.outputs)
        made = [Value(y, s) for y, s in zip(finals, wanted, strict=False)]
        for (y, _), name in zip(used, names[len(carried) :], strict=True):
            made.append(Value(y, with_dim(program.outputs[name].sharding, y.shape)))
            if y not in op.public_outputs:
                self.homes.bind(y, made[-1].sharding)
        self.places.instructions.append(
            Instruction(
                op.kind.name,
                op,
                tuple(values),
                tuple(made),
                op.region,
                body=program,
                trips=dim.size,
                carries=tuple(zip(carried, names, strict=False)),
                slices=tuple(name for name in sliced if name in program.inputs),
                stacks=tuple(names[len(carried) :]),
            )
        )
        for n, inside_makers in makers.items():
            self.places.makers[op.outputs[n]] = inside_makers
        for value in made:
            self.places.instances[value.tensor] = [(None, value)]
            self._settle(value.tensor)

    def _stack_home(self, t: Tensor) -> Sharding:
        """The home of a stacked result; of one that is only cast and transposed into a gradient, that of the gradient.

        So each trip reduces what it made to where the gradient lies.
        """
        end, gradients = t, self.homes.graph.gradient_of
        while end not in gradients:
            uses = self.graph.uses.get(end, [])
            if len(uses) != 1 or end in self.fetched or uses[0][0].kind.name not in ("cast", "transpose"):
                return self.homes.of(t)
            end = uses[0][0].output
        home = self.homes.of(end)
        return Sharding(t.shape, home.mesh, [home.of(d.name) for d in t.shape])

    def _is_used(self, t: Tensor) -> bool:
        return t in self.fetched or t in self.graph.taken or bool(self.graph.uses.get(t))

    # ------------------------------------------------------------ choosing

    def _operand(self, t: Tensor, op: Operation) -> Operand:
        known = tuple(v.sharding for v in self.places.known(t, op.region))
        shared = self.graph.users[t, op.region] > 1
        held = self.balance.stationary if self.balance.stationary and self.homes.is_weight(t) else ()
        return Operand(t, known, self.places.remade(t, op.region), self.ahead.coming(t, op), shared, held)

    def _choice(self, op: Operation, operands: Sequence[Operand]) -> Choice:
        home = self.homes.of(op.output)
        signature = self.signatures.of(op)
        may_be_pending = bool(signature.reducing) or any(x.pending for x in operands)
        later = self._later(op.output) if may_be_pending else ()
        key = choice_key(signature, operands, home, later)
        found = self.choices.get(key)
        if found is None:
            found = self.choices[key] = choose(signature, operands, home, later, self.balance)
        return found

    def _later(self, t: Tensor) -> tuple[Point, ...]:
        """The points along the linear chain of single users of `t`, each once."""
        chain: list[tuple[Tensor, Operation]] = []
        at = t
        while at not in self._points:
            user = self._passes_to(at)
            if user is None:
                self._points[at] = ()
            else:
                chain.append((at, user))
                at = user.output
        for x, user in reversed(chain):
            y, shared = user.output, self.signatures.of(user).linear.together
            onward = [p._replace(shared=True) if shared else p for p in self._points[y]]
            others = zip(self.graph.inputs[user], self.ahead.sums.get(user, ()), strict=False)
            joined = frozenset(pending for other, pending in others if other is not x and pending)
            narrow = min(x.dtype.itemsize, y.dtype.itemsize)  # a cast that widens lets reduce before it
            points = [Point(self.homes.of(y), narrow, shared, joined), *onward]
            self._points[x] = tuple(dict.fromkeys(points))
        return self._points[t]

    def _passes_to(self, t: Tensor) -> Operation | None:
        """The only user of `t`, if a pending sum may pass it."""
        uses = self.graph.uses.get(t, [])
        if len(uses) != 1 or t in self.fetched or t in self.homes.graph.gradient_of:
            return None
        op, index = uses[0]
        return op if index in self.signatures.of(op).linear.operands else None


def without_axes(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` with one dim whole."""
    axes = [() if d == dim else entry for d, entry in zip(sharding.shape, sharding.axes, strict=True)]
    return sharding.with_axes(axes)


def with_dim(sharding: Sharding, shape: Shape) -> Sharding:
    """`sharding` of every index of a dim, which is whole: `shape` has it first."""
    return Sharding(shape, sharding.mesh, [(), *sharding.axes])


def without_dim(sharding: Sharding, dim: Dimension) -> Sharding:
    """`sharding` of one index of `dim`, which is whole."""
    kept = [(d, entry) for d, entry in zip(sharding.shape, sharding.axes, strict=True) if d != dim]
    return Sharding(Shape([d for d, _ in kept]), sharding.mesh, [entry for _, entry in kept])
