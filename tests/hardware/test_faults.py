"""Failures: what pods still offer, rings around holes, and what runs lose, beside simulations of each."""

import itertools
import math
import random
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware import HardwareError, Links, Slice, Torus, collectives, detours, ring_plans
from hardware.dcn import one_ring_seconds
from hardware.faults import offered_share, slices_left
from hardware.goodput import best_segment_seconds, segment_seconds, waiting_share, young_seconds
from tests.effort import draws

LINKS = Links(45e9, 1e-6)

# ---------------------------------------------------------------- pods


@settings(max_examples=draws(20, 1000), deadline=None)
@given(st.sampled_from(["v5e-4x4", "v5e-8x16", "v5e-2x4", "v3-8", "v6e-16x16"]), st.data())
def test_slices_of_a_mesh_are_boxes_without_a_failed_chip(name, data):
    slice_ = Slice(name)
    pod = slice_.chip.pod_shape
    failed = data.draw(st.sets(st.tuples(*[st.integers(0, side - 1) for side in pod]), max_size=6))
    best = 0
    for sides in set(itertools.permutations(slice_.torus_shape)):
        starts = itertools.product(*[range(0, n - side + 1, side) for n, side in zip(pod, sides, strict=True)])
        boxes = [
            set(itertools.product(*[range(at, at + side) for at, side in zip(start, sides, strict=True)]))
            for start in starts
        ]
        best = max(best, sum(not box & failed for box in boxes))
    assert slices_left(slice_, failed) == best


@settings(max_examples=draws(20, 1000), deadline=None)
@given(st.sampled_from(["v4-4x4x4", "v4-8x8x16", "v4-12x12x24", "v4-4x4x8_twisted"]), st.data())
def test_slices_of_cubes_take_any_cubes_that_are_left(name, data):
    failed = data.draw(st.sets(st.tuples(*[st.integers(0, 15)] * 3), max_size=9))
    lost = len({(x // 4, y // 4, z // 4) for x, y, z in failed})
    assert slices_left(name, failed) == (64 - lost) // (Slice(name).chips // 64)


def test_parts_of_cubes():
    assert slices_left("v4-2x2x1", []) == 1024
    assert slices_left("v4-2x2x1", [(0, 0, 0)]) == 1023
    assert slices_left("v4-2x4x4", [(0, 0, 0)]) == 127
    assert slices_left("v5p-4x4x8", [(0, 0, 0)], pod="v5p-8x8x8") == 3


@pytest.mark.parametrize(("chips", "share"), [(1024, 0.75), (2048, 0.50), (3072, 0.75)])
@pytest.mark.parametrize("availability", [0.99, 0.995])
def test_goodput_of_tpu_v4_with_optical_switches(chips, share, availability):
    """Slices of 1, 2 and 3 k chips at 99.0 and 99.5 % of hosts: Jouppi et al. 2023, figure 4 (from memory)."""
    shapes = {1024: "8x8x16", 2048: "8x16x16", 3072: "12x16x16"}
    assert offered_share(f"v4-{shapes[chips]}", availability) == pytest.approx(share, abs=0.02)
    fixed = offered_share(f"v4-{shapes[chips]}", availability, switched=False)
    assert fixed < 0.5 * share  # without switches a slice needs all of its own hosts


@settings(max_examples=draws(5, 100), deadline=None)
@given(st.floats(0.9, 1.0), st.sampled_from(["v4-4x4x8", "v4-8x8x16"]), st.integers(0, 99))
def test_the_share_that_is_offered_is_the_mean_over_random_failures(availability, name, seed):
    rng = np.random.default_rng(seed)
    slice_ = Slice(name)
    cubes = slice_.chips // 64
    up = (rng.random((400, 64, 16)) < availability).all(axis=2).sum(axis=1)
    mean = (up // cubes * cubes / 64).mean()
    assert offered_share(slice_, availability) == pytest.approx(mean, abs=0.05)


# ---------------------------------------------------------------- rings around holes


@settings(max_examples=draws(25, 1000), deadline=None)
@given(st.sampled_from([(4, 4), (6, 4), (8, 8), (2, 4), (4, 4, 2), (2, 2, 4), (4, 6, 2)]), st.booleans(), st.data())
def test_a_ring_visits_all_that_is_left_and_takes_as_long_as_its_closed_form(shape, wrap, data):
    torus = Torus(shape, wrap)
    size = float(data.draw(st.integers(1, 10**7)))
    failed = set()
    if data.draw(st.booleans()):  # a host of 2 x 2 chips
        corner = [2 * data.draw(st.integers(0, n // 2 - 1)) for n in shape[:2]] + [
            data.draw(st.integers(0, n - 1)) for n in shape[2:]
        ]
        failed = {torus.node([corner[0] + a, corner[1] + b, *corner[2:]]) for a in (0, 1) for b in (0, 1)}
    links = [link for link in torus.links() if not set(torus.ends(link)) & failed]
    cut = [data.draw(st.sampled_from(links))] if not failed and data.draw(st.booleans()) else []
    ring = detours.ring_around(torus, failed, cut)
    if ring is None:
        assert failed or cut  # whole grids of even sides always have one
        return
    n = torus.nodes - len(failed)
    assert sorted(ring) == sorted(set(range(torus.nodes)) - failed)
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 100, 2 * n) for _ in range(torus.nodes)]
    reduce = detours.all_reduce(torus, ring, values, element_bytes=size / (2 * n))
    traffic = reduce.run(LINKS)
    assert traffic.seconds == pytest.approx(detours.all_reduce_seconds(size, n, LINKS), rel=1e-9)
    for link in traffic.link_bytes:
        assert not set(torus.ends(link)) & failed
        assert not cut or set(torus.ends(link)) != set(torus.ends(cut[0]))
    total = sum(values[node] for node in ring)
    for node, result in enumerate(reduce.results):
        assert np.array_equal(result, values[node] if node in failed else total)


@pytest.mark.parametrize("host", [*itertools.product((0, 2, 4, 6), repeat=2)], ids=str)
def test_every_host_of_a_mesh_of_v3_can_fail(host):
    """8 x 8 chips without wrap: wherever 2 x 2 of them fail, a ring goes round the other 60."""
    torus = Torus((8, 8), wrap=False)
    failed = [torus.node((host[0] + a, host[1] + b)) for a in (0, 1) for b in (0, 1)]
    ring = detours.ring_around(torus, failed)
    assert ring is not None
    assert len(ring) == 60


@pytest.mark.parametrize(("restart", "goodput"), [(300.0, 0.93), (600.0, 0.90)])
def test_goodput_of_llama_3(restart, goodput):
    """466 interruptions in 54 days, more than 90 % effective: arXiv:2407.21783; checkpoint and restart assumed."""
    mean = 54 * 86400 / 466
    best = best_segment_seconds(10.0, mean)
    assert best / segment_seconds(best, 10.0, restart, mean) == pytest.approx(goodput, abs=0.005)


def test_a_failed_link_of_a_ring_leaves_a_line():
    """The other axis keeps its ring; events on a torus whose axis 0 does not close cross no link at its end."""
    torus = Torus((4, 4), (False, True))
    data = [np.arange(64) + node for node in range(16)]
    reduce = ring_plans.all_reduce(torus, data, element_bytes=1e4)
    traffic = reduce.run(LINKS)
    want = collectives.all_reduce_seconds(64e4, [(4, False), (4, True)], LINKS)
    assert traffic.seconds == pytest.approx(want, rel=1e-9)
    assert want > collectives.all_reduce_seconds(64e4, [(4, True), (4, True)], LINKS)


# ---------------------------------------------------------------- goodput


def simulated(work, checkpoint, restart, mean, rng):
    """Time until one segment is done, failure by failure."""
    clock = 0.0
    while True:
        failure = rng.expovariate(1 / mean)
        if failure >= work + checkpoint:
            return clock + work + checkpoint
        clock += failure
        while True:
            failure = rng.expovariate(1 / mean)
            if failure >= restart:
                clock += restart
                break
            clock += failure


@pytest.mark.parametrize(("work", "checkpoint", "restart"), [(1.0, 0.1, 0.2), (0.3, 0.0, 0.5), (2.0, 0.3, 0.0)])
def test_segments_take_what_failures_one_by_one_make_of_them(work, checkpoint, restart):
    rng = random.Random(1)
    runs = [simulated(work, checkpoint, restart, 1.0, rng) for _ in range(draws(6000, 100_000))]
    mean, error = np.mean(runs), np.std(runs) / math.sqrt(len(runs))
    assert segment_seconds(work, checkpoint, restart, 1.0) == pytest.approx(mean, abs=4 * error)


@given(st.floats(1e-9, 10.0), st.floats(1.0, 1e6))
def test_the_best_segment_is_a_minimum_and_young_comes_near(share, mean):
    checkpoint = share * mean
    best = best_segment_seconds(checkpoint, mean)

    def cost(work):
        return segment_seconds(work, checkpoint, 7.0, mean) / work

    assert cost(best) <= min(cost(0.9 * best), cost(1.1 * best)) * (1 + 1e-12)
    if checkpoint < 1e-3 * mean:
        assert best == pytest.approx(young_seconds(checkpoint, mean), rel=0.03)


@pytest.mark.parametrize("share", [1e-2, 6e-7, 4e-7, 1e-9, 1e-20, 1e-40])
def test_the_best_segment_solves_its_equation_to_twelve_digits(share):
    with localcontext() as context:
        context.prec = 80
        t, scale = Decimal(best_segment_seconds(share, 1.0)), Decimal(share)
        error = ((1 - t).ln() + t + scale) * (1 - t) / t**2  # of a step of Newton's, relative
    assert abs(error) < 1e-11


def test_absurd_loads_wait_always_or_never():
    assert waiting_share(5, 1e300, 1e-300) == 1.0
    assert waiting_share(5, 1e-300, 1e300) == 0.0


@pytest.mark.parametrize(("spares", "repair"), [(0, 0.5), (1, 0.5), (2, 1.5)])
def test_waiting_for_repair_one_by_one(spares, repair):
    rng, now, waited, repairs = random.Random(2), 0.0, 0.0, []
    for _ in range(draws(20_000, 300_000)):
        now += rng.expovariate(1.0)  # nothing fails while all stands still
        repairs = [end for end in repairs if end > now]
        repairs.append(now + rng.expovariate(1 / repair))
        if len(repairs) > spares:
            waited += min(repairs) - now
            now = min(repairs)
    assert waiting_share(spares, repair, 1.0) == pytest.approx(waited / now, rel=0.05)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: slices_left("v5e-16", [(16, 0)]), "failed chip (16, 0) is not in a pod of shape 16x16"),
        (lambda: slices_left("2*v5e-16", []), "joins 2 slices; ask for one of them, v5e-4x4"),
        (lambda: slices_left("v4-4x4x4", [], pod="v5p-8x8x8"), "not a slice of a pod of v5p"),
        (lambda: offered_share("v4-4x4x4", 1.5), "must be a probability, not 1.5"),
        (lambda: offered_share("v4-2x2x1", 0.9), "is not made of whole cubes; give switched=False"),
        (lambda: detours.ring_around(Torus((4,)), [7]), "failed nodes [7] are not all in a torus of 4 nodes"),
        (lambda: detours.all_reduce(Torus((4,)), [0, 2], [np.ones(1)] * 4), "nodes 0 and 2 of the ring are not neigh"),
        (lambda: detours.all_reduce(Torus((4,)), [0, 0], [np.ones(1)] * 4), "two or more nodes, each once"),
        (lambda: segment_seconds(1, 1, 1, 0), "mean_time_between_failures must be a finite number > 0, not 0"),
        (lambda: segment_seconds(1e6, 0, 0, 1), "failures every 1 s let no segment of 1e+06 s end"),
        (lambda: segment_seconds(1e308, 1e308, 0, 1), "failures every 1 s let no segment of inf s end"),
        (lambda: waiting_share(-1, 1, 1), "spares must be an integer >= 0, not -1"),
        (lambda: waiting_share(10**12, 1, 1), "spares must be at most 1,000,000, not 1,000,000,000,000"),
        (lambda: detours.all_reduce_seconds(1e8, 0, Links(1e9)), "nodes must be an integer >= 1, not 0"),
        (lambda: detours.all_reduce_seconds(-1, 4, Links(1e9)), "payload_bytes must be a finite number >= 0, not -1"),
        (lambda: Links(1e9).seconds(-1), "size_bytes must be a finite number >= 0, not -1"),
        (lambda: one_ring_seconds("v5e-256", 1e9), "v5e-256 is one slice; name several, such as 2*v5e-256"),
    ],
)  # fmt: skip
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)
