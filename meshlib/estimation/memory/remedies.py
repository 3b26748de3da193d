"""Remedies that lower the peak of a device's memory, and by how much.

Each remedy changes the size of some buffers, and the peak is recomputed, so a gain accounts for a peak that moves
elsewhere. Gains are exact for this instruction order. A changed program may have another order and extra buffers:
counted are the largest gathered weight, and the saved values of one trip of a recomputed loop. Layouts that the library
would refuse are excluded. Where no single remedy suffices, those that save most are combined until the program fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, takewhile
from math import inf, prod

from layouts import Dimension, LayoutRules, Mesh
from meshlib.core.dtypes import FLOAT32
from meshlib.core.graph import BACKWARD, Tensor
from meshlib.core.opdef import Kind
from meshlib.core.text import bytes_text
from meshlib.estimation.memory.remat_segments import segments
from meshlib.estimation.work.tiles import tiled_bytes, tiled_value_bytes
from meshlib.lowering.assigned import Subjects, check_layout
from meshlib.program.analysis.memory import bytes_after, kind_of, live_buffers
from meshlib.program.instructions import Loop, Move, Value
from meshlib.program.records import Program, walk

Change = Callable[[Value], int | None]  # new bytes of a value; None: unchanged

_ERROR = 0.1  # of the peak: largest overestimate of a remedy's savings
_WORTH = 0.01  # of the peak: smaller savings are not reported
_MOST = 8  # maximum number of remedies shown
_TOGETHER = 3  # maximum number of remedies combined
_PARTS = 8  # parts of a chunked loss
# Words of remedies for which configurations have keys.
RECOMPUTE, CARRIES = "recompute what the loop keeps", "keep what the loop carries on the host"
SLOTS, HALF, MICROBATCHES, LOSS = "keep slots on the host", "half the batch", "microbatches of", "the loss over"


@dataclass(frozen=True)
class Remedy:
    """A change that lowers the peak: its description, and the approximate bytes saved.

    Attributes:
      parts: changes to be combined; usually one.
    """

    parts: tuple[str, ...]
    gain_bytes: int

    @property
    def what(self) -> str:
        """The change, in words."""
        return self.worded(lambda part: part)

    def worded(self, words: Callable[[str], str]) -> str:
        """The change, with each part worded by `words`."""
        together = "together: " if len(self.parts) > 1 else ""
        return together + "; and ".join(map(words, self.parts))

    def __str__(self) -> str:
        return f"{self.what}: saves about {bytes_text(self.gain_bytes)}"


def microbatches(words: str) -> int | None:
    """The number of microbatches that a remedy asks for; None for other remedies.

    >>> microbatches("4 microbatches of 'batch' (mtf.serialize_training_step, num_splits=4)"), microbatches(HALF)
    (4, None)
    """
    number, _, rest = words.partition(" ")
    return int(number) if rest.startswith(MICROBATCHES) else None


@dataclass(frozen=True, eq=False)
class _Idea:
    """A candidate remedy.

    Attributes:
      change: new sizes of buffers; more_bytes: additional memory.
      subject: only one idea per subject is combined.
      mesh, rule: the mesh, or an additional rule, under which the program must be lowered.
    """

    what: str
    change: Change
    subject: str
    more_bytes: int = 0
    mesh: str = ""
    rule: str = ""


def remedies(program: Program, room_bytes: int) -> tuple[Remedy, ...]:
    """The best remedies for a device with `room_bytes`, best first; combined ones if none suffices alone."""
    usage = bytes_after(program, tiled_value_bytes)
    peak = max(usage)
    n = usage.index(peak) - 1
    live = [b.at(n)[1] for b in live_buffers(program, n)]
    kinds = {b.owner: kind_of(program, b.owner, b.begin) for b in program.buffers}
    legal = _Legal(program)
    ideas = [*(_more_devices(program) or _new_axis(program, live)), *_rules(program, live, kinds, legal)]
    ideas += [
        *_recomputed(program, live),
        *_smaller_batch(program, live, kinds, peak, room_bytes),
        *_narrow(program),
        *_loss(program),
    ]
    ideas += _slots(kinds)
    gains = {idea: peak - _peak(program, [idea]) for idea in ideas}
    worth = sorted((i for i in ideas if gains[i] >= _WORTH * peak), key=lambda i: -gains[i])
    taken: list[_Idea] = []
    for idea in worth:
        if len(taken) < _MOST and legal([idea]):
            taken.append(idea)
    remedies_taken = [Remedy((i.what,), gains[i]) for i in taken]
    if peak > room_bytes and taken and peak - gains[taken[0]] > room_bytes:
        together = _combined(program, taken, legal, room_bytes)
        if together:
            parts = tuple(i.what for i in together)
            remedies_taken.insert(0, Remedy(parts, peak - _peak(program, together)))
    return tuple(remedies_taken)


def _combined(program: Program, ideas: Sequence[_Idea], legal: _Legal, room_bytes: int) -> list[_Idea]:
    """A greedy combination of ideas with the lowest peak that fits; [] if none does."""
    chosen: list[_Idea] = []
    while len(chosen) < _TOGETHER:
        subjects = {i.subject for i in chosen}
        others = [[*chosen, i] for i in ideas if i.subject not in subjects]
        others = sorted(others, key=lambda these: _peak(program, these))
        chosen = next((these for these in others if legal(these)), [])
        if not chosen or _peak(program, chosen) <= room_bytes:
            return chosen
    return []


def _peak(program: Program, ideas: Sequence[_Idea]) -> int:
    """The peak under these changes; where several shrink one buffer, their ratios multiply."""

    def size(v: Value) -> int:
        whole = tiled_value_bytes(v)
        shares = [part / whole for i in ideas if whole and (part := i.change(v)) is not None]
        return round(whole * prod(shares)) if shares else whole

    return max(bytes_after(program, size)) + sum(i.more_bytes for i in ideas)


class _Legal:
    """True if a program can be lowered with the mesh and rules of some ideas."""

    def __init__(self, program: Program) -> None:
        self.program = program
        operations = dict.fromkeys(i.operation for i in program.instructions)
        self.subjects = Subjects(next(iter(operations)).graph.root, operations)

    def __call__(self, ideas: Iterable[_Idea]) -> bool:
        mesh = next((i.mesh for i in ideas if i.mesh), str(self.program.mesh))
        rules = ";".join(filter(None, (str(self.program.layout), *(i.rule for i in ideas))))
        return check_layout(self.subjects, Mesh(mesh), LayoutRules(rules)).ok


def _cut(v: Value, ways: Callable[[str], int]) -> int:
    """Bytes of a value's block with each dim cut into `ways(dim)` times as many parts."""
    return tiled_bytes(tuple(-(-d.size // ways(d.name)) for d in v.local.shape), v.tensor.dtype.itemsize)


def _more_devices(program: Program) -> list[_Idea]:
    """A mesh axis of twice the size."""
    ideas: list[_Idea] = []
    for axis in program.mesh.axes:
        size = program.mesh.axis_size(axis)
        if not any(axis in rule.axes for rule in program.layout.rules):
            continue  # it would only replicate work

        def change(v: Value, axis: str = axis) -> int | None:
            split = {d.name for d, axes in zip(v.local.shape, v.sharding.axes, strict=True) if axis in axes}
            return _cut(v, lambda dim: 2 if dim in split else 1) if split else None

        mesh = ";".join(f"{a}:{program.mesh.axis_size(a) * (1 + (a == axis))}" for a in program.mesh.axes)
        what = f"twice the devices, mesh axis '{axis}' {size} -> {2 * size}"
        ideas.append(_Idea(what, change, "devices", mesh=mesh))
    return ideas


def _new_axis(program: Program, live: list[Value]) -> list[_Idea]:
    """If no axis splits anything: a new axis that splits a dim of a live value."""

    def halved(dim: str) -> Change:
        return lambda v: _cut(v, lambda name: 2 if name == dim else 1) if dim in v.local.shape else None

    dims = [
        d
        for d in _free_dims(program, live)
        if all(v.local.shape.dim(d).size % 2 == 0 for v in live if d in v.local.shape)
    ]
    what, mesh = "twice the devices, a new mesh axis 'new' of 2 with rule", f"{program.mesh};new:2"
    return [_Idea(f"{what} '{d}:new'", halved(d), "devices", mesh=mesh, rule=f"{d}:new") for d in dims]


def _rules(program: Program, live: list[Value], kinds: Mapping[Value, str], legal: _Legal) -> Iterator[_Idea]:
    """For each axis, the best legal rule that splits a dim wherever the axis is free, and the best for slots alone."""
    dims = _free_dims(program, live)
    for axis in program.mesh.axes:
        where, slots = f"(split wherever {axis} is free)", "(ZeRO-1: slots and gradients split)"
        for scope, note in (("", where), ("slots/", slots)):
            ideas = []
            for dim in dims:
                rule = f"{scope}{dim}:{axis}{'' if scope else '?'}"
                change = _split(program, dim, axis)
                more = 0 if scope else _gathered_bytes(program, change, program.mesh.axis_size(axis))
                change = _only_slots(change, kinds) if scope else change
                ideas.append(_Idea(f"layout rule '{rule}' {note}", change, f"axis {axis}", more, rule=rule))
            gains = {i: sum(map(partial(_gain, i.change), live)) - i.more_bytes for i in ideas}
            better = sorted((i for i in ideas if gains[i] > 0), key=lambda i: -gains[i])
            yield from islice((i for i in better if legal([i])), 1)


def _gain(change: Change, v: Value) -> int:
    size = change(v)
    return 0 if size is None else tiled_value_bytes(v) - size


def _free_dims(program: Program, live: list[Value]) -> list[str]:
    """Dims of live values that no rule splits and no loop runs over."""
    taken = {rule.dim for rule in program.layout.rules}
    taken |= {i.record.dim.name for i in program.instructions if isinstance(i, Loop)}
    return sorted({d.name for v in live for d in v.local.shape} - taken)


def _gathered_bytes(program: Program, change: Change, ways: int) -> int:
    """The largest weight that a product gathers, of variables split by `change` (its other operand, if smaller)."""
    split = [frozenset(v.tensor.shape.names) for v in program.variables.values() if change(v) is not None]
    gathered_bytes = 0
    for i, _, _ in walk(program):
        if i.operation.opdef.kind is Kind.CONTRACTION and len(i.inputs) > 1:
            for x, other in (i.inputs[:2], i.inputs[1::-1]):
                if change(x) is not None and any(dims.issuperset(x.tensor.shape.names) for dims in split):
                    gathered_bytes = max(gathered_bytes, min(tiled_value_bytes(x), ways * tiled_value_bytes(other)))
    return gathered_bytes


def _split(program: Program, dim: str, axis: str) -> Change:
    ways = program.mesh.axis_size(axis)
    gathered = {
        y for i in program.instructions for y in i.outputs if isinstance(i, Move) and i.step_kind.gathers
    }  # required whole

    def change(v: Value) -> int | None:
        used = {a for axes in v.sharding.axes for a in axes} | set(v.sharding.pending_axes)
        if axis in used or dim not in v.local.shape or v.local.shape.dim(dim).size % ways or v in gathered:
            return None
        return _cut(v, lambda name: ways if name == dim else 1)

    return change


def _only_slots(change: Change, kinds: Mapping[Value, str]) -> Change:
    """The change restricted to slots and gradients outside loops."""
    return lambda v: change(v) if kinds.get(v) in ("slots", "gradients") else None


def _recomputed(program: Program, live: list[Value]) -> Iterator[_Idea]:
    """Recomputation or offloading of values that the forward pass keeps for the backward pass."""
    stacked, carries = dict[Value, int](), set()
    for i in program.instructions:
        if isinstance(i, Loop):
            *_, befores, saved = i.record.outputs(i.operation.outputs)
            carries |= {y for y in i.outputs if y.tensor in befores}
            stacked |= {y: i.trips for y in i.outputs if y.tensor in saved}
    pieces = segments(program, tiled_value_bytes)
    if pieces is not None:
        again = f"recompute what the forward pass keeps, in {pieces.pieces} parts (mtf.recompute_grad of each)"
        yield _Idea(again, lambda v: 0 if v in pieces.spared else None, "kept values", pieces.more_bytes)
    if stacked:
        again = f"{RECOMPUTE} (mtf.scan, remat='full')"
        # one trip's values are live while it is recomputed
        of_a_trip = {v: tiled_value_bytes(v) // trips for v, trips in stacked.items()}
        yield _Idea(again, of_a_trip.get, "what the loop keeps")
    if carries:
        offload = f"{CARRIES} (mtf.scan, remat=mtf.Remat(offload_carries=True))"
        yield _Idea(offload, lambda v: 0 if v in carries else None, "carries")


def _smaller_batch(
    program: Program, live: list[Value], kinds: Mapping[Value, str], peak: int, room_bytes: int
) -> Iterator[_Idea]:
    """Half the batch, or enough microbatches to fit; the batch is the first dim of all inputs and no variable."""
    given = {*program.inputs.values()}
    inputs = [v for v in given if v.local_shape.sizes]
    batch = _batch_dim(program, inputs)
    if batch is None:
        return
    name = batch.name

    def part(v: Value, parts: int) -> int | None:
        return _cut(v, lambda dim: parts if dim == name else 1) if name in v.local_shape else None

    def of_rest(v: Value, parts: int) -> int | None:
        return None if v in given else part(v, parts)

    def divides(parts: int) -> bool:
        return all(v.local_shape.dim(name).size % parts == 0 for v in inputs)

    if divides(2):
        yield _Idea(f"{HALF}, '{name}' {batch.size} -> {batch.size // 2}", partial(part, parts=2), "batch")
    if not (program.updates and any(i.operation.region == BACKWARD for i in program.instructions)):
        return
    more = max(0, _sums_bytes(program) - sum(tiled_value_bytes(v) for v in live if kinds.get(v) == "gradients"))
    numbers = takewhile(divides, (2**n for n in count(1)))
    what = f"{MICROBATCHES} '{name}' (mtf.serialize_training_step, num_splits="
    ideas = (_Idea(f"{parts} {what}{parts})", partial(of_rest, parts=parts), "batch", more) for parts in numbers)
    yield from _first_that_fits(program, ideas, peak, room_bytes)


def _first_that_fits(program: Program, ideas: Iterable[_Idea], peak: int, room_bytes: int) -> list[_Idea]:
    """The first of alternatives that fits; where none does, the last that saves more than the error of such figures."""
    error, useful, least = _ERROR * peak, [], inf
    for idea in ideas:
        needed = _peak(program, [idea]) + error
        if needed <= room_bytes:
            return [idea]
        if needed + error < least:
            useful = [idea]
        least = min(least, needed)
    return useful


def _batch_dim(program: Program, inputs: Sequence[Value]) -> Dimension | None:
    """The first dim that all these inputs have, and no variable."""
    own = {d.name for v in program.variables.values() for d in v.tensor.shape}
    shared = [d for d in inputs[0].tensor.shape if all(d in v.tensor.shape for v in inputs)] if inputs else []
    return next((d for d in shared if d.name not in own), None)


def _sums_bytes(program: Program) -> int:
    """Bytes of gradients while microbatches are summed: the float32 sums, with the sharding of their variables, and the
    stacked gradients of one microbatch, which are pending until they are added."""
    trained = _trained(program)
    sums = sum(tiled_bytes(v.local_shape.sizes, 4) for v in trained)
    return sums + sum(tiled_bytes(v.local_shape.sizes, width) for v, width in trained.items() if width)


def _trained(program: Program) -> dict[Value, float]:
    """Trained variables, each with the bytes per element that a loop stacks for its gradient."""
    variables = {v.tensor.operation: v for v in program.variables.values()}
    graphs = dict.fromkeys(op.graph for op in variables)
    gradients = [pair for graph in graphs for pair in graph.gradient_of.items()]
    return {variables[op]: _stacked_width(gradient) for gradient, op in gradients if op in variables}


def _stacked_width(gradient: Tensor) -> float:
    """Bytes per element of the stack behind a gradient (through casts and views); 0 without one."""
    while gradient.operation.opdef.cheap:
        gradient = gradient.operation.inputs[0]
    op = gradient.operation
    stacked = op.loop is not None and gradient in op.loop.outputs(op.outputs).stacks
    return gradient.dtype.itemsize if stacked else 0


def _narrow(program: Program) -> Iterator[_Idea]:
    """Variables that are not updated, in bfloat16; for others the optimizer would also keep float32."""
    wide = {v for name, v in program.variables.items() if v.tensor.dtype is FLOAT32 and name not in program.updates}
    what = "variables in bfloat16 (slice_dtype='bfloat16')"
    yield _Idea(what, lambda v: tiled_bytes(v.local_shape.sizes, 2) if v in wide else None, "variables")


def _slots(kinds: Mapping[Value, str]) -> Iterator[_Idea]:
    """Optimizer slots in host memory; during the update, one variable's slots are on the device at a time."""
    slots = {v for v, kind in kinds.items() if kind == "slots"}
    if slots:
        what = f"{SLOTS} (an optimizer's slots_on_host=True)"
        yield _Idea(what, lambda v: 0 if v in slots else None, "slots")


def _loss(program: Program) -> Iterator[_Idea]:
    """A softmax over a dim of the variables, such as the vocabulary, in chunks along the other dims."""
    own = {d.name for v in program.variables.values() for d in v.tensor.shape}
    over = {
        d.name
        for i in program.instructions
        if i.operation.opdef.kind is Kind.REDUCTION and i.opcode == "reduce_max"
        for d in i.inputs[0].tensor.shape
        if d not in i.outputs[0].tensor.shape and d.name in own
    }
    residents = {*program.variables.values(), *program.inputs.values()}
    for name in sorted(over):

        def part(v: Value, name: str = name) -> int | None:
            if v in residents or name not in v.local_shape or own.issuperset(v.local_shape.names):
                return None
            rest = prod(d.size for d in v.local_shape if d.name not in own)
            return -(-tiled_value_bytes(v) // _PARTS) if rest % _PARTS == 0 else None

        yield _Idea(f"{LOSS} '{name}' in {_PARTS} parts (mtf.scan over them, remat='full')", part, "loss")
