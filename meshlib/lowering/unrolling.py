"""The program of a graph with alike layers, from that of the shortened graph, by inserting the omitted layers.

In its final order the short program has stretches that repeat layer by layer: forward, backward, update. Each stretch
gets as many more repetitions as layers were omitted. Where layers count up, an instruction before the insertion point
keeps its layer and one behind it is that many layers later; where they count down, vice versa. An instruction on values
of several layers, such as one launch for the gradients of all norms, gets those of all layers.

If a collective is in flight for longer than the remaining layers, the order depends on the number of layers. Then
instructions are inserted before ordering.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshlib.core.folding import runs
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.lowering.fusion import numbered
from meshlib.lowering.ordering import FLOPS_PER_SENT_BYTE, FLOPS_PER_START, hidden_flops
from meshlib.lowering.repetition import REGULAR_ENDS, Irregular, Repetition
from meshlib.program.instructions import Commit, Compute, Instruction, Move, Reason, Resident, Value
from meshlib.program.records import Program

QUOTED = re.compile(r"'([^']+)'")


class LayerValue(NamedTuple):
    """The identity of a value within its layer, and the layer of its tensor in the short graph."""

    what: int
    place: int


class Gap(NamedTuple):
    """A point behind instruction `at` where the last `length` instructions repeat, `step` (1 or -1) layers apart."""

    at: int
    length: int
    step: int
    inside: bool  # within a group of instructions that all layers share


def unrolled(program: Program, layers: Repetition) -> Program:
    """The program of the whole graph.

    Raises: Irregular where the short program has no such stretches.
    """
    return _Unroller(program, layers).run()


@dataclass(eq=False)
class _Unroller:
    program: Program
    layers: Repetition
    keys: list[Hashable] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    made: dict[Value, LayerValue] = field(default_factory=dict)
    values: dict[tuple[int, int], Value] = field(default_factory=dict)
    groups: dict[Hashable, list[Instruction]] = field(default_factory=dict)
    # For alike instructions: the reasons of one that reads nothing across the gap, and its layer.
    reasons: dict[Hashable, tuple[Sequence[Reason], int]] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)  # of keys of instructions and values
    written: set[tuple[Hashable, int]] = field(default_factory=set)  # (key of an instruction, layer)

    def run(self) -> Program:
        layers, program = self.layers, self.program
        self.names = layers.names
        for i in program.instructions:
            self._identify(i)
        gaps = list(self._gaps())
        if program.instructions[0].group >= 0:
            self._check_in_flight(gaps)
        thresholds = self._thresholds(gaps)
        behind = {gap.at: gap for gap in gaps}
        for n, i in enumerate(program.instructions):
            self._write(n, i, thresholds)
            if n in behind:
                gap = behind[n]
                for copy in range(1, layers.count + 1):
                    for m in range(n + 1 - gap.length, n + 1):
                        self._repeat(m, copy, thresholds, gap)
        self._check_all_written()
        return self._finished()

    # ------------------------------------------------------------ identities of instructions

    def _identify(self, i: Instruction) -> None:
        """Record the identity of an instruction within its layer, and its layer."""
        self._identify_results(i)
        results = self._places_of_results(i)
        if results is None:
            self.keys.append(i)
            self.places.append(None)
            return
        place = results[0][1]
        self.places.append(place)
        own_results = [(what, at - place) for what, at in results]
        operands = [(source.what, source.place - place) if (source := self.made.get(x)) else x for x in i.inputs]
        near = [source.place for x in i.inputs if (source := self.made.get(x))]
        own: Hashable = (i.assignment, i.exchanges) if isinstance(i, Compute) else ()
        if isinstance(i, Move):
            user, at = self.layers.where(i.operation)
            own = (i.steps, i.early, user, None if at is None else at - place)
            near += [] if at is None else [at]
        shardings = [(y.sharding, y.margins) for y in i.outputs]
        key = (type(i), i.opcode, i.region, own, *own_results, *operands, *shardings)
        number = self._number(key)
        self.keys.append(number)
        first = self.layers.first
        beside = {p < first for p in near} <= {place < first} and self._is_wired_alike(place, self.layers.layer(place))
        if beside and isinstance(i, Move | Compute) and i.reasons:
            self.reasons[number] = i.reasons, place

    def _places_of_results(self, i: Instruction) -> list[tuple[Hashable, int]] | None:
        """What an instruction computes, with places; None outside all layers, and for the same values of several."""
        labels = [self.layers.where(y.tensor) for y in i.outputs] or [self.layers.where(i.operation)]
        placed = [(what, at) for what, at in labels if at is not None]
        return placed if len(dict(placed)) == len(labels) else None

    def _identify_results(self, i: Instruction) -> None:
        """Record the identities of an instruction's results within their layer."""
        for y in i.outputs:
            what, place = self.layers.where(y.tensor)
            if place is not None:
                self.made[y] = LayerValue(self._number((what, y.sharding, y.margins, i.region, i.opcode)), place)

    def _number(self, key: Hashable) -> int:
        """Number of a key; equal keys have the same."""
        return self.numbers.setdefault(key, len(self.numbers))

    def _is_wired_alike(self, place: int, layer: int) -> bool:
        """True if an instruction of the short graph, used for a layer, has the wiring of regular layers."""
        first = self.layers.first
        return layer != self.layers.layer(place) or first - REGULAR_ENDS <= place < first + REGULAR_ENDS

    # ------------------------------------------------------------ insertion points

    def _gaps(self) -> Iterator[Gap]:
        """The repeating stretches, with the repetition behind which to insert more."""
        starts = [
            n == 0 or i.group != self.program.instructions[n - 1].group for n, i in enumerate(self.program.instructions)
        ]
        keys = [(key, start) for key, start in zip(self.keys, starts, strict=True)]
        for run in runs(keys, 1):
            if run.times < 2 or self.places[run.first] is None:
                continue
            step = self._step(run.first, run.length)
            if step == 0:
                continue
            # Repetitions begin at a group boundary, unless one group contains them all.
            last = run.first + run.length * run.times
            inside = self.program.instructions[run.first].group == self.program.instructions[last - 1].group
            fitting = [
                n
                for n in range(run.first + run.length, last - run.length + 1)
                if (starts[n] or inside) and self._fits(n, run.length, step)
            ]
            if not fitting:
                raise Irregular
            middle = run.first + run.length * run.times / 2
            yield Gap(min(fitting, key=lambda n: abs(n - middle)) - 1, run.length, step, inside)

    def _step(self, first: int, length: int) -> int:
        """Layers from one repetition to the next, 1 or -1; 0 if they do not count layers."""
        steps = set()
        for n in range(first, first + length):
            a, b = self.places[n], self.places[n + length]
            if a is None or b is None:
                return 0
            steps.add(b - a)
        return steps.pop() if steps in ({1}, {-1}) else 0

    def _fits(self, n: int, length: int, step: int) -> bool:
        """True if all instructions repeated behind instruction n - 1 have the gap among regular layers."""
        edges = [(self.places[m] or 0) + (step > 0) for m in range(n - length, n)]
        return all(abs(edge - self.layers.first) <= REGULAR_ENDS for edge in edges)

    def _check_in_flight(self, gaps: Sequence[Gap]) -> None:
        """Raise Irregular where more layers before a gap would change the order behind it.

        Users of a collective in flight at the gap would otherwise wait for all inserted layers.
        """
        program, done, producer = self.program, [0.0], dict[Value, int]()
        arrives: dict[Value, float] = {}
        for n, i in enumerate(program.instructions):
            done.append(done[-1] + hidden_flops(program, i))
            producer.update(dict.fromkeys(i.outputs, n))
            if i.is_collective:
                wire_flops = FLOPS_PER_START + FLOPS_PER_SENT_BYTE * i.sent_bytes
                arrives.update(dict.fromkeys(i.outputs, done[-1] + wire_flops))
        for gap in gaps:
            behind = gap.at + 1
            steady = {*self.keys[behind - gap.length : behind]}
            late = {x for x, flops in arrives.items() if flops > done[behind] > done[behind - gap.length]}
            for n in range(behind, len(program.instructions)):
                i = program.instructions[n]
                if (
                    self.keys[n] not in steady
                    and all(producer[x] < behind for x in i.inputs)
                    and not late.isdisjoint(i.inputs)
                ):
                    raise Irregular

    def _thresholds(self, gaps: Sequence[Gap]) -> dict[Hashable, int]:
        """For each instruction of a stretch, the first layer of the short graph shifted by the omitted layers."""
        thresholds: dict[Hashable, int] = {}
        for gap in gaps:
            for n in range(gap.at + 1 - gap.length, gap.at + 1):
                place = self.places[n]
                assert place is not None
                if self.keys[n] in thresholds:
                    raise Irregular
                thresholds[self.keys[n]] = place + 1 if gap.step > 0 else place
        return thresholds

    # ------------------------------------------------------------ writing

    def _layer(self, n: int, thresholds: Mapping[Hashable, int]) -> int | None:
        """The layer in the whole program of an instruction of the short one."""
        place = self.places[n]
        if place is None:
            return None
        threshold = thresholds.get(self.keys[n], self.layers.first)
        return place if place < threshold else place + self.layers.count

    def _write(self, n: int, i: Instruction, thresholds: Mapping[Hashable, int]) -> None:
        if self.places[n] is None and len(i.outputs) > 1 and isinstance(i, Move):
            self._put(self._for_all_layers(i), i.group)
        else:
            self._put(self._for_layer(i, n, self._layer(n, thresholds)), i.group)

    def _repeat(self, n: int, copy: int, thresholds: Mapping[Hashable, int], gap: Gap) -> None:
        i, layer = self.program.instructions[n], self._layer(n, thresholds)
        assert layer is not None
        self._put(self._for_layer(i, n, layer + gap.step * copy), i.group if gap.inside else (i.group, copy, gap.at))

    def _check_all_written(self) -> None:
        """Raise Irregular if an instruction of a regular layer was not inserted for all layers."""
        for key, place in zip(self.keys, self.places, strict=True):
            if place == self.layers.first and not all(
                (key, layer) in self.written for layer in range(self.layers.first, self.layers.end)
            ):
                raise Irregular

    def _put(self, i: Instruction, group: Hashable) -> None:
        self.groups.setdefault(group, []).append(i)

    def _for_layer(self, i: Instruction, n: int, layer: int | None) -> Instruction:
        """An instruction, adapted to a layer."""
        place = self.places[n]
        if layer is not None:
            self.written.add((self.keys[n], layer))
        inputs = tuple([self._operand(x, place, layer) for x in i.inputs])
        op = self._operation(i.operation, place, layer)
        outputs = tuple([self._result(y, place, layer) for y in i.outputs])
        if op is i.operation and inputs == i.inputs and outputs == i.outputs:
            return i
        copy = object.__new__(type(i))
        vars(copy).update(vars(i), operation=op, inputs=inputs, outputs=outputs)
        if isinstance(i, Move | Compute) and i.reasons:
            alike = place is not None and layer is not None and self._is_wired_alike(place, layer)
            reasons, of_place = self.reasons.get(self.keys[n], (i.reasons, place)) if alike else (i.reasons, place)
            vars(copy).update(reasons=tuple([self._reason(r, of_place, layer) for r in reasons]))
        return copy

    def _operand(self, x: Value, place: int | None, layer: int | None) -> Value:
        source = self.made.get(x)
        if source is None:
            return x
        value = self.values.get((source.what, self._layer_of(source, place, layer)))
        if value is None:
            raise Irregular
        return value

    def _layer_of(self, value: LayerValue, place: int | None, layer: int | None) -> int:
        """The layer of a value of an instruction, adapted to a layer."""
        if place is None or layer is None or not self._is_wired_alike(place, layer):
            return self.layers.layer(value.place)
        return layer + value.place - place

    def _result(self, y: Value, place: int | None, layer: int | None) -> Value:
        label = self.made.get(y)
        if label is None:
            return y
        layer = self._layer_of(label, place, layer)
        tensor = self._tensor(y.tensor, layer)
        value = y if tensor is y.tensor else Value(tensor, y.sharding, y.margins)
        if (label.what, layer) in self.values:
            raise Irregular
        self.values[label.what, layer] = value
        return value

    def _tensor(self, t: Tensor, layer: int) -> Tensor:
        op = t.operation
        return self._of_layer(op, layer).outputs[op.outputs.index(t)]

    def _of_layer(self, op: Operation, layer: int) -> Operation:
        other = self.layers.orbits[self.layers.labels[op].orbit].get(layer)
        if other is None:
            raise Irregular
        return other

    def _operation(self, op: Operation, place: int | None, layer: int | None) -> Operation:
        """The operation that an instruction belongs to, in a layer."""
        _, own = self.layers.where(op)
        if own is None or place is None or layer is None or not self._is_wired_alike(place, layer):
            return op
        return self._of_layer(op, layer + own - place)

    def _for_all_layers(self, i: Move) -> Instruction:
        """Extend an instruction on values of several layers to all layers."""
        layers = self.layers
        inputs, outputs, steps, reasons = [], [], [], []
        for x, y, step, reason in zip(i.inputs, i.outputs, i.steps, i.reasons, strict=True):
            place = self.layers.where(y.tensor)[1]
            own = None if place is None else layers.layer(place)
            more = range(layers.first, layers.end) if own == layers.first - 1 else ()
            for layer in (own, *more):
                inputs.append(self._operand(x, place, layer))
                outputs.append(self._result(y, place, layer))
                steps.append(step)
                reasons.append(self._reason(reason, place, layer))
        if inputs == [*i.inputs]:
            return i
        return replace(i, inputs=tuple(inputs), outputs=tuple(outputs), steps=tuple(steps), reasons=tuple(reasons))

    def _reason(self, reason: Reason, place: int | None, layer: int | None) -> Reason:
        """A reason of an instruction, with the names of another layer."""
        layers = self.layers
        if place is None or layer is None or not self._is_wired_alike(place, layer):
            return reason

        def of_layer(name: str) -> Operation | None:
            op = layers.names.get(name)
            if op is None:
                return None
            orbit, own = layers.labels[op]
            removed = layers.first <= own < layers.end
            distance = own - layers.layer(place) if removed else layers.place(own) - place
            return layers.orbits[orbit].get(layer + distance, op)

        def renamed(name: str) -> str:
            old, new = layers.names.get(name), of_layer(name)
            if old is None or new is None or old is new:
                return name
            return new.name if name == old.name else new.outputs[[y.name for y in old.outputs].index(name)].name

        def text(words: str) -> str:
            return QUOTED.sub(lambda match: f"'{renamed(match[1])}'", words)

        old, new = layers.names.get(reason.op), of_layer(reason.op)
        source = reason.source if old is None or new is None or old.source != reason.source else new.source
        return Reason(renamed(reason.op), reason.dim, text(reason.why), text(reason.avoid), source, reason.phase)

    # ------------------------------------------------------------ the program

    def _finished(self) -> Program:
        ordered = self.program.instructions[0].group >= 0
        groups = list(self.groups.values())
        instructions = numbered(groups) if ordered else [i for group in groups for i in group]
        residents = {i.operation: i.outputs[0] for i in instructions if isinstance(i, Resident)}
        whole, program = self.layers.whole, self.program
        written = {i.variable: i.inputs[0] for i in instructions if isinstance(i, Commit)}
        order = [op.attrs["variable"] for op in whole.operations if op.opdef.kind is Kind.COMMIT]
        first = [op for op in whole.operations if op.opdef.kind is Kind.VARIABLE and op in residents]
        stored = dict.fromkeys([*first, *[op for op in residents if op.opdef.kind is Kind.VARIABLE]])
        variables = {op.name: residents[op] for op in stored}
        inputs = {name: residents.get(v.tensor.operation, v) for name, v in program.inputs.items()}
        outputs = {name: self._operand(v, None, None) for name, v in program.outputs.items()}
        updates = {name: written[name] for name in order if name in written}
        return replace(
            program,
            instructions=tuple(instructions),
            inputs=inputs,
            variables=variables,
            outputs=outputs,
            updates=updates,
        )
