"""Repeated parts of listings, tables and pages are shown once, and nothing else is left out."""

from __future__ import annotations

import re
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

import meshlib as mtf
from meshlib.core.folding import RepeatedLines, runs
from meshlib.report.links import PageAnchors
from meshlib.report.page import page
from meshlib.report.timeline import layers_of

LAYERS = 40


@cache
def program_of(layers: int = LAYERS, odd: int = -1) -> mtf.Program:
    """A chain of dense layers that are written one after another, with the update; `odd`: one that is wider."""
    batch, d = mtf.Dimension("batch", 64), mtf.Dimension("d", 128)
    with mtf.Graph():
        h = mtf.input("x", [batch, d])
        for n in range(layers):
            f = mtf.Dimension("f", 512 if n == odd else 256)
            inner = mtf.relu(mtf.einsum([h, mtf.variable(f"layer_{n}/wi", [d, f])], output_shape=[batch, f]))
            h = h + mtf.einsum([inner, mtf.variable(f"layer_{n}/wo", [f, d])], output_shape=[batch, d])
        loss = mtf.reduce_mean(mtf.square(h), name="loss")
        updates = mtf.optimize.AdamOptimizer(1e-3).minimize(loss)
    return mtf.lower({"loss": loss}, updates, mesh="rows:2;cols:4", layout="batch:rows;f:cols")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 6))
def test_runs_cover_all_lines_once_and_repeat(lines: list[str], least: int) -> None:
    at = 0
    for run in runs(lines, least):
        assert run.first == at
        once = lines[at : at + run.length]
        assert lines[at : at + run.length * run.times] == once * run.times
        assert run.times == 1 or run.length * (run.times - 1) >= least
        at += run.length * run.times
    assert at == len(lines)


def test_the_run_that_saves_most_is_folded() -> None:
    inner = [*"aaab"] * 5
    assert list(runs(["x", *inner, "y"], 4)) == [
        RepeatedLines(0, 1, 1),
        RepeatedLines(1, 4, 5),
        RepeatedLines(21, 1, 1),
    ]


def test_a_listing_shows_equal_layers_once() -> None:
    program = program_of()
    text = str(program)
    assert len(text.splitlines()) < len(program.instructions) / 4
    assert f"x{LAYERS}, to %80 layer_39/wo; the first:" in text
    assert {*re.findall(r"layer_\d+/wi: f32", text)} == {"layer_0/wi: f32"}


def test_a_layer_that_differs_is_listed() -> None:
    text = str(program_of(odd=20))
    assert re.search(r"layer_20/wi: f32\[d:128, f:512@cols\] = variable", text)
    assert f"x{LAYERS}" not in text
    assert "x20, to %40 layer_19/wo; the first:" in text


def test_collectives_of_equal_layers_are_one_row() -> None:
    program = program_of()
    lines = str(program.collectives).splitlines()
    assert len(lines) < 40 < len(program.collectives)
    folded = [
        int(times or 1)
        for times in re.findall(r"^\w+ +(?:all|reduce)_\w+ +\S+ +\S+(?: x(\d+))? ", "\n".join(lines), re.M)
    ]
    assert sum(folded) == len(program.collectives)
    odd = program_of(odd=20)
    assert "x39" in str(odd.memory)
    assert len(str(odd.memory).splitlines()) < 60


def test_a_page_about_unrolled_layers_is_small() -> None:
    est = mtf.estimate(program_of(), "v5e-8")
    html = page(est).replace("<wbr>", "")
    assert len(html) < 400_000
    assert f"layer_0/wi x{LAYERS}" in html
    anchors = PageAnchors.of(est)
    assert sum(len(names) for names in anchors.rows) == len({part.name for part in est.profile().parts})
    parts = layers_of(est.schedule)
    assert parts
    assert all(part.times >= LAYERS - 4 for part in parts)
    assert f"One of {parts[0].times} alike parts" in html
