"""The report: one file; nothing overflows, dark or light, on paper or without scripts; figures of the estimate."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

import meshlib as mtf
from hardware import CHIPS, Slice
from meshlib.program.analysis.memory import KINDS
from meshlib.report.alternatives import Alternative, alternatives, pareto_front, scatter
from meshlib.report.collectives import causes_of
from meshlib.report.links import PageAnchors
from meshlib.report.memory import area, memory_over_time
from meshlib.report.operations import work_by_name
from meshlib.report.page import page
from meshlib.report.shards import grid_of, shards
from meshlib.report.stages import pipelines_of, stages
from meshlib.report.svg import LETTER
from meshlib.report.timeline import CORE, bars_of, loops_of
from meshlib.report.torus import links_of, loads, position
from tests.browser import Browser, browser_path

VOID = {"meta", "link", "br", "wbr", "line", "rect", "circle", "path"}


@cache
def estimate_of(layers: int = 4) -> mtf.Estimate:
    """A Transformer of that many layers on eight chips: loops, collectives, all kinds of memory."""
    config = mtf.models.preset("llama3.1-8b").replace(
        layers=layers, d_model=512, heads=8, kv_heads=8, head_dim=64, d_ff=1024, vocab=1024
    )
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=8, length=512)
        program = mtf.lower(outputs, updates, mesh="data:2;tensor:4", layout="batch:data;heads:tensor;d_ff:tensor")
    return mtf.estimate(program, "v5e-8")


@cache
def of_images() -> mtf.Estimate:
    """A small ResNet on four planes of chips: unrolled blocks, merged collectives."""
    config = mtf.models.image_preset("resnet-18").replace(height=64, width=64, classes=16)
    with mtf.Graph():
        outputs, updates = mtf.models.image_step(config, 256, mtf.optimize.MomentumOptimizer(0.1))
        program = mtf.lower(outputs, updates, mesh="data:64", layout="batch:data")
    return mtf.estimate(program, "v5p-128")


@cache
def pipeline_of(schedule: str) -> mtf.Estimate:
    """A Transformer in four stages on four chips, trained in eight microbatches."""
    config = mtf.models.preset("llama3.1-8b").replace(
        layers=4, d_model=256, heads=4, kv_heads=4, head_dim=64, d_ff=512, vocab=512
    )
    stages = mtf.models.Pipeline(stages=4, microbatches=8, schedule=schedule)
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, batch=8, length=256, remat="full", pipeline=stages)
        program = mtf.lower(outputs, updates, mesh="pipe:4", layout="stage:pipe")
    return mtf.estimate(program, "v5e-4")


class Checked(HTMLParser):
    """Elements are closed in order; `ids` and `links` are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"]] if given.get("id") else []
        self.links += [given["href"]] if tag == "a" and given.get("href") else []
        self.loaded += [v for k, v in attrs if k in ("src", "srcset") or (tag == "link" and k == "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"{tag} is closed where {self.open[-3:]} are open"


def checked(html: str) -> Checked:
    parser = Checked()
    parser.feed(html)
    assert not parser.open
    return parser


def test_the_page_is_whole_and_every_link_leads_somewhere():
    seen = checked(page(estimate_of()))
    assert len(seen.ids) == len(set(seen.ids))
    assert len(seen.links) > 50
    assert {link for link in seen.links if link.removeprefix("#") not in seen.ids} == set()


def test_the_page_loads_nothing_from_elsewhere():
    html = page(estimate_of())
    assert checked(html).loaded == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", html)


def test_one_hundred_layers_take_less_than_a_megabyte():
    assert len(page(estimate_of(100)).encode()) < 1_000_000


def test_names_are_escaped():
    with mtf.Graph():
        x = mtf.input("x", "batch:8;d:8")
        program = mtf.lower({"y": mtf.reduce_sum(x)}, mesh="a:8", layout="batch:a")
    html = page(mtf.estimate(program, "v5e-8"), "<script>alert(1)</script>")
    assert "<script>alert" not in html


@pytest.mark.parametrize(
    ("est", "rate"), [(estimate_of, r"[\d.]+ [kM] tokens/s"), (of_images, r"[\d.]+ [kM] images/s")]
)
def test_cards_count_what_a_step_works_on(est, rate):
    html = page(est())
    assert re.search(rate, html)
    assert re.search(r"\$[\d.]+ a (billion tokens|million images)", html)
    assert not re.search(r"more and \d+ more", html)


@pytest.mark.parametrize("path", [None, "", 3])
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(mtf.GraphError, match="path must be that of a file"):
        estimate_of().report(path)


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(mtf.GraphError, match=r"no/plan\.html"):
        estimate_of().report(tmp_path / "no" / "plan.html")


# ------------------------------------------------------------ figures


def test_memory_over_the_step_reaches_the_peak_and_has_no_gaps():
    est = estimate_of()
    moments = memory_over_time(est)
    assert max(m.total for m in moments) == est.memory.peak_bytes
    assert all(len(m.kinds) == len(KINDS) for m in moments)
    assert all(a.end == b.begin for a, b in pairwise(moments))


def test_causes_share_out_all_bytes_and_all_time_on_the_wire():
    est = estimate_of()
    causes = causes_of(est.program.collectives, est)
    assert sum(len(c.members) for c in causes) == len(est.program.collectives) > len(causes)
    total = sum(c.sent_bytes * c.count for c in est.program.collectives)
    assert sum(cause.sent_bytes for cause in causes) == pytest.approx(total)
    launches = sum(r.launch_seconds * r.count for r in est.rows if r.kind == "collective")
    assert sum(cause.seconds or 0 for cause in causes) == pytest.approx(est.comm_seconds - launches, rel=1e-6)
    assert [c.seconds for c in causes] == sorted((c.seconds for c in causes), reverse=True)


def test_the_timeline_has_the_busy_time_of_the_core():
    est = estimate_of()
    bars = [b for b in bars_of(est.schedule, est.slice.chip) if b.lane == CORE]
    assert sum(b.end - b.begin for b in bars) == pytest.approx(sum(e.seconds for e in est.schedule.events if e.on_core))
    loops = list(loops_of(est.schedule))
    assert {runs for _, _, runs in loops} == {4}
    for bar in (b for b in bars if b.parts):
        assert sum(share for _, share in bar.parts) == pytest.approx(1)


@pytest.mark.parametrize(("schedule", "kinds"), [("gpipe", "fb"), ("zb-h1", "fbw")])
def test_stages_of_pipelines_work_as_long_as_the_schedule_says(schedule, kinds):
    est = pipeline_of(schedule)
    (pipeline,) = pipelines_of(est)
    loops = [event for event in est.schedule.events if event.loop is not None]
    assert pipeline.seconds == pytest.approx(max(e.end for e in loops) - min(e.start for e in loops))
    assert len(pipeline.stages) == 4
    busy = 0.0
    for row in pipeline.stages:
        assert sorted((t.task.kind[0], t.task.microbatch) for t in row) == [
            (k, n) for k in sorted(kinds) for n in range(8)
        ]
        assert all(a.end <= b.start * (1 + 1e-9) + 1e-12 for a, b in pairwise(row))
        busy += sum(t.end - t.start for t in row) / 4
    assert busy == pytest.approx(sum(e.seconds for e in loops) - est.schedule.bubble_seconds)
    forwards, backwards = (
        {t.task.microbatch: t for t in pipeline.stages[2] if t.task.kind == k} for k in ("forward", "backward")
    )
    assert all(forwards[n].end <= backwards[n].start * (1 + 1e-9) for n in range(8))
    drawn = stages(est)
    assert drawn.count("<path") == 4 * len(kinds)
    assert f"idle {pipeline.idle_share(0):.0%}" in drawn
    assert stages(estimate_of()) == ""


@pytest.mark.parametrize("name", ["v5e-8", "v3-8", "v5p-128", "2*v4-16"])
def test_positions_invert_the_placement(name):
    from hardware.slices import Slice

    devices = Slice(name).devices
    with mtf.Graph():
        x = mtf.input("x", f"batch:{devices};d:{devices}")
        program = mtf.lower({"y": mtf.reduce_sum(x)}, mesh=f"a:2;b:{devices // 2}", layout="batch:a;d:b")
    est = mtf.estimate(program, name)
    for coordinate in program.mesh.coordinates():
        indices = dict(zip(program.mesh.axes, coordinate, strict=True))
        where, torus, core = est.placement.device(indices)
        if where == core == 0:
            assert position(est.placement, torus) == indices
    assert set(loads(est)) >= {axis for axis, size in enumerate(est.slice.torus_shape) if size > 1}


def test_links_of_a_ring_and_of_a_line():
    est = estimate_of()
    shape = est.slice.torus_shape
    links = links_of(est, shape)
    inside = sum((n - 1) * (est.slice.chips // n) for n in shape)
    rings = sum(est.slice.chips // n for n, wrap in zip(shape, est.slice.wrap, strict=True) if wrap and n > 2)
    assert len(links) == inside + rings


@pytest.mark.parametrize(
    ("shape", "axes", "mine"),
    [
        ("", [], 1),
        ("a:8", [("x",)], 1),
        ("a:8;b:4", [("x",), ("y",)], 1),
        ("a:8;b:4;c:6", [("x",), (), ("y",)], 1),
        ("a:8;b:4;c:6", [("x",), ("y",), ("z",)], 1),
        ("a:8;b:4;c:6;d:2", [(), (), (), ("x",)], 1),
    ],
    ids=["scalar", "1", "2", "3 with one whole", "3", "4"],
)  # fmt: skip
def test_shards_of_any_rank_have_one_block_of_a_device(shape, axes, mine):
    from layouts import Sharding

    sharding = Sharding(shape, "x:2;y:2;z:2", axes)
    drawn = shards(sharding)
    checked(drawn)
    assert len(re.findall('class="block mine"', drawn)) == mine
    plan = grid_of(sharding)
    blocks = 1
    for n in sharding.block_counts:
        blocks *= n
    assert len(re.findall('class="block', drawn)) == blocks
    assert set(plan.panels).isdisjoint({plan.down, plan.across})


def test_the_sides_of_shards_are_as_long_as_their_labels():
    from layouts import Sharding

    drawn = shards(Sharding("stage:4;a_long_name:10240;another:32768", "pipe:4;x:8;y:8", [("pipe",), ("x",), ("y",)]))
    ((width, height), *_) = re.findall('width="([0-9.]+)" height="([0-9.]+)" class="block', drawn)
    assert 8 * float(height) >= LETTER * len("a_long_name:10240@x") - 1  # rounded
    assert 8 * float(width) >= LETTER * len("another:32768@y") - 1


@pytest.mark.parametrize("layout", ["batch:a+b", "batch:a"])
def test_bytes_of_collectives_over_several_axes_are_said_to_count_for_each(layout):
    with mtf.Graph():
        loss = mtf.reduce_mean(mtf.einsum([mtf.input("x", "batch:8;d:8"), mtf.variable("w", "d:8")]))
        program = mtf.lower({"loss": loss}, mesh="a:2;b:2", layout=layout)
    shown = page(mtf.estimate(program, "v5e-4"))
    assert ("A collective over several axes counts for each" in shown) == ("+" in layout)


def test_the_pareto_front_has_what_nothing_beats():
    rows = [(3, 5, True), (1, 9, True), (2, 4, True), (0.5, 99, False), (2, 5, True)]
    options = [Alternative(f"{s}, {b}", s, b, fits) for s, b, fits in rows]
    assert [(a.step_seconds, a.needed_bytes) for a in pareto_front(options)] == [(1, 9), (2, 4)]
    checked(alternatives(options, 50))
    assert alternatives(options[:1], 50) == ""
    none_fits = [Alternative(f"{s}, {b}", s, b, False) for s, b, _ in rows]
    checked(drawn := alternatives(none_fits, 1))
    assert pareto_front(none_fits) == []
    assert 'class="front"' not in drawn


def test_a_search_reports_all_that_it_estimated(tmp_path):
    def build():
        x = mtf.input("x", "batch:512;d:512")
        w = mtf.variable("w", "d:512;f:512")
        return {"y": mtf.reduce_sum(mtf.einsum([x, w], output_shape="batch:512;f:512"))}, []

    search = mtf.search(build, "v5e-4", workers=1)
    search.report(tmp_path / "plan.html")
    html = (tmp_path / "plan.html").read_text()
    seen = checked(html)
    assert sum(i.startswith("alternative-") for i in seen.ids) == len(search.ranking) > 1
    assert "nothing is both faster and smaller" in html


def test_operations_count_their_own_bytes():
    est = estimate_of()
    sent = {" of ".join((row.opcode, row.name)) for row in est.rows if row.kind == "collective"}
    moved = {name: size for name, (_, size) in work_by_name(est).items()}
    assert sent <= {part.name for part in est.profile().parts}
    assert sum(moved[name] for name in sent) == pytest.approx(est.sent_bytes)
    assert sum(size for name, size in moved.items() if name not in sent) == est.hbm_bytes


def test_operations_lead_to_the_pictures_that_show_them():
    est = estimate_of()
    anchors = PageAnchors.of(est)
    html = page(est)
    name = max(est.rows, key=lambda r: r.total_seconds if r.mxu_flops else 0).name
    row = re.search(f'<tr id="{anchors.op(name)}">.*?</tr>', html, re.S).group()
    assert 'href="#timeline"' in row
    assert 'href="#roofline"' in row
    assert html.count(f'data-op="{anchors.op(name)}"') >= 3


def test_memory_far_below_the_capacity_is_drawn_large() -> None:
    """A line at the capacity is drawn where memory comes near it, else said in words."""
    with mtf.Graph():
        x, w = mtf.input("x", "batch:512;d:512"), mtf.variable("w", "d:512;f:512")
        small = mtf.estimate(mtf.lower({"y": mtf.einsum([x, w], output_shape="batch:512;f:512")}), "v5e-1")
    assert "above this picture" in area(small)
    assert 'class="limit"' not in area(small)
    chip = dataclasses.replace(CHIPS["v5e"], hbm_bytes=4 * small.memory.peak_bytes, hbm_reserved_bytes=0)
    near = mtf.estimate(small.program, Slice("v5e-1", chip))
    assert "above this picture" not in area(near)
    assert 'class="limit"' in area(near)


def test_alternatives_far_below_the_capacity_are_apart() -> None:
    options = [Alternative(str(n), n, 100 * n, fits=True) for n in (1, 2, 3)]
    heights = {}
    for capacity in (350, 100_000):
        drawn = scatter(options, capacity)
        heights[capacity] = sorted({float(y) for y in re.findall(r'<circle[^>]*cy="([\d.]+)"', drawn)})
        assert ("above this picture" in drawn) == ('class="limit"' not in drawn) == (capacity > 350)
    assert min(np.diff(heights[100_000])) >= min(np.diff(heights[350])) > 50


# ------------------------------------------------------------ in a browser

OUTSIDE = """(() => {
  const wide = document.documentElement.clientWidth, out = [];
  if (document.documentElement.scrollWidth > wide) out.push("the page is " + document.documentElement.scrollWidth);
  for (const e of document.querySelectorAll(".scroll"))
    if (wide >= 1400 && e.scrollWidth > e.clientWidth + 1) out.push("to scroll: " + e.textContent.slice(0, 60));
  for (const e of document.querySelectorAll("body *")) {
    if (e.closest(".scroll") && !e.classList.contains("scroll")) continue;
    if (e.closest("svg") && e.tagName !== "svg") continue;
    if (e.closest("details:not([open])")) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > wide + 1 || box.left < -1)) out.push(e.tagName + "." + e.className + " " + box.right);
  }
  for (const t of document.querySelectorAll("svg text")) {
    const box = t.getBoundingClientRect(), svg = t.closest("svg").getBoundingClientRect();
    if (box.width && (box.right > svg.right + 2 || box.left < svg.left - 2 || box.bottom > svg.bottom + 2
                      || box.top < svg.top - 2))
      out.push("text " + t.textContent);
  }
  return out.slice(0, 10);
})()"""
CONTRAST = """(() => {
  const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const p = c.match(/[0-9.]+/g).slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2]; };
  const back = light(getComputedStyle(document.body).backgroundColor);
  const ratio = e => { const a = light(getComputedStyle(e).color) + 0.05, b = back + 0.05; return a > b ? a/b : b/a; };
  return Math.min(...[...document.querySelectorAll("h1, h2, p, a, td, summary")].map(ratio));
})()"""


@pytest.fixture(scope="module")
def chromium():
    path = browser_path()
    if path is None:
        pytest.skip("no Chromium on the path")
    with Browser(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "plan.html"
    est = estimate_of()
    options = [Alternative(f"layout {n}", 1.0 + n, 2.0**30 * (9 - n), n > 1, n == 2) for n in range(8)]
    path.write_text(page(est, "a Transformer on v5e-8", options, "8 candidates"))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser_nothing_overflows_and_nothing_complains(chromium, file, width, dark):
    chromium.messages.clear()
    chromium.open(file, width, dark=dark)
    assert chromium.messages == []
    assert chromium.evaluate("document.documentElement.clientWidth") == width
    assert chromium.evaluate(OUTSIDE) == []
    assert chromium.evaluate(CONTRAST) > 4.5
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background != "rgb(255, 255, 255)") == dark


def test_a_table_beside_four_planes_is_whole(chromium, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(page(of_images()))
    chromium.open(path, 1400)
    assert chromium.evaluate(OUTSIDE) == []


def test_on_paper_nothing_is_cut_off(chromium, file):
    chromium.open(file, 720, dark=True, media="print")
    assert chromium.evaluate(OUTSIDE) == []
    assert chromium.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_without_scripts_the_same_is_there(chromium, file):
    def shown():
        return chromium.evaluate("document.querySelectorAll('svg *, td').length")

    chromium.open(file, 1400)
    complete = shown()
    chromium.scripts(False)
    try:
        chromium.open(file, 1400)
        assert shown() == complete > 500
    finally:
        chromium.scripts(True)


def test_scripts_mark_what_belongs_together_sort_and_unfold(chromium, file):
    chromium.open(file, 1400)
    marked = """(() => {
      const op = [...document.querySelectorAll('#timeline [data-op]')].find(e => e.closest('svg'));
      op.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
      return [document.querySelectorAll('.same').length,
              document.querySelectorAll('[data-op="' + op.dataset.op + '"]').length]; })()"""
    lit, same = chromium.evaluate(marked)
    assert lit == same > 1
    ordered = """(() => {
      const table = document.querySelector('#alternatives table'), title = table.querySelectorAll('th')[2];
      title.click(); title.click();
      return [...table.tBodies[0].rows].map(r => r.cells[2].textContent); })()"""
    assert chromium.evaluate(ordered) == [f"{n} GiB" for n in range(2, 10)]
    unfolded = "(() => { const d = document.querySelector('#operations details'); location.hash = d.querySelector('tr[id]').id; return d.open; })()"  # noqa: E501
    chromium.evaluate(unfolded)
    assert chromium.evaluate("document.querySelector('#operations details').open") is True
