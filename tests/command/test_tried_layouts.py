"""The layouts of a plan against all layouts with all levels of rematerialisation, lowered one by one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from math import inf

import pytest

import meshlib as mtf
from hardware.chips import CHIPS
from hardware.slices import Slice
from meshlib.command import tried_layouts
from meshlib.command.choices import REMAT
from meshlib.command.plan import text_of
from meshlib.command.subject import of_model
from meshlib.command.tried_layouts import (
    WholeRunOptions,
    _TooMuch,
    planned,
    plans_of,
    timed,
    with_more_rematerialisation,
)
from meshlib.core.text import bytes_text
from meshlib.estimation.memory.device_memory import memory_on
from meshlib.report.verdict import headline
from tests.effort import some


def test_recomputation_that_was_tried_in_vain_is_no_remedy() -> None:
    config = mtf.models.preset("gpt2").replace(layers=2)
    subject = of_model(config, {"batch": 8, "length": 256}, {}, mtf.XLA_TPU, given_batch=True)
    where = Slice("test-8", replace(CHIPS["v5e"], name="test", hbm_bytes=1 << 24, hbm_reserved_bytes=0))
    kept, full = (planned(subject, where, "fsdp", "fsdp:8", remat=level) for level in ("none", "full"))
    assert "recompute what the loop keeps" in text_of(subject, where, [kept, full])
    assert "recompute what the loop keeps" not in text_of(subject, where, [kept, replace(full, memory=kept.memory)])


@pytest.mark.parametrize("name", some(["gpt2", "mixtral-8x7b", "switch-base-8"], ["gpt2"]))
def test_no_layout_fits_if_a_plan_does_not(name: str) -> None:
    """Whatever the memory: a plan fits if any layout does, is then as fast as the fastest, else the smallest."""
    config = mtf.models.preset(name).replace(layers=2)
    subject = of_model(config, {"batch": 8, "length": 256}, {}, mtf.XLA_TPU, given_batch=True)
    where, layouts = Slice("v5e-8"), mtf.models.usual_layouts(config, 8, 8)
    each = [planned(subject, where, *layout, remat=level) for layout in layouts for level in REMAT]
    needed = sorted(plan.memory.needed_bytes for plan in each if plan.memory is not None)
    for capacity in (0.5 * needed[0], 1.0001 * needed[0], 1.0001 * needed[len(needed) // 2]):
        chip = replace(CHIPS["v5e"], name="test", hbm_bytes=int(capacity), hbm_reserved_bytes=0)
        said: dict[int, str] = {}
        progress = partial(_note, said)
        small = Slice("test-8", chip)
        best = plans_of([(subject, layouts)], small, None, progress=progress)[1][0]
        assert best.memory is not None
        memories = [(memory_on(plan.memory.program, small), plan.est) for plan in each if plan.memory is not None]
        assert (
            best.fits
            == any("; fits: " in text for text in said.values())
            == ("layouts; none fits" not in said.values())
        )
        assert best.fits == any(memory.fits for memory, _ in memories)
        fitting = [est.step_seconds for memory, est in memories if memory.fits and est is not None]
        if best.est is not None and best.fits:
            assert best.est.step_seconds <= min(fitting, default=inf) * (1 + 1e-9)
        else:
            least = min(memory.needed_bytes for memory, _ in memories)
            assert best.memory.needed_bytes == least, "the layout closest to fitting"


def test_a_lowering_ends_once_its_loops_show_that_it_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no layout fits, those are lowered wholly that may need the least memory."""
    config = mtf.models.preset("t5-small").replace(layers=2)
    subject = of_model(config, {"batch": 8, "length": 1024}, {}, mtf.XLA_TPU, given_batch=True)
    where, layouts = Slice("v5e-8"), mtf.models.usual_layouts(config, 8, 8)
    each = [planned(subject, where, *layout, remat=level) for layout in layouts for level in REMAT]
    least = min(each, key=lambda plan: inf if plan.memory is None else plan.memory.needed_bytes)
    assert least.memory is not None
    chip = replace(CHIPS["v5e"], name="test", hbm_bytes=int(0.7 * least.memory.needed_bytes), hbm_reserved_bytes=0)
    ended: list[float] = []

    class Ended(_TooMuch):
        def __init__(self, least_bytes: float) -> None:
            super().__init__(least_bytes)
            ended.append(least_bytes)

    monkeypatch.setattr(tried_layouts, "_TooMuch", Ended)
    subject._sessions.clear()  # which have the programs
    plans = plans_of([(subject, layouts)], Slice("test-8", chip), None)[1]
    assert (plans[0].name, plans[0].mesh, plans[0].choices) == (least.name, least.mesh, least.choices)
    needed = {(p.name, p.mesh, str(p.choices)): p.memory.needed_bytes for p in each if p.memory is not None}
    bounds = {(p.name, p.mesh, str(p.choices)): p.least_bytes for p in plans if p.least_bytes}
    assert all(int(chip.hbm_bytes) < bound <= needed[key] for key, bound in bounds.items())
    assert {*ended} & {*bounds.values()}


def test_the_likeliest_layout_of_each_batch_is_tried_first() -> None:
    """Under memory for the state of full sharding alone, the first layout tried fits; the largest batch is planned."""
    config = mtf.models.preset("gpt2").replace(layers=2)
    batches = [of_model(config, {"batch": n, "length": 512}, {}, mtf.XLA_TPU, given_batch=True) for n in (64, 8)]
    layouts = [("data", "data:8"), ("zero1", "data:8"), ("fsdp", "fsdp:8")]
    alone = [planned(subject, Slice("v5e-8"), *layouts[2]) for subject in batches]
    needed = [plan.memory.needed_bytes for plan in alone if plan.memory is not None]
    for n, subject in enumerate(batches):
        chip = replace(CHIPS["v5e"], name="test", hbm_bytes=int(1.01 * needed[n]), hbm_reserved_bytes=0)
        said: dict[int, str] = {}
        each = [(each, layouts) for each in batches]
        best, plans = plans_of(each, Slice("test-8", chip), "full", progress=partial(_note, said))
        assert (best, plans[0].name) == (subject, "fsdp")
        assert said[n].startswith("layouts; fits: fsdp")


def test_tables_and_reports_show_the_memory_that_decides() -> None:
    """Of a layout whose exact peak fits, and whose compiled step does not."""
    config = mtf.models.preset("gpt2").replace(layers=2)
    subject = of_model(config, {"batch": 64, "length": 512}, {}, mtf.XLA_TPU, given_batch=True)
    memory = planned(subject, Slice("v5e-8"), "fsdp", "fsdp:8", remat="full").memory
    assert memory is not None
    capacity = (memory.peak_bytes + memory.needed_bytes) // 2
    where = Slice("test-8", replace(CHIPS["v5e"], name="test", hbm_bytes=capacity, hbm_reserved_bytes=0))
    _, plans = plans_of([(subject, [("fsdp", "fsdp:8"), ("data", "data:8")])], where, "full")
    plans[0] = timed(subject, where, plans[0], WholeRunOptions({}))
    memory = memory_on(memory.program, where)
    needs, text = bytes_text(memory.needed_bytes), text_of(subject, where, plans)
    assert bytes_text(memory.peak_bytes) != needs
    assert f"memory     needs {needs}* of {bytes_text(capacity)} " in text
    assert re.search(rf"^1 .* {re.escape(needs)} ! +full +fsdp ", text, re.MULTILINE)
    assert "needs*" in text
    est = plans[0].est
    assert est is not None
    assert headline(est).startswith(f"Does not fit: needs {needs} of {bytes_text(capacity)} on each device, ")
    assert est.memory.message.startswith(f"does not fit: each device of test-8 has {bytes_text(capacity)} ({capacity} ")
    assert needs in str(mtf.scaling(lambda where: est.program, [where]))
    assert 'class="k-added"' in est._repr_html_(), "what compilation adds to the peak, in the bar"


def _note(said: dict[int, str], done: int, total: int, text: str) -> None:
    """Keep what a progress bar shows."""
    said[len(said)] = text


def test_beside_a_tight_plan_the_fastest_of_which_a_whole_run_fits_is_named() -> None:
    config = mtf.models.preset("gpt2").replace(layers=2, vocab=4096, heads=8)
    subject = of_model(config, {"batch": 64, "length": 1024}, {}, mtf.XLA_TPU, given_batch=True)
    layouts = [("fsdp", "fsdp:8"), ("tensor", "tensor:8")]
    fastest = planned(subject, Slice("v5e-8"), *layouts[0], remat="none").est
    assert fastest is not None
    for capacity, verdict in ((fastest.memory.run_bytes - 1, "tight"), (2 * fastest.memory.run_bytes, "yes")):
        chip = replace(CHIPS["v5e"], name="test", hbm_bytes=int(capacity), hbm_reserved_bytes=0)
        where = Slice("test-8", chip)
        _, plans = plans_of([(subject, layouts)], where, None)
        assert plans[0].memory is not None
        assert plans[0].memory.verdict == verdict
        plans = sorted(with_more_rematerialisation(subject, where, plans), key=lambda plan: plan.order)
        safe = [plan for plan in plans if plan.est is not None and plan.est.memory.verdict == "yes"]
        named = [f"  safer      fsdp on fsdp:8, remat {safe[0].choices['remat']}: "] if verdict == "tight" else []
        text = text_of(subject, where, plans)
        lines = [line for line in text.splitlines() if "safer" in line]
        assert [line[: len(name)] for line, name in zip(lines, named, strict=True)] == named
        assert "--remat full" not in text, "more rematerialisation is what the line above names"
        alone = text_of(subject, where, plans[:1])
        assert ("--remat full" in alone) == (verdict == "tight")
