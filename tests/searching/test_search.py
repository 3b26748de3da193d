"""`mtf.search`: equal to trying everything, its bounds sound, its certificate true, and its faults clear."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import meshlib as mtf
from hardware.slices import Slice
from layouts import LayoutRules
from meshlib.core.forks import usual_workers
from meshlib.searching import exploration
from meshlib.searching.outcomes import ALIKE, BOUNDED, ESTIMATED, NEEDLESS, OPEN, REFUSED, TOO_LARGE
from meshlib.searching.programs import SearchProblem, problem_of
from meshlib.searching.result import plainness
from meshlib.searching.roles import roles_of
from meshlib.searching.space import Candidate, Fixed, candidates
from tests.effort import draws
from tests.paths import ROOT
from tests.searching.test_bounds import SLOW, slowed


def chain(rng: random.Random) -> Callable[..., tuple[Any, Any]]:
    """A random network: products one after the other, with and without gradients."""
    sizes = [rng.choice([6, 16, 96, 256]) for _ in range(rng.randint(2, 3))]
    batch, training, wide = rng.choice([8, 64, 4096]), rng.random() < 0.6, rng.choice(["float32", "bfloat16"])

    def build(scale: int = 1) -> tuple[Any, Any]:
        dims = [mtf.Dimension(f"d{n}", size) for n, size in enumerate(sizes)]
        x = mtf.input("x", [mtf.Dimension("batch", batch * scale), dims[0]], wide)
        for n, (a, b) in enumerate(pairwise(dims)):
            x = mtf.relu(mtf.einsum([x, mtf.variable(f"w{n}", [a, b], dtype=wide)], reduced_dims=[a]))
        loss = mtf.reduce_mean(x)
        train = mtf.optimize.MomentumOptimizer(0.1, 0.9).minimize(loss) if training else []
        return {"loss": loss}, train

    return build


def everything(build: Callable[..., Any], name: str, axes: int, **choice: Any) -> list[tuple[Candidate, Any, Any]]:
    """All candidates of the declared space, lowered and estimated one by one; None for a refused one."""
    found = problem_of(build, tuple(choice.items()), (), ())
    fixed = Fixed(LayoutRules(""), {})
    roles = roles_of(found.tensors, found.dims, found.batch)
    made = []
    with mtf.Graph():
        session = mtf.Session(*build(**choice))
    for c in candidates(found.choices, Slice(name), roles, found.tensors.sizes, fixed, axes):
        try:
            est = mtf.estimate(session.lower(c.mesh, c.layout), name)
        except mtf.LayoutError:
            est = None
        made.append((c, found.bounds, est))
    return made


def test_the_best_is_that_of_trying_everything_and_bounds_are_below_all() -> None:
    rng, tried = random.Random(11), 0
    for _ in range(draws(1, 60)):
        build, name = chain(rng), rng.choice(["v5e-4", "v4-8"])
        axes = draws(1, 2)
        all_of_them = everything(build, name, axes)
        measures: dict[str, Callable[[Any], float]] = {
            "step_seconds": lambda est: est.step_seconds,
            "memory": lambda est: est.memory.peak_bytes,
        }
        for objective, measure in measures.items():
            found = mtf.search(build, name, axes=axes, objective=objective, seconds=None)
            fitting = [measure(est) for _, _, est in all_of_them if est is not None and est.fits]
            assert found.exact
            assert found.gap == 0
            assert found.fastest.value == min(fitting)
            assert found.best.value <= min(fitting) * (1 + found.objective.error)
            assert len(found.outcomes) == len(all_of_them)
        for c, bounds, est in all_of_them:
            if est is not None:
                tried += 1
                assert bounds.least_bytes(c) <= bounds.held_bytes(c) * (1 + 1e-9), c
                assert bounds.seconds(c) <= est.step_seconds, c
                assert bounds.held_bytes(c) <= est.memory.peak_bytes, c
    assert tried > 4


def network(batch: int = 512) -> tuple[Any, Any]:
    b, pixels, hidden = mtf.Dimension("batch", batch), mtf.Dimension("pixels", 784), mtf.Dimension("hidden", 1024)
    h = mtf.relu(mtf.einsum([mtf.input("x", [b, pixels]), mtf.variable("w", [pixels, hidden])], reduced_dims=[pixels]))
    loss = mtf.reduce_mean(h)
    return {"loss": loss}, mtf.optimize.AdamOptimizer(0.1).minimize(loss)


def test_the_winner_can_be_pasted_back() -> None:
    found = mtf.search(network, "v3-8", axes=2, seconds=None)
    with mtf.Graph():
        outputs, updates = network()
        best = found.best.candidate
        program = mtf.lower(outputs, updates, mesh=str(best.mesh), layout=str(best.layout))
    assert mtf.estimate(program, "v3-8").step_seconds == found.best.value
    assert str(found).startswith(f"best: mesh {best.mesh}\n      layout {best.layout}\n")
    assert found.certificate in str(found)
    states = {o.state for o in found.outcomes}
    assert states <= {ESTIMATED, ALIKE, BOUNDED, REFUSED, TOO_LARGE}
    assert all(found.why(o) for o in found.outcomes if o is not found.best)
    assert found.estimate().step_seconds == found.best.value
    assert max(map(len, str(found).splitlines())) < 160


def test_roles_are_read_from_the_program() -> None:
    tiny = mtf.models.preset("llama2-7b").reduced()
    found = problem_of(lambda: mtf.models.train_step(tiny, 8, 16), (), (), ())
    roles = {str(r) for r in roles_of(found.tensors, found.dims, found.batch)}
    assert "layers" not in found.dims
    assert {
        "batch:data", "batch:fsdp;d_model:fsdp?", "batch:zero1;slots/d_model:zero1?", "length:length",
        "vocab:model;heads:model;d_ff:model", "vocab:model;heads:model;d_ff:model;length:model?",
    } <= roles  # fmt: skip


def test_an_axis_splits_what_the_layout_has_a_rule_for_and_no_more() -> None:
    """Also where a dim of its role does not divide: sizes of this network are 16, 256, 6."""
    found = problem_of(chain(random.Random(7)), (), (), ())
    roles = roles_of(found.tensors, found.dims, found.batch)
    some = [*candidates((), Slice("v4-8"), roles, found.tensors.sizes, Fixed(LayoutRules(""), {}), 2)]
    assert any(set(part.role.base) > set(part.base) for c in some for part in c.parts)
    for c in some:
        for axis, dims, size in c.named_splits:
            assert dims == {rule.dim for rule in c.layout.rules if axis in rule.axes} or size == 1, str(c)


def test_sensitivity_names_the_winner_of_each_change() -> None:
    found = mtf.search(network, "v3-8", axes=1, seconds=None)
    made = found.sensitivity(links=[0.01, 1, 100], batch=[512, 500], slice=["v2-8"])
    rows = {c.what: c for c in made.changes}
    assert rows["links 1"].same
    assert rows["batch 512"].same
    for c in made.changes:
        assert c.mesh is not None
        assert c.layout is not None
        with mtf.Graph():
            name, _, value = c.what.partition(" ")
            outputs, updates = network(int(value) if name == "batch" else 512)
            program = mtf.lower(outputs, updates, mesh=c.mesh, layout=c.layout)
        if name in ("batch", "slice"):
            assert mtf.estimate(program, value if name == "slice" else "v3-8").step_seconds == c.step_seconds
    assert rows["links 0.01"].step_seconds > rows["links 100"].step_seconds
    assert "stays" in str(made)
    for bad, text in (
        ({}, "say what changes"),
        ({"links": ["fast"]}, "must be factors"),
        ({"slice": ["v3-9"]}, "v3-9"),
    ):
        with pytest.raises(mtf.MeshlibError, match=text):
            found.sensitivity(**bad)


def test_what_is_fixed_and_forbidden_is_so() -> None:
    found = mtf.search(network, "v3-8", fix="batch:rows", sizes="rows:2", forbid="pixels", seconds=None)
    for o in found.outcomes:
        assert o.candidate.mesh.axis_size("rows") == 2
        assert LayoutRules(o.candidate.layout).for_dim("batch")[0].axes == ("rows",)
        assert not o.candidate.layout.for_dim("pixels")
    assert mtf.search(network, "v3-8", fix="batch:rows", axes=0, seconds=None).best.candidate.mesh.axes == ("rows",)


def test_choices_slices_and_units() -> None:
    sizes = [256, 512]
    found = mtf.search(
        network,
        ["v3-8", "v5e-8", "v3-8"],
        choices={"batch": [*sizes, sizes[0]]},
        per="batch",
        objective="usd",
        axes=1,
        seconds=None,
    )
    assert len({o.candidate.key for o in found.outcomes}) == len(found.outcomes)
    seen = {(dict(o.candidate.choices)["batch"], o.candidate.slice.name) for o in found.ranking}
    assert seen == {(b, s) for b in sizes for s in ("v3-8", "v5e-8")}
    best = found.best
    assert best.value == pytest.approx(found.estimate().usd() / dict(best.candidate.choices)["batch"])
    assert all(found.fastest.value <= o.value for o in found.ranking if o.fits)


def test_the_reason_speaks_of_the_objective_and_each_row_of_its_slice() -> None:
    found = mtf.search(network, ["v3-8", "v5e-8"], axes=1, objective="usd", seconds=None)
    losers = [o for o in found.ranking if o.fits and o not in found.tied]
    for o in losers:
        assert found.why(o).startswith(f"{o.value / found.best.value - 1:.1%} worse: "), found.why(o)
    for line, o in zip(
        [x for x in found.table(None).splitlines() if x[:3].strip().isdigit()], found.ranking, strict=True
    ):
        assert f"  {o.candidate.slice.name}  " in line


def test_a_chip_that_cannot_run_a_program_is_refused_and_the_others_are_searched() -> None:
    def build() -> tuple[Any, Any]:
        b, k, h = mtf.Dimension("batch", 64), mtf.Dimension("k", 128), mtf.Dimension("h", 128)
        x, w = mtf.input("x", [b, k], "bfloat16"), mtf.variable("w", [k, h], dtype="bfloat16")
        return {"y": mtf.quantized_einsum([x, w], output_shape=[b, h])}, []

    found = mtf.search(build, ["v3-8", "v5e-8"], axes=1, seconds=None)
    assert {o.candidate.slice.name for o in found.ranking} == {"v5e-8"}
    refused = [o for o in found.outcomes if o.state == REFUSED]
    assert {o.candidate.slice.name for o in refused} == {"v3-8"}
    assert all("no published int8 rate" in o.why for o in refused)
    with pytest.raises(mtf.GraphError, match="no published int8 rate"):
        assert mtf.search(build, "v3-8", axes=1, seconds=None).best


def stack(remat: str = "none") -> tuple[Any, Any]:
    """Eight layers in a loop, of so many rows that "none", which is faster, keeps more than four devices hold."""
    layers, b = mtf.Dimension("layers", 8), mtf.Dimension("batch", 11 * 2**15)
    d, f = mtf.Dimension("d", 2048), mtf.Dimension("f", 8192)
    x = mtf.input("x", [b, d], "bfloat16")
    weights = [mtf.variable(n, [layers, *dims], dtype="bfloat16") for n, dims in (("up", (d, f)), ("down", (f, d)))]

    def layer(carries: Any, slices: Any) -> tuple[Any, Any]:
        h = mtf.tanh(mtf.einsum([carries[0], slices[0]], [b, f]))
        return (carries[0] + mtf.einsum([h, slices[1]], [b, d]),), ()

    (y,), _ = mtf.scan(layer, [x], weights, layers, remat=remat)
    loss = mtf.reduce_mean(mtf.square(y))
    return {"loss": loss}, mtf.optimize.AdamOptimizer(0.1).minimize(loss)


def test_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that does not fit is ranked before what fits, and the front has less memory the slower it gets."""
    choices = {"remat": ["none", "full"]}
    assert all(o.fits for o in mtf.search(stack, "v5e-4", axes=1, choices=choices, seconds=None).ranking)
    monkeypatch.setattr(SearchProblem, "needed_bytes", lambda *_: 0.0)  # so that some that do not fit are lowered
    found = mtf.search(stack, "v5e-4", axes=1, choices=choices, seconds=None)
    assert 0 < sum(o.fits for o in found.ranking) < len(found.ranking)
    assert min(o.value for o in found.ranking if not o.fits) < found.best.value
    fits = [o.fits for o in found.ranking]
    assert fits == sorted(fits, reverse=True)
    peaks = [o.figures.peak_bytes for o in found.pareto if o.figures]
    assert peaks == sorted(peaks, reverse=True)
    assert [o.value for o in found.pareto] == sorted(o.value for o in found.pareto)


def test_a_model_that_does_not_fit_says_so() -> None:
    found = mtf.search(
        mtf.models.preset("llama2-7b"), "v5e-4", batch=4, length=128, axes=1, choices={"remat": ["full"]}, seconds=None
    )
    assert not found.fits
    assert "nothing fits; every layout takes at least" in str(found)
    assert TOO_LARGE in {o.state for o in found.outcomes}


def test_what_certainly_needs_too_much_is_not_lowered() -> None:
    """The bound of memory before a lowering counts what is live while products run, and is no more than is needed."""
    config = mtf.models.preset("llama2-7b").replace(layers=2, vocab=4096, d_model=512, d_ff=2048, heads=8, kv_heads=8)
    problem = problem_of(lambda: mtf.models.train_step(config, 64, 1024, remat="full"), (), (), ())
    space = [*candidates((), Slice("v5e-4"), roles_of(problem.tensors, problem.dims, problem.batch),
                         problem.tensors.sizes, Fixed(LayoutRules(), {}), 1)]  # fmt: skip
    assert sum(problem.needed_bytes(c) > problem.bounds.held_bytes(c) for c in space) > len(space) / 2
    for c in space[:4]:
        assert problem.needed_bytes(c) <= problem.estimate(c).memory.needed_bytes


def test_time_runs_out_with_the_best_so_far_and_the_gap() -> None:
    seen: list[tuple[int, int, str]] = []
    found = mtf.search(network, "v3-32", seconds=1e-9, progress=lambda *args: seen.append(args))
    assert not found.exact
    assert len(found.ranking) == len(seen) == 1
    assert {o.state for o in found.outcomes} <= {OPEN, ESTIMATED, BOUNDED, ALIKE}
    assert 0 < found.gap < 1
    assert "could be better by at most" in found.certificate


@pytest.mark.parametrize("workers", [1, 2])
def test_known_layouts_are_estimated_however_little_time_there_is(workers: int) -> None:
    known = [("data:32", "batch:data"), ("rows:4;cols:8", "batch:rows;hidden:cols"), ("model:32", "hidden:model")]
    found = mtf.search(network, "v3-32", also=known, seconds=1e-9, workers=workers)
    with mtf.Graph():
        session = mtf.Session(*network())
    steps = [mtf.estimate(session.lower(*pair), "v3-32").step_seconds for pair in known]
    assert found.best.value <= min(steps)
    assert OPEN in {o.state for o in found.outcomes}, "time has to run out"


def test_of_the_most_promising_the_plainest_is_estimated_first() -> None:
    """The bounds of 2,000 layouts of an 8B step are within 3 %: the usual one is there before time runs out."""
    config = mtf.models.preset("llama3.1-8b")
    found = mtf.search(
        lambda: mtf.models.train_step(config, batch=256, length=4096), "v5e-64", axes=2, seconds=1e-9, workers=1
    )
    (first,) = [o for o in found.outcomes if o.state == ESTIMATED]
    assert str(first.candidate) == "v5e-64 fsdp:64 batch:fsdp;d_model:fsdp?"


def test_bounds_alone_count_once_nothing_better_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide the gap; until then half of a round are promising ones, whatever their bounds."""
    rounds: list[tuple[int, bool]] = []  # rounds since the last better one, and whether bounds decided alone
    choose, promise = exploration.Search._choose, exploration.Search._promise
    asked: list[int] = []

    def promised(search: exploration.Search, n: int) -> Any:
        asked.append(n)
        return promise(search, n)

    def chosen(search: exploration.Search) -> list[int]:
        asked.clear()
        numbers = choose(search)
        rounds.extend([(search.idle, not asked)] if numbers else [])
        limit = max((search.bounds[n] for n in numbers), default=0.0)
        left = {n for n in range(len(search.space)) if n not in search.outcomes and search.bounds[n] < limit}
        assert asked or left <= {*numbers}
        return numbers

    monkeypatch.setattr(exploration.Search, "_choose", chosen)
    monkeypatch.setattr(exploration.Search, "_promise", promised)
    monkeypatch.setattr(exploration, "PATIENCE", 1)
    mtf.search(network, "v3-32", axes=2, seconds=None, workers=1)
    assert {alone for _, alone in rounds} == {False, True}
    assert all(alone == (idle >= 1) for idle, alone in rounds)


def test_a_kept_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    first = mtf.search(network, "v3-8", axes=1, seconds=None, resume=path)
    kept = json.loads(path.read_text())
    assert len(kept["estimates"]) == sum(o.state == ESTIMATED for o in first.outcomes)
    with monkeypatch.context() as patch:  # what the file says is taken, not made again
        patch.setattr(SearchProblem, "estimated", lambda *_: pytest.fail("estimated again"))
        again = mtf.search(network, "v3-8", axes=1, seconds=None, resume=path, workers=1)
    assert again.best.value == first.best.value
    with pytest.raises(mtf.GraphError, match="the estimates of another program"):
        mtf.search(lambda: network(1024), "v3-8", axes=1, seconds=None, resume=path)
    for entry in kept["estimates"].values():
        entry["value"] /= 2
    path.write_text(json.dumps(kept))
    with pytest.raises(mtf.GraphError, match="was changed after it was written"):
        mtf.search(network, "v3-8", axes=1, seconds=None, resume=path)
    for text in ("[]", "[" * 100_000, "{", "{}"):
        path.write_text(text)
        with pytest.raises(mtf.GraphError, match=r"has no estimates|is not a file of estimates"):
            mtf.search(network, "v3-8", axes=1, seconds=None, resume=path)


def forked(code: str) -> None:
    """Runs code in a process that has not loaded JAX, as other tests have, and where forking always pays."""
    head = (
        "import meshlib as mtf, meshlib.searching.exploration as exploration; from tests.searching.test_search import *"
    )
    code = f"exploration.PAYS_SECONDS = 0\n{code}"
    subprocess.run([sys.executable, "-W", "error", "-c", f"{head}\n{code}"], cwd=ROOT, check=True)


def raised(est: Any) -> float:
    """An objective that fails for one candidate."""
    if str(est.program.layout) == "pixels:model":
        raise ValueError("it fails on pixels")
    return float(est.sent_bytes)


def test_processes_do_not_change_the_result_and_pass_faults_on() -> None:
    forked(
        "def all_of(workers, axes=1, objective='step_seconds'):\n"
        "    found = mtf.search(network, 'v3-8', axes=axes, seconds=None, workers=workers, objective=objective)\n"
        "    return [(o.candidate.key, o.state, o.value, o.bound, o.why, o.figures) for o in found.outcomes]\n"
        "assert all_of(1) == all_of(2)\n"
        "assert all_of(1, objective='memory') == all_of(2, objective='memory')\n"
        "for workers in (1, 2):\n"
        "    with pytest.raises(ValueError, match='it fails on pixels'):\n"
        "        mtf.search(network, 'v3-8', axes=1, objective=raised, seconds=None, workers=workers)\n"
    )


def test_processes_end_when_time_does_and_one_that_ends_by_itself_is_a_fault() -> None:
    forked(
        "import os, time, multiprocessing as mp\n"
        "def slowly(est):\n"
        "    if mp.parent_process():\n"
        "        time.sleep(60)\n"
        "    return 1.0\n"
        "found = mtf.search(network, 'v3-8', objective=slowly, seconds=1.5, workers=2)\n"
        "assert not found.exact and found.seconds < 30 and not mp.active_children()\n"
        "def killed(est):\n"
        "    if mp.parent_process():\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return 1.0\n"
        "with pytest.raises(mtf.GraphError, match='SIGKILL, perhaps for want of memory'):\n"
        "    mtf.search(network, 'v3-8', objective=killed, seconds=None, workers=2)\n"
        "assert not mp.active_children()\n"
    )


def test_nothing_is_forked_unasked_beside_other_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert usual_workers(8) == 1
    finally:
        stop.set()
        thread.join()
    cores = "len(os.sched_getaffinity(0))" if sys.platform == "linux" else "1"
    forked(
        f"import os; assert usual_workers(8) == min(8, {cores}); sys.modules['jax'] = sys; assert usual_workers(8) == 1"
    )


def test_what_is_known_already_is_looked_at_first_and_not_worsened() -> None:
    known = ("x:4;y:2", "batch:x;hidden:x?;pixels:y")
    with mtf.Graph():
        outputs, updates = network()
        own = mtf.estimate(mtf.lower(outputs, updates, mesh=known[0], layout=known[1]), "v3-8")
    short = mtf.search(network, "v3-8", also=[known], seconds=1e-9)
    assert str(short.outcomes[0].candidate) == f"v3-8 {known[0]} {known[1]}"
    found = mtf.search(network, "v3-8", axes=0, also=[known], seconds=None)
    assert found.best.value == own.step_seconds
    assert [o.state for o in found.outcomes] == [ESTIMATED]


def test_the_usual_layouts_of_a_model_are_members_of_its_space() -> None:
    config = mtf.models.preset("llama2-7b").reduced()
    found = mtf.search(config, "v5e-4", batch=8, length=16, axes=1, choices={"remat": ["full"]}, seconds=1e-9)
    usual = mtf.models.usual_layouts(config, 4, 8)
    names = [f"{o.candidate.mesh} {o.candidate.layout}" for o in found.outcomes[: len(usual)]]
    assert names == [f"{mesh} {mtf.models.layout(name, config, mesh)}" for name, mesh in usual]
    assert len(usual) > 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"build": 3}, "build must be a function"),
    ({"build": lambda: 3}, "must return"),
    ({"build": mtf.models.preset("gpt2")}, "needs batch"),
    ({"batch": 3}, "batch and length are for a model's config"),
    ({"slice": []}, "slice is empty"),
    ({"slice": "v3-9"}, "v3-9"),
    ({"choices": ["batch"]}, "choices must be a dict"),
    ({"choices": {"batch": []}}, "is empty"),
    ({"choices": {"batch": 3}}, "choices"),
    ({"choices": {"batch": [[3]]}}, "hashable values"),
    ({"progress": 3}, "progress must be a function"),
    ({"resume": 3}, "resume must be the name of a file"),
    ({"fix": "batch:rows", "sizes": "cols:2"}, "no rule of fix"),
    ({"fix": "bach:rows"}, "dim 'bach', which the program does not have; did you mean 'batch'"),
    ({"forbid": "pixel"}, "has dim 'pixel', which"),
    ({"per": "batches"}, "has dim 'batches', which"),
    ({"per": [3]}, "names of dims"),
    ({"also": [("rows:8", "batch:rows", "x")]}, "pairs of a mesh and a layout"),
    ({"also": [("rows:4", "batch:rows")]}, "has 4 devices; v3-8 has 8"),
    ({"also": [("rows", "batch:rows")]}, "rows"),
    ({"also": 3}, "also"),
    ({"choices": {"batches": [3]}}, "build has no argument 'batches'; did you mean 'batch'"),
    (
        {"build": mtf.models.preset("gpt2"), "batch": 8, "length": 16, "choices": {"stage": [2]}},
        "did you mean 'stages'",
    ),
    ({"build": lambda: ({"y": mtf.square(mtf.input("x", []))}, [])}, "dims .it has none."),
    ({"axes": -1}, "must not be negative"),
    ({"objective": "speed"}, "objective must be"),
    ({"objective": 3}, "objective must be"),
    ({"seconds": 0}, "more than 0"),
    ({"workers": 0}, "at least 1"),
    ({"fix": "batch:rows", "sizes": "rows:3", "axes": 0}, "sizes take 3 devices, .* v3-8 has 8"),
    ({"fix": "batch:rows", "sizes": "rows:2", "axes": 0}, "divides"),
]


def test_bad_arguments() -> None:
    for given, text in BAD:
        arguments: dict[str, Any] = {"build": network, "slice": "v3-8", **given}
        with pytest.raises(mtf.MeshlibError, match=text):
            mtf.search(**arguments)


def below(build: Callable[..., Any], name: str, most: int, seed: int, **choice: Any) -> int:
    """Tries the bounds on some candidates of a program; how many there were."""
    found = problem_of(build, tuple(choice.items()), (), ())
    roles = roles_of(found.tensors, found.dims, found.batch)
    space = [
        *candidates(found.choices, Slice(name), roles, found.tensors.sizes, Fixed(LayoutRules(""), {}, found.named), 3)
    ]
    tried = 0
    for c in random.Random(seed).sample(space, min(most, len(space))):
        try:
            est = found.estimate(c)
        except mtf.LayoutError:
            continue
        tried += 1
        for bounds in {found.bounds, found.bounds_under(c)}:
            assert 0 < bounds.seconds(c) <= est.step_seconds, c
            for links in (1.0, SLOW):
                step = mtf.estimate(est.program, slowed(name, links)).step_seconds
                own = replace(c, slice=slowed(name, links))
                assert bounds.critical_path_seconds(own) <= step * (1 + 1e-9), (str(c), links)
                assert bounds.core_time_seconds([own])[0] <= step * (1 + 1e-9), (str(c), links)
            placed = bounds.placed_bytes(c)
            assert bounds.least_bytes(c) <= placed * (1 + 1e-9) <= bounds.held_bytes(c) * (1 + 2e-9), c
            assert bounds.held_bytes(c) <= est.memory.peak_bytes, c
    return tried


MODELS = ("llama2-7b", "gpt2", "gemma3-4b", "t5-base", "mixtral-8x7b")


def test_bounds_are_below_estimates_of_models() -> None:
    """Loops, what they stack, attention and what is computed again."""
    rng = random.Random(3)
    for n in range(draws(1, 40)):
        config = mtf.models.preset(MODELS[n % len(MODELS)]).reduced()
        remat = rng.choice(["full", "matmuls", "none"])

        def build(config: Any = config, remat: str = remat) -> tuple[Any, Any]:
            return mtf.models.train_step(config, 8, 16, remat=remat)

        assert below(build, rng.choice(["v5e-4", "v4-16", "v3-8", "v6e-8"]), draws(1, 10), n)


def test_bounds_are_below_estimates_where_attention_takes_nearly_all() -> None:
    """And not far below: half of it would be no bound worth having."""

    def build() -> tuple[Any, Any]:
        batch, heads, length, memory, key = (
            mtf.Dimension(name, size)
            for name, size in (("batch", 8), ("heads", 8), ("length", 4096), ("memory_length", 4096), ("key", 128))
        )
        q = mtf.input("q", [batch, heads, length, key], "bfloat16")
        k, v = (mtf.input(name, [batch, heads, memory, key], "bfloat16") for name in "kv")
        return {"y": mtf.attention(q, k, v, length, memory, key)}, []

    assert below(build, "v5e-4", 4, 0) == 4
    found = mtf.search(build, "v5e-4", axes=1, seconds=None)
    problem = problem_of(build, (), (), ())
    assert problem.bounds.seconds(found.best.candidate) > 0.5 * found.best.value


def test_a_dim_goes_on_under_another_name_and_a_constraint_brings_any_axis() -> None:
    """So the bound must let the axis of the first name split what has only the second."""

    def build(bound: bool = False) -> tuple[Any, Any]:
        rows, inner, outer = mtf.Dimension("rows", 4096), mtf.Dimension("inner", 1024), mtf.Dimension("outer", 1024)
        x = mtf.rename_dimension(mtf.input("x", [rows, inner], "bfloat16"), "rows", "lines")
        if bound:
            x = mtf.constrain(x, "inner:data")
        for n in range(3):
            w = mtf.variable(f"w{n}", [inner, outer], dtype="bfloat16")
            x = mtf.rename_dimension(mtf.einsum([x, w], reduced_dims=[inner]), "outer", "inner")
        return {"loss": mtf.reduce_mean(x)}, []

    for bound in (False, True):
        assert below(build, "v5e-4", draws(10, 20), 0, bound=bound) > 3
    found = mtf.search(lambda: build(True), "v5e-4", axes=1, fix="lines:rows", seconds=None)
    assert {o.state for o in found.outcomes} <= {ESTIMATED, ALIKE, BOUNDED}


def test_a_tie_goes_to_the_plainest_layout_and_the_certificate_says_so() -> None:
    """Of two layouts that split the batch alike, the one that says so."""

    def build() -> tuple[Any, Any]:
        batch, d, f = mtf.Dimension("batch", 2**16), mtf.Dimension("d", 512), mtf.Dimension("f", 512)
        w, v = mtf.variable("w", [d, f], dtype="bfloat16"), mtf.variable("v", [f, d], dtype="bfloat16")
        h = mtf.relu(mtf.einsum([mtf.input("x", [batch, d], "bfloat16"), w], [batch, f]))
        return {"y": mtf.einsum([h, v], [batch, d])}, []

    also = [("model:4", "f:model;batch:model?"), ("model:2;data:2", "batch:data+model"), ("data:4", "batch:data")]
    found = mtf.search(build, "v5e-4", axes=0, also=also, seconds=None)
    assert str(found.best.candidate.layout) == "batch:data"
    assert len(found.tied) > 1
    if found.best is not found.fastest:
        assert "the simplest of" in found.certificate
        assert "a tie within the model's error" in found.why(found.fastest)
    assert "no two share a tensor" in found.certificate


def test_distances_to_the_winner_are_never_negative() -> None:
    """Bounds are compared to the fastest, behind which the winner may be within the model's error."""

    def build(wide: int = 1) -> tuple[Any, Any]:
        h, w = mtf.input("x", "batch:512;d:64"), mtf.variable("w", f"d:64;f:{64 * wide}")
        return {"y": mtf.einsum([h, w], output_shape=f"batch:512;f:{64 * wide}")}, []

    found = mtf.search(build, "v5e-4", axes=2, seconds=None, workers=1, choices={"wide": [1, 2]})
    fast, other = (next(o for o in found.ranking if o.candidate.choices == (("wide", n),)) for n in (1, 2))
    alike = (o.candidate for o in found.outcomes if o.candidate.choices == fast.candidate.choices)
    ordered = sorted(alike, key=lambda c: plainness(c.mesh, c.layout, "batch"))
    plain = replace(fast, value=1.01, candidate=ordered[0])
    error = replace(found.objective, error=0.02)

    def verdict(bound: float, *more: Any) -> str:
        passed = replace(fast, state=BOUNDED, bound=bound, figures=None)
        outcomes = (replace(fast, value=1.0, candidate=ordered[-1]), plain, *more, passed)
        return str(replace(found, outcomes=outcomes, objective=error))

    assert "1 that were not estimated are no faster than the fastest by their bounds" in verdict(1.001)
    assert "1 that were not estimated are at least 4.0% behind" in verdict(1.0504)
    assert "the next is 0.5% ahead" in verdict(1.001, replace(other, value=1.005))


def test_cautions_name_moved_weights_memory_and_territory() -> None:
    found = mtf.search(stack, "v5e-4", axes=0, also=[("data:4", "batch:data;d:data?")], choices={"remat": ["full"]})
    text = str(found)
    assert "moves weights over data (4 devices)" in text
    assert "4 chips (validated: 8 to 4,096)" in text
    assert list(found.cautions) == found.as_json()["cautions"]


def test_a_layout_is_tried_with_the_least_recomputation_that_fits() -> None:
    config = mtf.models.preset("llama2-7b").reduced()
    also = [("d:4", "batch:d"), ("m:4", "heads:m;d_ff:m")]
    remat = {"remat": ["full", "none"]}
    found = mtf.search(config, "v5e-4", batch=8, length=16, axes=0, also=also, choices=remat, seconds=None)
    assert found.exact
    assert "the least recomputation that fits" in found.certificate
    fitting = {(str(o.candidate.mesh), str(o.candidate.layout)) for o in found.ranking if o.fits}
    needless = [o for o in found.outcomes if o.state == NEEDLESS]
    assert needless
    for o in needless:
        assert dict(o.candidate.choices)["remat"] == "full"
        assert (str(o.candidate.mesh), str(o.candidate.layout)) in fitting or "remat=none" in o.why
