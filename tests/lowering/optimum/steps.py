"""What can follow from where the operands of one operation lie: every way to bring them, run it and leave them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from layouts import Sharding
from meshlib.core.graph import UPDATE, Operation, Tensor
from meshlib.core.opdef import Home, Kind
from tests.lowering.optimum.spots import INFINITE, Whereabouts
from tests.lowering.optimum.ways import Way, Ways, as_term

EPS = 1e-6
Spots = tuple[int, ...]  # of the operands of one operation, each tensor once


class Done(NamedTuple):
    """One operation run from given spots: bytes, work, spots of operands after it (-1: gone), that of the result."""

    bytes: float
    work: float
    after: Spots
    out: int
    ways: tuple[Way, ...]


class Total(NamedTuple):
    """Groups of terms of a sum, each added up: bytes, work, spots of the operands, how each was added."""

    bytes: float
    work: float
    after: Spots
    ways: tuple[Way, ...]


@dataclass(eq=False)
class Steps:
    """What can follow, for each operation of a program.

    Args:
      ends: what has to be at home at last, besides gradients and what is written back.
      budget: bytes above which nobody is interested in a move.
      priced: whether work is part of the cost, one operation a byte, or has a limit of its own.
    """

    ways: Ways
    ends: frozenset[Tensor]
    budget: float
    priced: bool
    at: dict[Tensor, Whereabouts] = field(default_factory=dict)
    _known: dict[tuple[Operation, Spots], list[Done]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self.ways.simple.operations:
            for y in op.outputs if op.opdef.kind is not Kind.COMMIT else ():
                bound = y in self.ends or (y in self.ways.simple.graph.gradient_of and not self._waits(y))
                self.at[y] = Whereabouts(y, self.ways.homes.of(y), bound, self.budget)

    def _waits(self, y: Tensor) -> bool:
        """Whether a gradient is only added to others: then it need not be at home before, unless it is larger."""
        users = [op for op, _ in self.ways.simple.uses.get(y, ())]
        return bool(users) and all(op.opdef.linear(op).together or op.opdef.home is Home.OPERAND for op in users)

    def cost(self, sent: float, work: float) -> tuple[float, float]:
        """What is to be least, and what has a limit."""
        return (sent + work, 0.0) if self.priced else (sent, work)

    def of(self, op: Operation, spots: Spots) -> list[Done]:
        """Every way to run an operation from there, but for those than which another is as good."""
        found = self._known.get((op, spots))
        if found is None:
            found = self._known[op, spots] = self._best(op, list(self._all(op, spots)))
        return found

    def operands(self, op: Operation) -> tuple[Tensor, ...]:
        """The operands and what they may be made of again, each once."""
        found = list(self.ways.simple.inputs[op])
        for x in found:
            found += self.ways.again.get(x, ())
        return tuple(dict.fromkeys(found))

    def _all(self, op: Operation, spots: Spots) -> Iterator[Done]:
        if op.opdef.kind is Kind.COMMIT:
            home = self.ways.homes.of(self.ways.simple.graph.variables[op.attrs["variable"]].output)
            for sent, after in self._bring(op, spots, [(home,)]):
                yield from self._ended(op, sent, 0.0, after, -1, ())
            return
        if op.output in self.ways.again:
            yield from self._ended(op, 0.0, 0.0, spots, self.at[op.output].unmade(), ())
        for way in self.ways.of[op]:
            for sent, after in self._bring(op, spots, way.wants):
                yield from self._made(op, sent + way.bytes, way.work, after, way.out, (way,))
        for blocks in _partitions(len(op.inputs)) if op in self.ways.groups else ():
            yield from self._grouped(op, spots, blocks)

    def _bring(self, op: Operation, spots: Spots, wants: Sequence[Sequence[Sharding]]) -> list[tuple[float, Spots]]:
        """Bytes and spots after bringing each operand to one of the shardings wanted of it, if any is."""
        xs = self.operands(op)
        region = UPDATE if op.opdef.kind is Kind.COMMIT else op.region
        partial = {spots: 0.0}
        for x, alternatives in zip(self.ways.simple.inputs[op], wants, strict=True):
            if not alternatives:
                continue
            after: dict[Spots, float] = {}
            for at, cost in partial.items():
                for wanted in alternatives:
                    for to, more in self._reach(op, xs, at, x, wanted, region).items():
                        after[to] = min(after.get(to, INFINITE), cost + more)
            partial = after
        return [(cost, at) for at, cost in partial.items()]

    def _reach(
        self, op: Operation, xs: Sequence[Tensor], spots: Spots, x: Tensor, wanted: Sharding, region: str
    ) -> dict[Spots, float]:
        """Bytes for each of the spots of `xs` after bringing one of them somewhere, or making it again there."""
        n, where = xs.index(x), self.at[x]
        later = where.bound or self.ways.last.get(x) is not op
        found = {(*spots[:n], to, *spots[n + 1 :]): c for c, to in where.bring(spots[n], wanted, region, later)}
        operands = self.ways.making(x, wanted) if x in self.ways.again and 0.0 not in found.values() else None
        if operands is None:
            return found
        partial, made_of = {spots: 0.0}, self.ways.again[x]
        for z, s in zip(made_of, operands, strict=True):
            after: dict[Spots, float] = {}
            for at, cost in partial.items():
                for to, more in self._reach(op, xs, at, z, s, region).items():
                    after[to] = min(after.get(to, INFINITE), cost + more)
            partial = after
        lasts = not all(self.at[z].is_small(s) for z, s in zip(made_of, operands, strict=True))
        for at, cost in partial.items():
            key = (*at[:n], where.made_again(at[n], wanted, region, lasts), *at[n + 1 :])
            found[key] = min(found.get(key, INFINITE), cost)
        return found

    def _made(
        self, op: Operation, sent: float, work: float, after: Spots, out: Sharding, ways: tuple[Way, ...]
    ) -> Iterator[Done]:
        where, y = self.at[op.output], op.output
        if op.opdef.home is Home.GIVEN:  # nobody goes round a constraint
            sent, out = sent + where.move(out, where.home)[0], where.home
        spot = where.made(out, op.region)
        if y in self.ways.simple.graph.gradient_of and not where.bound and not where.is_small(out):
            for more, to in where.bring(spot, where.home, op.region, False):
                yield from self._ended(op, sent + more, work, after, to, ways)
            return
        yield from self._ended(op, sent, work, after, spot, ways)

    def _ended(
        self, op: Operation, sent: float, work: float, after: Spots, out: int, ways: tuple[Way, ...]
    ) -> Iterator[Done]:
        """With what nobody needs any more ended: what is bound home is brought there, in each way to do so."""
        xs, last = self.operands(op), self.ways.last
        tensors, partial = (*xs, *op.outputs[: out >= 0]), {(*after, out)[: len(xs) + (out >= 0)]: 0.0}
        ending = [x for x in tensors if last.get(x, op) is op]
        for x in ending:
            where = self.at[x]
            if where.bound:
                closed: dict[Spots, float] = {}
                for at, cost in partial.items():
                    for to, more in self._reach(op, tensors, at, x, where.home, op.region).items():
                        closed[to] = min(closed.get(to, INFINITE), cost + more)
                partial = closed
        for at, more in partial.items():
            spots = [-1 if x in ending else n for x, n in zip(tensors, at, strict=True)]
            yield Done(sent + more, work, tuple(spots[: len(xs)]), spots[-1] if out >= 0 else -1, ways)

    def _best(self, op: Operation, found: list[Done]) -> list[Done]:
        kept: list[tuple[float, float, Done]] = []
        ranked = [(*self.cost(d.bytes, d.work), d) for d in found if d.bytes < INFINITE]
        for cost, work, d in sorted(ranked, key=lambda r: r[:2]):
            if not any(w <= work + EPS and self._as_good(op, cost - c, e, d) for c, w, e in kept):
                kept.append((cost, work, d))
        return [d for _, _, d in kept]

    def _as_good(self, op: Operation, left: float, a: Done, b: Done) -> bool:
        """Whether what `b` costs more buys, after `a`, all that `b` has."""
        if a.out != b.out:
            left -= self.at[op.output].short(a.out, b.out)
        for x, i, j in zip(self.operands(op), a.after, b.after, strict=True):
            if left < -EPS:
                return False
            if i != j:
                left -= self.at[x].short(i, j)
        return left >= -EPS

    # ------------------------------------------------------------ sums of which some terms are added first

    def _grouped(self, op: Operation, spots: Spots, blocks: Sequence[Sequence[int]]) -> Iterator[Done]:
        where, count = self.at[op.output], len(op.inputs)
        totals = [Total(0.0, 0.0, spots, ())]
        for block in (tuple(b) for b in blocks if len(b) > 1):
            totals = self._best_totals(
                op,
                [
                    Total(t.bytes + more, t.work + way.work, after, (*t.ways, way))
                    for t in totals
                    for way in self.ways.groups[op][block]
                    for more, after in self._bring(op, t.after, way.wants)
                ],
            )
        singles = [b[0] for b in blocks if len(b) == 1]
        for way in self.ways.of[op]:
            wants = [way.wants[i] if i in singles else () for i in range(count)]
            last = self.ways.price(op, self.ways.adding(op, way.out, len(blocks)))
            for t in totals:
                total = t.bytes + sum(min(where.move(w.out, s)[0] for s in as_term(way.out)) for w in t.ways)
                if total < INFINITE:
                    for more, after in self._bring(op, t.after, wants):
                        yield from self._made(op, total + more, t.work + last, after, way.out, (*t.ways, way))

    def _best_totals(self, op: Operation, found: list[Total]) -> list[Total]:
        """Those that can't be had as cheaply from another."""
        kept: list[Total] = []
        for t in sorted(found, key=lambda t: self.cost(t.bytes, t.work)):
            if not any(self._leads_to(op, k, t) for k in kept):
                kept.append(t)
        return kept

    def _leads_to(self, op: Operation, a: Total, b: Total) -> bool:
        (cost_a, work_a), (cost_b, work_b) = self.cost(a.bytes, a.work), self.cost(b.bytes, b.work)
        if work_a > work_b + EPS:
            return False
        move, xs = self.at[op.output].move, self.operands(op)
        left = cost_b - cost_a + EPS - sum(move(p.out, q.out)[0] for p, q in zip(a.ways, b.ways, strict=True))
        return left - sum(self.at[x].short(i, j) for x, i, j in zip(xs, a.after, b.after, strict=True)) >= 0


def _partitions(count: int) -> list[list[list[int]]]:
    """The ways to add some of `count` terms first: neither none nor all together."""
    found: list[list[list[int]]] = [[]]
    for i in range(count):
        found = [
            [*p[:n], [*p[n], i], *p[n + 1 :]] if n < len(p) else [*p, [i]] for p in found for n in range(len(p) + 1)
        ]
    return [p for p in found if 1 < len(p) < count]
