"""Frames of a torus: what links carry and nodes have received, as text and drawn."""

import importlib.util
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshlib as mtf
from hardware import MXU, HardwareError, Links, Torus, ring_plans
from hardware.films import Film, FilmFrame, axis_loads, film_of
from hardware.twisted import TwistedTorus
from tests.effort import draws

DRAWN = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra")


@settings(max_examples=draws(12, 300), deadline=None)
@given(
    st.sampled_from([Torus((3,)), Torus((2, 3), False), Torus((4, 2), (True, False)), TwistedTorus((2, 4))]),
    st.integers(1, 9), st.sampled_from([0.0, 1e-6]),
)  # fmt: skip
def test_frames_add_up_to_what_links_carry(torus, frames, hop):
    data = [np.zeros(8 * torus.nodes) for _ in range(torus.nodes)]
    links = Links(1e6, hop)
    traffic = ring_plans.all_reduce(torus, data).run(links)
    film = film_of(ring_plans.all_reduce(torus, data), links, frames)
    assert len(film.frames) == frames
    length = traffic.seconds / frames
    carried = {}
    for frame in film.frames:
        assert all(0 < load <= 1 + 1e-9 for load in frame.loads.values())
        for link, load in frame.loads.items():
            carried[link] = carried.get(link, 0.0) + load * length * 1e6
    assert carried == pytest.approx({link: float(size) for link, size in traffic.link_bytes.items()})
    shares = [[frame.received[node] for frame in film.frames] for node in range(torus.nodes)]
    assert all(sorted(share) == share and share[-1] == 1.0 for share in shares)


def test_text_says_which_way_links_carry():
    torus = Torus((2, 3), False)
    right, left, down = torus.link(0, 1, 1), torus.link(2, 1, -1), torus.link(1, 0, 1)
    both = [torus.link(4, 1, 1), torus.link(5, 1, -1)]
    frame = FilmFrame(torus, "now", dict.fromkeys([right, left, down, *both], 0.5), {0: 0.25, 4: 1.0})
    assert str(frame).splitlines() == ["now", "2 > o < o", "\u00b7   v   \u00b7", "o \u00b7 * = o"]


def test_planes_stand_beside_each_other():
    torus = Torus((2, 2, 2), False)
    frame = FilmFrame(torus, loads={torus.link(0, 0, 1): 1.0})
    lines = str(frame).splitlines()
    assert lines[0].split() == ["o", "\u00b7", "o", "o", "\u00b7", "o"]
    assert lines[-1] == "between planes, axis 0: 1 links carry data onward, 0 back"


def test_a_step_of_a_program():
    rows, k, n = mtf.Dimension("rows", 8192), mtf.Dimension("k", 8192), mtf.Dimension("n", 8192)
    with mtf.Graph():
        x, w = mtf.input("x", [rows, k], "bfloat16"), mtf.variable("w", [k, n], dtype="bfloat16")
        program = mtf.lower(
            {"y": mtf.einsum([x, w], [rows, n])}, mesh="chips:16", layout="rows:chips;variables/k:chips"
        )
    est = mtf.estimate(program, "v5e-16")
    film = est.film(8)
    torus, length = est.slice.torus, est.step_seconds / 8
    for number in (0, 1):
        links = [link for link in torus.links() if link // 2 % 2 == number]
        shown = [sum(frame.loads.get(link, 0.0) for frame in film.frames) * length for link in links]
        assert shown == pytest.approx([est.engine_seconds.get(f"ici axis {number}", 0.0)] * len(links), abs=2e-9)
    assert any(frame.loads for frame in film.frames)
    titles = [frame.title.splitlines() for frame in film.frames]
    assert titles[0][1:] == ["core: idle", "links: all_gather of w"]
    assert titles[-1][1] == "core: einsum"
    with pytest.raises(mtf.GraphError, match="frames must be at least 1, got 0"):
        est.film(0)


@DRAWN
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "head"), [("gif", b"GIF8"), ("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_save(kind, head, tmp_path):
    film = film_of(ring_plans.all_reduce(Torus((2, 3)), [np.zeros(12)] * 6), Links(1e6), 4)
    path = film.save(tmp_path / f"film.{kind}")
    assert path.read_bytes()[: len(head)] == head


@DRAWN
def test_a_frame_is_drawn_on_given_axes():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    torus = TwistedTorus((2, 2, 4))
    assert FilmFrame(torus, loads=axis_loads(torus, {0: 0.5})).plot(axes) is axes
    (lines,) = (c for c in axes.collections if len(c.get_paths()) == len(list(torus.links())))
    assert len({tuple(shade) for shade in lines.get_colors()}) == 2
    long = FilmFrame(torus, "now\n" + "x" * 400).plot(axes).get_title()
    assert "x…" in long
    assert len(long) < 200


def reduce(nodes):
    return ring_plans.all_reduce(Torus((nodes,)), [np.zeros(2)] * nodes)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: film_of("all_reduce", Links(1.0)), "a film is made of a collective"),
        (lambda: film_of(reduce(2), Links(1.0), 0), "frames must be an integer"),
        (lambda: film_of(reduce(2), Links(1.0), 10**9), "frames must be at most 10,000, not 1,000,000,000"),
        (lambda: film_of(reduce(1), Links(1.0)), "the collective sends nothing"),
        (lambda: Film((FilmFrame(Torus((2,))),)).save("film.mp4"), "a film is saved as .gif, .png or .svg, not 'film"),
        (lambda: Film(()).save("film.png"), "a film without frames"),
        (lambda: Film((FilmFrame(Torus((2,))),)).save("film.png", -1), "frames_per_second must be a finite number > 0"),
    ],
)  # fmt: skip
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)


@DRAWN
@pytest.mark.parametrize("kind", ["gif", "svg"])
def test_a_run_of_the_array_is_saved(kind, tmp_path):
    run = MXU(2, 2).run(np.eye(2), np.array([[1.0, 2.0]]))
    files = run.save(tmp_path / f"run.{kind}", shadow=True)
    assert len(files) == (1 if kind == "gif" else run.cycles)
    assert all(file.stat().st_size > 1000 for file in files)


def test_runs_that_cannot_be_saved():
    run = MXU(2, 30).run(np.ones((2, 30)), np.ones((1, 2)))
    for name, part in (("x.txt", "a run is saved as .gif, .png or .svg"), ("x.gif", "at most 24 rows and columns")):
        with pytest.raises(HardwareError, match=part):
            run.save(name)


def test_notebooks_show_every_cycle_of_an_array_with_its_registers():
    run = MXU(2, 2).run(np.array([[1, 2], [3, 4]]), np.array([[1, 1], [2, 0]]), "noload")
    html = run._repr_html_()
    assert html.count("<table") == run.cycles == 4
    for cycle, part in enumerate(html.split("<table")[1:]):
        state = run.state(cycle)
        assert part.count("background:") == state.busy
        assert sorted(re.findall(r"p (-?\d+) ", part)) == sorted(
            str(p) for p, row in zip(state.partial.flat, state.vector.flat, strict=True) if row >= 0
        )
    assert "y = [[4, 6], [2, 4]]" in html
    assert repr(run) == "<Run of a 2x2 systolic array: 4 cycles, y (2, 2)>"
    large = MXU(16, 16).run(np.ones((16, 16)), np.ones((40, 16)), "noload")
    assert large._repr_html_().count("<table") == 2  # at most 600 squares
    assert "the first 2 are shown" in large._repr_html_()


def test_notebooks_show_the_links_of_frames():
    film = film_of(ring_plans.all_gather(Torus((4,)), [np.zeros(8)] * 4, algorithm="oneway"), Links(16.0), frames=30)
    html = film._repr_html_()
    assert html.count("<svg") == 12
    for part in html.split("<svg")[1:]:
        assert part.count("#d1495b") == 4  # a link of each node, one way
    assert [re.findall(r">(\d+)</text>", part)[0] for part in (html.split("<svg")[1], html.split("<svg")[-1])] == [
        "0",
        "10",
    ]
    assert html.count("<figcaption>") == 12
    assert f"<figcaption>{film.frames[-1].title}<" in html
    assert repr(film) == "<Film of 30 frames>"
