"""The layout as a table of dims by mesh axes, and the shards of some tensors."""

from __future__ import annotations

from meshlib.core.graph import FORWARD
from meshlib.core.text import bytes_text
from meshlib.estimation import Estimate
from meshlib.program.instructions import Value
from meshlib.program.records import walk
from meshlib.report.markup import EXACT, paragraph, section, table, tag, text
from meshlib.report.shards import shards

EXAMPLES = 3


def layout(est: Estimate) -> str:
    """The section of the layout."""
    program = est.program
    if not program.layout.rules:
        return section("layout", "Layout", paragraph("Nothing is split: the layout has no rules."))
    notes = "".join(tag("li", text(note)) for note in program.notes)
    pictures = "".join(
        tag("figure", shards(v.sharding, v.tensor.name) + tag("figcaption", _caption(v))) for v in examples(est)
    )
    return section(
        "layout",
        "Layout",
        paragraph(f"<code>{text(program.layout)}</code> on mesh <code>{text(program.mesh)}</code>"),
        _table(est),
        tag("ul", notes) if notes else "",
        paragraph("Tensors of the program; filled is the block of device 0:"),
        tag("div", pictures, class_="row"),
    )


def examples(est: Estimate) -> list[Value]:
    """The largest variable, activation and weight gradient."""
    program = est.program
    groups: dict[str, list[Value]] = {"variables": list(program.variables.values())}
    for i, _, _ in walk(program):
        for v in i.outputs if i.inputs else ():  # skip constants
            gradient = v.tensor in v.tensor.operation.graph.gradient_of
            if gradient or i.region == FORWARD:
                groups.setdefault("gradients" if gradient else "activations", []).append(v)
    largest = []
    for values in groups.values():
        ranked = [v for v in values if v.tensor.shape.ndim]
        if ranked:
            largest.append(max(ranked, key=lambda v: (bool(v.sharding.split_axes), v.tensor.type.shape.size)))
    return largest[:EXAMPLES]


def _caption(v: Value) -> str:
    return f"<b>{text(v.tensor.name)}</b><br>{text(v)}<br>{text(bytes_text(v.local_bytes))} {EXACT} on each device"


def _table(est: Estimate) -> str:
    program = est.program
    axes = program.mesh.axes
    rows = []
    keys = dict.fromkeys((rule.scope, rule.dim) for rule in program.layout.rules)
    for scope, dim in keys:
        rules = [r for r in program.layout.rules if (r.scope, r.dim) == (scope, dim)]
        marks = {axis: ("optional" if r.optional else "split") for r in rules for axis in r.axes}
        cells = [tag("span", marks[a], class_=f"cell {marks[a]}") if a in marks else "" for a in axes]
        rows.append((text(dim), text(f"{scope} only" if scope else "all tensors"), *cells))
    return table(("dim", "of", *map(text, axes)), rows)
