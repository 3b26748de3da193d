"""The shardings in which each tensor exists while a program is written.

A value is resharded once per target sharding and then serves all users there, in other regions too, unless that copy
takes more memory than the assigned sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

from layouts import Sharding, reshard
from layouts.step_kinds import STEP_KINDS
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.lowering.assigned import Homes
from meshlib.lowering.balance import Balance
from meshlib.lowering.bindings import stored
from meshlib.lowering.distances import COLLECTIVE
from meshlib.lowering.loops import Loops, Makers
from meshlib.lowering.materialisation import RepeatableOperation, ValueSource, again_axes, between, cheapest
from meshlib.lowering.reasons import explain_step
from meshlib.lowering.simplification import Simplified
from meshlib.lowering.strategies import Choices
from meshlib.program.instructions import Compute, Instruction, Move, Value
from meshlib.program.signature import Signatures

MOST_ORDERED = 4  # all orders are tried for at most this many placements of a tensor


@dataclass(eq=False)
class Places:
    """The shardings in which each tensor exists; emits the instructions that materialise it under others."""

    graph: Simplified
    homes: Homes
    signatures: Signatures
    balance: Balance
    loops: Loops
    choices: Choices = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    # (region that may use it, value); None: all regions.
    instances: dict[Tensor, list[tuple[str | None, Value]]] = field(default_factory=dict)
    # For a pending tensor: axis -> (operation that left it pending, reduced dim).
    makers: dict[Tensor, Makers] = field(default_factory=dict)

    def uses(self, t: Tensor) -> dict[str, dict[Sharding, None]]:
        """Region -> placements under which operations use a tensor, in order."""
        uses: dict[str, dict[Sharding, None]] = {}
        for op, n in self.graph.readers.get(t, ()):
            if op.opdef.kind is Kind.LOOP:
                uses.setdefault(op.region, {}).setdefault(self.loops.of(op).wanted[op.needs.index(n)])
            for choice in self.choices.get(op, ()):
                uses.setdefault(op.region, {}).setdefault(choice.operands[n])
        return uses

    def _cost(self, t: Tensor, here: Sharding, there: Sharding) -> float:
        """Cost of a reshard: bytes, and the price of each collective, as the strategies were chosen by."""
        sent, collectives = between(here, there, t.dtype.itemsize, self.balance.axis_prices)
        return sent + (COLLECTIVE + self.balance.collective_bytes) * collectives

    def known(self, t: Tensor, region: str) -> list[Value]:
        """The values of `t` that a region may use."""
        allowed = [v for r, v in self.instances[t] if r is None or r == region]
        return allowed if allowed or t in self.graph.again else [v for _, v in self.instances[t]]

    def _existing(self, t: Tensor, wanted: Sharding, region: str) -> Value | None:
        """An existing value of `t` under `wanted` that a region may use, if any."""
        hidden = t not in self.graph.again  # whether to use other regions' values if there is no other
        for r, v in self.instances[t]:
            if r is None or r == region:
                if v.sharding == wanted:
                    return v
                hidden = False
        return next((v for _, v in self.instances[t] if v.sharding == wanted), None) if hidden else None

    def made(self, t: Tensor) -> Value:
        """`t` as computed by its operation."""
        return self.instances[t][0][1]

    def add(self, t: Tensor, value: Value, region: str) -> str | None:
        """Add a copy of `t`; returns the only region that may use it, or None if all may."""
        reach = self.homes.reach(t, value.sharding, region)
        self.instances.setdefault(t, []).append((reach, value))
        return reach

    def leave_copy(self, t: Tensor, made: Sharding) -> None:
        """If the copy computed under `made` takes too much memory, leave another one for later regions."""
        region, home = t.operation.region, self.homes.of(t)
        uses = self.uses(t)
        later = [s for other, placements in uses.items() if other != region for s in placements]
        if not later:
            return

        def cost(at: Sharding) -> float:
            first = 0.0 if at in own else self._cost(t, made, at)
            return first + sum([self._cost(t, at, s) for s in later])

        own = uses.get(region, {})
        candidates = [s for s in (*own, stored(made, home), *later, home) if s.local_size <= home.local_size]
        best = min(candidates, key=cost)
        if best not in own and not (t in self.graph.again and self._cost(t, made, best)):
            self.materialise(t, best, region, None)

    def use(self, t: Tensor, wanted: Sharding, op: Operation) -> Value:
        """`t` under `wanted` for an operation, after creating other copies first if later uses profit from them."""
        there = self._existing(t, wanted, op.region)
        if there is not None:
            return there
        if self._via_assigned(t, wanted, op.region):
            self.materialise(t, self.homes.of(t), op.region, op)
        for s in self._create_before(t, wanted, op.region):
            self.materialise(t, s, op.region, op)
        value = self.materialise(t, wanted, op.region, op)
        for s in self._lasting_slices(t, wanted, op.region):
            self.materialise(t, s, op.region, op)
        return value

    def _lasting_slices(self, t: Tensor, there: Sharding, region: str) -> Sequence[Sharding]:
        """Slices of a copy to keep for later regions, if the copy itself takes too much memory."""
        if self.homes.reach(t, there, region) is None:
            return ()
        slices: dict[Sharding, None] = {}
        for other, placements in self.uses(t).items():
            have = [v.sharding for v in self.known(t, other)]
            for s in placements if other != region and have else ():
                small = s.local_size <= self.homes.of(t).local_size
                if small and self._is_slice(t, s, [there]) and not self._is_slice(t, s, have):
                    slices.setdefault(s)
        return list(slices)

    def _is_slice(self, t: Tensor, s: Sharding, copies: Sequence[Sharding]) -> bool:
        """True if `s` can be sliced from one of these copies without communication."""
        return any(self._cost(t, at, s) == 0 for at in copies)

    def _create_before(self, t: Tensor, wanted: Sharding, region: str) -> Sequence[Sharding]:
        """Placements still needed in a region that should be created before `wanted`, in the cheapest order."""
        have = [v.sharding for v in self.known(t, region)]
        left = [s for s in self.uses(t).get(region, ()) if s not in have and s != wanted]
        if not 0 < len(left) <= MOST_ORDERED:
            return ()

        def cost(order: Sequence[Sharding]) -> float:
            there, total = list(have), 0.0
            for s in order:
                total += min(self._cost(t, at, s) for at in there)
                there.append(s)
            return total

        best = min(permutations((wanted, *left)), key=cost)  # of equal orders the first: `wanted` before all others
        return best[: best.index(wanted)]

    def _via_assigned(self, t: Tensor, wanted: Sharding, region: str) -> bool:
        """Whether to leave a copy under the assigned sharding on the way, because later regions save more by it."""
        home, have = self.homes.of(t), [v.sharding for v in self.known(t, region)]
        if home in have or wanted == home or home.pending:
            return False

        def cost(s: Sharding, there: Sequence[Sharding]) -> float:
            return min([self._cost(t, at, s) for at in there], default=float("inf"))

        saved = cost(wanted, have) - cost(home, have) - cost(wanted, [home, *have])
        lasting = [wanted] if self.homes.reach(t, wanted, region) is None else []
        for other, placements in self.uses(t).items():
            there = [v.sharding for v in self.known(t, other)]
            if other != region and there:
                there += lasting
                saved += sum(max(0.0, cost(s, there) - cost(s, [home])) for s in placements if s not in there)
        return saved > 0

    def materialise(self, t: Tensor, wanted: Sharding, region: str, user: Operation | None) -> Value:
        """Materialise `t` under `wanted` from the nearest copy; user None: for its assigned sharding."""
        there = self._existing(t, wanted, region)
        if there is not None:
            return there
        if wanted.pending and t in self.graph.again:  # a recomputed value is complete, and counts on one device
            self.materialise(t, wanted.drop_pending(), region, user)
        known = self.known(t, region)
        route = cheapest(self.source(t, region), wanted)
        if route.origin < 0:
            value = self._recompute(t, wanted, region, user)
            self.add(t, value, region)
            return value
        passed = {v.sharding: v for v in self.emit_reshard(known[route.origin], wanted, user)}
        for _, s in route.new:
            self.add(t, passed[s], region)
        return passed[wanted]

    def source(self, t: Tensor, region: str) -> ValueSource:
        """The existing copies of `t`, and how to recompute it."""
        producer = None
        if t in self.graph.again:
            op = t.operation
            producer = RepeatableOperation(
                self.signatures.of(op), tuple([self.source(x, region) for x in self.graph.inputs[op]])
            )
        return ValueSource(
            tuple([v.sharding for v in self.known(t, region)]), t.dtype.itemsize, self.balance.axis_prices, producer
        )

    def _recompute(self, t: Tensor, wanted: Sharding, region: str, user: Operation | None) -> Value:
        op, value = t.operation, Value(t, wanted)
        signature, inputs = self.signatures.of(op), self.graph.inputs[op]
        axes = again_axes(signature, wanted)
        assigned = None if axes is None else signature.under(wanted.mesh, axes, ((),) * len(inputs))
        assert axes is not None  # feasible, since it was priced
        assert assigned is not None
        taken = [self.materialise(x, s, region, user) for x, s in zip(inputs, assigned.operands, strict=True)]
        split = tuple((a, f) for f, entry in axes.items() for a in entry)
        self.instructions.append(Compute(op, tuple(taken), (value,), region, split))
        return value

    def emit_reshard(self, value: Value, wanted: Sharding, user: Operation | None) -> list[Value]:
        """Emit the steps of the cheapest reshard; returns `value` and the result of each step."""
        t, values = value.tensor, [value]
        for step in reshard(value.sharding, wanted, t.dtype.itemsize).steps:
            makers = [self.makers[t][a] for a in step.axes] if STEP_KINDS[step.kind].reduces else []
            reason = explain_step(step, t, makers, user, self.homes)
            after = Value(t, step.after)
            op = user or t.operation
            self.instructions.append(Move(op, (values[-1],), (after,), reason.phase, (step,), (reason,)))
            values.append(after)
        return values


def blockwise(sharding: Sharding) -> tuple[tuple[str, str], ...]:
    """The assignment of an operation that computes each block of its result from the existing block alone."""
    return tuple((a, d.name) for d, axes in zip(sharding.shape, sharding.axes, strict=True) for a in axes)
