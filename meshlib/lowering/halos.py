"""Pass: several shifts along a split dim share one halo exchange.

A shift fetches as many rows from its operand's neighbours as it shifts by. Where several shifts read one value, it is
widened once, by the largest shift on either side, and every shift slices the widened value. If their operands derive
from a common value by element-wise operations, or shifts along other dims, that value is widened and the operations
between compute results with margins. So the taps of a causal convolution share one halo, forward and backward, and the
nine of a 3x3 neighbourhood on a mesh of two axes one per side, corners included.

Applied only if it sends less; work on margins is priced as duplicated work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeGuard

from layouts.plan import Step
from layouts.step_kinds import COLLECTIVE_PERMUTE, SLICE
from meshlib.core.opdef import Factor, Work
from meshlib.lowering.balance import Balance
from meshlib.lowering.expected_halos import phase
from meshlib.lowering.passes import remove_dead_code
from meshlib.program.exchanges import (
    RUNS,
    Margin,
    fits,
    given_away,
    keeps_margins,
    needed_margins,
    row_size,
    takes_margins,
)
from meshlib.program.instructions import Compute, Instruction, Move, Reason, Value, Widen
from meshlib.program.records import Program

MOST_BETWEEN = 24  # operations between a shift and the value that is widened for it
Wide = dict[str, Margin]  # by dim
Root = tuple[Value, str]  # a value that is widened along a dim


class Point(NamedTuple):
    """A value at which a shift's need could be met if it had this margin, after `work` elements of margin computation.

    `free`: it is sliced from a whole value, and can be sliced with a margin at no cost.
    """

    value: Value
    margin: Margin
    work: int
    free: bool


@dataclass(frozen=True, eq=False)
class MarginDemand:
    """A computation that needs its operand's neighbours, and points where a margin could serve it, nearest first."""

    instruction: Compute
    points: tuple[Point, ...]
    phase: str

    @property
    def key(self) -> object:
        """Key that is equal for demands that may share an exchange."""
        first = self.points[0]
        return (self.phase, first.margin.dim, first.margin.wrap, first.value.sharding.of(first.margin.dim))


def share_halos(program: Program, across: bool = False) -> Program:
    """Widen a value once for several users of its neighbours' elements, where that sends less.

    `across`: one exchange serves forward and backward, and is kept in between; otherwise one for each.
    """
    widening = _Widening(program, across)
    shared_roots = list(widening.roots())
    best = widening.better(frozenset().union(*shared_roots), program)
    if best is not program or len(shared_roots) < 2:
        return best
    # Some exclude each other: add them one at a time.
    taken: frozenset[Root] = frozenset()
    for roots in shared_roots:
        more = widening.better(taken | roots, best)
        if more is not best:
            best, taken = more, taken | roots
    return best


@dataclass(eq=False)
class _Widening:
    program: Program
    across: bool = False
    makers: dict[Value, Compute] = field(default_factory=dict)
    places: dict[Compute, int] = field(default_factory=dict)  # positions of instructions
    users: dict[Value, list[Instruction]] = field(default_factory=dict)
    cuts: dict[Value, tuple[Value, Step]] = field(default_factory=dict)  # result of a local slice -> (operand, step)
    factors: dict[Compute, tuple[Factor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        moving = [i for i in self.program.instructions if isinstance(i, Compute) and i.exchanges]
        self.demands: list[MarginDemand] = []
        if not moving:
            return
        self.pinned = {*self.program.outputs.values(), *self.program.updates.values()}
        for n, i in enumerate(self.program.instructions):
            if isinstance(i, Compute):
                self.places[i] = n
                self.makers.update((y, i) for y in i.outputs)
            elif isinstance(i, Move) and i.step_kind is SLICE:
                self.cuts.update(zip(i.outputs, zip(i.inputs, i.steps, strict=True), strict=True))
            for x in i.inputs:
                self.users.setdefault(x, []).append(i)
        self.shifting = {i for i in moving if self._uniform(i)}
        for i in moving:
            if i in self.shifting:
                for x, needed in zip(i.inputs, self.needs(i, {}), strict=True):
                    points_of_margins = [tuple(self._points(i, x, m)) for m in needed.values()]
                    self.demands += [
                        MarginDemand(i, points, phase(i.region, self.across)) for points in points_of_margins
                    ]

    # ------------------------------------------------------------ demands

    def factors_of(self, i: Compute) -> tuple[Factor, ...]:
        if i not in self.factors:
            self.factors[i] = i.operation.opdef.roles(i.operation)
        return self.factors[i]

    def _uniform(self, i: Compute) -> bool:
        """True if every block of a shift or window needs the same margins."""
        split, factors = _split(i), self.factors_of(i)
        if not any(f.name in split and f.role in RUNS for f in factors):
            return False
        if not takes_margins(i.operation, factors, split):
            return False
        needed = zip(i.inputs, self.needs(i, {}), strict=True)
        return all(_may_have(x, m) for x, margins in needed for m in margins.values())

    def _points(self, i: Compute, value: Value, margin: Margin) -> Iterator[Point]:
        """The operand, then the values from which alone it is computed along the dim."""
        work, dim, needed = 0, margin.dim, {value: margin}
        for _ in range(MOST_BETWEEN):
            value = max(needed, key=self._place)
            margin = needed.pop(value)
            if not _may_have(value, margin):
                return
            if not needed:
                cut = self.cuts.get(value)
                free = cut is not None and cut[1].dim == dim and not cut[0].sharding.of(dim)
                yield Point(value, margin, work, free)
            if not self._can_be_wide(value, i.region):
                return
            maker = self.makers[value]
            work += (margin.before + margin.after) * _row(value, dim)
            for x, margins in zip(maker.inputs, self.needs(maker, {dim: margin}), strict=True):
                if dim in margins:
                    own = margins[dim]
                    if own.wrap != margin.wrap:
                        return
                    needed[x] = own.joined(needed.get(x))
            if not needed:
                return

    def _place(self, v: Value) -> int:
        """Position of the instruction that computes a value; -1 for values that exist before."""
        maker = self.makers.get(v)
        return -1 if maker is None else self.places[maker]

    def _can_be_wide(self, v: Value, region: str) -> bool:
        """True if a value can be computed with margins, and all its users belong to the same region and accept them."""
        maker = self.makers.get(v)
        if maker is None or v in self.pinned or maker.region != region or len(maker.outputs) > 1:
            return False
        if not keeps_margins(maker.operation, self.factors_of(maker), _split(maker)):
            return False
        return all(
            isinstance(u, Compute)
            and (u in self.shifting or (not u.exchanges and takes_margins(u.operation, self.factors_of(u), _split(u))))
            and u.region == region
            for u in (*self.users[v], *((maker,) if maker.exchanges else ()))
        )

    # ------------------------------------------------------------ where to widen

    def roots(self) -> Iterator[frozenset[Root]]:
        """Sets of values to widen, one per group of demands with common points, if that is cheaper."""
        groups: dict[object, list[MarginDemand]] = {}
        for d in self.demands:
            groups.setdefault(d.key, []).append(d)
        for group in groups.values():
            for linked in _linked(group):
                apart = sum(_sent(d.points[0].value, d.points[0].margin) for d in linked)
                chosen = _placed(linked)
                if _total(chosen) >= apart:
                    continue
                served: dict[Value, list[Point]] = {}
                for p in chosen.values():
                    served.setdefault(p.value, []).append(p)
                yield frozenset((v, p[0].margin.dim) for v, p in served.items() if len(p) > 1 or p[0].work or p[0].free)

    # ------------------------------------------------------------ the new program

    def better(self, chosen: frozenset[Root], than: Program) -> Program:
        """The program with these values widened, if possible and cheaper in bytes; otherwise `than`."""
        widened = self._widened(set(chosen)) if chosen else None
        return widened if widened is not None and widened.sent_bytes < than.sent_bytes else than

    def _widened(self, roots: set[Root]) -> Program | None:
        covered = {d.instruction for d in self.demands if any((p.value, p.margin.dim) in roots for p in d.points)}
        while True:
            # An instruction that uses margins has no exchange of its own.
            roots |= self._unserved(roots, covered)
            wants = self._wants(roots, covered)
            if wants is None:
                return None
            # Margins may fit one by one, yet overlap when combined around a wrapped dim.
            if not all(fits(m, v.tensor, v.sharding) for v, ms in wants.items() for m in _wanted(ms).values()):
                return None
            margins_of = {v: _without_roots(v, wanted, roots) for v, wanted in wants.items()}
            inside = {v for v, margins in margins_of.items() if margins}
            more = {i for i in self.shifting if not inside.isdisjoint((*i.inputs, i.outputs[0]))} - covered
            covered |= more
            if not more and not self._unserved(roots, covered):
                break
        if not all(self._can_be_wide(v, self.makers[v].region) if v in self.makers else False for v in inside):
            return None
        return _Rewriter(self, roots, covered, margins_of).run()

    def _unserved(self, roots: set[Root], covered: set[Compute]) -> set[Root]:
        """Operands of `covered` instructions whose margins no root provides yet."""
        return {
            (points[0].value, points[0].margin.dim)
            for i, points in ((d.instruction, d.points) for d in self.demands)
            if i in covered and not any((p.value, p.margin.dim) in roots for p in points)
        }

    def needs(self, i: Compute, made: Wide) -> list[Wide]:
        """The margins that each operand must have for a result with the margins `made`."""
        split, factors = _split(i), self.factors_of(i)
        return [dict(needed_margins(i.operation, factors, n, made, split)) for n in range(len(i.inputs))]

    def _wants(self, roots: set[Root], covered: set[Compute]) -> dict[Value, list[Wide]] | None:
        """The margins that each value's users need; None if only some of them wrap a dim."""
        wants: dict[Value, list[Wide]] = {}
        rounds: dict[Root, bool] = {}
        for i in reversed(self.program.instructions):
            if isinstance(i, Compute):
                of_users = wants.get(i.outputs[0])
                margins_of_result = _without_roots(i.outputs[0], of_users, roots) if of_users else {}
                if not margins_of_result and i not in covered:
                    continue
                if not takes_margins(i.operation, self.factors_of(i), _split(i)):
                    return None
                for x, margins in zip(i.inputs, self.needs(i, margins_of_result), strict=True):
                    if margins:
                        wants.setdefault(x, []).append(margins)
                    if any(rounds.setdefault((x, dim), m.wrap) != m.wrap for dim, m in margins.items()):
                        return None
        return wants


@dataclass(eq=False)
class _Rewriter:
    """Rewrites the instructions with margins."""

    widening: _Widening
    roots: set[Root]
    covered: set[Compute]
    made: Mapping[Value, Wide]
    instructions: list[Instruction] = field(default_factory=list)
    now: dict[Value, Value] = field(default_factory=dict)  # value -> its replacement with margins
    wide: dict[tuple[Value, str], list[Value]] = field(default_factory=dict)  # (value, phase) -> widened versions
    wanted: dict[tuple[Value, str], list[Wide]] = field(default_factory=dict)

    def run(self) -> Program:
        program = self.widening.program
        for i in program.instructions:
            if self._is_affected(i):
                for x, margins in zip(i.inputs, self._needs(i), strict=True):
                    if margins:
                        self.wanted.setdefault((x, self._phase(i)), []).append(margins)
        for i in program.instructions:
            self.instructions.append(self._computed(i) if self._is_affected(i) else self._plain(i))
        return remove_dead_code(program.with_instructions(self.instructions))

    def _phase(self, i: Compute) -> str:
        return phase(i.region, self.widening.across)

    def _is_affected(self, i: Instruction) -> TypeGuard[Compute]:
        """True if an instruction uses margins, or computes a result with them."""
        return isinstance(i, Compute) and (i in self.covered or bool(self.made.get(i.outputs[0])))

    def _needs(self, i: Compute) -> list[Wide]:
        return self.widening.needs(i, self.made.get(i.outputs[0], {}))

    def _plain(self, i: Instruction) -> Instruction:
        """An instruction that is not affected."""
        if not isinstance(i, Compute) or self.now.keys().isdisjoint(i.inputs):
            return i
        return replace(i, inputs=tuple([self.now.get(x, x) for x in i.inputs]))

    def _computed(self, i: Compute) -> Compute:
        inputs = tuple(self._version(x, margins, i) for x, margins in zip(i.inputs, self._needs(i), strict=True))
        outputs = i.outputs
        if margins := self.made.get(outputs[0]):
            (y,) = outputs
            outputs = (Value(y.tensor, y.sharding, _in_order(y, margins)),)
            self.now[y] = outputs[0]
        apart = replace(i, exchanges=(), reasons=()) if i in self.covered else i
        return replace(apart, inputs=inputs, outputs=outputs)

    def _version(self, x: Value, margins: Wide, user: Compute) -> Value:
        """`x` with at least these margins, widened if necessary."""
        plain = self.now.get(x, x)
        new = [d.name for d in x.tensor.shape if d.name in margins and (x, d.name) in self.roots]
        if not new:
            return plain
        known = self.wide.setdefault((x, self._phase(user)), [])
        if not known:
            self._widen(x, plain, user, known)
        held = [({m.dim: m for m in v.margins}, v) for v in known]
        return next(v for has, v in held if all(d in has and has[d].covers(m) for d, m in margins.items()))

    def _widen(self, x: Value, plain: Value, user: Compute, known: list[Value]) -> None:
        """Widen `x` for all users of a phase: dim after dim if corners are needed, otherwise each dim separately."""
        wanted = self.wanted[x, self._phase(user)]
        by_dim: Wide = {}
        for margins in wanted:
            for dim, m in margins.items():
                if (x, dim) in self.roots:
                    by_dim[dim] = m.joined(by_dim.get(dim))
        corners = any(sum((x, dim) in self.roots for dim in margins) > 1 for margins in wanted)
        at = plain
        for d in x.tensor.shape:
            if d.name in by_dim:
                at = self._exchange(at if corners else plain, by_dim[d.name], user, len(wanted))
                known.append(at)

    def _exchange(self, x: Value, m: Margin, user: Compute, users: int) -> Value:
        if x in self.widening.cuts and not x.margins and (cut := self._cut(x, m, user)) is not None:
            return cut
        axes, size = x.sharding.of(m.dim), x.tensor.shape.dim(m.dim).size
        count = x.sharding.mesh.group_size(axes)
        row = row_size(x.tensor, x.sharding, x.margins, m.dim)
        sent = tuple(x.tensor.dtype.size_bytes(n * row) for n in given_away(m, count, size))
        y = Value(x.tensor, x.sharding, _in_order(x, {**{o.dim: o for o in x.margins}, m.dim: m}))
        op, over = user.operation, "+".join(axes)
        step = Step(COLLECTIVE_PERMUTE.name, axes, m.dim, None, x.sharding, x.sharding, max(sent), max(sent))
        others = f" and {users - 1} more need" if users > 1 else " needs"
        lie = f"{m.before} before and {m.after} after each block, on other cores"
        why = f"{op.opdef.name} '{op.name}'{others} indices of '{m.dim}' of '{x.tensor.name}', split over {over}: {lie}"
        rules = [str(r) for r in self.widening.program.layout.rules if r.dim == m.dim]
        avoid = (
            f"leave '{m.dim}' unsplit over {over} ({f'rule {rules[0]}' if rules else 'no rule of the layout says so'})"
        )
        reason = Reason(op.name, m.dim, why, avoid, op.source, op.region)
        self.instructions.append(Widen(op, (x,), (y,), user.region, (step,), (reason,), by_block=sent))
        return y

    def _cut(self, x: Value, m: Margin, user: Compute) -> Value | None:
        """A slice with a margin, cut from the operand if that is whole along the dim."""
        whole, step = self.widening.cuts[x]
        if step.dim != m.dim or whole.sharding.of(m.dim):
            return None
        y = Value(x.tensor, x.sharding, (m,))
        op = user.operation
        why = f"{op.opdef.name} '{op.name}' needs a part of '{x.tensor.name}' only; each core keeps its own"
        reason = Reason(op.name, m.dim, why, "costs nothing", op.source, user.region)
        self.instructions.append(Move(op, (whole,), (y,), user.region, (step,), (reason,)))
        return y


def _split(i: Compute) -> dict[str, int]:
    """Factor -> number of blocks, for factors that some axis splits."""
    return {factor: i.outputs[0].sharding.mesh.group_size(axes) for factor, axes in i.factor_axes.items()}


def _in_order(v: Value, margins: Wide) -> tuple[Margin, ...]:
    return tuple(margins[d.name] for d in v.tensor.shape if d.name in margins)


def _wanted(of_users: list[Wide]) -> Wide:
    """The union of all users' margins."""
    wanted_margins: Wide = {}
    for margins in of_users:
        for dim, m in margins.items():
            wanted_margins[dim] = m.joined(wanted_margins.get(dim))
    return wanted_margins


def _without_roots(v: Value, of_users: list[Wide], roots: set[Root]) -> Wide:
    """The margins with which a value must be computed: its users' margins without those added by widening."""
    return {dim: m for dim, m in _wanted(of_users).items() if (v, dim) not in roots}


def _may_have(v: Value, m: Margin) -> bool:
    return not v.sharding.pending and fits(m, v.tensor, v.sharding)


def _row(v: Value, dim: str) -> int:
    """Elements per index of a dim in a block."""
    return v.sharding.local_size // v.sharding.local_shape.dim(dim).size


def _joined(points: list[Point]) -> dict[Value, Margin]:
    joined: dict[Value, Margin] = {}
    for p in points:
        joined[p.value] = p.margin.joined(joined.get(p.value))
    return joined


def _sent(v: Value, m: Margin) -> int:
    return v.tensor.dtype.size_bytes((m.before + m.after) * _row(v, m.dim))


def _total(chosen: Mapping[MarginDemand, Point]) -> float:
    moved = _joined([p for p in chosen.values() if not p.free])
    work = Work(0, sum(p.work for p in chosen.values()))
    return sum(_sent(v, m) for v, m in moved.items()) + Balance().bytes_of(work)


def _linked(demands: list[MarginDemand]) -> list[list[MarginDemand]]:
    """Demands grouped by common points, directly or transitively."""
    of: dict[Value, list[MarginDemand]] = {}
    for d in demands:
        for p in d.points:
            of.setdefault(p.value, []).append(d)
    left, groups = dict.fromkeys(demands), []
    while left:
        linked, waiting = [], [next(iter(left))]
        while waiting:
            d = waiting.pop()
            if d in left:
                del left[d]
                linked.append(d)
                waiting += [other for p in d.points for other in of[p.value]]
        groups.append(linked)
    return groups


def _placed(demands: list[MarginDemand]) -> dict[MarginDemand, Point]:
    """A point for each demand: the nearest at first; then greedily those that save the most."""
    chosen = {d: d.points[0] for d in demands}
    candidates: dict[Value, dict[MarginDemand, Point]] = {}
    for d in demands:
        for p in d.points:
            candidates.setdefault(p.value, {})[d] = p
    meeting = {v: d for v, d in candidates.items() if len(d) > 1 or any(p.free for p in d.values())}
    while meeting:
        best = min(meeting.values(), key=lambda served: _total({**chosen, **served}))
        if _total({**chosen, **best}) >= _total(chosen):
            break
        chosen.update(best)
    return chosen
