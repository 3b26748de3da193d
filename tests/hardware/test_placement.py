"""Mesh axes on torus axes: every placement is one-to-one, prices agree with simulated messages."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware import CHIPS, collectives, network, point_plans, ring_plans
from hardware.checks import HardwareError
from hardware.events import Links, Message, MessagePlan, simulate
from hardware.network import KINDS, Demand, best_placement, collective_cost, ici_links
from hardware.placement import CORES, DCN, Placement, PlacementFactor, placements
from hardware.sharing import together_seconds
from hardware.slices import Slice
from hardware.snakes import closes, hop_length, snake_orders, snakes
from hardware.torus import Torus

MESHES = [
    ("v3-8", {"rows": 2, "cols": 4}), ("v3-8", {"x": 8}), ("v3-32", {"a": 2, "b": 4, "c": 4}),
    ("v5e-16", {"a": 8, "b": 2}), ("v4-32", {"a": 4, "b": 4}), ("2*v5e-16", {"a": 4, "b": 8}),
    ("v5e-1", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_every_placement_puts_each_position_on_its_own_device(name, mesh):
    slice_ = Slice(name)
    found = list(placements(slice_, mesh))
    assert len(set(found)) == len(found) >= 1
    for placement in found:
        devices = [
            placement.device(dict(zip(mesh, index, strict=True)))
            for index in itertools.product(*(range(size) for size in mesh.values()))
        ]
        assert len(set(devices)) == slice_.devices
        assert placement.mesh == mesh
        for slice_number, torus, core in devices:
            assert slice_number < slice_.slices
            assert all(c < n for c, n in zip(torus, slice_.torus_shape, strict=True))
            assert core < slice_.chip.devices_per_chip


def test_placements_of_a_square_by_hand():
    # 4x4 mesh on 4x4 torus: whole axes (2 ways), or 2x2 blocks in each of two orders per axis (4 ways)
    assert len(list(placements(Slice("v5e-16"), {"a": 4, "b": 4}))) == 6
    strides = {
        tuple((f.place, f.size, f.stride) for f in dict(p.factors)["a"])
        for p in placements(Slice("v5e-16"), {"a": 4, "b": 4})
    }
    assert strides == {
        ((0, 4, 1),), ((1, 4, 1),), ((0, 2, 1), (1, 2, 1)), ((0, 2, 1), (1, 2, 2)), ((0, 2, 2), (1, 2, 1)),
        ((0, 2, 2), (1, 2, 2)),
    }  # fmt: skip


def test_parts_of_a_ring_do_not_wrap_and_strided_rings_do():
    p = next(
        p for p in placements(Slice("v5e-256"), {"a": 4, "b": 64})
        if dict(p.factors)["a"] == (PlacementFactor(1, 4, 4),)
    )  # fmt: skip
    a, b = p.of(["a"]), p.of(["b"])
    assert p.wraps(a[0])
    assert [p.wraps(f) for f in b] == [True, False]
    assert [f.size for f in p.of(["a", "b"])] == [16, 16]  # joined again
    assert "4 of 16 on torus axis 1 (ring, hops 4, link load 4)" in str(p)


def ring_messages(torus, rings, size_bytes):
    """all_gather by halves round each ring of nodes (lists), routed between neighbours."""
    plan = MessagePlan([np.zeros(1) for _ in range(torus.nodes)])
    for ring in rings:
        n = len(ring)
        last = {}
        for hop in range(n - 1):
            for start in range(n):
                for step in (1, -1):
                    a, b = ring[(start + step * hop) % n], ring[(start + step * (hop + 1)) % n]
                    after = (last[start, step],) if hop else ()
                    last[start, step] = len(plan.messages)
                    size = Fraction(size_bytes) / n / 2
                    route = torus.route(a, b, backward_ties=step < 0)
                    plan.messages.append(Message(a, b, route, (0,), (0,), size, after))
    return plan


@pytest.mark.parametrize(("n", "stride"), [(8, 2), (8, 1), (12, 3), (16, 4)])
def test_a_strided_ring_sees_a_share_of_its_links(n, stride):
    torus, links = Torus((n,)), Links(1e9, 1e-6)
    rings = [list(range(offset, n, stride)) for offset in range(stride)]
    events = simulate(torus, links, [ring_messages(torus, rings, 10**6)]).seconds
    thin = Links(1e9 / stride, stride * 1e-6)
    want = collectives.all_gather_seconds(10**6, [(n // stride, True)], thin, "halves")
    assert events == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(("shape", "wrap"), [((2, 4), False), ((4, 4), False), ((3, 4), True), ((2, 3, 4), False)])
def test_a_snake_is_a_ring(shape, wrap):
    torus, links = Torus(shape, wrap), Links(1e9, 1e-6)
    path = snakes(tuple(zip(torus.shape, torus.wrap, strict=True)))
    ring = [torus.node(place) for place in path]
    events = simulate(torus, links, [ring_messages(torus, [ring], 10**6)]).seconds
    want = collectives.all_gather_seconds(10**6, [(torus.nodes, True)], links, "halves")
    assert events == pytest.approx(want, rel=1e-9)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_snakes_visit_every_node_hop_by_hop(sizes):
    for path in snake_orders(sizes):
        assert sorted(path) == list(itertools.product(*(range(n) for n in sizes)))
        axes = [(n, False) for n in sizes]
        assert all(hop_length(a, b, axes) == 1 for a, b in itertools.pairwise(path))
    ring = snakes(tuple((n, False) for n in sizes))
    large = [n for n in sizes if n > 1]
    if len(large) == 2 and any(n % 2 == 0 for n in large):
        assert ring is not None  # a grid with an even side has a Hamiltonian cycle
    if math.prod(sizes) % 2 and math.prod(sizes) > 1:
        assert ring is None  # an odd grid is bipartite with unequal halves


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3).map(tuple))
def test_a_snake_closes_if_one_is_found(axes):
    assert closes(axes) == (snakes(axes) is not None)


@pytest.mark.parametrize("name", ["v5e-8x16", "v5e-16", "v5p-128", "v4-32", "v5e-256"])
def test_all_to_all_is_priced_as_its_closed_form(name):
    slice_ = Slice(name)
    placement = next(placements(slice_, {"x": slice_.devices}))
    axes = list(zip(slice_.torus_shape, slice_.wrap, strict=True))
    cost = collective_cost(placement, "all_to_all", ["x"], 1e8)
    assert cost.algorithm == "rotated"
    assert cost.seconds == pytest.approx(collectives.all_to_all_seconds(1e8, axes, ici_links(slice_)))
    assert cost.seconds <= 1.15 * collectives.all_to_all_bound_seconds(1e8, axes, ici_links(slice_))
    small = collective_cost(placement, "all_to_all", ["x"], 1)  # few bytes: each axis once, not once for every part
    assert small.seconds <= collectives.all_to_all_seconds(1, axes, ici_links(slice_))


def test_snake_beats_axes_in_turn_on_a_small_mesh():
    placement, _ = best_placement(Slice("v5e-8"), {"x": 8})
    cost = collective_cost(placement, "all_reduce", ["x"], 1e8)
    assert cost.algorithm == "snake ring"
    want = collectives.all_reduce_seconds(1e8, [(8, True)], ici_links(Slice("v5e-8")))
    assert cost.seconds == pytest.approx(want)


def test_whole_torus_uses_all_axes_at_once():
    placement, _ = best_placement(Slice("v5p-128"), {"x": 64})
    cost = collective_cost(placement, "all_reduce", ["x"], 1e8)
    assert cost.algorithm == "rotated"
    want = collectives.all_reduce_seconds(1e8, [(4, True)] * 3, ici_links(Slice("v5p-128")))
    assert cost.seconds == pytest.approx(want)
    assert sum(seconds for _, seconds in cost.busy_seconds) == pytest.approx(3 * cost.busy_seconds[0][1])
    assert cost.busy_seconds[0][1] <= cost.seconds


def test_unequal_axes_cost_what_the_closed_form_says():
    slice_ = Slice("v4-4x4x8")
    placement = next(placements(slice_, {"x": 128}))
    cost = collective_cost(placement, "all_reduce", ["x"], 1e8)
    axes = [(4, True), (4, True), (8, True)]
    assert cost.algorithm == "rotated"
    equal = collectives.all_reduce_seconds(1e8, axes, ici_links(slice_))
    # Parts that start along an axis of n send (n-1)/n of their bytes there first: with equal parts, 7/8 beside 3/4.
    # As 7:7:6 the first stages end together, 21/40 of a third after 7/24.
    assert cost.seconds < equal
    first = 1e8 / (2 * ici_links(slice_).bytes_per_second) * 0.75 * 7 / 20
    assert cost.seconds > 2 * first
    assert sum(seconds for _, seconds in cost.busy_seconds) == pytest.approx(
        2 * 1e8 * (1 - 1 / 128) / (2 * ici_links(slice_).bytes_per_second)
    )


@pytest.mark.parametrize("shape", [(16, 32), (8, 16)])
def test_axes_that_are_not_alike_share_a_gather_unequally(shape):
    """No gather is faster than all bytes over all links; equal parts take longer than unequal ones."""
    chip = dataclasses.replace(
        CHIPS["v4"], pod_shape=tuple(sorted(shape)), max_slice_chips=math.prod(shape), wrap_cube=1
    )
    slice_ = Slice("v4-" + "x".join(map(str, shape)), chip)
    links = ici_links(slice_)
    cost = collective_cost(next(placements(slice_, {"x": math.prod(shape)})), "all_gather", ["x"], 1e9)
    least = 1e9 * (1 - 1 / math.prod(shape)) / (2 * len(shape) * links.bytes_per_second)
    equal = collectives.all_gather_seconds(1e9, [(n, True) for n in shape], links)
    assert least < cost.seconds < equal
    assert cost.seconds < 1.04 * least


@pytest.mark.parametrize("shape", [(2, 4, 4), (4, 8), (2, 8)])
def test_an_all_to_all_has_no_barriers_that_events_do_not_have(shape):
    """Blocks of 4 KiB: as long on the way as on the links. Within an eighth of the faster of the simulated ways."""
    nodes = math.prod(shape)
    chip = dataclasses.replace(CHIPS["v4"], pod_shape=tuple(sorted(shape)), max_slice_chips=nodes, wrap_cube=None)
    slice_ = Slice("v4-" + "x".join(map(str, shape)), chip)
    cost = collective_cost(next(placements(slice_, {"x": nodes})), "all_to_all", ["x"], 4096 * nodes)
    torus, data = Torus(shape, wrap=False), [np.zeros((nodes, 1)) for _ in range(nodes)]
    ways = (point_plans.all_to_all(torus, data, algorithm=way, element_bytes=4096) for way in ("rotated", "routed"))
    events = min(way.run(ici_links(slice_)).seconds for way in ways)
    assert cost.seconds == pytest.approx(events, rel=0.15)


def test_two_factors_on_one_torus_axis_take_turns():
    a = (PlacementFactor(0, 2, 1), PlacementFactor(1, 2, 8), PlacementFactor(1, 2, 1))
    b = (PlacementFactor(0, 8, 2), PlacementFactor(1, 4, 2))
    placement = Placement(Slice("v5e-256"), (("a", a), ("b", b)))
    assert len(placement.of(["a"])) == 3
    cost = collective_cost(placement, "all_reduce", ["a"], 1e8)
    assert cost.algorithm == "in turn"
    assert cost.seconds >= sum(seconds for place, seconds in cost.busy_seconds if place == 1)


def test_both_cores_of_a_chip_share_its_links():
    slice_ = Slice("v3-32")
    across = next(p for p in placements(slice_, {"a": 16, "b": 2}) if dict(p.factors)["b"][0].place == CORES)
    links = ici_links(slice_)
    half = Links(links.bytes_per_second / 2, links.hop_seconds)
    cost = collective_cost(across, "all_gather", ["a"], 1e7)
    plain = collectives.all_gather_seconds(1e7, [(4, False), (4, False)], half)
    assert cost.seconds == pytest.approx(min(plain, collectives.all_gather_seconds(1e7, [(16, True)], half)))
    on_chip = collective_cost(across, "all_gather", ["b"], 1e7)
    assert on_chip.busy_seconds[0][0] == CORES
    assert on_chip.seconds < cost.seconds / 5


def test_a_group_over_cores_and_chips_halves_its_traffic_on_the_torus():
    slice_ = Slice("v3-8")
    placement = next(placements(slice_, {"x": 8}))
    chip, links = slice_.chip, ici_links(slice_)
    cost = collective_cost(placement, "all_reduce", ["x"], 1e8)
    on_chip = 1e8 / (chip.hbm_bytes_per_second / 4)  # half read, half written; there and back
    ring = collectives.all_reduce_seconds(1e8 / 2, [(4, True)], Links(links.bytes_per_second / 2, 1e-6))
    assert cost.seconds == pytest.approx(on_chip + ring)  # a 2x2 mesh is a ring of 4, or two rotated lines
    exchange = collective_cost(placement, "all_to_all", ["x"], 1e8)
    lines = collectives.all_to_all_seconds(1e8, [(2, False)] * 2, Links(links.bytes_per_second / 2, 1e-6))
    assert exchange.seconds == pytest.approx(on_chip / 2 + lines)


def test_dcn_is_slow_and_last():
    slice_ = Slice("2*v5e-256")
    mesh = {"data": 2, "x": 16, "y": 16}
    placement = next(p for p in placements(slice_, mesh) if dict(p.factors)["data"][0].place == DCN)
    chip = slice_.chip
    over = collective_cost(placement, "all_reduce", ["data"], 1e8)
    rate = chip.dcn_bytes_per_second * chip.dcn_efficiency
    assert over.seconds == pytest.approx(1e8 / rate + 2 * chip.dcn_hop_seconds)
    everything = collective_cost(placement, "all_reduce", ["data", "x", "y"], 1e8)
    inside = collective_cost(placement, "all_reduce", ["x", "y"], 1e8)
    dcn = 1e8 / 256 / rate + 2 * chip.dcn_hop_seconds
    assert max(inside.seconds, dcn) < everything.seconds <= inside.seconds + dcn  # which overlap in chunks
    assert dict(everything.busy_seconds)[DCN] == pytest.approx(1e8 / 256 / rate)


def test_best_placement_follows_the_demands():
    slice_ = Slice("v5e-8x16")
    heavy = [Demand("all_reduce", ("model",), 1e9), Demand("all_reduce", ("data",), 1e6)]
    placement, seconds = best_placement(slice_, {"data": 8, "model": 16}, heavy)
    assert placement.wraps(placement.of(["model"])[0])
    every = [
        sum(collective_cost(p, d.kind, d.axes, d.payload_bytes).seconds for d in heavy)
        for p in placements(slice_, {"data": 8, "model": 16})
    ]
    assert seconds == min(every)
    assert max(every) > 1.5 * seconds  # a bad placement costs


def test_names_do_for_slices():
    placement, seconds = best_placement("v5e-16", {"x": 4, "y": 4})
    assert (placement, seconds) == best_placement(Slice("v5e-4x4"), {"x": 4, "y": 4})
    assert placement in list(placements("v5e-16", {"x": 4, "y": 4}))


def test_the_best_order_of_axes_in_turn_is_found_without_trying_all():
    rng = np.random.default_rng(0)
    for _ in range(100):
        count = rng.integers(1, 5)
        factors = [
            PlacementFactor(*map(int, rng.choice([[0, 1, 2], [2, 3, 8], [1, 2, 4]], axis=1))) for _ in range(count)
        ]
        legs = [network._Leg(f, (f.size, bool(rng.integers(2))), network._thinned(Links(45e9), f, 1)) for f in factors]
        every = [network._staged("", [order], legs).seconds(1e6) for order in itertools.permutations(range(count))]
        assert network._staged_times(legs)[0].seconds(1e6) == pytest.approx(min(every))


def test_best_placement_on_the_largest_slice_prices_each_group_of_factors_once():
    """38,360 placements; a price for each would be 153,440."""
    network._route.cache_clear()
    placement, _ = best_placement("v5p-12288", {"a": 4, "b": 8, "c": 12, "d": 16})
    assert network._route.cache_info().misses < 1000
    assert placement.mesh == {"a": 4, "b": 8, "c": 12, "d": 16}


CUBE = {"x": 4, "y": 4, "z": 4}


@pytest.mark.parametrize(
    "axes",
    [("x", "y"), ("x", "x"), ("x", "y", "z"), ("x", "y", "x"), ("x", "x", "x"), ("xy", "z"), ("x", "x", "y", "y")],
)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_together_agrees_with_events(kind, axes):
    """Several collectives at once on a 4x4x4 torus; hop times are small, so that links are what they share."""
    torus, links = Torus((4, 4, 4)), Links(1e9, 1e-9)
    placement = next(p for p in placements("v5p-128", CUBE) if all(len(p.of([name])) == 1 for name in CUBE))
    place = {name: placement.of([name])[0].place for name in CUBE}
    plans, costs = [], []
    for names in axes:
        group = 4 ** len(names)
        rows = [np.ones((group, 12) if kind in ("reduce_scatter", "all_to_all") else 48) for _ in range(64)]
        payload = 1e6 * {"all_gather": group}.get(kind, 1)
        options = {"axes": [place[name] for name in names], "element_bytes": 1e6 / rows[0].size}
        module = point_plans if kind == "all_to_all" else ring_plans
        plans.append(getattr(module, kind)(torus, rows, **options))
        costs.append(collective_cost(placement, kind, list(names), payload, links))
    events = ring_plans.run_together(links, plans).seconds
    assert together_seconds(costs) == pytest.approx(events, rel=0.01)


def test_together():
    placement, _ = best_placement(Slice("v5e-256"), {"x": 16, "y": 16})
    x, y = (collective_cost(placement, "all_reduce", [axis], 1e8) for axis in "xy")
    assert together_seconds([x, y]) == pytest.approx(max(x.seconds, y.seconds))
    assert together_seconds([x, x]) == pytest.approx(2 * x.seconds, rel=0.02)
    assert together_seconds([]) == 0


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MESHES), st.sampled_from(KINDS), st.floats(0, 1e9), st.data())
def test_costs_are_finite_ordered_and_grow_with_bytes(case, kind, size, data):
    name, mesh = case
    placement = data.draw(st.sampled_from(list(placements(Slice(name), mesh))))
    axes = data.draw(st.lists(st.sampled_from(sorted(mesh)), unique=True, min_size=1))
    cost = collective_cost(placement, kind, axes, size)
    assert 0 <= cost.seconds < math.inf
    assert all(busy <= cost.seconds * (1 + 1e-9) for _, busy in cost.busy_seconds)
    assert collective_cost(placement, kind, axes, 2 * size + 1).seconds >= cost.seconds
    group = math.prod(mesh[axis] for axis in axes)
    assert (cost.seconds == 0) == (group == 1 or (size == 0 and cost.hops == 0 and cost.seconds == 0))
    if kind == "all_reduce":
        halves = [collective_cost(placement, k, axes, size).seconds for k in ("reduce_scatter", "all_gather")]
        assert cost.seconds == pytest.approx(sum(halves))


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: list(placements(Slice("v3-8"), {"a": 4})), "mesh a:4 has 4 positions, v3-8: 4 chips"),
        (lambda: list(placements(Slice("v3-8"), {"a": 0})), "mesh axis 'a' must be an integer >= 1, not 0"),
        (lambda: list(placements(Slice("v3-8"), [8])), "a mesh is a mapping"),
        (
            lambda: best_placement(Slice("v5e-4"), {"a": 4}, [Demand("all_reduce", ("b",), 1)]),
            "['b'] are not distinct",
        ),
        (lambda: collective_cost(first(), "gather", ["a"], 1), "unknown collective 'gather'"),
        (lambda: collective_cost(first(), "all_reduce", ["a", "a"], 1), "['a', 'a'] are not distinct"),
        (lambda: collective_cost(first(), "all_reduce", ["a"], -1), "payload_bytes must be a finite number"),
        (lambda: collective_cost(first(), "all_reduce", "a", 1), "a list of names, such as ['x', 'y'], not 'a'"),
        (lambda: collective_cost("v3-8", "all_reduce", ["a"], 1), "on a Placement, such as best_placement finds"),
        (lambda: Demand("all_reduce", ("a",), 1, float("nan")), "Demand count must be a finite number >= 0, not nan"),
        (lambda: Demand("all_reduce", ("a",), 1, -1), "Demand count must be a finite number >= 0, not -1"),
        (lambda: Demand("all_reduce", ("a",), -1), "Demand payload_bytes must be a finite number"),
        (lambda: Demand("all_reduce", "ab", 1), "Demand axes must be a list of names"),
        (lambda: Demand("gather", ("a",), 1), "unknown collective 'gather'"),
        (lambda: best_placement("v3-8", {"a": 8}, [3]), "demands must be a list of Demand"),
        (lambda: together_seconds([3]), "costs must be a list of Cost"),
        (lambda: best_placement("v3-9", {"a": 8}), "'v3-9' is not a slice of v3"),
        (
            lambda: Placement("v5e-4", (("a", (PlacementFactor(7, 4, 1),)),)),
            "is on no torus axis, cores or DCN of v5e-4",
        ),
        (lambda: first().device({"a": 8}), "coordinate 'a' = 8 is outside an axis of 8"),
        (lambda: first().device({"b": 0}), "must name the axes of the mesh"),
        (lambda: Placement(Slice("v5e-4"), (("a", (PlacementFactor(0, 2, 1),)),)), "cover 1 of the 2 positions"),
        (lambda: Placement(Slice("v5e-4"), (("a", (PlacementFactor(0, 2, 2),)),)), "do not tile torus axis 0"),
        (lambda: ici_links(Slice("v1-1")), "chip 'v1' has no links"),
        (lambda: next(snake_orders([])), "at least one axis"),
    ],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)


def first():
    return next(placements(Slice("v3-8"), {"a": 8}))


def test_the_best_of_some_placements_is_one_of_them() -> None:
    slice_, mesh = Slice("v5e-8x16"), {"data": 8, "model": 16}
    demands = [Demand("all_reduce", ("model",), 2.0**24)]
    best, seconds = best_placement(slice_, mesh, demands)
    others = [p for p in placements(slice_, mesh) if p != best]
    found, slower = best_placement(slice_, mesh, demands, among=others)
    assert found in others
    assert slower >= seconds
    assert slower == min(collective_cost(p, "all_reduce", ["model"], 2**24).seconds for p in others)
    with pytest.raises(HardwareError, match="cannot be laid"):
        best_placement(slice_, mesh, demands, among=[])
    with pytest.raises(HardwareError, match="among must hold placements of mesh"):
        best_placement(slice_, {"data": 16, "model": 8}, demands, among=others)
