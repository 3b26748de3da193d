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
from meshlib.loop_record import LoopRecord
from meshlib.lowering.choose import Balance, Choice, Operand, Point, choice_key, choose, settled
from meshlib.lowering.homes import Homes
from meshlib.lowering.places import Foresight, Pending, Places, blockwise
from meshlib.lowering.reasons import explain_exchange
from meshlib.lowering.simplification import Simplified
from meshlib.operation import Home, Kind
from meshlib.ops.sources import is_zero
from meshlib.program.instructions import Commit, Compute, Loop, Resident, Value
from meshlib.program.records import Program
from meshlib.program.signature import Signatures
from meshlib.program.split import beside
from meshlib.replay import needed


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
            match op.kind.kind:
                case Kind.INPUT | Kind.VARIABLE:
                    self.resident(op)
                case Kind.COMMIT:
                    self._assign(op)
                case Kind.LOOP:
                    self._loop(op)
                case Kind.COPY:
                    self._copy(op)
                case _:
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
        (self.inputs if op.kind.kind is Kind.INPUT else self.variables)[op.name] = value
        self.places.instructions.append(Resident(op, (), (value,), op.region))

    def _assign(self, op: Operation) -> None:
        (x,) = self.graph.inputs[op]
        name = op.attrs["variable"]
        if name not in self.variables:  # written but never read
            self.resident(self.homes.graph.variables[name])
        value = self.places.bring(x, self.variables[name].sharding, UPDATE, op)
        self.updates[name] = value
        self.places.instructions.append(Commit(op, (value,), (), UPDATE))

    def _copy(self, op: Operation) -> None:
        """Between the memories of device and host: every block as it lies."""
        (x,) = self.graph.inputs[op]
        value = self.as_it_lies(x)
        made = Value(op.output, value.sharding)
        split = blockwise(value.sharding)
        self.places.instructions.append(Compute(op, (value,), (made,), op.region, split))
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
            Compute(
                op,
                tuple(values),
                made,
                op.region,
                choice.assignment,
                choice.exchanges,
                tuple(explain_exchange(e, op, self.homes) for e in choice.exchanges),
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
        constrained = t.operation.kind.home is Home.GIVEN
        bound = t in self.fetched or t in self.homes.graph.gradient_of or constrained
        if bound or len(uses) > 1:
            home = self.places.bring(t, self.homes.of(t), t.operation.region, None)
            (_, made), *passed = self.places.instances[t]
            self.places.instances[t] = [(None, home), *(x for x in passed if x[1] is not home)]
            # A constrained value is to be had at its home alone: its users must not go round the constraint.
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
            added = Compute(op, tuple(values), (total,), op.region, assignment)
            self.places.instructions.append(added)
            self.places.makers[op.output] = self.places.makers[members[0]]
            result.append(self.places.walk(total, wanted, op)[-1])
        return result

    def _body_homes(
        self, op: Operation, loop: LoopRecord, inner: Sequence[Tensor], sums: Mapping[int, Sharding]
    ) -> tuple[Homes, list[Sharding]]:
        """Homes inside the body of a loop, and where each operand has to be; `sums` says where some carries lie."""
        homes = Homes(loop.body, self.homes.mesh, self.homes.rules)
        wanted = []
        for n, y in zip(loop.needs, inner, strict=True):
            x = self.graph.inputs[op][n]
            if y in loop.given.inits:
                home = sums.get(n) or homes.of(y)
                homes.bind(y, home)
            elif y in loop.given.slices:
                home = without_axes(self.homes.of(x), loop.dim)
                homes.bind(y, without_dim(home, loop.dim))
            else:
                home = self.homes.of(x)
                homes.bind(y, home)
            wanted.append(home)
        for n, sharding in sums.items():
            homes.bind(loop.made.finals[n], sharding)
        return homes, wanted

    def _accumulators(
        self, op: Operation, loop: LoopRecord, homes: Homes
    ) -> tuple[dict[int, Sharding], dict[int, dict[str, tuple[Operation, str]]]]:
        """Carries that only add something up, from zero: they lie as what is added does, pending sums included.

        So a gradient that every trip adds to is reduced once, after the loop. Found by lowering the body once as if
        there were none. Returned with who leaves each sum pending.
        """
        results = loop.results
        operations = needed(loop.body.known.get(y, y).operation for y in results)
        befores = loop.outputs(op.outputs).befores
        found: dict[int, Tensor] = {}
        for n, (carry, end) in enumerate(zip(loop.given.inits, loop.made.finals, strict=True)):
            first, add = self.graph.inputs[op][n].operation, end.operation
            others = [x for x in add.inputs if x is not carry]
            uses = sum(x is carry for other in operations for x in other.inputs) + results.count(carry)
            # The carry before each trip is asked for by a gradient alone; then it has to be whole.
            stacked = self.graph.uses.get(befores[n])
            linear = add.kind.linear(add)
            adds = linear.together and linear.operands == (0, 1)
            alone = results.count(end) == 1 and not any(end in x.inputs for x in operations)
            one = len(others) == 1 == len(add.inputs) - 1 and others[0].shape == end.shape
            if is_zero(first) and adds and uses == 1 and alone and not stacked and one:
                found[n] = others[0]
        if not found:
            return {}, {}
        trial = self.sweep_body(loop.body, homes, results)
        terms = {n: trial.graph.of(t) for n, t in found.items()}
        lies = {n: trial.places.made(t).sharding for n, t in terms.items()}
        sums = {
            n: s
            for n, s in lies.items()
            if s != homes.of(loop.given.inits[n]) and all(kind == "sum" for _, kind in s.pending)
        }
        return sums, {n: trial.places.makers.get(terms[n], {}) for n in sums}

    def _loop(self, op: Operation) -> None:
        """Lower the body by itself: carries at home, slices where the stacked tensors lie, the rest where it lies."""
        loop = op.loop
        assert loop is not None
        operands = [self.graph.inputs[op][n] for n in loop.needs]
        inner = [loop.stand_ins[n] for n in loop.needs]
        homes, wanted = self._body_homes(op, loop, inner, {})
        sums, makers = self._accumulators(op, loop, homes)
        if sums:
            homes, wanted = self._body_homes(op, loop, inner, sums)
        values = [self.places.use(x, s, op) for x, s in zip(operands, wanted, strict=True)]
        # Finals always; of what could be stacked (results, and carries before each trip) only what is used.
        finals, others = op.outputs[: loop.carries], op.outputs[loop.carries :]
        used = [(y, t) for y, t in zip(others, loop.stacked, strict=True) if self._is_used(y)]
        bound: list[Sharding | None] = [*wanted[: loop.carries]]
        for y, _ in used:
            public = y in op.public_outputs
            bound.append(without_dim(without_axes(self._stack_home(y), loop.dim), loop.dim) if public else None)
        made_inside = [*loop.made.finals, *(t for _, t in used)]
        program = self.lower_body(loop.body, homes, made_inside, bound, [x.operation.name for x in inner])
        names = list(program.outputs)
        made = [Value(y, s) for y, s in zip(finals, wanted, strict=False)]
        for (y, _), name in zip(used, names[loop.carries :], strict=True):
            made.append(Value(y, with_dim(program.outputs[name].sharding, y.shape)))
            if y not in op.public_outputs:
                self.homes.bind(y, made[-1].sharding)
        self.places.instructions.append(
            Loop(
                op,
                tuple(values),
                tuple(made),
                op.region,
                body=program,
                trips=loop.dim.size,
                carries=tuple((t.operation.name, name) for t, name in zip(loop.given.inits, names, strict=False)),
                slices=tuple(t.operation.name for t in loop.given.slices if t.operation.name in program.inputs),
                stacks=tuple(names[loop.carries :]),
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
            if len(uses) != 1 or end in self.fetched or not _same_elements(uses[0][0]):
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
        plain = settled(signature, operands, home)
        if plain is not None:
            return plain  # sooner told than looked up
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


def _same_elements(op: Operation) -> bool:
    """Whether it only casts its operand, or puts its dims in another order."""
    (x, *others), y = op.inputs, op.output
    return op.kind.cheap and not others and set(x.shape) == set(y.shape)


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
