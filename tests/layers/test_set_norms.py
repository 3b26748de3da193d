"""Batch norm and spectral norm over steps: moving averages, use, what is sent, one result for every layout; errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import some
from tests.oracle import assert_close, run

D = mtf.Dimension
B, W, C = D("batch", 8), D("width", 4), D("channels", 6)
LAYOUTS = {
    "one core": ("p:1", ""),
    "batch": ("p:4", "batch:p"),
    "batch and width": ("p:2;q:2", "batch:p;width:q"),
    "channels": ("p:2;q:2", "batch:q;channels:p"),
    "groups of cores": ("p:2;q:2", "batch:p+q"),
}
Array = np.ndarray[Any, Any]


def feeds() -> list[Array]:
    rng = np.random.default_rng(4)
    return [rng.normal(3.0, 2.0, (8, 4, 6)) for _ in range(3)]


def sets(x: Array, groups: int) -> Array:
    """[groups, elements, channels]"""
    return x.reshape(groups, -1, 6)


SPOTS = [(layout, groups) for layout in LAYOUTS for groups in (1, 2, 4)]


# One group over all cores of several axes takes long to lower; over those of one, or of two dims, it is tried.
@pytest.mark.parametrize(("layout", "groups"), some(SPOTS, [x for x in SPOTS if x != ("groups of cores", 1)]))
def test_moving_averages_and_their_use(layout: str, groups: int) -> None:
    """What evaluation takes of three steps of training, with its own batch: the formulas, whatever the layout."""
    mesh, rules = LAYOUTS[layout]
    numerics = mtf.Numerics("float64")

    def norm(batch: mtf.Dimension, is_training: bool) -> tuple[mtf.Tensor, list[mtf.Operation]]:
        x = mtf.input("x", [batch, W, C], "float64")
        return mtf.layers.batch_norm(x, C, is_training, groups if is_training else 1, 0.75, numerics=numerics)

    with mtf.Graph():
        y, updates = norm(B, True)
        assert [u.attrs["variable"] for u in updates] == ["batch_norm/moving_mean", "batch_norm/moving_variance"]
        training = mtf.lower({"y": y}, updates, mesh=mesh, layout=rules)
    with mtf.Graph():
        y, updates = norm(D("batch", 4), False)
        assert not updates
        use = mtf.lower({"y": y}, mesh=mesh, layout=rules)
    sim = mtf.simulate(training, executor="exact")
    mean, variance = np.zeros(6), np.ones(6)
    for x in feeds():
        sim.step(x=x)
        mean = 0.75 * mean + 0.25 * sets(x, groups).mean(1).mean(0)
        variance = 0.75 * variance + 0.25 * sets(x, groups).var(1).mean(0)
    np.testing.assert_allclose(sim.state["batch_norm/moving_mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(sim.state["batch_norm/moving_variance"], variance, rtol=1e-11)
    x = feeds()[0][:4]
    found = sim.run(use, x=x)["y"]
    np.testing.assert_allclose(found, (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-11)


def step(groups: Any, dims: list[mtf.Dimension]) -> mtf.Session:
    with mtf.Graph() as graph:
        x = mtf.input("x", dims)
        y, _ = mtf.layers.batch_norm(x, C, True, groups)
        c = mtf.input("cotangent", y.shape)
        grads = mtf.gradients([y], [x, *graph.trainable_variables], [c])
        names = ["dx", "dscale", "dbias"]
        return mtf.Session({"y": y, **{n: g for n, g in zip(names, grads, strict=True) if g is not None}})


def test_what_batch_norm_sends() -> None:
    """Global: two numbers a channel forward, and two backward, which are the gradients of the variables as well."""
    program = step(1, [B, W, C]).lower("p:2;q:2", "batch:p;width:q")
    assert [(c.kind, c.phase, c.payload_bytes) for c in program.collectives] == [
        ("all_reduce", "forward", 4 * 6),
        ("all_reduce", "forward", 4 * 6),
        ("all_reduce", "backward", 4 * 6),
        ("all_reduce", "backward", 4 * 6),
    ]
    # Each core by itself: nothing but the gradients of the variables.
    program = step(4, [B, W, C]).lower("p:4", "batch:p")
    assert [(c.phase, c.payload_bytes) for c in program.collectives] == [("backward", 24), ("backward", 24)]
    # Groups of cores, as dims of the batch: among the cores of a group alone.
    replicas = D("replicas", 2)
    program = step(replicas, [replicas, D("batch", 4), W, C]).lower("p:2;q:2", "replicas:p;batch:q")
    among = [c.axes for c in program.collectives if c.phase == "forward"]
    assert among == [("q",), ("q",)]


LARGE = {  # how batch and group norms are written, and the axes of [batch, width, channels] that their sets have
    "batch norm": (lambda x, **of: mtf.layers.batch_norm(x, C, True, **of)[0], (0, 1)),
    "batch norm of groups": (lambda x, **of: mtf.layers.batch_norm(x, C, True, D("batch", 8), **of)[0], (1,)),
    "group norm": (lambda x, **of: mtf.layers.group_norm(x, C, 1, **of), (1, 2)),
}


@pytest.mark.parametrize("norm", LARGE)
def test_a_mean_much_larger_than_the_deviation(norm: str) -> None:
    """Mean 3000, deviation 1, in float32: y and dx to a few roundings of x; mean of squares minus square loses both."""
    layer, axes = LARGE[norm]
    rng = np.random.default_rng(5)
    x, c = (rng.normal(shift, 1.0, (8, 4, 6)).astype(np.float32) for shift in (3000.0, 0.0))
    inverse = 1 / np.sqrt(x.astype(float).var(axes, keepdims=True) + 1e-5)
    y = (x.astype(float) - x.astype(float).mean(axes, keepdims=True)) * inverse
    dx = (c - c.mean(axes, keepdims=True) - y * (c * y).mean(axes, keepdims=True)) * inverse
    faults = {}
    for fast in (False, True):
        with mtf.Graph():
            given, cotangent = mtf.input("x", [B, W, C]), mtf.input("c", [B, W, C])
            result = layer(given, use_fast_variance=fast)
            (gradient,) = mtf.gradients([result], [given], [cotangent])
            session = mtf.Session({"y": result, "dx": gradient})
        for mesh, layout in LAYOUTS.values():
            (found,) = run(session.lower(mesh, layout), {"x": x, "c": c}, "fast")
            error = max(np.abs(found["y"] - y).max(), np.abs(found["dx"] - dx).max())
            faults[fast] = max(faults.get(fast, 0.0), float(error))
    assert faults[False] < 0.01
    assert faults[True] > 1


def test_the_stable_variance_is_one_collective_more() -> None:
    def launches(fast: bool) -> int:
        with mtf.Graph():
            y, _ = mtf.layers.batch_norm(mtf.input("x", [B, W, C]), C, True, use_fast_variance=fast)
            return len({c.launch for c in mtf.lower({"y": y}, mesh="p:4", layout="batch:p").collectives})

    assert launches(False) <= launches(True) + 1


def test_groups_as_dims_are_groups_of_the_batch() -> None:
    replicas, rng = D("replicas", 2), np.random.default_rng(0)
    x, c = rng.normal(size=(2, 8, 4, 6)).astype(np.float32)
    (flat,) = run(step(2, [B, W, C]).lower("p:2;q:2", "batch:p+q", "highest"), {"x": x, "cotangent": c})
    cut = {"x": x.reshape(2, 4, 4, 6), "cotangent": c.reshape(2, 4, 4, 6)}
    dims = [replicas, D("batch", 4), W, C]
    (apart,) = run(step(replicas, dims).lower("p:2;q:2", "replicas:p;batch:q", "highest"), cut)
    apart = {n: v.reshape(flat[n].shape) for n, v in apart.items()}
    assert_close(apart, flat, 1e-5, "groups")


def test_a_batch_norm_without_variance_is_zero_and_has_gradients() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B, W, C])
        y, _ = mtf.layers.batch_norm(x, C, True)
        (dx,) = mtf.gradients([mtf.square(y)], [x])
        assert dx is not None
        program = mtf.lower({"y": y, "dx": dx}, mesh="p:2", layout="batch:p")
    (found,) = run(program, {"x": np.full((8, 4, 6), 7.0, np.float32)})
    assert not found["y"].any()
    assert not found["dx"].any()


@pytest.mark.parametrize("layout", ["", "rows:p", "cols:p", "rows:p;cols:q"])
def test_spectral_norm_finds_the_largest_singular_value_in_steps(layout: str) -> None:
    rng = np.random.default_rng(1)
    w = rng.normal(size=(8, 6)) + 1.0
    with mtf.Graph():
        given = mtf.variable("w", [D("rows", 8), D("cols", 6)], w, "float64")
        y, updates = mtf.layers.spectral_norm(given, D("cols", 6), True)
        training = mtf.lower({"y": y}, updates, mesh="p:2;q:2", layout=layout)
    with mtf.Graph():
        given = mtf.variable("w", [D("rows", 8), D("cols", 6)], w, "float64")
        y, updates = mtf.layers.spectral_norm(given, D("cols", 6), False)
        assert not updates
        use = mtf.lower({"y": y}, mesh="p:2;q:2", layout=layout)
    sim = mtf.simulate(training, executor="exact")
    values = [np.linalg.svd(sim.step()["y"], compute_uv=False)[0] for _ in range(30)]
    assert abs(values[0] - 1) > 1e-3
    assert abs(values[-1] - 1) < 1e-9
    kept = sim.state["spectral_norm/u"].copy()
    np.testing.assert_allclose(sim.run(use)["y"], w / np.linalg.svd(w, compute_uv=False)[0], rtol=1e-9)
    np.testing.assert_array_equal(sim.state["spectral_norm/u"], kept)


X = [B, W, C]
MESSAGES: list[tuple[Callable[[mtf.Tensor], object], str]] = [
    (lambda x: mtf.layers.batch_norm(x, D("depth", 6), True), "no dim 'depth'"),
    (lambda x: mtf.layers.batch_norm(x, D("channels", 5), True), "size 6 .*but 5"),
    (lambda x: mtf.layers.batch_norm(x, C, 1), "is_training must be True or False"),
    (lambda x: mtf.layers.batch_norm(x, C, True, 3), r"groups=3 does not divide dim 'batch' of size 8: 8 % 3 = 2"),
    (lambda x: mtf.layers.batch_norm(x, C, True, D("replicas", 2)), "no dim 'replicas'"),
    (lambda x: mtf.layers.batch_norm(x, C, True, decay=1.5), r"decay must be in \[0, 1\]"),
    (lambda x: mtf.layers.batch_norm(x, C, True, epsilon=-1.0), "epsilon must not be negative"),
    (lambda x: mtf.layers.batch_norm(x, X, True), "no dim but its channels"),
    (lambda x: mtf.layers.batch_norm(x, [], True), "at least one dim"),
    (lambda x: mtf.layers.batch_norm(mtf.cast(x, "int32"), C, True), "float"),
    (lambda x: mtf.layers.group_norm(x, C, 4), r"groups=4 does not divide dim 'channels' of size 6: 6 % 4 = 2"),
    (lambda x: mtf.layers.group_norm(x, C, 2, batch_dims=C), "can't be the channels and a dim of the batch"),
    (lambda x: mtf.layers.conditional_batch_norm(x, C, x, C, True), "channels"),
    (lambda x: mtf.layers.conditional_batch_norm(x, C, mtf.zeros([D("z", 2), D("y", 2)]), D("z", 2), True), "y:2"),
    (lambda x: mtf.layers.spectral_norm(x, X, True), "not none or all"),
    (lambda x: mtf.layers.spectral_norm(x, C, True, 0), "at least 1"),
    (lambda x: mtf.layers.image_attention(x, [C], C), "other than the channels"),
    (lambda x: mtf.layers.image_attention(x, [W], C, pooling=3), "3 does not divide dim 'width' of size 4"),
    (lambda x: mtf.layers.focal_loss(x, x, 2.0), r"alpha must be in \[0, 1\]"),
    (lambda x: mtf.layers.focal_loss(x, mtf.zeros([B])), "same dims and dtype"),
    (lambda x: mtf.layers.smooth_l1_loss(x, x, 0.0), "beta must be positive"),
    (lambda x: mtf.layers.hinge_loss(x, "real"), "finite number"),
]


@pytest.mark.parametrize(("build", "words"), MESSAGES)
def test_messages(build: Callable[[mtf.Tensor], object], words: str) -> None:
    with mtf.Graph():
        x = mtf.input("x", X)
        with pytest.raises(mtf.MeshlibError, match=words) as raised:
            build(x)
    assert "test_set_norms.py:" in str(raised.value)
