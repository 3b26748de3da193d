"""Twisted tori: routes against breadth-first search, closed forms against events, gains against published ones."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshlib as mtf
from hardware import (
    Demand,
    HardwareError,
    Links,
    Slice,
    Torus,
    best_placement,
    collective_cost,
    collectives,
    point_plans,
    ring_plans,
    twisted,
)
from hardware.network import ici_links
from hardware.placement import Placement, PlacementFactor
from hardware.twisted import TwistedTorus
from meshlib.estimation.views.wiring import other_wiring, twisting
from tests.effort import draws

LINKS = Links(45e9, 1e-6)
SHAPES = [(2, 4), (3, 6), (4, 8), (2, 2, 4), (3, 3, 6), (2, 4, 4), (4, 2, 4)]


@pytest.mark.parametrize("shape", [*SHAPES, (3, 6, 6), (4, 4, 8)], ids=str)
def test_routes_are_all_shortest_ways_and_load_every_link_equally(shape):
    torus = TwistedTorus(shape)
    hops, queue = {0: 0}, [0]
    for node in queue:  # breadth-first
        for axis in range(torus.rank):
            for step in (1, -1):
                there = torus.neighbour(node, axis, step)
                assert torus.neighbour(there, axis, -step) == node
                if there not in hops:
                    hops[there] = hops[node] + 1
                    queue.append(there)
    assert max(hops.values()) == torus.diameter
    assert sum(hops.values()) == twisted.total_distance(shape)
    loads = Counter()
    for target in range(torus.nodes):
        assert torus.distance(0, target) == hops[target]
        routes = torus.routes(0, target)
        assert len(set(routes)) == len(routes)
        for route in routes:
            here = 0
            for link in route:
                start, end = torus.ends(link)
                assert start == here
                here = end
                loads[link % (2 * torus.rank)] += 1 / len(routes)
            assert here == target
            assert len(route) == hops[target]
    assert np.allclose(list(loads.values()), sum(hops.values()) / (2 * torus.rank))
    assert len(loads) == 2 * torus.rank


@pytest.mark.parametrize("k", [2, 4, 6])
def test_total_distance_as_a_polynomial(k):
    assert twisted.total_distance((k, 2 * k)) == (4 * k**3 - k) / 3
    assert twisted.total_distance((k, k, 2 * k)) == 7 * k**4 / 4 - k**2 / 2
    assert twisted.total_distance((k, 2 * k, 2 * k)) == 35 * k**4 / 8 - k**2


def gathered(torus, op, size_bytes, algorithm, axes):
    """Simulate on integers, check every result; seconds."""
    members = [
        [m for m in range(torus.nodes) if all(torus.coordinates(m)[a] == torus.coordinates(node)[a]
                                              for a in range(torus.rank) if a not in axes)]
        for node in range(torus.nodes)
    ]  # fmt: skip
    group, parts = len(members[0]), len(axes)
    rng = np.random.default_rng(0)
    if op == "all_gather":
        data = [rng.integers(0, 1000, 2 * parts) for _ in range(torus.nodes)]
        want = [np.array([data[m] for m in members[node]]) for node in range(torus.nodes)]
    else:
        data = [rng.integers(0, 1000, (group, 2 * parts)) for _ in range(torus.nodes)]
        want = [sum(data[m] for m in members[node]) for node in range(torus.nodes)]
        if op == "reduce_scatter":
            want = [total[members[node].index(node)] for node, total in enumerate(want)]
    options = {"axes": axes, "algorithm": algorithm, "element_bytes": size_bytes / (2 * parts * group)}
    collective = getattr(ring_plans, op)(torus, data, **options)
    seconds = collective.run(LINKS).seconds
    assert all(map(np.array_equal, collective.results, want))
    return seconds


@settings(max_examples=draws(8, 1000), deadline=None)
@given(
    st.sampled_from(SHAPES), st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from(collectives.ALGORITHMS), st.integers(1, 10**7), st.data(),
)  # fmt: skip
def test_closed_form_equals_events(shape, op, algorithm, size_bytes, data):
    torus = TwistedTorus(shape)
    axes = sorted(data.draw(st.sets(st.integers(0, torus.rank - 1), min_size=1)))
    sides = tuple(shape[axis] for axis in axes)
    seconds = gathered(torus, op, float(size_bytes), algorithm, axes)
    if min(sides) == torus.twist and set(torus.long_axes) <= set(axes):
        want = twisted.all_gather_seconds(size_bytes, sides, LINKS, algorithm) * (2 if op == "all_reduce" else 1)
    else:  # short axes are lines, since their twist leads out of the group
        lines = [(n, n > torus.twist) for n in sides]
        want = getattr(collectives, f"{op}_seconds")(size_bytes, lines, LINKS, algorithm)
    assert seconds == pytest.approx(want, rel=1e-9)


@settings(max_examples=draws(6, 1000), deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from(["rotated", "routed", "phased"]), st.integers(1, 10**7), st.data())
def test_all_to_all_equals_its_closed_form(shape, algorithm, size, data):
    torus = TwistedTorus(shape)
    axes = sorted(data.draw(st.sets(st.integers(0, torus.rank - 1), min_size=1)))
    places = [torus.coordinates(node) for node in range(torus.nodes)]
    key = [tuple(place[a] for a in range(torus.rank) if a not in axes) for place in places]
    members = [[m for m in range(torus.nodes) if key[m] == key[node]] for node in range(torus.nodes)]
    group = len(members[0])
    rows = [np.arange(group * 6).reshape(group, 6) + 1000 * node for node in range(torus.nodes)]
    exchange = point_plans.all_to_all(torus, rows, axes, algorithm, element_bytes=size / (6 * group))
    traffic = exchange.run(LINKS)
    for node, result in enumerate(exchange.results):
        assert np.array_equal(result, [rows[m][members[node].index(node)] for m in members[node]])
    sides = tuple(shape[axis] for axis in axes)
    if min(sides) == torus.twist and set(torus.long_axes) <= set(axes):
        bound = twisted.all_to_all_bound_seconds(size, sides, LINKS)
        whole = len(axes) == torus.rank  # else some of the shortest ways lead through links of other groups
        assert traffic.seconds >= bound * (1 - 1e-12) or (algorithm == "routed" and not whole)
        if algorithm == "rotated":
            assert traffic.seconds == pytest.approx(twisted.all_to_all_seconds(size, sides, LINKS), rel=1e-9)
        if algorithm == "routed" and whole:  # no link carries more than an equal share of the shortest ways
            assert traffic.max_link_bytes == pytest.approx(bound * LINKS.bytes_per_second)
    elif algorithm == "rotated":
        lines = [(n, n > torus.twist) for n in sides]
        assert traffic.seconds == pytest.approx(collectives.all_to_all_seconds(size, lines, LINKS), rel=1e-9)


@pytest.mark.parametrize(("name", "gain"), [("v4-4x4x8", 1.63), ("v4-4x8x8", 1.31)], ids=["4x4x8", "4x8x8"])
def test_all_to_all_gains_what_tpu_v4_reached(name, gain):
    """Throughput of all_to_all on a twisted torus over the regular one: Jouppi et al. 2023, figure 6."""
    costs = [
        collective_cost(best_placement(name + twist, {"all": Slice(name).devices})[0], "all_to_all", ["all"], 1e9)
        for twist in ("", "_twisted")
    ]
    assert costs[0].seconds / costs[1].seconds == pytest.approx(gain, rel=0.01)
    torus = Slice(name + "_twisted").torus
    assert twisted.bisection_links(torus) == 2 * twisted.bisection_links(Torus(torus.shape))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_slice_prices_what_events_take(kind):
    slice_ = Slice("v4-4x4x8_twisted")
    links = ici_links(slice_)
    whole = best_placement(slice_, {"all": 128})[0]
    times = 2 if kind == "all_reduce" else 1
    want = times * twisted.all_gather_seconds(1e9, (4, 4, 8), links)
    assert collective_cost(whole, kind, ["all"], 1e9).seconds == pytest.approx(want, rel=1e-9)
    parts = Placement(
        slice_, (("a", (PlacementFactor(0, 4, 1), PlacementFactor(2, 8, 1))), ("b", (PlacementFactor(1, 4, 1),)))
    )
    cost = collective_cost(parts, kind, ["a"], 1e9)
    assert cost.seconds == pytest.approx(times * twisted.all_gather_seconds(1e9, (4, 8), links), rel=1e-9)
    assert [place for place, _ in cost.busy_seconds] == [0, 2]
    line = collective_cost(parts, kind, ["b"], 1e9).seconds
    assert line == pytest.approx(times * collectives.all_gather_seconds(1e9, [(4, False)], links), rel=1e-9)


@pytest.mark.parametrize("short", [(0,), (0, 1)], ids=["one short axis", "two"])
def test_two_positions_of_the_long_axis_close_the_rings_of_short_ones(short):
    slice_ = Slice("v4-4x4x8_twisted")
    ring = (*[PlacementFactor(a, 4, 1) for a in short], PlacementFactor(2, 2, 4))
    rest = (*[PlacementFactor(a, 4, 1) for a in (0, 1) if a not in short], PlacementFactor(2, 4, 1))
    placement = Placement(slice_, (("ring", ring), ("rest", rest)))
    size = placement.mesh["ring"]
    members = {placement.device({"ring": i, "rest": 0})[1] for i in range(size)}
    torus, reached, queue = slice_.torus, {(0, 0, 0)}, [0]
    for node in queue:
        for there in (torus.neighbour(node, axis, 1) for axis in short):
            if torus.coordinates(there) not in reached:
                reached.add(torus.coordinates(there))
                queue.append(there)
    assert members == reached  # walks along the short axes alone visit just this group
    cost = collective_cost(placement, "all_gather", ["ring"], 1e9)
    own, seconds = 1e9 / size / len(short), 0.0
    for n in (8, 4)[: len(short)]:
        seconds += collectives.ring_stage_seconds(own, (n, True), ici_links(slice_))
        own *= n
    assert (cost.algorithm, cost.seconds) == ("twisted", pytest.approx(seconds, rel=1e-9))


def test_names_of_slices():
    assert Slice("V4-256_twisted ") == Slice("v4-4x4x8_twisted") != Slice("v4-4x4x8")
    assert str(Slice("2*v5p-8x16x16_twisted")).startswith(
        "2*v5p-8x16x16_twisted: 4096 chips (2 slices of 8x16x16, twisted)"
    )
    assert Slice("2*v5p-8x16x16_twisted").single == Slice("v5p-8x16x16_twisted")
    assert Slice("v4-12x12x24_twisted").wrap == (False, False, True)
    placements = [best_placement(f"v4-4x4x8{t}", {"a": 128}, [Demand("all_reduce", ("a",), 1e6)])[0] for t in
                  ("", "_twisted")]  # fmt: skip
    assert placements[0] != placements[1]


@pytest.mark.parametrize("name", ["v4-4x4x4", "v4-2x2x4", "v4-4x4x12", "v5e-16", "v7-4x4x8", "v5p-4x8x16"])
def test_slices_without_a_twist(name):
    with pytest.raises(HardwareError, match=f"slice '{name}_twisted' has no twist; shapes k x k x 2k"):
        Slice(f"{name}_twisted")


@pytest.mark.parametrize("shape", [(4, 4), (4,), (1, 2), (4, 12), (2, 4, 8)], ids=str)
def test_shapes_without_a_twist(shape):
    with pytest.raises(HardwareError, match="has no twist; its axes must have k and 2k nodes"):
        TwistedTorus(shape)


def exchanging(mesh, layout):
    with mtf.Graph():
        x = mtf.input("x", "batch:1024;d:65536", "bfloat16")
        return mtf.lower({"y": mtf.constrain(x, "d:all") * 2}, mesh=mesh, layout=layout)


def test_an_estimate_says_which_wiring_is_faster():
    program = exchanging("all:128", "batch:all;d:all?")
    plain, other = (mtf.estimate(program, f"v4-4x4x8{twist}") for twist in ("", "_twisted"))
    assert other_wiring(plain).step_seconds == other.step_seconds
    assert other_wiring(other).step_seconds == plain.step_seconds
    line = twisting(plain)
    assert line.startswith("wiring: on v4-4x4x8_twisted a step takes ")
    assert line in plain.table()
    assert twisting(other) is None
    assert "wiring" not in other.table()
    assert other_wiring(mtf.estimate(program, "v5e-128")) is None
