"""Programs as text: the listing of one core's instructions, and the table of collectives with reasons."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from layouts.plan import gathered_axes
from meshlib.core.errors import GraphError
from meshlib.core.folding import RepeatedLines, alike, name_pattern, runs, times_text
from meshlib.core.opdef import Kind
from meshlib.core.text import bytes_text, counted, fitted_to, grid, too_wide
from meshlib.program.instructions import Commit, Compute, Instruction, Loop, Move, Resident, Value
from meshlib.program.records import Collective, Program, require_program


def listing(program: Program) -> str:
    """One line per instruction: result, its global type, operation, local bytes, source line.

    Repeated runs of instructions, such as unrolled layers, are listed once, with "x32".
    """
    head = f"program on {program.headline}, precision {program.precision}"
    return "\n".join([head, *(f"note: {n}" for n in program.notes), *_instructions(program)])


def _instructions(program: Program) -> list[str]:
    names: dict[Value, str] = {}
    for i in program.instructions:
        for y in i.outputs:
            names[y] = f"%{len(names)}"
    lines: list[str] = []
    region, width = "", max((len(n) for n in names.values()), default=0)
    for run in runs([_likeness(i) for i in program.instructions]):
        margin = "  "
        if run.times > 1:
            lines.append(f"  x{run.times}, to {_ending(program.instructions, run, names)}; the first:")
            margin = "    "
        for i in program.instructions[run.first : run.first + run.length]:
            if i.region != region:
                region = i.region
                lines.append(f"{region}:" if run.times == 1 else f"  {region}:")
            lines.append(margin + _line(i, names, width))
            if isinstance(i, Loop):
                lines += [f"{margin}  {line}" for line in _instructions(i.body)]
    fetched = ", ".join(f"{k} = {names[v]}" for k, v in program.outputs.items())
    lines.append(f"returns {fetched or 'nothing'}")
    return lines


def _likeness(i: Instruction) -> Hashable:
    """Grouping key of an instruction: everything in its line except the numbers in names."""
    types = tuple(
        [(name_pattern(v.tensor.name), v.tensor.dtype, v.sharding, v.margins) for v in (*i.inputs, *i.outputs)]
    )
    steps: Hashable = ()
    match i:
        case Move():
            steps = tuple([(s.kind, s.axes, s.dim, s.to_dim) for s in i.steps])
        case Compute():
            steps = i.assignment
        case Loop():
            steps = (i.trips, *map(_likeness, i.body.instructions))
    sent = tuple([(t.sent.sent_bytes, name_pattern(t.reason.why)) for t in i.transfers])
    return (type(i), i.opcode, i.region, types, steps, sent, name_pattern(i.operation.source))


def _ending(instructions: Sequence[Instruction], run: RepeatedLines, names: Mapping[Value, str]) -> str:
    """The end of a repeated run: its last result, or the last variable that it writes."""
    last = instructions[run.first + run.length * run.times - 1]
    return f"{names[last.outputs[0]]} {last.outputs[0].tensor.name}" if last.outputs else last.operation.name


def _line(i: Instruction, names: dict[Value, str], width: int) -> str:
    operands = ", ".join(f"{names[x]} {x.tensor.name}" for x in i.inputs)
    if isinstance(i, Commit):
        return f"{i.variable} <- {operands}  ({i.operation.source})"
    text = i.opcode if isinstance(i, Resident) else f"{i.opcode}({operands})"
    if isinstance(i, Move):
        where = "".join(f" {s.dim}" + (f" to {s.to_dim}" if s.to_dim else "") for s in i.steps[:1] if s.dim)
        if i.step_kind.gathers and not where:
            where = "".join(f" {dim}" for dim, _ in gathered_axes(i.steps[0]))
        text += f" over {'+'.join(i.steps[0].axes)}{where}"
    elif isinstance(i, Loop):
        text += f", {_trips(i)} of the body below"
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
    """The collectives as a table, with reasons; bytes are exact.

    Collectives that differ only in numbers of names, such as those of unrolled layers, are one row: "x32", with the
    bytes of each.

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
    groups = alike(collectives, _alikeness)
    rows = [
        (
            c.phase,
            c.kind,
            "+".join(c.axes),
            times_text(c.tensor, len(group)),
            c.dtype,
            bytes_text(c.payload_bytes),
            bytes_text(c.sent_bytes),
            str(c.count),
            c.source,
        )
        for group in groups
        for c in group[:1]
    ]
    with fitted_to(None):
        first, *shown = grid([head, *rows])
    stacked = too_wide([first, *shown])
    if stacked:  # long names go below the figures
        figures = [n for n, name in enumerate(head) if name not in ("of", "line")]
        first, *shown = grid([[row[n] for n in figures] for row in (head, *rows)])
    lines = [first]
    for group, row in zip(groups, shown, strict=True):
        lines += [row, f"    of {times_text(group[0].tensor, len(group))}, {group[0].source}"] if stacked else [row]
        lines += [f"    because {group[0].reason}", f"    avoid: {group[0].avoid}"]
    launches = len({c.launch for c in collectives})
    total = bytes_text(sum(c.sent_bytes * c.count for c in collectives))
    values = f"{len(collectives)} value{'s' * (len(collectives) > 1)}"
    lines.append(f"{values} in {launches} launch{'es' * (launches > 1)}, {total} sent by each core (exact)")
    return "\n".join(lines)


def _alikeness(c: Collective) -> Hashable:
    """Grouping key of collectives: everything in the row except the numbers in names."""
    named = tuple([name_pattern(text) for text in (c.tensor, c.source, c.reason, c.avoid)])
    return (c.phase, c.kind, c.axes, c.dim, c.dtype, c.payload_bytes, c.sent_bytes, c.count, *named)


def explain(program: Program) -> str:
    """The effects of the layout on the program, in words: notes, collectives with reasons, memory.

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


def _trips(i: Loop) -> str:
    """Number of runs of a loop's body: for a branch, the trips of the enclosing loop in which it runs."""
    branch = i.record.branch
    if branch is None:
        return ("at most " if i.going else "") + counted(i.trips, "trip")
    around = len(branch.active.indices)
    return f"a branch that a device takes in {i.runs(around)} of {around} trips"
