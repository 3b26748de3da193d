"""Why a compiled program communicates, as far as its text shows: whose data, which consumer, which dim is split."""

from __future__ import annotations

import re
from collections.abc import Iterator

from layouts.step_kinds import STEP_KINDS
from meshlib.jax.hlo.collectives import HloCollective
from meshlib.jax.hlo.text import Computation, HloInstruction, Module
from meshlib.jax.hlo.walk import Frame, branches

# Primitives of collectives that users or libraries call explicitly -> JAX function.
WRITTEN = {
    "psum": "lax.psum", "psum2": "lax.psum", "psum_invariant": "lax.psum", "pmax": "lax.pmax", "pmin": "lax.pmin",
    "all_gather": "lax.all_gather", "all_gather_invariant": "lax.all_gather", "reduce_scatter": "lax.psum_scatter",
    "psum_scatter": "lax.psum_scatter", "all_to_all": "lax.all_to_all", "ppermute": "lax.ppermute",
    "pbroadcast": "lax.pbroadcast", "ragged_all_to_all": "lax.ragged_all_to_all",
}  # fmt: skip
_SHOWS = (
    "convert", "copy", "bitcast", "reshape", "transpose", "copy-start", "copy-done", "slice", "dynamic-slice",
    "optimization-barrier", "reduce-precision", "bitcast-convert", "slice-start", "slice-done", "async-done",
)  # fmt: skip
_PRODUCTS = ("dot_general", "conv_general_dilated", "dot", "ragged_dot_general", "ragged_dot")
_ADDS = {"add": "sums", "maximum": "maxima", "minimum": "minima", "and": "conjunctions", "or": "disjunctions"}


def phase_of(op_name: str) -> str:
    """ "backward", "recomputed" or "forward" in a program that JAX differentiates; "" if the text does not say.

    >>> phase_of("jit(f)/transpose(jvp())/dot_general"), phase_of("jit(f)/add")
    ('backward', '')
    """
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


def reason_of(module: Module, c: HloCollective, axes: str) -> str:
    """One sentence: what is split over which axes, and which consumer needs another sharding.

    Args:
      module: that holds the collective.
      c: the collective.
      axes: the mesh axes that it runs over, as text.
    """
    primitive = _primitive(c.op_name)
    merged = f" ({len(c.operands)} values in one)" if len(c.operands) > 1 else ""
    if primitive in WRITTEN:
        text = f"written in the program: {WRITTEN[primitive]} of {_subject(module, c)}"
    else:
        kind = STEP_KINDS[c.kind]
        along = "" if c.dim is None else f" along dim {c.dim}"
        names = {"axes": axes, "along": along}
        if kind.reduces:
            names |= _of_sum(module, c, primitive)
        else:
            names |= {"tensor": _subject(module, c), "user": _reader(c)}
        text = kind.compiled_why.format_map(names)
    if c.sliced:
        text += "; each device reads its slice alone, and a reduce_scatter would send half"
    return text + merged


def _of_sum(module: Module, c: HloCollective, primitive: str) -> dict[str, str]:
    """Names for the reason of a sum: its partial results, the primitive that makes them, how it uses the split dim."""
    i = c.frame.holder.instructions[c.name]
    adder = module.computations.get(i.called("to_apply") or "")
    what = _ADDS.get(adder.root.opcode, "results") if adder is not None and adder.root is not None else "sums"
    makers = dict.fromkeys(_made_by(module, c))
    by = next((m for m in makers if m in _PRODUCTS), primitive or next(iter(makers), ""))
    reduces = "contracts" if by in _PRODUCTS else "reduces over"
    return {"sums": what, "maker": by or "an operation without a name", "reduces": reduces}


def _made_by(module: Module, c: HloCollective) -> Iterator[str]:
    """Primitives that produce the operands."""
    holder = c.frame.holder
    for x in holder.instructions[c.name].operands:
        i = holder.instructions.get(x)
        if i is not None and (name := _primitive(i.op_name)):
            yield name
    if name := _primitive(c.op_name):
        yield name


def _subject(module: Module, c: HloCollective) -> str:
    """The data sent: an argument of the program by name, or the operation that produces it."""
    operands = c.frame.holder.instructions[c.name].operands
    return origin(module, c.frame, operands[0]) if operands else "a value"


def _reader(c: HloCollective) -> str:
    """The operation that uses the result."""
    own = _primitive(c.op_name)
    waiting, seen = [c.name], set[str]()
    while waiting:
        for r in c.frame.holder.users.get(waiting.pop(0), ()):
            if r.name in seen:
                continue
            seen.add(r.name)
            name = _primitive(r.op_name)
            if name and r.opcode not in (*_SHOWS, "get-tuple-element", "tuple"):
                return name
            waiting.append(r.name)
    return own or "an operation without a name"


def origin(module: Module, frame: Frame, name: str) -> str:
    """Origin of a value behind casts and copies: "argument 'w'", "a carry of the loop" or "the result of tanh"."""
    for _ in range(200):
        i = frame.holder.instructions.get(name)
        if i is None:
            return "a value"
        if i.opcode == "parameter":
            outer = _outside(frame, int(i.operands[0]))
            if outer is None:
                return f"argument '{i.op_name}'" if i.op_name else f"argument {i.operands[0]}"
            frame, name = outer
        elif i.opcode in _SHOWS:
            name = i.operands[0]
        elif i.opcode == "get-tuple-element":
            step = _element(module, frame, i)
            if isinstance(step, str):
                return step
            frame, name = step
        elif i.opcode == "recv":
            return f"a value from another {'slice' if 'is_host_transfer=true' in i.attributes else 'device'}"
        elif (root := _behind(module, i)) is not None:
            frame, name = Frame(module.computations[i.called("calls") or ""], i, frame), root.name
        elif primitive := _primitive(i.op_name):
            return f"the result of {primitive}"
        elif i.operands and i.opcode not in ("constant", "iota"):
            name = i.operands[0]  # an instruction that the compiler added
        else:
            return "a value without a name"
    return "a value"


def _behind(module: Module, i: HloInstruction) -> HloInstruction | None:
    """The root of a fusion that only casts, copies or slices an operand, or that has no name of its own."""
    inner = module.computations.get(i.called("calls") or "") if i.opcode == "fusion" else None
    root = inner.root if inner is not None else None
    return root if root is not None and (root.opcode in _SHOWS or not _primitive(i.op_name)) else None


def _outside(frame: Frame, number: int) -> tuple[Frame, str] | None:
    """The caller's operand for a parameter of a called computation; None in the entry computation."""
    if frame.call is None or frame.parent is None:
        return None
    operands = frame.call.operands
    if frame.call.opcode == "conditional":
        number = 1 + branches(frame.call).index(frame.holder.name)
    return frame.parent, operands[min(number, len(operands) - 1)]


def _value_of_loop(body: Computation, around: Frame, loop: HloInstruction, n: int) -> tuple[Frame, str] | str:
    """The initial value of element `n` of a loop's state if trips pass it on unchanged, otherwise its description."""
    root = body.root
    back = body.instructions.get(root.operands[n]) if root is not None and n < len(root.operands) else None
    while back is not None and back.opcode in ("copy", "bitcast"):
        back = body.instructions.get(back.operands[0])
    if back is None or back.opcode != "get-tuple-element" or back.index != n:
        return "a carry of the loop"
    begin = around.holder.instructions.get(loop.operands[0])
    if begin is not None and begin.opcode == "tuple":
        return around, begin.operands[n]
    return "a value of the loop"


def _element(module: Module, frame: Frame, i: HloInstruction) -> tuple[Frame, str] | str:
    """The value behind an element of a tuple, or its description."""
    source = frame.holder.instructions.get(i.operands[0])
    n = i.index or 0
    if source is None:
        return "a value"
    if source.opcode == "tuple":
        return frame, source.operands[n]
    if source.opcode == "parameter" and frame.call is not None and frame.parent is not None:
        if frame.call.opcode == "conditional" and (outer := _outside(frame, 0)) is not None:
            given = outer[0].holder.instructions.get(outer[1])
            return (outer[0], given.operands[n]) if given is not None and given.opcode == "tuple" else outer
        if frame.call.opcode != "while":
            return frame.parent, frame.call.operands[0]
        return _value_of_loop(frame.holder, frame.parent, frame.call, n)
    if source.opcode in ("while", "conditional"):
        return f"a result of a {'loop' if source.opcode == 'while' else 'branch'}"
    if primitive := _primitive(i.op_name or source.op_name):
        return f"the result of {primitive}"
    if (root := _behind(module, source)) is not None and n < len(root.operands):
        return Frame(module.computations[source.called("calls") or ""], source, frame), root.operands[n]
    return (frame, source.operands[min(n, len(source.operands) - 1)]) if source.operands else "a value without a name"


def _primitive(op_name: str) -> str:
    """The last part of a path of scopes; "" for the name of an argument.

    >>> _primitive("jit(f)/transpose(jvp())/dot_general")
    'dot_general'
    """
    last = op_name.rpartition("/")[2]
    return last if re.fullmatch(r"[a-z_][\w.\-]*", last) and "/" in op_name else ""
