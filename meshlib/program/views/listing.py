"""Programs as text: the listing of what one core runs, and the table of collectives with their reasons."""

from __future__ import annotations

from collections.abc import Sequence

from layouts.plan import gathered_axes
from meshlib.core.errors import GraphError
from meshlib.core.opdef import Kind
from meshlib.core.text import bytes_text, grid
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.records import Collective, Program, require_program


def listing(program: Program) -> str:
    """One line per instruction: result, its global type, what makes it, local bytes, source line."""
    head = f"program on {program.headline}, precision {program.precision}"
    return "\n".join([head, *(f"note: {n}" for n in program.notes), *_instructions(program)])


def _instructions(program: Program) -> list[str]:
    names: dict[Value, str] = {}
    for i in program.instructions:
        for y in i.outputs:
            names[y] = f"%{len(names)}"
    lines: list[str] = []
    region, width = "", max((len(n) for n in names.values()), default=0)
    for i in program.instructions:
        if i.region != region:
            region = i.region
            lines.append(f"{region}:")
        lines.append("  " + _line(i, names, width))
        if isinstance(i, Loop):
            lines += ["    " + line for line in _instructions(i.body)]
    fetched = ", ".join(f"{k} = {names[v]}" for k, v in program.outputs.items())
    lines.append(f"returns {fetched or 'nothing'}")
    return lines


def _line(i: Instruction, names: dict[Value, str], width: int) -> str:
    operands = ", ".join(f"{names[x]} {x.tensor.name}" for x in i.inputs)
    if isinstance(i, Commit):
        return f"{i.variable} <- {operands}  ({i.operation.source})"
    text = i.opcode if isinstance(i, Resident) else f"{i.opcode}({operands})"
    if isinstance(i, Move):
        where = "".join(f" {s.dim}" + (f" to {s.to_dim}" if s.to_dim else "") for s in i.steps[:1] if s.dim)
        if i.opcode == "all_gather" and not where:
            where = "".join(f" {dim}" for dim, _ in gathered_axes(i.steps[0]))
        text += f" over {'+'.join(i.steps[0].axes)}{where}"
    elif isinstance(i, Loop):
        text += f", {f'at most {i.trips}' if i.going else i.trips} trips of the body below"
    elif isinstance(i, Compute):
        split = ", ".join(f"{f}@{a}" for a, f in i.assignment)
        text += f" split {split}" if split else ""
        if i.operation.opdef.kind is Kind.COPY:
            text += f", copies {bytes_text(i.outputs[0].local_bytes)} {i.opcode.replace('_', ' the ')}"
    if i.transfers:
        text += f", sends {bytes_text(i.sent_bytes)}: " + "; ".join(t.reason.why for t in i.transfers)
    results = " and ".join(f"{names[y]:<{width}} {y.tensor.name}: {y}" for y in i.outputs)
    local = bytes_text(sum(y.local_bytes for y in i.outputs))
    return f"{results} = {text}  [{local} a core, group {i.group}]  ({i.operation.source})"


def collectives_table(collectives: Sequence[Collective]) -> str:
    """The collectives as a table, largest senders' reasons included; bytes are exact.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_sum(mtf.input("x", "batch:64;d:4"), output_shape="d:4")
      ...     program = mtf.lower({"y": y}, mesh="rows:2", layout="batch:rows")
      >>> print(mtf.collectives_table(program.collectives).splitlines()[-1])
      1 value in 1 launch, 16 B sent by each core (exact)
    """
    if not isinstance(collectives, Sequence) or not all(isinstance(c, Collective) for c in collectives):
        raise GraphError(f"collectives_table: expected program.collectives, got {type(collectives).__name__}")
    if not collectives:
        return "no collectives: every core works alone"
    head = ("phase", "collective", "over", "of", "dtype", "payload", "sent a core", "count", "line")
    rows = [
        (
            c.phase,
            c.kind,
            "+".join(c.axes),
            c.tensor,
            c.dtype,
            bytes_text(c.payload_bytes),
            bytes_text(c.sent_bytes),
            str(c.count),
            c.source,
        )
        for c in collectives
    ]
    first, *shown = grid([head, *rows])
    lines = [first]
    for c, row in zip(collectives, shown, strict=True):
        lines += [row, f"    because {c.reason}", f"    avoid: {c.avoid}"]
    launches = len({c.launch for c in collectives})
    total = bytes_text(sum(c.sent_bytes * c.count for c in collectives))
    values = f"{len(collectives)} value{'s' * (len(collectives) > 1)}"
    lines.append(f"{values} in {launches} launch{'es' * (launches > 1)}, {total} sent by each core (exact)")
    return "\n".join(lines)


def explain(program: Program) -> str:
    """What the layout does to the program, in words: notes, collectives with reasons, memory.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("batch", 8)])
      ...     total = mtf.reduce_sum(x, name="total")
      >>> print(mtf.explain(mtf.lower({"total": total}, mesh="rows:2", layout="batch:rows")))  # doctest: +ELLIPSIS
      1 program on mesh rows:2 (2 cores), layout batch:rows
      ...
    """
    require_program(program, "explain")
    lines = [f"1 program on {program.headline}", *(f"note: {n}" for n in program.notes)]
    table = collectives_table(program.collectives)
    return "\n".join([*lines, table, f"choice of strategies: {program.choice}", str(program.memory)])
