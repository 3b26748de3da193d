"""The checker: recomputes every type and sharding of a program, after each pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from layouts import LayoutError, Mesh, Shape, Sharding
from layouts.plan import Step
from layouts.step_kinds import COLLECTIVE_PERMUTE, SLICE, STEP_KINDS
from meshlib.core.errors import ProgramError
from meshlib.core.opdef import Factor, Linear, Role
from meshlib.program.exchanges import (
    fits,
    given_away,
    keeps_margins,
    needed_margins,
    plan_exchanges,
    row_size,
    takes_margins,
)
from meshlib.program.factor_shardings import beside, derive
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Resident, Value, Widen
from meshlib.program.records import Program
from meshlib.program.signature import Signature, Signatures

_WITH_MARGINS = (Compute, Widen)  # instructions that may have operands with margins


@dataclass(eq=False)
class Sound:
    """Cache of successful checks, by everything that a check depends on.

    Computations are shared between equal layers, and between layouts that shard them alike. Instructions, on one mesh,
    and whole bodies are shared between passes that do not change them; content is independent of fusion groups.
    """

    signatures: Signatures = field(default_factory=Signatures)
    computations: set[object] = field(default_factory=set)
    instructions: set[Instruction] = field(default_factory=set)
    contents: set[object] = field(default_factory=set)
    bodies: set[Program] = field(default_factory=set)


def check_program(program: Program, after: str, before: Program | None = None, sound: Sound | None = None) -> Program:
    """`program`, if it is valid; a pass may not change inputs, outputs and updates of the program `before` it.

    If a pass returns `before`, which has been checked, nothing is left to check.
    Raises: ProgramError naming the pass, the instruction and the fault.
    """
    if program is before:
        return program
    defined: set[Value] = set()
    known = Sound() if sound is None else sound
    for number, instruction in enumerate(program.instructions):
        new = instruction not in known.instructions
        if new or not defined.issuperset(instruction.inputs) or not defined.isdisjoint(instruction.outputs):
            try:
                _check_instruction(instruction, defined, program, known)
            except (LayoutError, ProgramError) as fault:
                raise ProgramError(
                    f"after {after}, instruction {number} ({instruction.opcode} for {instruction.operation}): {fault}"
                ) from None
        defined.update(instruction.outputs)
    _check_ends(program, defined, after)
    if before is not None:
        _check_same_face(program, before, after)
    return program


def _check_same_face(program: Program, before: Program, after: str) -> None:
    for what in ("inputs", "variables", "outputs", "updates"):
        old, new = getattr(before, what), getattr(program, what)
        changed = sorted({*old} ^ {*new}) or [n for n in old if old[n].tensor is not new[n].tensor]
        if changed:
            raise ProgramError(f"after {after}: {what} changed: {', '.join(changed)}")


def _check_instruction(instruction: Instruction, computed: set[Value], program: Program, sound: Sound) -> None:
    if not computed.issuperset(instruction.inputs):
        x = next(x for x in instruction.inputs if x not in computed)
        raise ProgramError(f"operand {x.tensor.name} {x} is used before it is computed")
    if not computed.isdisjoint(instruction.outputs):
        y = next(y for y in instruction.outputs if y in computed)
        raise ProgramError(f"result {y.tensor.name} {y} is computed twice")
    content = instruction.content
    if content not in sound.contents:
        if not isinstance(instruction, _WITH_MARGINS) and any(x.margins for x in instruction.inputs):
            raise ProgramError("takes an operand with margins")
        _check_alone(instruction, program.mesh, sound)
        sound.contents.add(content)
    match instruction:
        case Commit():
            _check_commit(instruction, program)
        case Loop():
            _check_loop(instruction, sound)
        case Resident():
            pending = instruction.outputs[0].sharding.pending
            if pending and not (program.is_body and all(kind == "sum" for _, kind in pending)):
                raise ProgramError("a resident value can't be pending")
        case _:
            sound.instructions.add(instruction)


def _check_alone(instruction: Instruction, mesh: Mesh, sound: Sound) -> None:
    """Checks that do not depend on the program around an instruction."""
    for y in instruction.outputs:
        if y.sharding.mesh != mesh:
            raise ProgramError(f"result {y.tensor.name} is on mesh {y.sharding.mesh}, not {mesh}")
        if y.sharding.shape != y.tensor.shape:
            raise ProgramError(f"result {y.tensor.name} has shape {y.tensor.shape}, its sharding {y.sharding.shape}")
    match instruction:
        case Widen():
            _check_widened(instruction)
        case Move():
            _check_reshard(instruction)
        case Compute():
            if tuple(y.tensor for y in instruction.outputs) != instruction.operation.outputs:
                raise ProgramError(f"makes {', '.join(y.tensor.name for y in instruction.outputs)}")
            key = _key(instruction, sound.signatures)
            if key not in sound.computations:
                _check_computation(instruction, sound.signatures.of(instruction.operation))
                sound.computations.add(key)


def _key(instruction: Compute, signatures: Signatures) -> object:
    """Everything on which the check of a computation depends."""
    tensors = [x.tensor for x in instruction.inputs]
    return (
        signatures.of(instruction.operation),
        instruction.assignment,
        instruction.exchanges,
        *[tensors.index(t) for t in tensors],
        *[(x.sharding, x.margins) for x in (*instruction.inputs, *instruction.outputs)],
    )


def _check_reshard(instruction: Move) -> None:
    for x, y, step in zip(instruction.inputs, instruction.outputs, instruction.steps, strict=True):
        if x.tensor is not y.tensor:
            raise ProgramError(f"moves {x.tensor.name} into {y.tensor.name}")
        if x.margins or (y.margins and not _cuts_margins(step, y)):
            raise ProgramError(f"moves {x} to {y}, which loses margins or makes them")
        if x.sharding != step.before or y.sharding != step.after:
            raise ProgramError(f"step {step.before} -> {step.after} does not move {x.sharding} to {y.sharding}")
        if step.kind != instruction.opcode:
            raise ProgramError(f"holds a step of kind {step.kind}")
        kind = STEP_KINDS[step.kind]
        kind.check(x.sharding, y.sharding, step.axes, step.dim, step.to_dim)
        sent = kind.sent_bytes(x.local_bytes, x.sharding.mesh.group_size(step.axes))
        if step.payload_bytes != x.local_bytes or abs(step.sent_bytes - sent) > 1e-9 * max(1, sent):
            raise ProgramError(f"claims {step.sent_bytes} bytes sent of {step.payload_bytes}; a ring sends {sent}")


def _cuts_margins(step: Step, y: Value) -> bool:
    """True if a local slice of an unsplit dim leaves margins along it."""
    cuts = STEP_KINDS[step.kind] is SLICE and step.dim is not None
    whole = cuts and not step.before.of(step.dim or "") and not y.sharding.pending
    return whole and all(m.dim == step.dim and fits(m, y.tensor, y.sharding) for m in y.margins)


def _check_widened(instruction: Widen) -> None:
    (x,), (y,), (step,) = instruction.inputs, instruction.outputs, instruction.steps
    new = [m for m in y.margins if m not in x.margins]
    if x.tensor is not y.tensor or x.sharding != y.sharding or len(new) != 1 or {*x.margins} != {*y.margins} - {*new}:
        raise ProgramError(f"widens {x.tensor.name} {x} into {y.tensor.name} {y}")
    (margin,) = new
    size = x.tensor.shape.dim(margin.dim).size
    axes = x.sharding.of(margin.dim)
    count = x.sharding.mesh.group_size(axes)
    taken = any(m.dim == margin.dim for m in x.margins)
    if x.sharding.pending or taken or not fits(margin, x.tensor, x.sharding):
        raise ProgramError(f"{x} can't have margins of {margin}")
    row = row_size(x.tensor, x.sharding, x.margins, margin.dim)
    sent = tuple(x.tensor.dtype.size_bytes(n * row) for n in given_away(margin, count, size))
    claims = (step.kind, step.axes, step.dim, instruction.by_block, step.payload_bytes, step.sent_bytes)
    if claims != (COLLECTIVE_PERMUTE.name, axes, margin.dim, sent, max(sent), max(sent)):
        raise ProgramError(f"{step} claims {instruction.by_block} bytes sent; margins {margin} over {axes} take {sent}")


def _check_commit(instruction: Commit, program: Program) -> None:
    name = instruction.variable
    (x,) = instruction.inputs
    if program.updates.get(name) is not x:
        raise ProgramError(f"variable '{name}' is not updated with {x}")
    if name in program.variables and x.sharding != program.variables[name].sharding:
        raise ProgramError(f"variable '{name}' is sharded as {program.variables[name]}, but is written as {x}")


def _check_loop(instruction: Loop, sound: Sound) -> None:
    body = instruction.body
    if body not in sound.bodies:
        check_program(body, f"lowering the body of {instruction.operation}", sound=sound)
        sound.bodies.add(body)
    loop = instruction.operation.loop
    assert loop is not None
    dim = loop.dim
    if instruction.trips != dim.size:
        raise ProgramError(f"makes {instruction.trips} trips over {dim}")
    for x, (name, y) in zip(instruction.inputs, body.inputs.items(), strict=True):
        if _body_view(x, dim.name if name in instruction.slices else None) != (y.sharding, y.tensor.dtype):
            raise ProgramError(f"operand {x.tensor.name} is {x}; the body takes {y}")
    count = len(instruction.carries)
    for (begin, end), out in zip(instruction.carries, instruction.outputs[:count], strict=True):
        if not body.inputs[begin].sharding == body.outputs[end].sharding == out.sharding:
            raise ProgramError(
                f"carry {begin} is {body.inputs[begin]} before a trip, {body.outputs[end]} after, {out} at last"
            )
    for name, out in zip(instruction.stacks, instruction.outputs[count:], strict=True):
        y = body.outputs[name]
        if _body_view(out, dim.name) != (y.sharding, y.tensor.dtype):
            raise ProgramError(f"each trip makes {y}; stacked it can't be {out}")


def _body_view(x: Value, dim: str | None) -> tuple[Sharding, object]:
    """A value in a loop's body: its sharding for one index of `dim`, which must be unsplit, and its dtype."""
    s = x.sharding
    if dim is None:
        return s, x.tensor.dtype
    if s.of(dim):
        raise ProgramError(f"{x.tensor.name} is split along '{dim}', over which the loop iterates: {s}")
    return _one_index(s, dim), x.tensor.dtype


@lru_cache(maxsize=1 << 12)
def _one_index(s: Sharding, dim: str) -> Sharding:
    """A sharding without one of its dims."""
    others = [(d, entry) for d, entry in zip(s.shape, s.axes, strict=True) if d.name != dim]
    return Sharding(Shape([d for d, _ in others]), s.mesh, [entry for _, entry in others], s.pending)


def _check_computation(instruction: Compute, signature: Signature) -> None:
    op = instruction.operation
    out = instruction.outputs[0]
    factors, linear = signature.factors, signature.linear
    axes = instruction.factor_axes
    by_name = {f.name: f for f in factors}
    for name in axes:
        if name not in by_name or by_name[name].role is Role.WHOLE:
            raise ProgramError(f"splits '{name}', which must stay whole")
    passed = tuple(x.sharding.pending_axes for x in instruction.inputs)
    _check_pending(instruction, linear)
    wanted, result = derive(
        factors, axes, [x.tensor.shape for x in instruction.inputs], op.output.shape, out.sharding.mesh, passed
    )
    for x, s in zip(instruction.inputs, wanted, strict=True):
        if x.sharding != s:
            raise ProgramError(f"operand {x.tensor.name} is {x.sharding}; the assignment {axes} needs {s}")
    for y, s in zip(instruction.outputs, beside(op, out.sharding), strict=True):
        if y.sharding != s:
            raise ProgramError(f"makes {y} beside {out}; the same axes split both")
    exchanges = plan_exchanges(op, factors, axes, wanted, result) if len(wanted) == len(op.inputs) else ()
    if any(v.margins for v in (*instruction.inputs, *instruction.outputs)):
        _check_margins(instruction, factors, axes)
        exchanges = ()  # exchanges are replaced by margins
    if instruction.exchanges != exchanges:
        raise ProgramError(f"sends {instruction.exchanges} inside; the assignment {axes} needs {exchanges}")
    if out.sharding != result:
        raise ProgramError(f"makes {result} under the assignment {axes}, not {out.sharding}")


def _check_margins(instruction: Compute, factors: Sequence[Factor], axes: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ProgramError unless the operands have the margins that the result and its margins need."""
    op = instruction.operation
    margins_of_dims = {m.dim: m for y in instruction.outputs for m in y.margins}
    mesh = instruction.outputs[0].sharding.mesh
    counts = {name: mesh.group_size(over) for name, over in axes.items() if over}
    split = {f.outputs[0] for f in factors if f.name in counts}
    fitting = all(fits(m, y.tensor, y.sharding) for y in instruction.outputs for m in y.margins)
    if margins_of_dims and not (fitting and keeps_margins(op, factors, counts) and split.issuperset(margins_of_dims)):
        raise ProgramError(f"can't make margins {', '.join(map(str, margins_of_dims.values()))}")
    if not takes_margins(op, factors, counts):
        raise ProgramError("needs elements of other blocks that no margin has")
    for n, x in enumerate(instruction.inputs):
        held = {m.dim: m for m in x.margins}
        for dim, margin in needed_margins(op, factors, n, margins_of_dims, counts).items():
            if dim not in held or not held[dim].covers(margin):
                raise ProgramError(f"operand {x.tensor.name} is {x}; its block needs margins {margin}")


def _check_pending(instruction: Instruction, linear: Linear) -> None:
    pending = [x.sharding.pending for x in instruction.inputs]
    for x, p in zip(instruction.inputs, pending, strict=True):
        if any(kind != "sum" for _, kind in p):
            raise ProgramError(f"operand {x.tensor.name} is a pending {p[0][1]}, which passes no operation")
    waiting = [i for i, p in enumerate(pending) if p]
    if not waiting:
        return
    if any(i not in linear.operands for i in waiting):
        raise ProgramError(f"is not linear in operand {waiting[0]}, a sum pending over {pending[waiting[0]]}")
    if linear.together:
        if len({pending[i] for i in linear.operands}) > 1:
            raise ProgramError("adds operands that are pending over different axes")
    else:
        axes = [a for i in waiting for a, _ in pending[i]]
        if len(axes) != len(set(axes)):
            raise ProgramError(f"multiplies two sums pending over the same axis: {axes}")
        tensors = [x.tensor for x in instruction.inputs]
        if any(tensors.count(tensors[i]) > 1 for i in waiting):
            raise ProgramError("multiplies a pending sum with itself")


def _check_ends(program: Program, computed: Iterable[Value], after: str) -> None:
    known = set(computed)
    for what, values in (("output", program.outputs), ("update of", program.updates)):
        for name, v in values.items():
            if v not in known:
                raise ProgramError(f"after {after}: {what} '{name}' is never computed")
            if v.margins:
                raise ProgramError(f"after {after}: {what} '{name}' is still {v}")
            if v.sharding.pending and not program.is_body:
                raise ProgramError(f"after {after}: {what} '{name}' is still {v}")
    written = [i.variable for i in program.instructions if isinstance(i, Commit)]
    if sorted(written) != sorted(program.updates):
        raise ProgramError(f"after {after}: updates {sorted(program.updates)}, but {sorted(written)} are written")
