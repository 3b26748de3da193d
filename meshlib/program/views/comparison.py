"""Differences between two programs: two layouts of one graph, or two graphs.

All figures are exact and derived from the programs, without allocating arrays. Tensors and collectives are matched by
tensor names, so two graphs can be compared as far as they use the same names.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from layouts import Sharding
from layouts.checking import some
from meshlib.core.graph import BACKWARD, FORWARD, UPDATE, Tensor
from meshlib.core.opdef import Kind
from meshlib.core.text import bytes_text, grid
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Value
from meshlib.program.records import Collective, Program, require_program, walk
from meshlib.program.views.plan_changes import Replanned, plan_notes, replanned

__all__ = ["CollectivePair", "ComparedWork", "Comparison", "Laid", "Replanned", "compare"]

PHASES = (FORWARD, BACKWARD, UPDATE)
GROUPS = ("inputs", "variables", "slots", "gradients", "activations")
SHOWN_NAMES = 4  # listed tensors with the same change; others are counted


@dataclass(frozen=True)
class Laid:
    """The shardings of one tensor in both programs, in order; "" if the program lacks it.

    `group` is inputs, variables, slots, gradients or activations; `label` the display name of the tensor.
    """

    tensor: str
    label: str
    type: str
    group: str
    a: str
    b: str
    source: str

    @property
    def same(self) -> bool:
        """True if both programs shard it alike."""
        return self.a == self.b


@dataclass(frozen=True)
class CollectivePair:
    """A collective of one kind on one tensor in both programs."""

    a: Collective
    b: Collective

    @property
    def same_bytes(self) -> bool:
        """True if a device sends equal bytes for it, equally often."""
        a, b = self.a, self.b
        return (a.payload_bytes, a.sent_bytes, a.count) == (b.payload_bytes, b.sent_bytes, b.count)


@dataclass(frozen=True)
class ComparedWork:
    """Work of each core, and the share that is duplicated on others.

    `mxu_duplicated` is the work of all cores over that of the unsharded program: 1 means no duplication.
    """

    mxu_flops: int
    vpu_ops: int
    mxu_duplicated: float
    vpu_duplicated: float


@dataclass(frozen=True)
class Comparison:
    """Result of `mtf.compare`; `a` and `b` are the programs. All figures are exact, per core and step.

    Example:
      >>> import meshlib as mtf
      >>> def program(layout):
      ...     with mtf.Graph():
      ...         y = mtf.reduce_sum(mtf.input("x", "batch:8;d:8"))
      ...         return mtf.lower({"y": y}, mesh="p:2", layout=layout)
      >>> comparison = mtf.compare(program("batch:p"), program(""))
      >>> comparison.sent_bytes, [c.kind for c in comparison.only_a]
      ((4.0, 0.0), ['all_reduce'])
    """

    a: Program
    b: Program

    @cached_property
    def tensors(self) -> tuple[Laid, ...]:
        """Every tensor of either program that is split or pending somewhere."""
        return tuple(_tensors(self.a, self.b))

    @cached_property
    def _matched(self) -> tuple[list[Collective], list[Collective], list[CollectivePair]]:
        return _match(self.a.collectives, self.b.collectives)

    @property
    def only_a(self) -> tuple[Collective, ...]:
        """Collectives of a without a counterpart in b, in a's order."""
        return tuple(self._matched[0])

    @property
    def only_b(self) -> tuple[Collective, ...]:
        """Collectives of b without a counterpart in a, in b's order."""
        return tuple(self._matched[1])

    @property
    def changed(self) -> tuple[CollectivePair, ...]:
        """Pairs of collectives of the same kind and tensor with different bytes."""
        return tuple(p for p in self._matched[2] if not p.same_bytes)

    @property
    def unchanged(self) -> tuple[CollectivePair, ...]:
        """Pairs of collectives with the same bytes."""
        return tuple(p for p in self._matched[2] if p.same_bytes)

    @cached_property
    def replanned(self) -> tuple[Replanned, ...]:
        """Operations of both with different strategies, in a's order."""
        return replanned(self.a, self.b)

    @property
    def notes(self) -> tuple[str, ...]:
        """Changes of the plan, with names, if mesh and layout are the same, such as between two sizes of a model."""
        same = (self.a.mesh, self.a.layout) == (self.b.mesh, self.b.layout)
        return plan_notes(self.replanned) if same else ()

    @property
    def sent_bytes(self) -> tuple[float, float]:
        """Bytes that a core sends in a step."""
        return float(self.a.sent_bytes), float(self.b.sent_bytes)

    @property
    def sent_by_phase(self) -> dict[str, tuple[float, float]]:
        """Bytes that a core sends in forward, backward and update."""
        return {phase: (_sent(self.a.collectives, phase), _sent(self.b.collectives, phase)) for phase in PHASES}

    @property
    def peak_bytes(self) -> tuple[int, int]:
        """Peak memory of a core."""
        return self.a.memory.peak_bytes, self.b.memory.peak_bytes

    @property
    def memory_by_kind(self) -> dict[str, tuple[int, int]]:
        """Bytes live at each program's own peak, by kind."""
        a, b = self.a.memory.by_kind, self.b.memory.by_kind
        return {kind: (a.get(kind, 0), b.get(kind, 0)) for kind in dict.fromkeys([*a, *b])}

    @cached_property
    def work(self) -> tuple[ComparedWork, ComparedWork]:
        """Work of each core in both programs."""
        return _work(self.a), _work(self.b)

    def summary(self) -> str:
        """The main differences in one sentence."""
        sent, peak = self.sent_bytes, self.peak_bytes
        (wa, wb) = self.work
        parts = [
            _against("sends", *sent, bytes_text),
            _against("peaks at", *peak, bytes_text),
            _against("computes", wa.mxu_flops, wb.mxu_flops, _count_text, " MXU flops"),
        ]
        return f"a core of b {', '.join(parts)}"

    def table(self) -> str:
        """The figures side by side: bytes, launches, memory, work, and the ratio b / a."""
        rows: list[tuple[str, str, str, str]] = [("a core, in a step", "a", "b", "b / a")]

        def add(name: str, pair: tuple[float, float], text: Callable[[float], str]) -> None:
            if any(pair) or not name.startswith(" "):
                rows.append((name, text(pair[0]), text(pair[1]), _ratio(*pair)))

        add("bytes sent", self.sent_bytes, bytes_text)
        for phase, pair in self.sent_by_phase.items():
            add(f"  {phase}", pair, bytes_text)
        add("collectives launched", (_launches(self.a), _launches(self.b)), _count_text)
        for kind in dict.fromkeys(c.kind for p in (self.a, self.b) for c in p.collectives):
            pair = (_launches(self.a, kind), _launches(self.b, kind))
            add(f"  {kind}", pair, _count_text)
        add("memory at the peak", self.peak_bytes, bytes_text)
        for kind, memory in self.memory_by_kind.items():
            add(f"  {kind}", memory, bytes_text)
        (wa, wb) = self.work
        add("MXU flops", (wa.mxu_flops, wb.mxu_flops), _count_text)
        add("VPU operations", (wa.vpu_ops, wb.vpu_ops), _count_text)
        for name, x, y in (
            ("MXU", wa.mxu_duplicated, wb.mxu_duplicated),
            ("VPU", wa.vpu_duplicated, wb.vpu_duplicated),
        ):
            rows.append((f"  times {name} work is done", f"{x:.3g}", f"{y:.3g}", ""))
        return "\n".join(grid(rows, right=(1, 2, 3)))

    def __str__(self) -> str:
        lines = [f"{side}  {p.headline}" for side, p in (("a", self.a), ("b", self.b))]
        lines += [f"{self.summary()} (exact)", *(f"note: {n}" for n in self.notes), "", self.table()]
        names_a, names_b = _labels(self.a), _labels(self.b)
        lines += _section("only in a", [_collective(c, names_a) for c in _largest_first(self.only_a)])
        lines += _section("only in b", [_collective(c, names_b) for c in _largest_first(self.only_b)])
        changed = sorted(self.changed, key=lambda p: -abs(_total(p.a) - _total(p.b)))
        lines += _section("in both, with other bytes", [_pair(p, names_a) for p in changed])
        same = [
            f"  {p.a.phase} {p.a.kind} of {names_a[p.a.tensor]} over {_over(p.a)}: {_bytes(p.a)}"
            for p in self.unchanged
        ]
        lines += _section("in both, alike", same)
        lines += self._sharding_lines()
        return "\n".join(lines)

    def _sharding_lines(self) -> list[str]:
        moved = [t for t in self.tensors if not t.same]
        if not moved:
            return ["", f"tensors: all {len(self.tensors)} that are split anywhere have the same axes"]
        shown = [("", "tensors split differently", "in a", "in b")]
        for group in GROUPS:
            alike: dict[tuple[str, str], list[Laid]] = {}
            for t in moved:
                if t.group == group:
                    alike.setdefault((t.a, t.b), []).append(t)
            for n, ((a, b), members) in enumerate(alike.items()):
                shown.append(("" if n else group, _names(members), a or "not there", b or "not there"))
        return ["", f"{len(moved)} of {len(self.tensors)} split tensors differ in their axes", *grid(shown)]


def compare(program_a: Program, program_b: Program) -> Comparison:
    """Differences between two lowered programs: shardings, collectives with reasons, memory, duplicated work.

    Args:
      program_a, program_b: lowered programs, for two layouts of one graph or for two graphs.
    Returns: a Comparison. `print` it, or take `.tensors`, `.only_a`, `.only_b`, `.changed`, `.unchanged`,
      `.sent_by_phase`, `.memory_by_kind`, `.peak_bytes`, `.work`, `.replanned`. Bytes are per core and step, exact.
      For two sizes of one model under one mesh and layout, `.notes` names the operations whose plan changed.
    Raises: GraphError if an argument is not a Program.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8), mtf.Dimension("d", 16)])
      ...     w = mtf.variable("w", [mtf.Dimension("d", 16), mtf.Dimension("out", 4)])
      ...     y = mtf.einsum([x, w], output_shape=[mtf.Dimension("batch", 8), mtf.Dimension("out", 4)])
      >>> by_batch = mtf.lower({"y": y}, mesh="p:2", layout="batch:p")
      >>> by_d = mtf.lower({"y": y}, mesh="p:2", layout="d:p")
      >>> found = mtf.compare(by_batch, by_d)
      >>> found.sent_bytes, [c.kind for c in found.only_b]
      ((0.0, 128.0), ['all_reduce'])
      >>> [(t.tensor, t.a, t.b) for t in found.tensors if t.group == "variables"]
      [('w', 'whole', 'd@p')]
    """
    for name, program in (("program_a", program_a), ("program_b", program_b)):
        require_program(program, f"compare: {name}")
    return Comparison(program_a, program_b)


# ---------------------------------------------------------------- shardings


def _tensors(a: Program, b: Program) -> Iterator[Laid]:
    left, right = _shardings_of_tensors(a), _shardings_of_tensors(b)
    for name in dict.fromkeys([*left, *right]):
        t, _ = left.get(name) or right[name]
        where = [" -> ".join(side[name][1]) if name in side else "" for side in (left, right)]
        if set(where) - {"whole"}:
            variable = t.operation.graph.gradient_of.get(t)
            label = name if variable is None else f"of {variable.name}"
            yield Laid(name, label, str(t.type), _group(t), where[0], where[1], t.operation.source)


def _shardings_of_tensors(program: Program) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Per tensor its distinct shardings, in order."""
    shardings_of_tensor: dict[str, tuple[Tensor, dict[str, None]]] = {}
    for i, _, _ in walk(program):
        for y in i.outputs:
            shardings_of_tensor.setdefault(y.tensor.name, (y.tensor, {}))[1][_where(y.sharding)] = None
    return {name: (t, tuple(seen)) for name, (t, seen) in shardings_of_tensor.items()}


def _where(s: Sharding) -> str:
    split = [f"{d.name}@{'+'.join(axes)}" for d, axes in zip(s.shape, s.axes, strict=True) if axes]
    pending = [f"{{{kind} over {axis}}}" for axis, kind in s.pending]
    return " ".join([*split, *pending]) or "whole"


def _group(t: Tensor) -> str:
    op = t.operation
    if op.opdef.kind is Kind.INPUT:
        return "inputs"
    if op.opdef.kind is Kind.VARIABLE:
        return "slots" if op.attrs["slot_of"] else "variables"
    return "gradients" if t in op.graph.gradient_of else "activations"


def _names(members: Sequence[Laid]) -> str:
    return some([f"{t.label} {t.type}" if len(members) == 1 else t.label for t in members], SHOWN_NAMES)


# ---------------------------------------------------------------- collectives


def _match(
    a: Sequence[Collective], b: Sequence[Collective]
) -> tuple[list[Collective], list[Collective], list[CollectivePair]]:
    """Pairs of collectives with equal kind, tensor and phase; among several, axes and bytes decide, then order."""
    pairs: list[CollectivePair] = []
    left, right = list(a), list(b)
    for key in (_exact_key, _rough_key):
        waiting: dict[object, list[Collective]] = {}
        for c in right:
            waiting.setdefault(key(c), []).append(c)
        alone = []
        for c in left:
            others = waiting.get(key(c))
            if others:
                pairs.append(CollectivePair(c, others.pop(0)))
            else:
                alone.append(c)
        paired = {id(p.b) for p in pairs}
        left, right = alone, [c for c in right if id(c) not in paired]
    return left, right, pairs


def _exact_key(c: Collective) -> object:
    return (c.kind, c.tensor, c.phase, c.axes, c.payload_bytes, c.sent_bytes, c.count)


def _rough_key(c: Collective) -> object:
    return (c.kind, c.tensor, c.phase)


def _total(c: Collective) -> float:
    return float(c.sent_bytes * c.count)


def _sent(collectives: Sequence[Collective], phase: str) -> float:
    return sum(_total(c) for c in collectives if c.phase == phase)


def _launches(program: Program, kind: str | None = None) -> int:
    """Launches in a step: merged collectives count once, those of a loop's body once per trip."""
    return sum({c.launch: c.count for c in program.collectives if kind in (None, c.kind)}.values())


def _largest_first(collectives: Sequence[Collective]) -> list[Collective]:
    return sorted(collectives, key=lambda c: -_total(c))


def _over(c: Collective) -> str:
    return "+".join(c.axes)


def _bytes(c: Collective) -> str:
    times = f" {c.count} times" if c.count > 1 else ""
    return f"payload {bytes_text(c.payload_bytes)}, sends {bytes_text(c.sent_bytes)}{times}"


def _labels(program: Program) -> dict[str, str]:
    """Display names of tensors: a gradient is named by its variable."""
    return {name: _label(t) for name, (t, _) in _shardings_of_tensors(program).items()}


def _label(t: Tensor) -> str:
    variable = t.operation.graph.gradient_of.get(t)
    return t.name if variable is None else f"{t.name} (gradient of {variable.name})"


def _collective(c: Collective, labels: Mapping[str, str]) -> str:
    head = f"  {c.phase} {c.kind} of {labels[c.tensor]} over {_over(c)}: {_bytes(c)}  ({c.source})"
    return f"{head}\n{_because('because ' + c.reason)}"


def _pair(p: CollectivePair, labels: Mapping[str, str]) -> str:
    over_a, over_b = _over(p.a), _over(p.b)
    lines = [f"  {p.a.phase} {p.a.kind} of {labels[p.a.tensor]}  ({p.a.source})"]
    lines += [f"      {side}  over {_over(c)}: {_bytes(c)}" for side, c in (("a", p.a), ("b", p.b))]
    split_a, split_b = f"split over {over_a}", f"split over {over_b}"
    if p.a.reason == p.b.reason:
        reasons = [f"because {p.a.reason}"]
    elif p.a.reason.replace(split_a, "") == p.b.reason.replace(split_b, ""):
        reasons = [f"because {p.a.reason.replace(split_a, f'{split_a} (in b over {over_b})')}"]
    else:
        reasons = [f"a because {p.a.reason}", f"b because {p.b.reason}"]
    return "\n".join([*lines, *map(_because, reasons)])


def _because(reason: str) -> str:
    return textwrap.fill(reason, 112, initial_indent=" " * 6, subsequent_indent=" " * 10, break_long_words=False)


# ---------------------------------------------------------------- work


def _work(program: Program) -> ComparedWork:
    one, total = program.work, [0, 0]
    for i, holder, times in walk(program):
        whole = local_work(holder, replace(i, inputs=_replicated(i.inputs), outputs=_replicated(i.outputs)))
        total = [total[0] + times * whole.mxu_flops, total[1] + times * whole.vpu_ops]
    size = program.mesh.size
    mxu, vpu = (size * x / y if y else 1.0 for x, y in zip((one.mxu_flops, one.vpu_ops), total, strict=True))
    return ComparedWork(one.mxu_flops, one.vpu_ops, mxu, vpu)


def _replicated(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(Value(v.tensor, Sharding.replicated(v.tensor.shape, v.sharding.mesh)) for v in values)


# ---------------------------------------------------------------- text


def _section(title: str, entries: Sequence[str]) -> list[str]:
    if not entries:
        return []
    return ["", f"{title}: {len(entries)}", *_merged(entries)]


def _merged(entries: Sequence[str]) -> list[str]:
    """Equal entries merged, with their number."""
    return [entry if n == 1 else entry.replace("  ", f"  {n} x ", 1) for entry, n in Counter(entries).items()]


def _against(verb: str, a: float, b: float, text: Callable[[float], str], what: str = "") -> str:
    if a == b:
        return f"{verb} {text(b)}{what} as well" if a else f"{verb} nothing{what}, as of a"
    return f"{verb} {text(b)}{what}, not {text(a)}" + (f" ({_ratio(a, b)})" if a and b else "")


def _ratio(a: float, b: float) -> str:
    if a == b or not a:
        return "same" if a == b else "new"
    return f"{b / a:.3g}x" if b < 100 * a else f"{b / a:,.0f}x"


def _count_text(n: float) -> str:
    return f"{int(n):,}" if n < 1e7 else f"{n:.4g}"
