"""Unrolled layers: alike segments of a graph, of which a few represent all.

    runs      stretches of the list of operations that repeat, compared by signature and region
    layers    the repetitions of each run, numbered by wiring: a backward layer has the number of the forward layer that
              it reads. The operations at one position of a run form an orbit: one per layer
    regular   layers whose operations read the same orbits of the same relative layers, or the same tensors
    short     the graph without the regular layers in the middle; their users read the layers before them instead

A program of the short graph is lowered like any other; `meshlib.lowering.unrolling` then inserts the omitted layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from meshlib.core.folding import RepeatedLines, runs
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.lowering.simplification import Simplified
from meshlib.program.signature import Signatures

Reading: TypeAlias = tuple[int | Tensor, int, int]  # (orbit or outer tensor, relative layer, result number)
Wiring: TypeAlias = tuple[Reading, ...]
LEAST_LAYERS = 16  # with fewer, nothing is gained
REGULAR_ENDS = 2  # regular layers that stay on each side of the gap; no layer reads one further away
LEAST_SAVED = 200  # operations


class Irregular(Exception):
    """Layers turn out to differ under a layout: the whole graph must be lowered."""


class Label(NamedTuple):
    """The position of an operation within its layer (its orbit), and the layer."""

    orbit: int
    layer: int


@dataclass(frozen=True, eq=False)
class Repetition:
    """The alike layers of a graph. Layers from `first` up to `end` are omitted in `short`."""

    whole: Simplified
    short: Simplified
    labels: Mapping[Operation, Label]
    orbits: Mapping[int, Mapping[int, Operation]]
    first: int
    end: int

    @cached_property
    def names(self) -> Mapping[str, Operation]:
        """Operations of layers, by their names and those of their results."""
        return {name: op for op in self.labels for name in (op.name, *[y.name for y in op.outputs])}

    @property
    def count(self) -> int:
        """Number of omitted layers."""
        return self.end - self.first

    def place(self, layer: int) -> int:
        """The number of a layer within the short graph."""
        return layer if layer < self.first else layer - self.count

    def where(self, t: Tensor | Operation) -> tuple[Hashable, int | None]:
        """The identity of a tensor or operation within its layer, and the number of that in the short graph, if any."""
        op = t.operation if isinstance(t, Tensor) else t
        label = self.labels.get(op)
        if label is None:
            return t, None
        return (label.orbit, op.outputs.index(t) if isinstance(t, Tensor) else None), self.place(label.layer)

    def layer(self, place: int) -> int:
        """The layer with a number within the short graph."""
        return place if place < self.first else place + self.count


def repetition(simple: Simplified, signatures: Signatures, fetched: Collection[Tensor]) -> Repetition | None:
    """The alike layers of a graph; None if there are too few."""
    operations = simple.operations
    if len(operations) < LEAST_SAVED:
        return None
    colours = [_colour(simple, op, signatures) for op in operations]
    some = [r for r in runs(colours, LEAST_LAYERS) if r.times >= LEAST_LAYERS]
    if not some:
        return None
    layers = _Layers(simple, some)
    labels = layers.labels()
    regular = _regular(simple, labels)
    first, end = regular.start + REGULAR_ENDS, regular.stop - REGULAR_ENDS
    removed = {op for op, label in labels.items() if first <= label.layer < end}
    if end - first < 1 or len(removed) < LEAST_SAVED or not _is_removable(simple, labels, regular, removed, fetched):
        return None
    orbits: dict[int, dict[int, Operation]] = {}
    for op, label in labels.items():
        orbits.setdefault(label.orbit, {})[label.layer] = op
    short = _shortened(simple, labels, orbits, regular, range(first, end))
    return None if short is None else Repetition(simple, short, labels, orbits, first, end)


def _colour(simple: Simplified, op: Operation, signatures: Signatures) -> Hashable:
    """Key of an operation that is independent of its name and operands, and so equal in alike layers."""
    graph, kind = op.graph, op.opdef.kind
    if kind is Kind.LOOP:
        return op
    if kind in (Kind.INPUT, Kind.VARIABLE):
        slot = bool(op.attrs.get("slot_of"))
        return (op.opdef, op.output.type, slot, op.attrs.get("trainable"), op.attrs.get("on_host"))
    if kind is Kind.COMMIT:
        return (op.opdef, op.inputs[0].shape, op.inputs[0].dtype)
    gradients = tuple([y in graph.gradient_of for y in op.outputs])
    taken = tuple([y in simple.taken for y in op.outputs])
    own = (op.owner is None, op in graph.again, op in graph.inner)
    return (signatures.of(op), op.region, gradients, taken, *own)


class _Layers:
    """Numbers the layers of each run by their wiring."""

    def __init__(self, simple: Simplified, some: Sequence[RepeatedLines]) -> None:
        self.simple, self.runs = simple, some
        self.at: dict[Operation, tuple[int, int, int]] = {}  # (run, repetition, position in it)
        for n, run in enumerate(some):
            for k, op in enumerate(simple.operations[run.first : run.first + run.length * run.times]):
                self.at[op] = (n, *divmod(k, run.length))

    def labels(self) -> dict[Operation, Label]:
        """Label of every operation in runs that are wired to the largest run."""
        sizes = [run.length * run.times for run in self.runs]
        numbers = {sizes.index(max(sizes)): dict(enumerate(range(self.runs[sizes.index(max(sizes))].times)))}
        edges = list(self._edges())
        while len(numbers) < len(self.runs):
            slots: dict[tuple[int, Hashable], dict[int, int]] = {}
            for (a, j, p), (b, k, q), operand in edges:
                if (a in numbers) != (b in numbers):
                    run, number, layer = (b, k, numbers[a].get(j)) if a in numbers else (a, j, numbers[b].get(k))
                    if layer is not None:
                        slots.setdefault((run, (a, p, q, operand)), {})[number] = layer
            fitting = {slot: pairs for slot, pairs in slots.items() if len({*pairs.values()}) == len(pairs) > 1}
            if not fitting:
                break
            (run, _), pairs = max(fitting.items(), key=lambda item: len(item[1]))
            numbers[run] = _extended(pairs, self.runs[run].times)
        first = [0, *accumulate(run.length for run in self.runs)]
        labels = {
            op: Label(first[n] + place, numbers[n][k])
            for op, (n, k, place) in self.at.items()
            if n in numbers and k in numbers[n]
        }
        for op, (orbit, layer) in list(labels.items()):
            if op.opdef.kind is Kind.COMMIT:  # a variable belongs to the layer that writes it
                labels[op.graph.variables[op.attrs["variable"]]] = Label(-1 - orbit, layer)
        return labels

    def _edges(self) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int], int]]:
        """(producer, user, operand number) between operations of different runs."""
        for op, b in self.at.items():
            for operand, x in enumerate(self.simple.inputs[op]):
                a = self.at.get(x.operation)
                if a is not None and a[0] != b[0]:
                    yield a, b, operand


def _extended(pairs: Mapping[int, int], times: int) -> dict[int, int]:
    """The layers of all repetitions if the known ones count up or down; otherwise the known ones."""
    (j, first), (k, second) = list(pairs.items())[:2]
    step = 1 if (second - first) * (k - j) > 0 else -1
    if all(layer == first + step * (n - j) for n, layer in pairs.items()):
        return {n: first + step * (n - j) for n in range(times)}
    return dict(pairs)


def _wiring(simple: Simplified, labels: Mapping[Operation, Label], op: Operation, layer: int) -> Wiring:
    """Operands of an operation: results of orbits in relative layers, or outer tensors."""
    wiring: list[Reading] = []
    for x in simple.inputs.get(op, ()):  # a variable that is only written has no entry
        label = labels.get(x.operation)
        wiring.append((x, 0, 0) if label is None else (label.orbit, label.layer - layer, x.operation.outputs.index(x)))
    return tuple(wiring)


def _regular(simple: Simplified, labels: Mapping[Operation, Label]) -> range:
    """The contiguous layers around the middle that have all orbits and the same wiring."""
    by_layer: dict[int, dict[int, Wiring]] = {}
    for op, (orbit, layer) in labels.items():
        by_layer.setdefault(layer, {})[orbit] = _wiring(simple, labels, op, layer)
    numbers = sorted(by_layer)
    most = Counter(len(orbits) for orbits in by_layer.values()).most_common(1)[0][0]
    middle = min((n for n in numbers if len(by_layer[n]) == most), key=lambda n: abs(2 * n - numbers[0] - numbers[-1]))
    pattern = by_layer[middle]
    if any(abs(distance) > REGULAR_ENDS for wiring in pattern.values() for _, distance, _ in wiring):
        return range(middle, middle)
    low = high = middle
    while by_layer.get(low - 1) == pattern:
        low -= 1
    while by_layer.get(high + 1) == pattern:
        high += 1
    return range(low, high + 1)


def _is_removable(
    simple: Simplified,
    labels: Mapping[Operation, Label],
    regular: range,
    removed: Collection[Operation],
    fetched: Collection[Tensor],
) -> bool:
    """True if the operations to remove are read by regular layers alone, and not fetched."""
    if any(t.operation in removed for t in fetched):
        return False
    return not any(
        x.operation in removed
        for op in simple.operations
        if op not in labels or labels[op].layer not in regular
        for x in simple.inputs[op]
    )


def _shortened(
    simple: Simplified,
    labels: Mapping[Operation, Label],
    orbits: Mapping[int, Mapping[int, Operation]],
    regular: range,
    removed: range,
) -> Simplified | None:
    """The graph without the layers `removed`: users across the gap read the layer on its other side.

    None if it has no topological order.
    """

    def read(op: Operation, x: Tensor) -> Tensor:
        if op not in labels or x.operation not in labels or labels[op].layer not in regular:
            return x
        orbit, layer = labels[x.operation]
        before = labels[op].layer < removed.start
        if layer < removed.start if before else layer >= removed.stop:
            return x
        other = orbits[orbit][layer + len(removed) if before else layer - len(removed)]
        return other.outputs[x.operation.outputs.index(x)]

    left = [op for op in simple.operations if op not in labels or labels[op].layer not in removed]
    inputs = {op: tuple([read(op, x) for x in simple.inputs[op]]) for op in left}
    operations: dict[Operation, None] = {}
    for op in left:
        for x in inputs[op]:  # operations without operands, such as variables, may come after the gap
            operations.setdefault(x.operation)
        operations.setdefault(op)
    if any(op not in inputs for op in operations):
        return None
    short = Simplified(simple.graph, list(operations), inputs, simple.same)
    short.taken.update(t for t in simple.taken if t.operation in inputs)
    return short.linked()
