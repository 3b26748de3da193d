"""Collectives: closed forms, events and reference times agree; every node ends with the right data."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware import collectives, point_plans, ring_plans
from hardware.checks import HardwareError
from hardware.collectives import all_gather_seconds, all_reduce_seconds, ring_sent_bytes
from hardware.events import Links
from hardware.torus import Torus
from tests.effort import draws, some
from tests.hardware import reference

CASES = reference.load("torus_cases.json")
SOME_CASES = reference.held("torus_some_cases.json")["cases"]
LINKS = Links(45e9, 1e-6)


def axes_of(torus):
    return list(zip(torus.shape, torus.wrap, strict=True))


def ring_case(torus, op, size_bytes, algorithm, parts, barrier=True, axes=None):
    """Simulate on integers, check all results, return (traffic, closed form)."""
    axes = range(torus.rank) if axes is None else axes
    chosen = [(torus.shape[axis], torus.wrap[axis]) for axis in axes]
    group = int(np.prod([n for n, _ in chosen]))
    cells, nodes = 2 * parts * group, torus.nodes
    members = groups(torus, axes)
    options = {
        "axes": axes, "algorithm": algorithm, "parts": parts, "barrier": barrier,
        "element_bytes": size_bytes / cells,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    if op == "all_gather":
        data = [rng.integers(0, 1000, 2 * parts) for _ in range(nodes)]
        want = [np.array([data[m] for m in members[node]]) for node in range(nodes)]
    else:
        data = [rng.integers(0, 1000, (group, 2 * parts)) for _ in range(nodes)]
        sums = [sum(data[m] for m in members[node]) for node in range(nodes)]
        want = sums
        if op == "reduce_scatter":
            want = [sums[node][members[node].index(node)] for node in range(nodes)]
    collective = getattr(ring_plans, op)(torus, data, **options)
    traffic = collective.run(LINKS)
    assert all(map(np.array_equal, collective.results, want))
    seconds = getattr(collectives, f"{op}_seconds")(size_bytes, chosen, LINKS, algorithm, parts)
    return traffic, seconds


def groups(torus, axes):
    """For every node, the nodes that differ from it only along `axes`, row-major."""
    fixed = [axis for axis in range(torus.rank) if axis not in axes]
    key = [tuple(torus.coordinates(node)[axis] for axis in fixed) for node in range(torus.nodes)]
    return [[m for m in range(torus.nodes) if key[m] == key[node]] for node in range(torus.nodes)]


def point_case(torus, case):
    size, nodes, algo = case["bytes_per_node_S"], torus.nodes, case["algo"]
    if case["op"] == "all_to_all":
        data = [np.arange(nodes * 2).reshape(nodes, 2) + 1000 * node for node in range(nodes)]
        kind = "phased" if algo == "phased" else "routed"
        collective = point_plans.all_to_all(torus, data, algorithm=kind, element_bytes=size / (2 * nodes))
        traffic = collective.run(LINKS)
        want = [np.array([data[source][node] for source in range(nodes)]) for node in range(nodes)]
        if kind == "phased":
            seconds = collectives.all_to_all_seconds(size, axes_of(torus), LINKS, "phased")
        else:
            seconds = collectives.all_to_all_bound_seconds(size, axes_of(torus), LINKS)
    elif case["op"] == "permute":
        target = permutation(torus, algo)
        data = [np.arange(8) + 10 * node for node in range(nodes)]
        collective = point_plans.permute(torus, data, target, case["chunks"], element_bytes=size / 8)
        traffic = collective.run(LINKS)
        source = {target(node): node for node in range(nodes)}
        want = [data[source[node]] for node in range(nodes)]
        hops = max(torus.distance(node, target(node)) for node in range(nodes))
        seconds = collectives.permute_seconds(size, hops, LINKS, case["chunks"])
    else:
        kind, data = "halves" if "halves" in algo else "tree", np.arange(32)
        collective = point_plans.broadcast(torus, data, 0, kind, case["chunks"], element_bytes=size / 32)
        traffic, want = collective.run(LINKS), [data] * nodes
        seconds = collectives.broadcast_seconds(size, axes_of(torus), LINKS, kind, case["chunks"])
    assert all(map(np.array_equal, collective.results, want))
    return traffic, seconds


def permutation(torus, algo):
    if algo.startswith("transpose"):
        return lambda node: torus.node(torus.coordinates(node)[1:] + torus.coordinates(node)[:1])
    numbers = re.search(r"shift \(?\+?([\d, ]+)\)?", algo)[1].replace(",", " ").split()
    shift = [int(number) for number in numbers]
    return lambda node: torus.node(
        [(c + s) % n for c, s, n in zip(torus.coordinates(node), shift, torus.shape, strict=True)]
    )


@pytest.mark.parametrize("index", range(75))
def test_reference_case(index):
    """Times, per-link bytes and message counts of all of torus_cases.json."""
    check_case(reference.need(CASES, "torus_cases.json")["cases"][index])


@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: f"{case['number']}-{case['op']}")
def test_reference_case_held_here(case):
    """The same for those that every checkout holds."""
    check_case(case)


def check_case(case):
    torus = Torus(tuple(case["dims"]), case["wrap"])
    assert (case["B_bytes_per_s"], case["L_s"]) == (LINKS.bytes_per_second, LINKS.hop_seconds)
    if case["op"] in ("all_gather", "reduce_scatter", "all_reduce"):
        algorithm = "shortest" if case["algo"] == "line" else case["algo"]
        traffic, seconds = ring_case(
            torus, case["op"], case["bytes_per_node_S"], algorithm, case["parts"], case["barrier"]
        )
        assert seconds == pytest.approx(case["barrier_closed_form_s"], rel=1e-9)
    else:
        traffic, seconds = point_case(torus, case)
        assert case["closed_form_s"] is None or seconds == pytest.approx(case["closed_form_s"], rel=1e-9)
    # order-dependent cases agree too: the order of equal events is that of the message numbers
    assert traffic.seconds == pytest.approx(case["time_s"], rel=1e-9)
    assert traffic.seconds >= case["bandwidth_lower_bound_s"] * (1 - 1e-12)
    assert traffic.messages == case["messages"]
    assert traffic.max_link_bytes == case["max_link_bytes"]
    assert traffic.total_link_bytes == case["total_link_bytes"]
    carried = {torus.describe_link(link): size for link, size in traffic.link_bytes.items()}
    for link, size in case.get("link_bytes", {}).items():
        assert carried.get(link, 0) == size, link


small_tori = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3).map(
    lambda axes: Torus(tuple(n for n, _ in axes), tuple(wrap for _, wrap in axes))
)


@settings(max_examples=draws(25, 1000))
@given(
    small_tori, st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.sampled_from(collectives.ALGORITHMS), st.booleans(), st.integers(1, 10**6), st.data(),
)  # fmt: skip
def test_closed_form_equals_events(torus, op, algorithm, split, size_bytes, data):
    axes = sorted(data.draw(st.sets(st.integers(0, torus.rank - 1), min_size=1)))
    parts = len(axes) if split else 1
    traffic, seconds = ring_case(torus, op, float(size_bytes), algorithm, parts, axes=axes)
    assert traffic.seconds == pytest.approx(seconds, rel=1e-9)
    group = np.prod([torus.shape[axis] for axis in axes])
    crossings = (2 if op == "all_reduce" else 1) * (group - 1) / group * size_bytes * torus.nodes
    assert traffic.total_link_bytes == pytest.approx(crossings, rel=1e-9)  # each block reaches each node once
    assert max(map(float, traffic.link_bytes.values()), default=0) / LINKS.bytes_per_second <= traffic.seconds


@settings(max_examples=draws(12, 1000))
@given(small_tori, st.sampled_from(collectives.ALGORITHMS), st.data())
def test_without_barriers_data_is_right_and_time_at_least_the_busiest_link(torus, algorithm, data):
    op = data.draw(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]))
    traffic, _ = ring_case(torus, op, 1e6, algorithm, torus.rank, barrier=False)
    assert traffic.seconds * LINKS.bytes_per_second >= traffic.max_link_bytes


@settings(max_examples=draws(12, 1000))
@given(small_tori, st.sampled_from([1, 4321, 10**5, 10**6, 10**8]), st.sampled_from(collectives.EXCHANGES))
def test_all_to_all_equals_its_closed_form(torus, size, algorithm):
    nodes = torus.nodes
    data = [np.arange(nodes * 2).reshape(nodes, 2) + 1000 * node for node in range(nodes)]
    exchange = point_plans.all_to_all(torus, data, algorithm=algorithm, element_bytes=size / (2 * nodes))
    traffic = exchange.run(LINKS)
    want = collectives.all_to_all_seconds(size, axes_of(torus), LINKS, algorithm)
    assert traffic.seconds == pytest.approx(want, rel=1e-9)
    hops = sum(math.ceil(n / 2) if wrap else n - 1 for n, wrap in axes_of(torus))
    assert traffic.total_link_bytes <= size * torus.nodes * hops
    bound = collectives.all_to_all_bound_seconds(size, axes_of(torus), LINKS)
    assert traffic.seconds >= bound * (1 - 1e-12)
    for node, result in enumerate(exchange.results):
        assert np.array_equal(result, [data[source][node] for source in range(nodes)])


@settings(max_examples=draws(10, 250))
@given(small_tori, st.data())
def test_all_to_all_over_some_axes(torus, data):
    axes = sorted(data.draw(st.sets(st.integers(0, torus.rank - 1), min_size=1)))
    members = groups(torus, axes)
    size = len(members[0])
    rows = [np.arange(size * 3).reshape(size, 3) + 100 * node for node in range(torus.nodes)]
    for algorithm in ("rotated", "phased", "routed"):
        exchange = point_plans.all_to_all(torus, rows, axes, algorithm)
        exchange.run(LINKS)
        for node, result in enumerate(exchange.results):
            here = members[node].index(node)
            assert np.array_equal(result, [rows[m][here] for m in members[node]])


@settings(max_examples=draws(12, 1000))
@given(small_tori, st.integers(1, 5), st.integers(1, 10**6), st.data())
def test_broadcast_equals_its_closed_form(torus, chunks, size, data):
    wrapped = all(wrap or n == 1 for n, wrap in axes_of(torus))
    algorithm = data.draw(st.sampled_from(["tree", "halves"] if wrapped else ["tree"]))
    root = data.draw(st.integers(0, torus.nodes - 1)) if wrapped else 0  # the corner of a mesh
    payload = np.arange(2 * chunks)
    spread = point_plans.broadcast(torus, payload, root, algorithm, chunks, element_bytes=size / payload.size)
    traffic = spread.run(LINKS)
    want = collectives.broadcast_seconds(size, axes_of(torus), LINKS, algorithm, chunks)
    assert traffic.seconds == pytest.approx(want, rel=1e-9)
    assert all(np.array_equal(result, payload) for result in spread.results)
    assert traffic.total_link_bytes == pytest.approx((torus.nodes - 1) * size)


@given(st.integers(2, 9), st.integers(0, 8), st.integers(1, 10**6))
def test_shift_of_a_ring(n, shift, size):
    torus = Torus((n,))
    data = [np.array([node]) for node in range(n)]
    move = point_plans.permute(torus, data, lambda node: (node + shift) % n, element_bytes=size)
    traffic = move.run(LINKS)
    hops = min(shift % n, -shift % n)
    assert traffic.seconds == pytest.approx(collectives.permute_seconds(size, hops, LINKS), rel=1e-9)
    assert [int(result[0]) for result in move.results] == [(node - shift) % n for node in range(n)]


def test_routed_all_to_all_splits_ties_evenly():
    """torus_cases.json, case 48: 24 link crossings, every link carries 32,768 bytes."""
    data = [np.zeros((4, 2)) for _ in range(4)]
    exchange = point_plans.all_to_all(Torus((4,)), data, algorithm="routed", element_bytes=65536 / 8)
    traffic = exchange.run(LINKS)
    assert traffic.messages == 24
    assert set(traffic.link_bytes.values()) == {32768}
    assert len(traffic.link_bytes) == 8


@pytest.mark.parametrize("n", [2, 3, 4, 8, 13])
def test_all_to_all_on_a_line_keeps_its_middle_link_busy(n):
    """floor(n/2) ceil(n/2) blocks cross the middle, and the way there and back is all that comes on top."""
    data = [np.arange(n) for _ in range(n)]
    traffic = point_plans.all_to_all(Torus((n,), False), data, element_bytes=45e3).run(Links(45e9, 1e-9))
    assert traffic.max_link_bytes == n // 2 * ((n + 1) // 2) * 45e3
    assert traffic.seconds == pytest.approx(n * n // 4 * 1e-6 + -(-n // 2) * 1e-9, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 6, 9])
@pytest.mark.parametrize("hop_seconds", [0, 1e-7, 1e-6, 3e-6, 1e-3])
def test_all_to_all_on_a_line_from_short_hops_to_long(n, hop_seconds):
    """Another link is the last to finish as hops grow; the closed form follows."""
    links, data = Links(45e9, hop_seconds), [np.arange(n) for _ in range(n)]
    traffic = point_plans.all_to_all(Torus((n,), False), data, element_bytes=45e3).run(links)
    want = collectives.all_to_all_seconds(45e3 * n, [(n, False)], links)
    assert traffic.seconds == pytest.approx(want, rel=1e-9)
    assert want == pytest.approx(
        max((k + 1) * (n - 1 - k) * 1e-6 + (n - 1 - k) * hop_seconds for k in range(n - 1)), rel=1e-9
    )


@pytest.mark.parametrize(
    ("shape", "wrap", "most"),
    [((4, 4), False, 1.05), ((8, 4), False, 1.05), ((4, 4, 4), True, 1.15), ((16,), True, 1.05), ((3, 5), False, 1.1)],
)
def test_all_to_all_comes_near_its_bound(shape, wrap, most):
    axes = [(n, wrap) for n in shape]
    rotated, phased = (collectives.all_to_all_seconds(2**22, axes, LINKS, way) for way in collectives.EXCHANGES)
    assert rotated <= most * collectives.all_to_all_bound_seconds(2**22, axes, LINKS)
    assert rotated <= phased


def test_equal_axes_formula():
    """2d(n-1)L + (N-1)S/(NdB): all_reduce by halves on a cube."""
    n, d, size = 4, 3, 1e8
    nodes = n**d
    want = 2 * d * (n - 1) * 1e-6 + (nodes - 1) * size / (nodes * d * 45e9)
    assert all_reduce_seconds(size, [(n, True)] * d, LINKS, "halves") == pytest.approx(want, rel=1e-12)


def test_two_collectives_share_links_and_disjoint_ones_do_not():
    torus = Torus((4, 4))
    data = [np.ones(32) for _ in range(16)]
    links = Links(1e6, 0)

    def reduce(axis):
        return ring_plans.all_reduce(torus, data, axes=[axis])

    alone = reduce(0).run(links).seconds
    same = [reduce(0), reduce(0)]
    assert ring_plans.run_together(links, same).seconds == pytest.approx(2 * alone)
    apart = ring_plans.run_together(links, [reduce(0), reduce(1)])
    assert apart.seconds == pytest.approx(alone)
    assert apart.plan_seconds == pytest.approx((alone, alone))
    assert all(np.array_equal(result, np.full(32, 4.0)) for c in same for result in c.results)


def test_results_keep_shape_and_dtype_when_nothing_divides():
    torus = Torus((3, 2))
    data = [np.full((5, 7), node, np.float32) for node in range(6)]
    reduce = ring_plans.all_reduce(torus, data)
    reduce.run(LINKS)
    assert all(r.shape == (5, 7) and r.dtype == np.float32 and (r == 15).all() for r in reduce.results)
    gather = ring_plans.all_gather(torus, data, axes=[1])
    gather.run(LINKS)
    assert np.array_equal(gather.results[5], np.stack([data[4], data[5]]))


def test_simulation_is_deterministic():
    torus = Torus((4, 2), (True, False))
    data = [np.random.default_rng(node).standard_normal(40) for node in range(8)]
    runs = []
    for _ in range(2):
        reduce = ring_plans.all_reduce(torus, data, barrier=False)
        runs.append((reduce.run(LINKS), [result.tobytes() for result in reduce.results]))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("shape", some([(4, 4), (16, 16), (3, 5)], [(4, 4), (3, 5)]))
def test_padding_is_not_charged(shape):
    """Two elements for every node are cut in four pieces of half an element: padded in memory only."""
    torus = Torus(shape)
    data = [np.ones(2 * torus.nodes, np.float32) for _ in range(torus.nodes)]
    reduce = ring_plans.all_reduce(torus, data)
    seconds = reduce.run(LINKS).seconds
    assert seconds == pytest.approx(all_reduce_seconds(8 * torus.nodes, axes_of(torus), LINKS), rel=1e-9)
    assert all((result == torus.nodes).all() for result in reduce.results)


def test_sent_bytes():
    assert ring_sent_bytes("reduce_scatter", 800, 8) == 700
    assert ring_sent_bytes("broadcast", 800, 1) == 0


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: all_gather_seconds(-1, [(4, True)], LINKS), "bytes must be a finite number >= 0, not -1"),
        (lambda: all_gather_seconds(float("nan"), [(4, True)], LINKS), "not nan"),
        (lambda: all_gather_seconds(1, [(0, True)], LINKS), "axis size must be an integer >= 1, not 0"),
        (lambda: all_gather_seconds(1, [4], LINKS), "an axis is (size, wrap), such as (16, True), not 4"),
        (lambda: all_gather_seconds(1, [(4, True)], LINKS, "both"), "use one of oneway, halves, shortest"),
        (lambda: all_gather_seconds(1, [(4, True)] * 3, LINKS, parts=2), "one per axis (3), not 2"),
        (lambda: all_gather_seconds(1, None, LINKS), "axes are a list of (size, wrap), such as [(16, True)], not None"),
        (lambda: all_gather_seconds(1, [(4, True)], None), "Links(bytes_per_second, hop_seconds), not None"),
        (lambda: collectives.all_to_all_seconds(1, [(4, True)], LINKS, "routed"), "use one of rotated, phased"),
        (lambda: collectives.ring_stage_seconds(-5, (4, True), LINKS), "bytes must be a finite number >= 0, not -5"),
        (lambda: collectives.ring_stage_seconds(5, (0, True), LINKS), "axis size must be an integer >= 1, not 0"),
        (lambda: collectives.ring_stage_seconds(5, (4, True), LINKS, "foo"), "unknown ring algorithm 'foo'"),
        (lambda: collectives.permute_seconds(1, -1, LINKS), "hops must be an integer >= 0"),
        (lambda: collectives.permute_seconds(1, 1, LINKS, 0), "chunks must be an integer >= 1, not 0"),
        (lambda: collectives.broadcast_seconds(1, [(4, False)], LINKS, "halves"), "do not all wrap"),
        (lambda: collectives.broadcast_seconds(1, [(4, False)], LINKS, "ring"), "'ring'; use one of tree, halves"),
        (lambda: ring_sent_bytes("gather", 1, 4), "unknown collective 'gather'; use one of all_gather"),
        (
            lambda: ring_plans.all_gather(Torus((3,)), [np.ones(1)] * 2),
            "one array per node: 3 for shape (3,), not 2",
        ),
        (lambda: ring_plans.all_gather(Torus((2,)), [np.ones(1), np.ones(2)]), "(1,) float64; (2,) float64"),
        (lambda: ring_plans.all_gather(Torus((2,)), [np.ones(0)] * 2), "must hold numbers"),
        (
            lambda: ring_plans.all_gather(Torus((2,)), [np.ones(1)] * 2, axes=[1]),
            "axes (1,) are not distinct axes",
        ),
        (
            lambda: ring_plans.all_gather(Torus((2,)), [np.ones(1)] * 2, algorithm="x"),
            "unknown ring algorithm 'x'",
        ),
        (lambda: ring_plans.all_reduce(Torus((2,)), [np.ones(1)] * 2, op="mean"), "unknown reduction 'mean'"),
        (
            lambda: ring_plans.reduce_scatter(Torus((2,)), [np.ones(3)] * 2),
            "operands must be [2, ...] for this group",
        ),
        (lambda: ring_plans.run_together(LINKS, []), "one torus, not on 0"),
        (lambda: point_plans.all_to_all(Torus((2,)), [np.ones(3)] * 2), "operands must be [2, ...]"),
        (
            lambda: point_plans.all_to_all(Torus((2,)), [np.ones(2)] * 2, algorithm="x"),
            "use one of rotated, phased, routed",
        ),
        (
            lambda: point_plans.permute(Torus((2,)), [np.ones(2)] * 2, lambda n: 0),
            "one source for every target",
        ),
        (lambda: point_plans.permute(Torus((2,)), [np.ones(2)] * 2, lambda n: n + 1), "target 2 of node 1"),
        (lambda: point_plans.broadcast(Torus((2,)), np.ones(2), root=2), "node 2 is not in"),
        (lambda: point_plans.broadcast(Torus((2,)), np.ones(2), algorithm="x"), "use one of tree, halves"),
        (
            lambda: point_plans.broadcast(Torus((2,), False), np.ones(2), algorithm="halves"),
            "needs rings",
        ),
    ],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)
