"""Slices with failed chips and links: rings that avoid them, names, and what programs cost there."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import meshlib as mtf
from hardware import Demand, HardwareError, Links, Slice, Torus, best_placement, collective_cost, detours
from hardware.damage import Damage, remains
from tests.effort import draws


@settings(max_examples=draws(40, 1000), deadline=None)
@given(
    st.sampled_from([(4, 4), (8, 8), (4, 8), (16, 16), (2, 2, 4), (4, 4, 4), (4, 4, 8)]), st.integers(0, 3),
    st.integers(0, 2), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
@example((4, 4, 4), 0, 2, False, 2)  # each of two failed links replaces the other
def test_what_remains_never_uses_what_failed(shape, chips, links, wrap, seed):
    draw = random.Random(seed)
    torus = Torus(shape, wrap)
    places = tuple(tuple(draw.randrange(side) for side in shape) for _ in range(chips))
    ends = [torus.ends(draw.choice(list(torus.links()))) for _ in range(links)]
    damage = Damage(places, tuple((torus.coordinates(a), torus.coordinates(b)) for a, b in ends))
    broken = {frozenset(pair) for pair in ends}
    try:
        rest = remains(torus, damage)
    except HardwareError:
        assert chips or links
        return
    if rest.ring is None:  # axes that became lines: shifted so that they begin behind the cut, no link there is used
        line = Torus(rest.shape, rest.wrap)
        cuts = dict.fromkeys(range(torus.rank), 0)
        for a, b in ends:
            axis = next(n for n in range(torus.rank) if torus.coordinates(a)[n] != torus.coordinates(b)[n])
            low, high = sorted((torus.coordinates(a)[axis], torus.coordinates(b)[axis]))
            cuts[axis] = high if high - low == 1 else 0
        for link in line.links():
            pair = frozenset(
                torus.node([(c + cuts[n]) % shape[n] for n, c in enumerate(line.coordinates(node))])
                for node in line.ends(link)
            )
            assert pair not in broken
        return
    failed = {torus.node(place) for place in rest.failed}
    assert {torus.node(place) for place in places} <= failed <= set(range(torus.nodes))
    assert sorted([*rest.ring, *failed]) == list(range(torus.nodes))
    for a, b in zip(rest.ring, (*rest.ring[1:], rest.ring[0]), strict=True):
        assert torus.distance(a, b) == 1
        assert frozenset((a, b)) not in broken


@pytest.mark.parametrize("seed", range(3))
def test_every_tray_can_fail_alone(seed):
    draw = random.Random(seed)
    for name in ("v5e-64", "v5e-256", "v5p-128", "v4-4x4x8_twisted", "v3-32", "v6e-16"):
        whole = Slice(name)
        left = whole.without(tuple(draw.randrange(side) for side in whole.torus_shape))
        assert left.chips == whole.chips - 4 == left.torus_shape[0]


@pytest.mark.parametrize("at", [*itertools.product((1, 2, 5), (0, 3, 6))], ids=str)
def test_a_link_inside_a_mesh_can_fail(at):
    row, column = at
    ring = remains(Torus((8, 8), False), Damage((), (((row, column), (row, column + 1)),))).ring
    assert ring is not None


def test_a_collective_takes_what_messages_round_the_hole_do():
    slice_ = Slice("v5e-64").without((3, 5))
    torus, links = Slice("v5e-64").torus, Links(45e9, 0.0)
    failed = [torus.node(place) for place in slice_.failed]
    ring = detours.ring_around(torus, failed)
    plan = detours.all_reduce(torus, ring, [np.zeros(2 * 60) for _ in range(64)], element_bytes=1e6 / 120)
    placement, _ = best_placement(slice_, {"data": 60}, [Demand("all_reduce", ("data",), 1e6)])
    cost = collective_cost(placement, "all_reduce", ["data"], 1e6, links)
    assert cost.seconds == pytest.approx(plan.run(links).seconds, rel=1e-9)


@pytest.mark.parametrize(
    "name", ["v5e-256 without 3x5", "v5e-256 without 3x5,0x0-0x1", "v5e-256 without 0x0-0x1", "v3-32 without 1x1"]
)
def test_a_name_is_the_slice(name):
    whole, _, text = name.partition(" without ")
    chips = [tuple(map(int, part.split("x"))) for part in text.split(",") if "-" not in part]
    links = [
        tuple(tuple(map(int, end.split("x"))) for end in part.split("-")) for part in text.split(",") if "-" in part
    ]
    slice_ = Slice(whole).without(chips, links)
    assert slice_ == Slice(f" {name.upper()} ".replace("WITHOUT", "without")) == Slice(slice_.name)
    assert slice_ != Slice(whole)
    assert slice_.single == Slice(whole)
    assert slice_.usd_per_hour == Slice(whole).usd_per_hour  # what failed is paid all the same


def test_damage_is_the_same_in_any_order_and_however_often_it_is_named():
    slice_ = Slice("v5e-256 without 1x1,3x5,0x0-0x1")
    assert slice_ == Slice("v5e-256 without 3x5,0x1-0x0,1x1,3x5")
    assert slice_ == Slice("v5e-256").without([(3, 5), (1, 1)], [((0, 1), (0, 0))]) == slice_.without(np.array((3, 5)))


def test_programs_run_on_what_is_left():
    batch, wide, out = (mtf.Dimension(name, size) for name, size in (("batch", 60 * 64), ("wide", 4096), ("out", 4096)))

    def program(devices):
        with mtf.Graph():
            x = mtf.input("x", [batch, wide], "bfloat16")
            w = mtf.variable("w", [wide, out], dtype="bfloat16")
            loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [batch, out])))
            train = mtf.optimize.SgdOptimizer(lr=0.1).minimize(loss)
            return mtf.lower({"loss": loss}, train, f"data:{devices}", "batch:data")

    whole = Slice("v5e-64")
    left = mtf.estimate(program(60), whole.without((3, 5)))
    cut = mtf.estimate(program(64), whole.without(links=[((2, 2), (2, 3))]))
    sound = mtf.estimate(program(64), whole)
    assert left.exposed_comm_seconds > sound.exposed_comm_seconds
    assert cut.step_seconds >= sound.step_seconds
    assert "v5e-64 without 3x5" in left.table()
    frames = left.film(4).frames
    assert all(str(frame).count("x") == 4 for frame in frames)
    on_ring = {link for frame in frames for link in frame.loads}
    assert len(on_ring) == 2 * 60
    assert not any(set(frames[0].torus.ends(link)) & frames[0].failed for link in on_ring)
    with pytest.raises(mtf.MeshlibError, match=r"64 .*60"):
        mtf.estimate(program(64), whole.without((3, 5)))


def test_slices_of_several_are_left_out_as_a_whole():
    assert Slice("4*v5p-128").without(slices=1) == Slice("3*v5p-128")
    assert Slice("2*v5e-256").without(slices=1) == Slice("v5e-256")


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: Slice("v5e-256").without((16, 0)), r"coordinates (16, 0) are not in a torus of shape (16, 16)"),
        (lambda: Slice("v5e-256").without("3x5"), "failed chips are coordinates such as (3, 5)"),
        (lambda: Slice("v5e-256").without(links=[((0, 0), (0, 2))]), "chips 0x0 and 0x2 share no link"),
        (lambda: Slice("v5e-256").without(links=[(0, 0)]), "failed"),
        (lambda: Slice("v5e-4").without((0, 0)), "the 0 remaining chips of a torus of 2x2 form no ring"),
        (lambda: Slice("v5e-64").without(links=[((0, 0), (0, 1))]), "form no ring"),
        (lambda: Slice("2*v5e-256").without((0, 0)), "leaves 1: .without(slices=1)"),
        (lambda: Slice("2*v5e-256").without(slices=2), "none is left"),
        (lambda: Slice("v5e-256 without row 3"), "failed part 'row 3': write a chip by its coordinates"),
    ],
    ids=["outside", "text", "no link", "no pairs", "all", "corner", "one of several", "all slices", "name"],
)
def test_bad_input(call, part):
    with pytest.raises(HardwareError) as fault:
        call()
    assert part in str(fault.value)
    assert "\n" not in str(fault.value)
