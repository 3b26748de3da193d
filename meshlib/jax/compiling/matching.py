"""Planned collectives matched with compiled ones, and the source of every difference in bytes.

A compiled collective keeps the scope of the instruction that it comes from, unless the compiler merged it with others
or fused it. So values are matched by scope first, then by kind, axes, bytes and runs, then by known rewrites of
compilers: a reduce_scatter becomes an all_reduce, a cast moves before a gather, a reduction leaves a loop.
Each compiled value is matched to one planned value, or is an addition; so the differences add up to that of the totals.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from hardware.collectives import ring_sent_bytes
from layouts.step_kinds import ALL_REDUCE, STEP_KINDS
from meshlib.core.text import bytes_text
from meshlib.estimation.work.communication import Communication
from meshlib.jax.explaining import Explained, ExplainedCollective
from meshlib.jax.hlo.scopes import scope_in
from meshlib.jax.hlo.text import Array
from meshlib.program.instructions import Compute, Instruction
from meshlib.program.records import Program, walk

CLOSE = 0.15  # padding may lengthen an operand by this share


@dataclass(eq=False)
class Planned:
    """One value's part in one planned collective, and the compiled collectives that implement it."""

    instruction: Instruction
    scope: str
    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    sent_bytes: float
    times: int
    dtype_bytes: int
    tensor: str
    op: str
    source: str
    became: list[CompiledPart] = field(default_factory=list)

    @property
    def total_bytes(self) -> float:
        """Bytes sent per step."""
        return self.sent_bytes * self.times


@dataclass(eq=False)
class CompiledPart:
    """One value's part in one compiled collective."""

    launch: ExplainedCollective
    scope: str | None
    source: str
    payload_bytes: int
    dtype: str
    dtype_bytes: int

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, with parts of an axis given as the axis."""
        return tuple(dict.fromkeys(a.partition(":")[0] for a in self.launch.axes or ()))

    @property
    def times(self) -> int:
        """Runs per step; 1 for loops whose trips depend on data."""
        return 1 if self.launch.count is None else self.launch.count

    @property
    def total_bytes(self) -> float:
        """This value's share of the bytes that the collective sends per step."""
        launch = self.launch
        return launch.total_bytes * self.payload_bytes / max(launch.payload_bytes, 1)


@dataclass(frozen=True)
class Difference:
    """One difference between what a compiled program sends and its plan.

    what         description; op, source: the operation that needs the collective
    planned_bytes, compiled_bytes  sent by a device per step
    """

    what: str
    op: str
    source: str
    planned_bytes: float
    compiled_bytes: float

    @property
    def more_bytes(self) -> float:
        """Additional bytes that the compiled program sends."""
        return self.compiled_bytes - self.planned_bytes

    def __str__(self) -> str:
        sign = "+" if self.more_bytes >= 0 else "-"
        return f"{sign}{bytes_text(abs(self.more_bytes))}  {self.what}  ({self.source or 'no line'})"


def differences_of(program: Program, explained: Explained) -> tuple[Difference, ...]:
    """Differences between the bytes planned and the bytes sent by the compiled step, largest first.

    They add up: the sum of `more_bytes` is the difference of the totals.
    """
    planned = _planned(program)
    added = _match(planned, _compiled_parts(program, explained))
    differences = [d for p in planned if (d := _difference(p, planned)) is not None]
    for m in added:
        c = m.launch
        over = "+".join(c.axes or ("unknown axes",))
        what = f"added: {c.kind} of {m.dtype}, {bytes_text(m.payload_bytes)}, over {over}: {c.reason}"
        differences.append(Difference(what, m.scope or c.op, m.source, 0.0, m.total_bytes))
    return tuple(sorted(_alike(differences), key=lambda d: (-abs(d.more_bytes), d.what)))


def kept_moves(program: Program, explained: Explained) -> dict[Instruction, tuple[Communication, ...]]:
    """The collectives that the compiled program runs for each instruction of the plan, for `mtf.estimate`.

    A collective that became several, or runs over parts of its axes, is one collective of their kind and total bytes;
    a removed one sends nothing. Added ones are assigned to an operation that runs as often.
    """
    planned = _planned(program)
    added = _match(planned, _compiled_parts(program, explained))
    moves_of: dict[Instruction, list[Communication]] = defaultdict(list)
    groups: dict[tuple[Instruction, int], list[Planned]] = defaultdict(list)
    for n, p in enumerate(planned):  # values of one launch together; exchanges of a computation separately
        groups[p.instruction, 0 if p.instruction.is_collective else n].append(p)
    for (instruction, _), values in groups.items():
        first = values[0]
        moves_of[instruction].append(_move(program, first, [m for p in values for m in p.became], first.times))
    hosts = {times: i for i, _, times in walk(program) if isinstance(i, Compute)}
    for m in added:
        host = hosts.get(m.times) or next(iter(hosts.values()), None)
        if host is not None:
            times = next(t for t, i in hosts.items() if i is host)
            moves_of[host].append(_move(program, None, [m], times))
    return {i: tuple(moves) for i, moves in moves_of.items()}


def _move(program: Program, p: Planned | None, became: Sequence[CompiledPart], times: int) -> Communication:
    """One collective with the total bytes of the compiled values per run, run `times` times."""
    if not became:
        return Communication(ALL_REDUCE.name, (), 1, 0, 0.0, 0, p.tensor if p else "", "the compiler sends nothing")
    largest = max(became, key=lambda m: m.total_bytes)
    kind = largest.launch.kind
    axes = largest.axes or (p.axes if p else ())
    group = program.mesh.group_size(axes)
    sent = sum(m.total_bytes for m in became) / times
    share = ring_sent_bytes(kind, 1.0, group)
    larger = round(sent / share) if share else 0
    payload = larger // group if STEP_KINDS[kind].gathers else larger
    return Communication(
        kind, axes, group, payload, sent, larger, p.tensor if p else largest.launch.name, largest.launch.reason
    )


def merged_launches(explained: Explained) -> tuple[int, int]:
    """(values sent in merged collectives, number of merged collectives); loops count all their trips."""
    several = [c for c in explained.collectives if len(c.operands) > 1]
    return sum(len(c.operands) * (c.count or 1) for c in several), sum(c.count or 1 for c in several)


def _planned(program: Program) -> list[Planned]:
    return [
        Planned(
            i,
            i.scope,
            sent.kind,
            tuple(sent.axes),
            sent.payload_bytes,
            float(sent.sent_bytes),
            times,
            int(x.tensor.dtype.itemsize),
            x.tensor.name,
            reason.op,
            reason.source,
        )
        for i, _, times in walk(program)
        for sent, x, reason in i.transfers
        if sent.sent_bytes
    ]


def _compiled_parts(program: Program, explained: Explained) -> list[CompiledPart]:
    scopes = {i.scope: i.operation.source for i, _, _ in walk(program)}
    parts = []
    for c in explained.collectives:
        if not c.total_bytes:
            continue
        scope = scope_in(c.op, scopes)
        for text, size in zip(c.operands, c.operand_bytes, strict=True):
            dtype = text.partition("[")[0]
            source = c.source if scope is None else scopes[scope]
            parts.append(CompiledPart(c, scope, source, size, dtype, Array(dtype, (1,)).bytes))
    return parts


Rule = Callable[[CompiledPart, Planned], bool]


def _match(planned: Sequence[Planned], compiled: Sequence[CompiledPart]) -> list[CompiledPart]:
    """Assign each compiled value to a planned one; returns those without a match."""
    left = list(compiled)
    for rule, shared in _RULES:
        rest = []
        for m in left:
            p = next((p for p in planned if (shared or not p.became) and rule(m, p)), None)
            if p is None:
                rest.append(m)
            else:
                p.became.append(m)
        left = rest
    return left


def _same_kind(m: CompiledPart, p: Planned) -> bool:
    return m.launch.kind == p.kind and set(m.axes) == set(p.axes)


def _does_more(m: CompiledPart, p: Planned) -> bool:
    """True if the compiled collective does what was planned and more."""
    return _sums_and_cuts(m, p) and set(m.axes) == set(p.axes)


def _sums_and_cuts(m: CompiledPart, p: Planned) -> bool:
    """True if an all-reduce was compiled where a reduce_scatter was planned."""
    return STEP_KINDS[m.launch.kind].sums_in_place and STEP_KINDS[p.kind].scatters


def _same_bytes(m: CompiledPart, p: Planned) -> bool:
    return m.payload_bytes == p.payload_bytes


def _same_elements(m: CompiledPart, p: Planned) -> bool:
    return m.dtype_bytes > 0 and m.payload_bytes * p.dtype_bytes == p.payload_bytes * m.dtype_bytes


def _padded(m: CompiledPart, p: Planned) -> bool:
    return 0 <= m.payload_bytes - p.payload_bytes <= CLOSE * p.payload_bytes


def _is_part(m: CompiledPart, p: Planned) -> bool:
    """True if it is one stage of a collective over consecutive parts of its axes, or a rebalancing of its blocks."""
    if m.launch.kind != p.kind or m.times != p.times or not set(m.axes) <= set(p.axes) or m.launch.axes == p.axes:
        return False
    planned = None if m.scope in (None, p.scope) else STEP_KINDS.get(m.scope.partition(":")[0])
    if planned is not None and (planned.scatters or planned.gathers):
        return False
    if not p.became:
        return _padded(m, p)
    if any(b.launch.axes == m.launch.axes for b in p.became):
        return False
    earlier = [int(before) for a in m.launch.axes or () for before in re.findall(r":\((\d+)\)", a)]
    whole = m.payload_bytes * prod(earlier)  # payload before the stages over the major parts of its axes
    return 0 <= whole - p.payload_bytes <= CLOSE * p.payload_bytes


def _continues(m: CompiledPart, p: Planned) -> bool:
    """True if a part follows another part of the same collective: a further stage, or a permute that evens out blocks
    padded to whole tiles."""
    parts = {b.launch.name for b in p.became}
    alike = m.launch.kind == p.kind or STEP_KINDS[m.launch.kind].permutes
    same = alike and set(m.axes) <= set(p.axes)
    return same and m.times == p.times and not parts.isdisjoint(m.launch.follows)


def _does_as_much(m: CompiledPart, p: Planned) -> bool:
    return _same_kind(m, p) or _does_more(m, p)


# (rule, whether a planned value may match several compiled ones by it); the first match counts.
_RULES: list[tuple[Rule, bool]] = [
    (lambda m, p: m.scope == p.scope and _same_bytes(m, p) and m.axes == p.axes, False),
    (lambda m, p: m.scope == p.scope and _same_elements(m, p) and len(m.launch.operands) == 1, False),
    (lambda m, p: _same_kind(m, p) and _same_bytes(m, p) and m.times == p.times, False),
    (lambda m, p: _does_more(m, p) and _same_bytes(m, p) and m.times == p.times, False),
    (lambda m, p: _does_as_much(m, p) and _same_elements(m, p) and m.times == p.times, False),
    (lambda m, p: _does_as_much(m, p) and m.payload_bytes * m.times == p.payload_bytes * p.times, False),
    (_is_part, True),
    (_continues, True),
    (lambda m, p: m.scope == p.scope and len(m.launch.operands) == 1, True),
    (lambda m, p: _same_kind(m, p) and m.times == p.times and _padded(m, p), False),
]


def _difference(p: Planned, planned: Sequence[Planned]) -> Difference | None:
    name = f"{p.kind} of '{p.tensor}' over {'+'.join(p.axes)}"
    if not p.became:
        twin = next((q for q in planned if q is not p and q.became and _is_twin(p, q)), None)
        why = f"the compiler sends it once, with that of {twin.op}" if twin else "the compiler sends nothing for it"
        return Difference(f"removed: {name}: {why}", p.op, p.source, p.total_bytes, 0.0)
    total = sum(m.total_bytes for m in p.became)
    notes = [note for note in _notes(p) if note]
    if abs(total - p.total_bytes) < 0.5 and not notes:
        return None
    text = ", ".join(dict.fromkeys(notes)) or "other bytes"
    return Difference(f"{name}: {text}", p.op, p.source, p.total_bytes, total)


def _notes(p: Planned) -> list[str]:
    notes = []
    kinds = Counter(m.launch.kind for m in p.became)
    if len(p.became) > 1:
        parts = ", ".join(f"{m.launch.kind} over {'+'.join(m.launch.axes or ('?',))}" for m in p.became)
        notes.append(f"goes in {len(p.became)} parts ({parts})")
    elif p.kind not in kinds:
        (m,) = p.became
        cut = " and a slice" if _sums_and_cuts(m, p) else ""
        notes.append(f"became {_article(m.launch.kind)}{cut}")
    for m in p.became:
        if m.dtype_bytes and m.dtype_bytes != p.dtype_bytes and _same_elements(m, p):
            notes.append(f"sent as {m.dtype}, {m.dtype_bytes} bytes an element instead of {p.dtype_bytes}")
        if m.times != p.times:
            same = m.times * m.payload_bytes == p.times * p.payload_bytes
            moved = "" if not same else "moved out of the loop, " if m.times < p.times else "in pieces, "
            notes.append(f"{moved}{m.times:,} run{'s' * (m.times > 1)} instead of {p.times:,}")
        if len(p.became) == 1 and set(m.axes) != set(p.axes):
            notes.append(f"over {'+'.join(m.launch.axes or ('unknown axes',))}")
        if m.payload_bytes > p.payload_bytes and m.dtype_bytes == p.dtype_bytes and m.times == p.times:
            notes.append(f"padded by {bytes_text(m.payload_bytes - p.payload_bytes)}")
    return notes


def _is_twin(p: Planned, q: Planned) -> bool:
    return (q.tensor, q.kind, set(q.axes), q.payload_bytes) == (p.tensor, p.kind, set(p.axes), p.payload_bytes)


def _article(kind: str) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"


def _alike(differences: Sequence[Difference]) -> list[Difference]:
    """Merge differences with equal text and line."""
    groups: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for d in differences:
        groups[d.what, d.source].append(d)
    return [
        Difference(
            what if len(ds) == 1 else f"{what} ({len(ds)} times)", ds[0].op, source,
            sum(d.planned_bytes for d in ds), sum(d.compiled_bytes for d in ds),
        )
        for (what, source), ds in groups.items()
    ]  # fmt: skip
