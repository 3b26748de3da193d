"""The collectives of a compiled module: kind, devices, bytes, count, and origin.

One collective takes several forms in HLO. A pair of `-start` and `-done` counts once. So does one that a TPU's compiler
spreads over several fusions, each with a copy: only the copy with `AsyncCollectiveStart` counts. An all-reduce in a
fusion that slices its result per device is a reduce-scatter. A permute may be a pair of `send` and `recv`. A module for
several slices is the program of one of them: collectives between slices are host transfers, sends that name the kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from layouts.step_kinds import ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, STEP_KINDS, StepKind
from meshlib.core.errors import ProgramError
from meshlib.jax.hlo.groups import PAIRS, Groups, permute_pairs, replica_groups
from meshlib.jax.hlo.text import Array, Computation, HloInstruction, Module
from meshlib.jax.hlo.walk import Frame, walk

_NAMES = {alias: STEP_KINDS[name] for name in COLLECTIVES for alias in (name, *STEP_KINDS[name].aliases)}
RAGGED = "ragged-all-to-all"  # of rows by offsets and sizes, which are operands too
KINDS = {name.replace("_", "-"): kind for name, kind in _NAMES.items()}  # by opcode
_PARTS = ("bitcast", "reshape", "get-tuple-element", "copy", "copy-start", "copy-done", "slice", "dynamic-slice")
_LOOKS = ("bitcast", "reshape", "get-tuple-element", "copy", "convert", "transpose")  # show an operand, or parts of it
# Host transfers between slices, by the type that the compiler writes.
BETWEEN = {name.upper(): kind for name, kind in _NAMES.items()}
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_DIMS = re.compile(r"\bdimensions=\{(\d+)\}")


@dataclass(frozen=True)
class HloCollective:
    """One collective of a compiled module. Bytes are exact unless ragged, without padding, for one run on one device.

    kind           a key of `layouts.step_kinds.STEP_KINDS`
    groups         the devices of each group; for a permute its (source, target) pairs
    operands       the operands on one device, one for each value that the compiler merged
    payload_bytes  of the operands; result_bytes of the result
    count          runs per run of the module; None where the trips of a loop depend on data
    conditional    whether it is in a branch, which may not run
    is_async       whether other work runs meanwhile
    sliced         an all-reduce of which each device uses its own slice alone: a reduce-scatter would send half
    op_name        the named scopes and the primitive in the user's program
    source         its line there
    dim            along which blocks are gathered or scattered; None where there is no such dim
    name           of the instruction; frame: its computation, with the caller
    follows        names of collectives whose results its operands are parts or copies of
    is_ragged      a `ragged-all-to-all`: how many rows go where depends on data, and bytes are upper bounds
    """

    kind: str
    groups: Groups
    operands: tuple[Array, ...]
    payload_bytes: int
    result_bytes: int
    count: int | None
    conditional: bool
    is_async: bool
    sliced: bool
    op_name: str
    source: str
    dim: int | None
    name: str
    frame: Frame = field(repr=False, compare=False)
    follows: tuple[str, ...] = ()
    is_ragged: bool = False

    @property
    def group_size(self) -> int:
        """Devices per group; 2 for a permute."""
        return len(self.groups[0]) if self.groups else 1

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends per run on a ring; for a permute, a device that is a source.

        A ragged exchange sends at most all rows of its operand, each once.
        """
        kind = STEP_KINDS[self.kind]
        if self.is_ragged:
            return float(self.payload_bytes)
        if kind.permutes and all(a == b for a, b in self.groups):
            return 0.0
        return float(kind.sent_bytes(self.payload_bytes, self.group_size))

    @property
    def larger_bytes(self) -> int:
        """The larger of operand and result bytes, by which the network is priced; ragged: the operand's alone.

        The result of a ragged exchange is a buffer with space for all rows that could arrive.
        """
        return self.payload_bytes if self.is_ragged else max(self.payload_bytes, self.result_bytes)


def collectives_of(module: Module, hidden: tuple[str, ...] = (), slices: int = 1) -> list[HloCollective]:
    """All collectives that run, in the order of the schedule; loops once, with their trips as `count`.

    Args:
      module: a parsed module.
      hidden: parts of paths of files that are not the user's, which `source` skips.
      slices: number of slices that run the module, each with the header's number of devices; devices are numbered slice
        by slice.
    Raises: ProgramError for groups in an unknown notation.
    """
    collectives = []
    for frame, i, times, branch in walk(module):
        opcode = i.opcode.removesuffix("-start")
        if opcode == "send" and PAIRS in i.attributes:
            opcode = "collective-permute"
        between = _BETWEEN.search(i.attributes) if opcode == "send" else None
        if opcode in KINDS and _is_counted(frame.holder, i):
            own = _collective(module, frame, i, opcode)
            own["groups"] = _in_each(own["groups"], module.devices, slices)
        elif between is not None:
            own = _between(module, i, between[1], slices)
        else:
            continue
        name = i.op_name or _op_name_beside(frame, i)
        source = module.source(i, hidden) or _source_beside(module, frame, i, hidden)
        follows = tuple(_before(module, frame, i))
        collectives.append(
            HloCollective(**own, count=times, conditional=branch, is_async=_is_async(frame, i), op_name=name,
                          source=source, name=i.name, frame=frame, follows=follows)
        )  # fmt: skip
    return collectives


def _in_each(groups: Groups, devices: int, slices: int) -> Groups:
    """The groups of one slice, repeated for each of several."""
    return tuple(tuple(d + s * devices for d in g) for s in range(slices) for g in groups)


def _between(module: Module, i: HloInstruction, transfer: str, slices: int) -> dict[str, Any]:
    """A collective between slices, whose groups are the devices at the same position of each slice."""
    if transfer not in BETWEEN:
        raise ProgramError(f"explain: a transfer between slices of an unknown kind: {transfer}")
    kind = BETWEEN[transfer]
    groups = tuple(tuple(d + s * module.devices for s in range(slices)) for d in range(module.devices))
    if kind.permutes:
        groups = tuple((d + s * module.devices, d + (s + 1) % slices * module.devices) for d in range(module.devices)
                       for s in range(slices))  # fmt: skip
    size = i.arrays[0].bytes
    of_bytes = {"payload_bytes": size, "result_bytes": kind.larger_bytes(size, slices)}
    return {"kind": kind.name, "groups": groups, "operands": i.arrays[:1], "sliced": False, "dim": None, **of_bytes}


def _is_counted(holder: Computation, i: HloInstruction) -> bool:
    """True if this copy counts, of a collective whose copies are spread over several fusions."""
    if "async_collective_fusion_config" not in i.attributes:
        return True
    readers = holder.users.get(i.name, ())
    return any("AsyncCollectiveStart" in r.attributes for r in readers)


def _collective(module: Module, frame: Frame, i: HloInstruction, opcode: str) -> dict[str, Any]:
    """The fields of a collective that its own instruction determines."""
    holder = frame.holder
    kind = KINDS[opcode]
    pairs = PAIRS in i.attributes
    groups = permute_pairs(i.attributes) if kind.permutes and pairs else replica_groups(i.attributes, module.devices)
    if kind.permutes and not pairs:  # a broadcast: from the first device of each group to the others
        groups = tuple([(g[0], d) for g in groups for d in g[1:]])
    results = _results(i, kind)
    size = 1 if kind.permutes else len(groups[0])
    operands = tuple(_operand(a, kind, size) for a in results)
    ragged = opcode == RAGGED
    operands = (ragged and _values_of(holder, i.operands[:1])) or _operands_of(holder, i, operands)
    if kind.exchanges and len(operands) > 1:  # one value, cut into one piece per device
        operands = (Array(operands[0].dtype, (sum(prod(a.sizes) for a in operands),)),)
    payload, result = sum(a.bytes for a in operands), sum(a.bytes for a in results)
    if kind is ALL_REDUCE and holder.name != module.entry and _gives_slice(holder, i, size):
        kind, result = REDUCE_SCATTER, result // size
    return {
        "kind": kind.name,
        "groups": groups,
        "operands": operands,
        "payload_bytes": payload,
        "result_bytes": result,
        "sliced": kind is ALL_REDUCE and size > 1 and _reads_slices(module, holder, i.name),
        "dim": int(match[1]) if (match := _DIMS.search(i.attributes)) else None,
        "is_ragged": ragged,
    }


def _before(module: Module, frame: Frame, i: HloInstruction) -> Iterator[str]:
    """Names of the collectives that feed this one through copies, slices and fusions: parts of a collective that the
    compiler has split are chained."""
    holder, call = frame.holder, frame.call
    if call is not None and frame.parent is not None and call.opcode == "fusion":
        holder, i = frame.parent.holder, call
    for maker in _upstream(holder, i, lambda producer: producer.opcode in _PARTS):
        if _kind(maker) is not None:
            yield maker.name
        inner = module.computations.get(maker.called("calls") or "") if maker.opcode == "fusion" else None
        yield from [j.name for j in inner.instructions.values() if j.opcode in KINDS] if inner else ()


def _upstream(
    holder: Computation, i: HloInstruction, passes: Callable[[HloInstruction], bool]
) -> Iterator[HloInstruction]:
    """Producers of an instruction's operands, nearest first, and behind those that `passes` accepts their producers."""
    waiting, seen = list(i.operands), set[str]()
    while waiting and len(seen) < 50:
        maker = holder.instructions.get(name := waiting.pop(0))
        if maker is None or name in seen:
            continue
        seen.add(name)
        yield maker
        if passes(maker):
            waiting += maker.operands


def _is_async(frame: Frame, i: HloInstruction) -> bool:
    wrapped = frame.call is not None and frame.call.opcode == "async-start"
    return wrapped or i.opcode.endswith(("-start", "send")) or "async_collective_fusion_config" in i.attributes


def _results(i: HloInstruction, kind: StepKind) -> tuple[Array, ...]:
    """The result arrays of a collective; the result of a `-start` also contains its operands and flags."""
    arrays = i.arrays
    if i.opcode == "send":
        return arrays[:1]
    if not i.opcode.endswith("-start") or kind is ALL_REDUCE:
        return arrays
    return arrays[len(i.operands) : 2 * len(i.operands)]


def _operand(result: Array, kind: StepKind, size: int) -> Array:
    """An operand with the number of bytes that the result implies; its shape is unknown."""
    total = prod(result.sizes)
    if kind.gathers:
        return Array(result.dtype, (total // size,))
    if kind.scatters:
        return Array(result.dtype, (total * size,))
    return result


def _values_of(holder: Computation, names: Iterable[str]) -> tuple[Array, ...]:
    """The arrays of instructions, as far as the computation has them."""
    return tuple(a for x in names if x in holder.instructions for a in holder.instructions[x].arrays)


def _operands_of(holder: Computation, i: HloInstruction, derived: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands' real shapes where these are instructions with the bytes that the result implies."""
    flat = _values_of(holder, i.operands)
    same = len(flat) == len(derived) and all(a.bytes == b.bytes for a, b in zip(flat, derived, strict=True))
    return flat if same else derived


def _gives_slice(fusion: Computation, i: HloInstruction, size: int) -> bool:
    """True if a fusion returns this device's slice of the sum that it computes."""
    root = fusion.root
    if root is None or root.name == i.name:
        return False
    whole = sum(a.bytes for a in i.arrays)
    return size > 1 and sum(a.bytes for a in root.arrays) * size <= whole and _cut(fusion, i)


def _cut(holder: Computation, i: HloInstruction) -> bool:
    """True if all users of an array read a dynamic slice of it."""
    readers = holder.users.get(i.name, ())
    return bool(readers) and all(
        r.opcode == "dynamic-slice" or (r.opcode in _LOOKS and _cut(holder, r)) for r in readers
    )


def _reads_slices(module: Module, holder: Computation, name: str, depth: int = 0) -> bool:
    readers = holder.users.get(name, ())
    if not readers or depth > 8:
        return False
    for r in readers:
        if r.opcode == "dynamic-slice":
            continue
        if r.opcode in _LOOKS:
            if not _reads_slices(module, holder, r.name, depth + 1):
                return False
        elif r.opcode == "fusion":
            inner = module.computations.get(r.called("calls") or "")
            at = [n for n, x in enumerate(r.operands) if x == name]
            if inner is None or not all(
                n in inner.parameters and _reads_slices(module, inner, inner.parameters[n].name, depth + 1) for n in at
            ):
                return False
        else:
            return False
    return True


def _neighbours(holder: Computation, i: HloInstruction, sums: bool | None = None) -> Iterator[HloInstruction]:
    """Neighbours that may name a collective without a name: for sums the operands' producers first, else the users."""
    makers = [holder.instructions[x] for x in i.operands if x in holder.instructions]
    readers = []
    for r in holder.users.get(i.name, ()):
        readers.append(r)
        if r.opcode in _LOOKS:
            readers += holder.users.get(r.name, ())
    if sums is None:
        sums = _reduces(i)
    yield from (*makers, *readers) if sums else (*readers, *makers)


def _kind(i: HloInstruction) -> StepKind | None:
    return KINDS.get(i.opcode.removesuffix("-start").removesuffix("-done"))


def _reduces(i: HloInstruction) -> bool:
    kind = _kind(i)
    return kind is not None and kind.reduces


def _all_neighbours(frame: Frame, i: HloInstruction) -> Iterator[HloInstruction]:
    """Neighbours of a collective, then of the fusion that contains it."""
    yield from _neighbours(frame.holder, i)
    if frame.call is not None and frame.parent is not None and frame.call.opcode == "fusion":
        yield frame.call
        yield from _neighbours(frame.parent.holder, frame.call, _reduces(i))
        yield from _upstream(frame.parent.holder, frame.call, lambda producer: not producer.op_name)
    yield from _upstream(frame.holder, i, lambda producer: not producer.op_name)
    yield from _transitive_users(frame.holder, i)


def _transitive_users(holder: Computation, i: HloInstruction) -> Iterator[HloInstruction]:
    """Direct and indirect users of a result, nearest first."""
    waiting, seen = [i.name], {i.name}
    while waiting and len(seen) < 50:
        for r in holder.users.get(waiting.pop(0), ()):
            if r.name not in seen:
                seen.add(r.name)
                waiting.append(r.name)
                yield r


def _op_name_beside(frame: Frame, i: HloInstruction) -> str:
    return next((other.op_name for other in _all_neighbours(frame, i) if other.op_name), "")


def _source_beside(module: Module, frame: Frame, i: HloInstruction, hidden: tuple[str, ...]) -> str:
    return next((line for other in _all_neighbours(frame, i) if (line := module.source(other, hidden))), "")
