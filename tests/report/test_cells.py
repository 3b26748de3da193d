"""What notebooks and terminals show of each type: a cell of sound HTML, and a repr of at most 200 characters."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import meshlib as mtf
from hardware.slices import Slice
from tests.report.test_report import checked, estimate_of

LONGEST = 200


@cache
def shown() -> dict[str, Any]:
    """One of each type, made of programs with long names."""
    name = "a_very_long_name_of_a_dim_" * 8
    with mtf.Graph() as graph, mtf.scope("outer" * 20), mtf.scope("inner" * 20):
        x = mtf.input("x", [mtf.Dimension("batch", 64), mtf.Dimension(name, 64)])
        w = mtf.variable("w", [mtf.Dimension(name, 64), mtf.Dimension("d", 8)])
        y = mtf.reduce_sum(mtf.einsum([x, w], output_shape=[mtf.Dimension("batch", 64), mtf.Dimension("d", 8)]))
        updates = mtf.optimize.SgdOptimizer(0.1).minimize(y)
        session = mtf.Session({"y": y}, updates)
        program = session.lower("a:4", f"batch:a;{name}:a?")
    small = {"layers": 1, "d_model": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "d_ff": 64, "vocab": 64}
    config = mtf.models.preset("gpt2").replace(**small)

    def build() -> tuple[Any, Any]:
        x = mtf.input("x", "batch:64;d:64")
        return {"y": mtf.reduce_sum(mtf.square(x))}, []

    est = estimate_of()
    return {
        "Dimension": mtf.Dimension("batch", 512), "Shape": x.shape, "Mesh": program.mesh,
        "LayoutRules": program.layout, "Sharding": program.variables[w.name].sharding, "Tensor": x, "Graph": graph,
        "Program": program, "collectives": program.collectives, "memory": program.memory, "device memory": est.memory,
        "Estimate": est, "Profile": est.profile(), "search": mtf.search(build, "v5e-4", workers=1),
        "Serving": mtf.serving(config, "v5e-4", context=64, batches=[1, 8]), "Session": session,
        "Simulation": mtf.simulate(program),
        "Slice": Slice("2*v5e-256"), "Chip": Slice("v5p-128").chip, "TransformerConfig": config,
    }  # fmt: skip


NAMES = ("Dimension", "Shape", "Mesh", "LayoutRules", "Sharding", "Tensor", "Graph", "Program", "collectives", "memory",
         "device memory", "Estimate", "Profile", "search", "Serving", "Session", "Simulation", "Slice", "Chip",
         "TransformerConfig")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_type_has_a_cell_and_a_short_repr(name: str) -> None:
    value = shown()[name]
    short = repr(value)
    assert len(short) <= LONGEST, short
    assert "\n" not in short
    html = value._repr_html_()
    checked(html)
    assert len(html) < 100_000
    assert "href" not in html.partition("</style>")[2]  # a link would lead nowhere in a notebook


# What a person asks of each type: figures that its cell has to show.
ANSWERS: dict[str, list[str]] = {
    "Dimension": ["batch", "512", "256"],
    "Mesh": ["4 devices"],
    "LayoutRules": ["dim 'batch' is split over 'a'".replace("'", "&#x27;"), "where no other dim takes them"],
    "Graph": ["&lt;Graph of", "1 input ", "512"],
    "Program": ["reduce_scatter over a", "a:4", "what each core runs"],
    "memory": ["live at the peak", "variables"],
    "Estimate": ["Fits", "timeline", "memory over the step"],
    "collectives": ["reduce_scatter over a", "avoid:"],
    "Chip": ["459 T/s", "95 GiB"],
    "Slice": ["512 in 2 slices over DCN", "16x16"],
    "search": ["best:", "candidates"],
    "Serving": ["tokens/s", "frontier"],
    "TransformerConfig": ["parameters", "flops a token"],
}


def test_records_have_short_reprs() -> None:
    """Fields that have their defaults are left out, and long collections counted."""
    program, est = shown()["Program"], shown()["Estimate"]
    records = (est.plan, est.schedule, est.rows[0], program.memory_plan, program.collectives[0], program.compiler)
    records += (*program.instructions, *(v for i in program.instructions for v in i.outputs))
    assert [repr(record) for record in records if len(repr(record)) > LONGEST] == []
    assert repr(mtf.layers.Routing(top_k=1)) == "Routing(top_k=1)"
    assert repr(est.plan) == f"UnitPlan(units=<{len(est.plan.units)} entries>)"


@pytest.mark.parametrize("name", ANSWERS)
def test_a_cell_answers_what_one_would_ask(name: str) -> None:
    html = shown()[name]._repr_html_()
    assert [text for text in ANSWERS[name] if text not in html] == []
