"""Plans are right (run on blocks), cheapest (against an exhaustive table), and cost what they say."""

import random
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import given

from layouts import LayoutError, Mesh, Sharding, permute_pairs, reshard
from tests.effort import draws
from tests.layouts.oracle import Exhaustive, block_of, execute, reduced, spread
from tests.layouts.strategies import properties, shardings

MESH = Mesh("x:2;y:4")


def on(*axes, pending=(), shape="A:16;B:16", mesh=MESH):
    return Sharding(shape, mesh, axes, pending)


@pytest.mark.parametrize(
    ("source", "target", "kinds", "sent_bytes"),
    [
        (on("x", "y"), on("x", "y"), [], 0),
        (on((), ()), on("x", "y"), ["slice", "slice"], 0),
        (on((), ()), on((), ("y", "x")), ["slice"], 0),
        (on("x", ()), on((), ()), ["all_gather"], 128 * 4),
        (on("x", "y"), on("x", ()), ["all_gather"], 3 * 32 * 4),
        (on(("x", "y"), ()), on("x", ()), ["all_gather"], 3 * 32 * 4),
        (on(("x", "y"), ()), on((), ()), ["all_gather"], 7 * 32 * 4),
        (on("x", ()), on((), "x"), ["all_to_all"], 128 * 4 // 2),
        (on(("x", "y"), ()), on((), ("x", "y")), ["all_to_all"], 32 * 4 * 7 // 8),
        (on(("x", "y"), ()), on(("y", "x"), ()), ["collective_permute"], 32 * 4),
        (on((), (), pending={"y": "sum"}), on((), ()), ["all_reduce"], 2 * 256 * 4 * 3 // 4),
        (on((), (), pending={"y": "max"}), on((), ()), ["all_reduce"], 2 * 256 * 4 * 3 // 4),
        (on((), (), pending={"y": "max"}), on("y", ()), ["all_reduce", "slice"], 2 * 256 * 4 * 3 // 4),
        (on((), (), pending={"y": "sum"}), on("y", ()), ["reduce_scatter"], 256 * 4 * 3 // 4),
        (on("x", (), pending={"y": "sum"}), on(("x", "y"), ()), ["reduce_scatter"], 128 * 4 * 3 // 4),
        (on((), (), pending={"y": "sum", "x": "sum"}), on(("y", "x"), ()), ["reduce_scatter"], 32 * 4 * 7),
        (on("x", (), pending={"y": "sum"}), on((), (), pending={"y": "sum"}), ["all_gather"], 128 * 4),
        (on((), ()), on((), (), pending={"y": "sum"}), ["mask"], 0),
        (on("x", ()), on("x", (), pending={"y": "sum"}), ["mask"], 0),
        (on((), ()), on((), (), pending={"x": "sum", "y": "sum"}), ["mask"], 0),
        (on((), ()), on("x", (), pending={"y": "sum"}), ["slice", "mask"], 0),
        (on("x", ()), on((), (), pending={"x": "sum"}), ["all_gather", "mask"], 128 * 4),
        (on((), (), pending={"x": "sum"}), on((), (), pending={"x": "sum", "y": "sum"}), ["mask"], 0),
        (on((), (), pending={"x": "sum"}), on((), (), pending={"y": "sum"}), ["all_reduce", "mask"], 256 * 4),
        (on((), (), pending={"x": "sum"}), on("x", (), pending={"y": "sum"}), ["reduce_scatter", "mask"], 256 * 4 // 2),
    ],
)  # fmt: skip
def test_known_plans(source, target, kinds, sent_bytes):
    plan = reshard(source, target, 4)
    assert [step.kind for step in plan.steps] == kinds
    assert plan.sent_bytes == sent_bytes
    assert isinstance(plan.sent_bytes, int)
    assert plan.collectives == sum(kind not in ("slice", "mask") for kind in kinds)


def test_steps_say_what_they_do():
    source = on("x", (), pending={"y": "sum"})
    (step,) = reshard(source, on("x", "y"), 2).steps
    assert (step.kind, step.axes, step.dim, step.to_dim) == ("reduce_scatter", ("y",), "B", None)
    assert (step.before, step.after) == (source, on("x", "y"))
    assert (step.payload_bytes, step.sent_bytes) == (128 * 2, 128 * 2 * 3 // 4)
    assert str(step) == "reduce_scatter over y B: 192 bytes sent"
    (step,) = reshard(on("x", ()), on((), "x"), 1).steps
    assert (step.kind, step.axes, step.dim, step.to_dim) == ("all_to_all", ("x",), "A", "B")
    (step,) = reshard(on(("x", "y"), ()), on((), ()), 1).steps
    assert (step.kind, step.axes) == ("all_gather", ("x", "y"))
    (step,) = reshard(on("x", ()), source, 2).steps
    assert (step.kind, step.axes, step.dim, step.to_dim) == ("mask", ("y",), None, None)
    assert (step.before, step.after) == (on("x", ()), source)
    assert (step.payload_bytes, step.sent_bytes, step.is_local) == (128 * 2, 0, True)
    assert str(step) == "mask over y: 0 bytes sent"


def test_an_idle_dim_serves_as_a_parking_place():
    # y waits on B, so that x is scattered in blocks a fourth as large as with the direct way.
    plan = reshard(on((), (), pending={"x": "sum"}), on(("x", "y"), ()), 4)
    assert [(step.kind, step.dim, step.to_dim) for step in plan.steps] == [
        ("slice", "B", None),
        ("reduce_scatter", "A", None),
        ("all_to_all", "B", "A"),
    ]
    assert plan.sent_bytes == 4 * (64 // 2 + 32 * 3 // 4)


def test_fractions_of_bytes_are_kept():
    source = Sharding("n:3", "y:4", [()], {"y": "sum"})
    assert reshard(source, source.drop_pending(), 1).sent_bytes == 4.5
    assert reshard(source, source.drop_pending(), 2).sent_bytes == 9


def test_refusals():
    with pytest.raises(LayoutError, match="keeps shape and mesh"):
        reshard(on((), ()), on((), (), shape="A:16;B:8"), 4)
    # What is zero elsewhere adds nothing to a sum; a maximum or a minimum it may change.
    for before, after in (
        ((), {"x": "max"}),
        ((), {"x": "min"}),
        ({"x": "max"}, {"x": "max", "y": "max"}),
        ({"x": "max"}, {"x": "sum"}),
        ({"x": "sum"}, {"x": "max"}),
        ({"x": "max"}, {"y": "sum"}),
    ):
        with pytest.raises(LayoutError, match="can make only sums pending"):
            reshard(on((), (), pending=before), on((), (), pending=after), 4)
    with pytest.raises(LayoutError, match="itemsize must be positive"):
        reshard(on("x", ()), on((), ()), 0)


# Shapes include sizes that do not divide, dims too small for an axis, and equal axes (permutes).
WORLDS = [
    ((8, 8), {"x": 2, "y": 4}, True),
    ((8, 8), {"x": 2, "y": 4}, False),
    ((4, 2, 8), {"x": 2, "y": 4}, True),
    ((8, 8, 8), {"x": 2, "y": 2}, True),
    ((6, 5, 3), {"x": 2, "y": 3}, True),
    ((5, 3), {"x": 4, "y": 3}, True),
    ((16,), {"x": 2, "y": 2, "z": 4}, True),
    ((8, 8), {"x": 2, "y": 2, "z": 2}, True),
    ((8, 4), {"x": 2, "y": 2, "z": 2}, False),
    ((64, 64), {"x": 2, "y": 4, "z": 4}, True),
    ((24, 24, 24), {"x": 2, "y": 3, "z": 4}, True),
    ((8, 8, 8), {"x": 2, "y": 2, "z": 2}, True),
    ((64, 4, 2), {"x": 2, "y": 2, "z": 4}, True),
]


@pytest.mark.parametrize(("sizes", "axes", "summing"), WORLDS)
def test_no_sequence_of_steps_is_cheaper(sizes, axes, summing):
    exhaustive = Exhaustive(sizes, axes, summing)
    mesh, shape = Mesh(axes), [("ABC"[d], size) for d, size in enumerate(sizes)]
    kind = "sum" if summing else "max"

    def used(state):
        return {a for entry in state[0] for a in entry} | set(state[1])

    pairs = [
        (s, t)
        for s in exhaustive.states
        for t in exhaustive.states
        # the table may use all axes, so ask only for pairs in which all occur
        if set(t[1]) <= set(s[1]) and used(s) | used(t) == set(axes)
    ]
    for s, t in random.Random(0).sample(pairs, min(draws(120, 1000), len(pairs))):
        source = Sharding(shape, mesh, s[0], [(a, kind) for a in s[1]])
        target = Sharding(shape, mesh, t[0], [(a, kind) for a in t[1]])
        plan = reshard(source, target, 1)
        found = (Fraction(plan.sent_bytes) * mesh.size, plan.collectives)
        assert found == exhaustive.cost(s, t), f"{source} -> {target}\n{plan}"


def ring_bytes(step):
    """The ring figures, from the definition."""
    k, b = prod(step.before.mesh.axis_size(a) for a in step.axes), Fraction(step.payload_bytes)
    return {
        "all_gather": (k - 1) * b,
        "reduce_scatter": (k - 1) * b / k,
        "all_reduce": 2 * (k - 1) * b / k,
        "all_to_all": (k - 1) * b / k,
        "collective_permute": b,
        "slice": 0,
        "mask": 0,
    }[step.kind]


def at_least(source: Sharding, target: Sharding) -> float:
    """A bound on the elements that a device sends: reduced values, or what its old block lacks of the new one."""
    if any(a not in target.pending_axes for a in source.pending_axes):
        return float(target.local_size)
    counts = zip(source.block_counts, target.block_counts, strict=True)
    return target.local_size - target.shape.size / prod([max(pair) for pair in counts])


@properties
@given(shardings(count=2))
def test_every_device_ends_with_its_block(pair):
    source, target = pair
    target = target.with_pending(p for p in target.pending if p in source.pending)
    plan = reshard(source, target, 8)
    blocks, parts = spread(source)
    blocks = execute(plan, blocks)
    gone = [a for a in source.pending_axes if a not in target.pending_axes]
    parts = reduced(parts, source, gone)
    for device, block in enumerate(blocks):
        point = target.mesh.coordinate(device)
        part = parts[tuple(point[target.mesh.index(a)] for a in target.pending_axes)]
        np.testing.assert_array_equal(block, part[block_of(target, device)])
    # The steps join up and cost what they say.
    ends = [source, *(step.after for step in plan.steps)]
    assert [step.before for step in plan.steps] == ends[:-1]
    assert ends[-1] == target
    for step in plan.steps:
        assert step.payload_bytes == step.before.local_size * 8
        assert step.sent_bytes == float(ring_bytes(step))
    assert plan.sent_bytes == pytest.approx(float(sum(map(ring_bytes, plan.steps))), rel=1e-14)  # a sum of rounded ones
    assert at_least(source, target) * 8 <= plan.sent_bytes


@properties
@given(shardings(count=2, kinds=("sum",)))
def test_what_becomes_pending_sums_to_the_same(pair):
    """Whole values may be masked, pending ones be reduced or stay: over all that is pending, the sum is kept."""
    source, target = pair
    plan = reshard(source, target, 8)
    blocks, parts = spread(source)
    total = reduced(parts, source, source.pending_axes)
    blocks = execute(plan, blocks)
    for group in target.mesh.groups(target.pending_axes):
        kept = total[block_of(target, group[0])]
        np.testing.assert_array_equal(sum(blocks[d] for d in group), kept)
    masked = {a for step in plan.steps if step.kind == "mask" for a in step.axes}
    assert masked == set(target.pending_axes) - set(source.pending_axes)
    assert (
        plan.sent_bytes == reshard(source, target.with_pending(set(target.pending) & set(source.pending)), 8).sent_bytes
    )


def test_equal_shardings_give_equal_plans():
    source, target = on(("x", "y"), ()), on((), "x")
    one = reshard(source, target, 4)
    assert reshard(on(("x", "y"), ()), on((), "x"), 4) == one
    halved = reshard(source, target, 2)  # the item size scales the bytes and changes nothing else
    assert [step.after for step in halved.steps] == [step.after for step in one.steps]
    assert halved.sent_bytes * 2 == one.sent_bytes


@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [("x:2;y:2;z:2", "x", "y"), ("x:4;z:2;y:2;w:2", "x", "wy"), ("z:2;w:2;y:2;x:4", "yw", "x")],
)
def test_permute_pairs(mesh, source, target):
    mesh = Mesh(mesh)
    before, after = (Sharding("n:8", mesh, [tuple(axes)], {"z": "sum"}) for axes in (source, target))
    pairs = permute_pairs(before, after)
    assert sorted(s for s, _ in pairs) == sorted(d for _, d in pairs) == list(range(mesh.size))
    for s, d in pairs:
        assert before.block_index(mesh.coordinate(s)) == after.block_index(mesh.coordinate(d))
        assert mesh.coordinate(s)[mesh.index("z")] == mesh.coordinate(d)[mesh.index("z")]  # it is pending
    kept = [d for d, c in enumerate(mesh.coordinates()) if before.block_index(c) == after.block_index(c)]
    assert [s for s, d in pairs if s == d] == kept
    with pytest.raises(LayoutError, match="a permute cannot turn"):
        permute_pairs(before, after.drop_pending())
    with pytest.raises(LayoutError, match="a permute cannot turn"):
        permute_pairs(before, after.with_axes([()]))


def test_a_reduction_names_its_axes_in_the_order_of_the_mesh():
    here = Sharding("d:8", "rows:4;cols:2", [()], {"rows": "sum", "cols": "sum"})
    (step,) = reshard(here, here.drop_pending(), 4).steps
    assert step.axes == ("rows", "cols")
