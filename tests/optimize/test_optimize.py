"""Optimizers, schedules, clipping, microbatches, mixed precision and loss scaling, against NumPy and closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshlib as mtf
from tests.core.public import public_names
from tests.effort import draws, each, some

opt = mtf.optimize
D = mtf.Dimension
Array = np.ndarray[Any, Any]
State = dict[str, Any]

BATCH, ROWS, COLS, HEADS = D("batch", 8), D("rows", 4), D("cols", 8), D("heads", 2)
LAYOUTS = {
    "replicated": ("data:2", ""),
    "data parallel": ("data:2", "batch:data"),
    "fully sharded": ("data:2", "batch:data;cols:data?;rows:data?"),
    "zero 1": ("data:2", "batch:data;slots/cols:data;slots/rows:data?"),
    "two axes": ("data:2;model:2", "batch:data;cols:model;slots/rows:data"),
}


# ---------------------------------------------------------------- the model, and its gradients by hand


def initial() -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {
        "w": rng.normal(size=(4, 8)) * 0.5,
        "bias": rng.normal(size=8) * 0.5,
        "t": rng.normal(size=(2, 4, 8)) * 0.5,
    }


def feeds(step: int, dtype: type = np.float64) -> dict[str, Array]:
    rng = np.random.default_rng(100 + step)
    return {"x": rng.normal(size=(8, 4)).astype(dtype), "y": rng.normal(size=(8, 8)).astype(dtype)}


def model(features: Mapping[str, mtf.Tensor], v: Mapping[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
    """prediction = x w + bias + sum over heads of (x t)^2, the loss its mean squared error over the batch."""
    x, y = features["x"], features["y"]
    batch = x.shape.dim("batch")
    heads = mtf.einsum([x, v["t"]], [batch, HEADS, COLS])
    prediction = mtf.einsum([x, v["w"]], [batch, COLS]) + v["bias"]
    prediction = prediction + mtf.reduce_sum(mtf.square(heads), reduced_dim=HEADS)
    return {"loss": mtf.reduce_sum(mtf.square(prediction - y)) / batch.size, "prediction": prediction}


def gradients(v: Mapping[str, Array], x: Array, y: Array) -> tuple[float, dict[str, Array]]:
    heads = np.einsum("bi,hio->bho", x, v["t"])
    error = x @ v["w"] + v["bias"] + np.sum(heads**2, 1) - y
    back = 2 * error / len(x)
    return float(np.sum(error**2) / len(x)), {
        "w": x.T @ back,
        "bias": back.sum(0),
        "t": np.einsum("bi,bho->hio", x, 2 * heads * back[:, None]),
    }


def variables(dtype: str = "float64", **options: Any) -> dict[str, mtf.Tensor]:
    shapes = {"w": [ROWS, COLS], "bias": [COLS], "t": [HEADS, ROWS, COLS]}
    return {n: mtf.variable(n, shapes[n], value, dtype, **options) for n, value in initial().items()}


def inputs(dtype: str = "float64", batch: mtf.Dimension = BATCH) -> dict[str, mtf.Tensor]:
    return {"x": mtf.input("x", [batch, ROWS], dtype), "y": mtf.input("y", [batch, COLS], dtype)}


# ---------------------------------------------------------------- every optimizer against NumPy in float64


def sgd(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    return w - lr * g


def momentum(nesterov: bool) -> Callable[..., Array]:
    """Sutskever et al. 2013, with the learning rate outside of the sum."""

    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        s["m"] = 0.8 * s.get("m", 0.0) + g
        return w - lr * (0.8 * s["m"] + g if nesterov else s["m"])

    return rule


def adam(corrected: bool = True, coupled: float = 0.0, decay: float = 0.0, epsilon: float = 1e-6) -> Callable[..., Any]:
    """Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2."""

    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        s["m"] = 0.8 * s.get("m", 0.0) + 0.2 * g
        s["v"] = 0.95 * s.get("v", 0.0) + 0.05 * g**2
        m, v = (s["m"] / (1 - 0.8**t), s["v"] / (1 - 0.95**t)) if corrected else (s["m"], s["v"])
        return w - lr * (m / (np.sqrt(v) + epsilon) + (0.0 if s["name"] == "bias" else decay) * w)

    return rule


def lion(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    """Chen et al. 2023, program 1."""
    m = s.get("m", np.zeros_like(w))
    s["m"] = 0.95 * m + 0.05 * g
    return w - lr * (np.sign(0.8 * m + 0.2 * g) + 0.1 * w)


def lars(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    """You et al. 2017, algorithm 1."""
    trust, decay = 1.0, 0.0
    if s["name"] != "bias":
        decay = 0.1
        trust = 0.05 * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w) + 1e-3)
    s["m"] = 0.8 * s.get("m", 0.0) + lr * trust * (g + decay * w)
    return w - s["m"]


def lars_unscaled(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    """Kumar et al. 2019: the learning rate outside of the momentum."""
    trust, decay = 1.0, 0.0
    if s["name"] != "bias":
        decay = 0.1
        trust = 0.05 * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
    s["m"] = 0.8 * s.get("m", 0.0) + g + decay * w
    return w - lr * trust * s["m"]


def lamb(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    """You et al. 2020, algorithm 2."""
    s["m"] = 0.8 * s.get("m", 0.0) + 0.2 * g
    s["v"] = 0.95 * s.get("v", 0.0) + 0.05 * g**2
    along = s["m"] / (1 - 0.8**t) / (np.sqrt(s["v"] / (1 - 0.95**t)) + 1e-6)
    if s["name"] == "bias":
        return w - lr * along
    along = along + 0.1 * w
    return w - lr * np.linalg.norm(w) / np.linalg.norm(along) * along


def decayed_momentum(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
    """The gradient of the loss + 0.05 |w|^2, of all but the bias."""
    s["m"] = 0.8 * s.get("m", 0.0) + g + (0.0 if s["name"] == "bias" else 0.1 * w)
    return w - lr * s["m"]


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def adafactor(
    relative: bool = True,
    decay: Callable[[int], float] = lambda t: 1 - t**-0.8,
    beta1: float = 0.0,
    clip: float | None = 1.0,
    factored: bool = True,
) -> Callable[..., Array]:
    """Shazeer and Stern 2018, algorithms 4 and 5, with rows and columns normalised by their mean."""

    def rule(w: Array, g: Array, s: State, t: int, lr: float) -> Array:
        d, squared = decay(t), g**2 + 1e-30
        if factored and w.ndim >= 2:  # cols is the largest dim, rows the next
            s["r"] = d * s.get("r", 0.0) + (1 - d) * squared.mean(-1)
            s["c"] = d * s.get("c", 0.0) + (1 - d) * squared.mean(-2)
            v = s["r"][..., :, None] * s["c"][..., None, :] / s["r"].mean(-1)[..., None, None]
        else:
            v = s["v"] = d * s.get("v", 0.0) + (1 - d) * squared
        u = g / np.sqrt(v)
        if clip is not None:
            u = u / max(1.0, rms(u) / clip)
        u = u * lr * (max(rms(w), 1e-3) if relative else 1.0)
        if beta1:
            u = s["m"] = beta1 * s.get("m", 0.0) + (1 - beta1) * u
        return w - u

    return rule


def adam_rate(t: int) -> float:
    return 0.95 * (1 - 0.95 ** (t - 1)) / (1 - 0.95**t)


RULES: dict[str, tuple[Callable[[], opt.Optimizer], Callable[..., Array], Callable[[int], float]]] = {
    "sgd": (lambda: opt.SgdOptimizer(0.02), sgd, lambda t: 0.02),
    "momentum": (lambda: opt.MomentumOptimizer(0.01, 0.8), momentum(False), lambda t: 0.01),
    "nesterov": (lambda: opt.MomentumOptimizer(0.01, 0.8, nesterov=True), momentum(True), lambda t: 0.01),
    "adam": (lambda: opt.AdamOptimizer(0.02, 0.8, 0.95, 1e-6), adam(), lambda t: 0.02),
    "adamw": (
        lambda: opt.AdamWOptimizer(0.02, 0.8, 0.95, 1e-6, weight_decay=0.3, exclude_from_weight_decay=["^bias"]),
        adam(decay=0.3),
        lambda t: 0.02,
    ),
    "adam weight decay": (
        lambda: opt.AdamWeightDecayOptimizer(0.02, 0.3, 0.8, 0.95, 1e-5, ["bias"]),
        adam(corrected=False, decay=0.3, epsilon=1e-5),
        lambda t: 0.02,
    ),
    "lion": (lambda: opt.LionOptimizer(0.01, 0.8, 0.95, weight_decay=0.1), lion, lambda t: 0.01),
    "lars": (
        lambda: opt.LarsOptimizer(0.5, 0.8, 0.1, trust_coefficient=0.05, epsilon=1e-3, exclude=["bias"]),
        lars,
        lambda t: 0.5,
    ),
    "lars, unscaled momentum": (
        lambda: opt.LarsOptimizer(0.5, 0.8, 0.1, 0.05, exclude=opt.NORMS_AND_BIASES, scaled_momentum=False),
        lars_unscaled,
        lambda t: 0.5,
    ),
    "lamb": (
        lambda: opt.LambOptimizer(0.02, 0.8, 0.95, 1e-6, 0.1, opt.NORMS_AND_BIASES),
        lamb,
        lambda t: 0.02,
    ),
    "momentum, decay": (
        lambda: opt.MomentumOptimizer(0.01, 0.8, weight_decay=0.1, exclude_from_weight_decay=opt.NORMS_AND_BIASES),
        decayed_momentum,
        lambda t: 0.01,
    ),
    "adafactor": (
        lambda: opt.AdafactorOptimizer(learning_rate=0.05, decay_rate=0.75, min_dim_size_to_factor=4),
        adafactor(decay=lambda t: 0.75),
        lambda t: 0.05,
    ),
    "adafactor, some absolute": (
        lambda: opt.AdafactorOptimizer(
            True, 0.05, 0.75, min_dim_size_to_factor=4, exclude_from_parameter_scale=["^t", "ias$"]
        ),
        # of w, the one other matrix; t has three dims
        lambda w, g, s, t, lr: adafactor(w.ndim == 2, lambda t: 0.75)(w, g, s, t, lr),
        lambda t: 0.05,
    ),
    "adafactor, momentum": (
        lambda: opt.AdafactorOptimizer(False, 0.05, 0.5, 0.7, None, min_dim_size_to_factor=4),
        adafactor(False, lambda t: 0.5, 0.7, None),
        lambda t: 0.05,
    ),
    "adafactor, not factored": (
        lambda: opt.AdafactorOptimizer(True, 0.05, 0.75, clipping_threshold=0.5, min_dim_size_to_factor=5),
        adafactor(decay=lambda t: 0.75, clip=0.5, factored=False),
        lambda t: 0.05,
    ),
}
SCHEDULED = {  # rates are float32, so these agree to float32's rounding only
    "adafactor, defaults": (
        lambda: opt.AdafactorOptimizer(min_dim_size_to_factor=4),
        adafactor(),
        lambda t: min(t**-0.5, 0.01),
    ),
    "adafactor, offset": (
        lambda: opt.AdafactorOptimizer(
            learning_rate=0.05, decay_rate=opt.adafactor_decay_rate_pow(0.6, 3), min_dim_size_to_factor=4
        ),
        adafactor(decay=lambda t: 1 - max(t - 3, 1) ** -0.6),
        lambda t: 0.05,
    ),
    "adafactor, absolute": (
        lambda: opt.AdafactorOptimizer(False, decay_rate=opt.adafactor_decay_rate_adam(0.95), min_dim_size_to_factor=4),
        adafactor(False, adam_rate),
        lambda t: 0.05 * min(t**-0.5, 0.01),
    ),
    "adam, warm-up": (
        lambda: opt.AdamOptimizer(opt.warmup_then_decay(0.1, 4, 1.0), 0.8, 0.95, 1e-6),
        adam(),
        lambda t: 0.1 * min(t / 4, 4 / t),
    ),
}


def test_every_optimizer_has_a_rule_in_numpy() -> None:
    tried = {type(make()).__name__ for make, _, _ in {**RULES, **SCHEDULED}.values()}
    assert {n for n in public_names(mtf.optimize) if n.endswith("Optimizer")} - {"Optimizer"} == tried


@cache
def session(name: str) -> mtf.Session:
    """A step of an optimizer, to lower under many layouts."""
    make, _, _ = {**RULES, **SCHEDULED}[name]
    with mtf.Graph():
        loss = model(inputs(), variables())["loss"]
        return mtf.Session({"loss": loss}, make().minimize(loss))


def check_rule(name: str, layout: str, steps: int, tolerance: float) -> None:
    _, rule, rate = {**RULES, **SCHEDULED}[name]
    mesh, rules = LAYOUTS[layout]
    program = session(name).lower(mesh, rules, "highest")
    sim = mtf.simulate(program, executor="exact")
    values = initial()
    states: dict[str, State] = {n: {"name": n} for n in values}
    for t in range(1, steps + 1):
        fed = feeds(t)
        wanted, grads = gradients(values, **fed)
        found = float(sim.step(fed)["loss"])
        assert found == pytest.approx(wanted, rel=tolerance), f"step {t}"
        values = {n: rule(w, grads[n], states[n], t, rate(t)) for n, w in values.items()}
    for n, w in values.items():
        np.testing.assert_allclose(sim.state[n], w, rtol=tolerance, atol=tolerance, err_msg=n)


EVERYWHERE = [(name, layout) for name in RULES for layout in LAYOUTS]
# Each optimizer with slots that are split, one of them everywhere.
FIRST = [*zip(RULES, cycle(("two axes", "zero 1", "fully sharded"))), *(("adam", x) for x in LAYOUTS)]


@pytest.mark.parametrize(("name", "layout"), some(EVERYWHERE, list(dict.fromkeys(FIRST))))
def test_optimizers_follow_their_papers_under_every_layout(name: str, layout: str) -> None:
    check_rule(name, layout, draws(6, 20), 1e-9)


@pytest.mark.parametrize("name", SCHEDULED)
def test_optimizers_with_schedules_follow_their_papers(name: str) -> None:
    check_rule(name, "zero 1", draws(8, 20), 2e-5)


def test_adafactor_slots_lie_as_rules_under_slots_say() -> None:
    with mtf.Graph():
        loss = model(inputs(), variables())["loss"]
        train = opt.AdafactorOptimizer(beta1=0.5, min_dim_size_to_factor=4).minimize(loss)
    program = mtf.lower(None, train, "data:2", "batch:data;slots/cols:data;slots/rows:data?")
    lies = {n: str(v.sharding) for n, v in program.variables.items()}
    assert lies["w"] == "[rows:4, cols:8]"
    assert lies["w/slot_vr"] == "[rows:4@data]"  # the largest dim, cols, is averaged away
    assert lies["w/slot_vc"] == "[cols:8@data]"
    assert lies["t/slot_vr"] == "[heads:2, rows:4@data]"
    assert lies["t/slot_vc"] == "[heads:2, cols:8@data]"
    assert lies["bias/slot_v"] == "[cols:8@data]"
    assert lies["t/slot_m"] == "[heads:2, rows:4, cols:8@data]"
    assert program.memory.by_kind["slots"] == 8 * (2 + 4 + 4 + 8 + 4 + 4 * 4 + 4 + 2 * 4 * 4)


# ---------------------------------------------------------------- schedules

SCHEDULES: dict[str, tuple[opt.Optimizer | Any, Callable[[int], float]]] = {
    "constant": (opt.constant(0.3), lambda t: 0.3),
    "linear_warmup": (opt.linear_warmup(0.5, 10), lambda t: 0.5 * min(1, (t + 1) / 10)),
    "linear_decay": (opt.linear_decay(0.5, 50), lambda t: 0.5 * max(0, 1 - t / 50)),
    "linear_decay from an offset": (opt.linear_decay(0.5, 50, 10), lambda t: 0.5 * min(1, max(0, (50 - t) / 40))),
    "exponential": (opt.exponential_decay(0.5, 20, 0.9), lambda t: 0.5 * 0.9 ** (t / 20)),
    "staircase": (opt.exponential_decay(0.5, 20, 0.9, staircase=True), lambda t: 0.5 * 0.9 ** (t // 20)),
    "cosine": (
        opt.cosine_decay(0.5, 50, 0.1),
        lambda t: 0.5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(t, 50) / 50))),
    ),
    "inverse square root": (opt.inverse_square_root(0.5, 10), lambda t: 0.5 * (10 / max(t + 1, 10)) ** 0.5),
    "warmup_then_decay": (
        opt.warmup_then_decay(0.5, 10),
        lambda t: 0.5 * min((t + 1) / 10, (10 / (t + 1)) ** 0.5),
    ),
    "product": (
        opt.product(opt.linear_warmup(1.0, 10), opt.inverse_square_root(0.25, 10), 2.0),
        lambda t: 0.5 * min((t + 1) / 10, (10 / (t + 1)) ** 0.5),
    ),
    "piecewise": (opt.piecewise([10, 40], [0.5, 0.25, 0.125]), lambda t: 0.5 if t < 10 else 0.25 if t < 40 else 0.125),
    "warm-up, then cosine": (
        opt.piecewise([10], [opt.linear_warmup(0.5, 10), opt.cosine_decay(0.5, 40)]),
        lambda t: 0.5 * (t + 1) / 10 if t < 10 else 0.25 * (1 + math.cos(math.pi * min(t - 10, 40) / 40)),
    ),
    "polynomial": (opt.polynomial_decay(0.5, 40, 2.0, 0.1), lambda t: 0.1 + 0.4 * (1 - min(t, 40) / 40) ** 2),
    "linear scaling": (
        opt.linear_scaling(0.1, 1024, 2.5, 4, [8, 16.1], 0.5),
        lambda t: min(0.1 + 0.3 * t / 10, 0.4) * 0.5 ** ((t >= 20) + (t >= 41)),
    ),
    "linear scaling down": (opt.linear_scaling(0.1, 128, 2.5, 4, []), lambda t: 0.05),
    "of the user": (lambda t: mtf.cast(t, "float32") * 0.5, lambda t: 0.5 * t),
}


def test_schedules_at_chosen_steps() -> None:
    with mtf.Graph():
        done = mtf.step()
        rates = {n: (r if isinstance(r := s(done), mtf.Tensor) else mtf.constant(r)) for n, (s, _) in SCHEDULES.items()}
        sim = mtf.simulate(mtf.lower(rates))
    for t in (0, 1, 5, 8, 9, 10, 11, 19, 20, 39, 40, 41, 50, 51, 60, 100, 1000):
        sim.state["step"] = np.int32(t)
        found = sim.step()
        for n, (_, closed) in SCHEDULES.items():
            np.testing.assert_allclose(found[n], closed(t), rtol=2e-6, atol=1e-8, err_msg=f"{n} at {t}")


@each("schedule, closed", SCHEDULES)
def test_optimizers_take_schedules(schedule: Any, closed: Callable[[int], float]) -> None:
    with mtf.Graph():
        w = mtf.variable("w", [], 0.0)
        sim = mtf.simulate(mtf.lower(None, opt.SgdOptimizer(schedule).apply_grads([mtf.constant(-1.0)], [w])))
    for _ in range(3):
        sim.step()
    np.testing.assert_allclose(sim.state["w"], sum(closed(t) for t in range(3)), rtol=1e-6)


# ---------------------------------------------------------------- averages, growing batches, two optimizers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_averages_of_weights_follow_what_they_become(layout: str, dtype: str) -> None:
    mesh, rules = LAYOUTS[layout]
    with mtf.Graph():
        sliced = {"slice_dtype": "bfloat16"} if dtype == "float32" else {}
        loss = model(inputs(dtype), variables(dtype, activation_dtype=dtype, **sliced))["loss"]
        train = opt.MomentumOptimizer(0.05).minimize(loss)
        averages = opt.moving_averages(train, 0.75, start_step=2)
        program = mtf.lower({"loss": loss}, train + averages, mesh=mesh, layout=rules, precision="highest")
    sim = mtf.simulate(program, executor="exact")
    wanted: dict[str, Array] = {}
    for t in range(6):
        sim.step(feeds(t, np.dtype(dtype).type))
        new = {n: np.asarray(sim.state[n], np.float64) for n in initial()}
        wanted = new if t <= 2 else {n: 0.75 * wanted[n] + 0.25 * w for n, w in new.items()}
    found = opt.averaged(sim.state)
    assert found.keys() == initial().keys()
    for n, w in wanted.items():
        assert np.abs(w - new[n]).max() > 1e-3
        np.testing.assert_allclose(found[n], w, rtol=1e-12 if dtype == "float64" else 1e-5, atol=1e-7)


def test_a_batch_that_grows_in_place_of_a_falling_rate() -> None:
    """Two programs of one model and other batches go on from each other's variables, slots and steps."""
    programs = {}
    for size in (4, 8):
        with mtf.Graph():
            loss = model(inputs(batch=D("batch", size)), variables())["loss"]
            train = opt.MomentumOptimizer(lambda t: (mtf.cast(t, "float32") + 1) * 0.01, 0.8).minimize(loss)
            programs[size] = mtf.lower({"loss": loss}, train, "data:2", "batch:data", "highest")
    sim = mtf.simulate(programs[4])
    values, states = initial(), {n: {"name": n} for n in initial()}
    for t, size in enumerate((4, 4, 8, 8)):
        fed = {n: x[:size] for n, x in feeds(t).items()}
        sim.run(programs[size], fed)
        _, grads = gradients(values, **fed)
        values = {n: momentum(False)(w, grads[n], states[n], t + 1, 0.01 * (t + 1)) for n, w in values.items()}
    assert sim.state["step"] == 4
    for n, w in values.items():
        np.testing.assert_allclose(sim.state[n], w, rtol=1e-6)


@pytest.mark.parametrize("layout", ["replicated", "two axes"])
def test_two_optimizers_in_one_program(layout: str) -> None:
    """Of two players each steps along its own loss, of what both were before the step."""
    mesh, rules = LAYOUTS[layout]
    with mtf.Graph():
        v = variables()
        made = model(inputs(), v)
        mine = opt.AdamOptimizer(0.02, 0.8, 0.95, 1e-6).minimize(made["loss"], [v["w"], v["bias"]])
        theirs = opt.MomentumOptimizer(opt.linear_warmup(0.02, 2), 0.8).minimize(-made["loss"], [v["t"]])
        program = mtf.lower(made, mine + theirs, mesh, rules, "highest")
    sim = mtf.simulate(program, executor="exact")
    values, states = initial(), {n: {"name": n} for n in initial()}
    for t in (1, 2, 3):
        sim.step(feeds(t))
        _, g = gradients(values, **feeds(t))
        rate = 0.02 * min(t / 2, 1)
        values = {
            "w": adam()(values["w"], g["w"], states["w"], t, 0.02),
            "bias": adam()(values["bias"], g["bias"], states["bias"], t, 0.02),
            "t": momentum(False)(values["t"], -g["t"], states["t"], t, rate),
        }
    for n, w in values.items():
        np.testing.assert_allclose(sim.state[n], w, rtol=1e-6)


# ---------------------------------------------------------------- clipping


@cache
def clipping(max_norm: float | None) -> mtf.Session:
    with mtf.Graph():
        loss = model(inputs(), variables())["loss"]
        return mtf.Session({"loss": loss}, opt.SgdOptimizer(0.02).minimize(loss, max_norm=max_norm))


def clipped_step(max_norm: float | None, layout: tuple[str, str]) -> mtf.Program:
    return clipping(max_norm).lower(*layout, "highest")


CLIPPED = [(layout, norm) for layout in LAYOUTS for norm in (0.5, 1e6)]


@pytest.mark.parametrize(("layout", "max_norm"), some(CLIPPED, [*CLIPPED[::2], ("fully sharded", 1e6)]))
def test_clipping_by_the_global_norm(layout: str, max_norm: float) -> None:
    sim = mtf.simulate(clipped_step(max_norm, LAYOUTS[layout]), executor="exact")
    sim.step(feeds(1))
    _, grads = gradients(initial(), **feeds(1))
    norm = math.sqrt(sum(float(np.sum(g**2)) for g in grads.values()))
    assert norm > 1
    for n, w in initial().items():
        wanted = w - 0.02 * grads[n] * min(1.0, max_norm / norm)
        np.testing.assert_allclose(sim.state[n], wanted, rtol=1e-10, atol=1e-12)


# What the norm adds, by hand. Gradients that are whole on every core: nothing. Gradients of which every core holds a
# part: the squares are summed on each core, over all variables, and one float64 is reduced. With k = 2 cores a ring
# sends 2 (k-1)/k 8 = 8 bytes. "two axes": all three gradients are split over model; w and t over data too, which bias
# is not. So few numbers are rather gathered as gradients, before the norm, than as new weights after it.
CLIPPING_ADDS = {
    "replicated": [],
    "data parallel": [],
    "fully sharded": [("all_reduce", "data", 8, 8)],
    "zero 1": [("all_reduce", "data", 8, 8)],
    "two axes": [("all_reduce", "model", 8, 8)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_costs_one_number_per_set_of_axes(layout: str) -> None:
    def moved(max_norm: float | None) -> list[tuple[str, str, int, float]]:
        program = clipped_step(max_norm, LAYOUTS[layout])
        return [(c.kind, "+".join(sorted(c.axes)), c.payload_bytes, c.sent_bytes) for c in program.collectives]

    added = moved(0.5)
    for c in moved(None):
        added.remove(c)
    assert sorted(added) == CLIPPING_ADDS[layout]


def test_clipping_keeps_dtypes_and_none() -> None:
    with mtf.Graph():
        grads = [mtf.constant(3.0, [D("d", 4)], "bfloat16"), None, mtf.constant(8.0)]
        limit = mtf.constant(1.0)
        (a, none, b), norm = opt.clip_by_global_norm(grads, limit)
    assert none is None
    assert a is not None
    assert b is not None
    result = mtf.simulate(mtf.lower({"a": a, "b": b, "norm": norm})).step()
    assert (a.dtype.name, b.dtype.name, norm.dtype.name) == ("bfloat16", "float32", "float32")
    np.testing.assert_allclose(result["norm"], 10.0, rtol=1e-6)  # sqrt(4 x 9 + 64)
    np.testing.assert_allclose(result["a"].astype(float), 0.3, rtol=2**-8)
    np.testing.assert_allclose(result["b"], 0.8, rtol=1e-6)


# ---------------------------------------------------------------- microbatches

FOUR_CORES = {  # which need at least four examples
    "four cores": ("data:4", "batch:data"),
    "batch over both": ("data:2;model:2", "batch:data+model;rows:model?"),
}


CUTS = [(layout, n) for layout in LAYOUTS for n in (1, 2, 4)] + [(layout, 2) for layout in FOUR_CORES]
CUTS_FIRST = [("replicated", 4), ("data parallel", 1), ("fully sharded", 2), ("zero 1", 2), ("two axes", 4), CUTS[-1]]


@pytest.mark.parametrize(("layout", "splits"), some(CUTS, CUTS_FIRST))
def test_microbatches_give_what_the_whole_batch_gives(layout: str, splits: int) -> None:
    mesh, rules = {**LAYOUTS, **FOUR_CORES}[layout]
    with mtf.Graph() as graph:
        v = variables()
        grads, outputs = mtf.serialize_training_step(inputs(), lambda f: model(f, v), BATCH, splits)
        assert list(outputs) == ["loss", "prediction"]
        outputs |= {f"d {x.name}": g for x, g in zip(graph.trainable_variables, grads, strict=True)}
        train = opt.AdamOptimizer(0.02).apply_grads(grads, graph.trainable_variables)
    program = mtf.lower(outputs, train, mesh, rules, "highest")
    fed = feeds(1)
    loss, wanted = gradients(initial(), **fed)
    prediction = fed["x"] @ initial()["w"] + initial()["bias"]
    prediction += np.sum(np.einsum("bi,hio->bho", fed["x"], initial()["t"]) ** 2, 1)
    for executor in ("exact", "fast"):
        result = mtf.simulate(program, executor=executor).step(fed)
        np.testing.assert_allclose(result["loss"], loss, rtol=1e-12)
        np.testing.assert_allclose(result["prediction"], prediction, rtol=1e-11)
        for n, g in wanted.items():
            np.testing.assert_allclose(result[f"d {n}"], g, rtol=1e-10, atol=1e-12)


def test_microbatches_move_no_example_and_gradients_as_the_layout_says() -> None:
    """Data-parallel: one all_reduce of each gradient and of the loss, after the last microbatch; or reduce_scatters."""
    batch = D("batch", 1024)  # so large that moving gradients is cheaper than moving examples

    def moved(layout: str) -> list[tuple[str, int, int]]:
        with mtf.Graph() as graph:
            v, f = variables(), inputs(batch=batch)
            grads, outputs = mtf.serialize_training_step(f, lambda f: model(f, v), batch, 4)
            train = opt.SgdOptimizer(0.02).apply_grads(grads, graph.trainable_variables)
        program = mtf.lower({"loss": outputs["loss"]}, train, *LAYOUTS[layout])
        return sorted((c.kind, c.payload_bytes, c.count) for c in program.collectives)

    sizes = (8, 8 * 8, 8 * 32, 8 * 64)  # loss, bias, w, t in float64
    assert moved("data parallel") == [("all_reduce", n, 1) for n in sizes]
    halves = [("all_gather", n // 2, 1) for n in sizes[1:]]
    assert moved("zero 1") == [*halves, ("all_reduce", 8, 1), *(("reduce_scatter", n, 1) for n in sizes[1:])]


def test_variables_declared_in_the_model_keep_their_names() -> None:
    hidden = D("hidden", 16)

    def net(features: Mapping[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
        with mtf.scope("net"):
            h = mtf.layers.dense(features["x"], hidden, activation=mtf.tanh, name="in")
            y = mtf.layers.dense(h, COLS, name="out")
        decay = mtf.reduce_sum(mtf.square(features["scale"])) * 0.5
        return {"loss": mtf.reduce_mean(mtf.square(y - features["y"])) + decay}

    def lowered(splits: int | None) -> mtf.Program:
        with mtf.Graph() as graph, mtf.scope("model"):
            scale = mtf.variable("scale", [COLS], 0.5)  # leads to the loss from outside, through other operations
            f = {**inputs("float32"), "scale": mtf.sin(scale) * 2.0}
            f["y"] = f["y"] * scale  # and by way of a feature that is cut
            if splits is None:
                outputs = net(f)
                grads = mtf.gradients([outputs["loss"]], graph.trainable_variables)
            else:
                grads, outputs = mtf.serialize_training_step(f, net, BATCH, splits)
            assert set(graph.variables) == {
                "model/scale",
                *(f"model/net/{n}/{k}" for n in ("in", "out") for k in ("kernel", "bias")),
            }
            train = opt.MomentumOptimizer(0.1).apply_grads(grads, graph.trainable_variables)
        return mtf.lower(outputs, train, "data:2", "batch:data;hidden:data?", "highest")

    whole, cut = (mtf.simulate(lowered(n), seed=3, executor="exact") for n in (None, 4))
    for t in range(3):
        fed = feeds(t, np.float32)
        names = [f"model/{n}" for n in fed]
        named = dict(zip(names, fed.values(), strict=True))
        np.testing.assert_allclose(whole.step(named)["loss"], cut.step(named)["loss"], rtol=1e-5)
    for n in whole.state:
        np.testing.assert_allclose(whole.state[n], cut.state[n], rtol=1e-4, atol=1e-6, err_msg=n)


def test_outputs_of_other_kinds() -> None:
    """Whole numbers are summed, truth values joined, examples put back in order; features without batch passed on."""
    with mtf.Graph():
        x, table = mtf.input("x", [ROWS, BATCH]), mtf.input("table", [ROWS])
        w = mtf.variable("w", [ROWS], 1.0)

        def net(f: Mapping[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
            assert f["table"].shape == mtf.Shape([ROWS])
            y = mtf.reduce_sum(f["x"] * w * f["table"], reduced_dim=ROWS)
            large = mtf.greater(y, 1.0)
            count = mtf.reduce_sum(mtf.cast(large, "int32"))
            return {
                "loss": mtf.reduce_sum(y),
                "large": large,
                "count": count,
                "many": mtf.greater(count, 1),
                "narrow": mtf.cast(mtf.sin(f["x"]), "bfloat16"),
            }

        grads, outputs = mtf.serialize_training_step({"x": x, "table": table}, net, BATCH, 2, reduction="sum")
    rng = np.random.default_rng(0)
    xs, ts = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    for mesh, layout in (("data:1", ""), ("data:4", "batch:data"), ("data:2", "rows:data")):
        program = mtf.lower({**outputs, "dw": grads[0]}, mesh=mesh, layout=layout)
        result = mtf.simulate(program, executor="exact").step(x=xs, table=ts)
        y = ts @ xs
        np.testing.assert_allclose(result["loss"], y.sum(), rtol=1e-5)
        np.testing.assert_array_equal(result["large"], y > 1)
        assert result["large"].dtype == bool
        assert result["count"] == (y > 1).sum()
        assert result["many"] == any((y[n::2] > 1).sum() > 1 for n in (0, 1))
        np.testing.assert_array_equal(result["narrow"].astype(np.float32), np.float32(np.sin(xs).astype("bfloat16")))
        np.testing.assert_allclose(result["dw"], ts * xs.sum(1), rtol=1e-5)


@pytest.mark.parametrize("layout", ["batch:data", "batch:data;slots/cols:data"])
def test_sums_of_bfloat16_gradients_are_float32(layout: str) -> None:
    """Four gradients of bfloat16, 1 and three times 2^-9, add up to what bfloat16 can't hold."""
    with mtf.Graph():
        w = mtf.variable("w", [COLS], 1.0, activation_dtype="bfloat16")
        x = mtf.input("x", [BATCH], "bfloat16")
        (dw,), outputs = mtf.serialize_training_step(
            {"x": x}, lambda f: {"loss": mtf.reduce_sum(mtf.reduce_sum(f["x"]) * w)}, BATCH, 4, reduction="sum"
        )
    assert outputs["loss"].dtype.name == "bfloat16"
    sim = mtf.simulate(mtf.lower({"dw": dw}, mesh="data:2", layout=layout), executor="exact")
    # the examples of microbatch n are n and n + 4
    found = sim.step(x=np.array([1, 2.0**-9, 2.0**-9, 2.0**-9, 0, 0, 0, 0], np.float32))
    np.testing.assert_array_equal(found["dw"], 1 + 3 * 2.0**-9)


def test_random_numbers_differ_by_microbatch_not_by_layout() -> None:
    masks = []
    for mesh, layout in (("data:1", ""), ("data:2", "batch:data"), ("data:4", "batch:data")):
        with mtf.Graph():
            w, x = mtf.variable("w", [ROWS], 1.0), mtf.input("x", [BATCH, ROWS])

            def net(f: Mapping[str, mtf.Tensor], w: mtf.Tensor = w) -> dict[str, mtf.Tensor]:
                y = mtf.dropout(f["x"] * w, True, keep_prob=0.5)
                return {"loss": mtf.reduce_mean(y), "y": y}

            _, outputs = mtf.serialize_training_step({"x": x}, net, BATCH, 2)
        sim = mtf.simulate(mtf.lower({"y": outputs["y"]}, mesh=mesh, layout=layout), executor="exact")
        masks.append(sim.step(x=np.ones((8, 4), np.float32))["y"])
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], masks[2])
    assert not np.array_equal(masks[0][::2], masks[0][1::2])  # the two microbatches


# ---------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("layout", some(["replicated", "fully sharded", "zero 1"], ["fully sharded", "zero 1"]))
def test_a_master_copy_lets_small_updates_add_up(layout: str) -> None:
    """1 - 2^-10 rounds to 1 in bfloat16: without a master copy nothing would ever move. All sums here are exact."""
    with mtf.Graph() as graph:
        w = mtf.variable("w", [ROWS, COLS], 1.0, slice_dtype="bfloat16")
        batch = mtf.input("x", [BATCH])
        loss = mtf.reduce_sum(mtf.cast(w, "float32")) * mtf.reduce_mean(batch)
        train = opt.SgdOptimizer(2.0**-10).minimize(loss)
        assert graph.variables["w/master"].output.dtype.name == "float32"
    sim = mtf.simulate(mtf.lower(None, train, *LAYOUTS[layout]), executor="exact")
    seen = []
    for _ in range(16):
        sim.step(x=np.ones(8, np.float32))
        seen.append(float(sim.state["w"][0, 0]))
    np.testing.assert_array_equal(sim.state["w/master"], 1 - 16 * 2.0**-10)
    # bfloat16 keeps 8 bits: below 1 they are multiples of 2^-8; halves go to the even one
    assert seen == [float(np.float32(1 - n * 2.0**-10).astype("bfloat16")) for n in range(1, 17)]
    sim.state["w"] = np.full((4, 8), 3.0, np.float32)  # what is assigned counts, not the old master
    sim.step(x=np.ones(8, np.float32))
    np.testing.assert_array_equal(sim.state["w/master"], 3 - 2.0**-10)


def test_float32_master_bfloat16_activations_follow_float32_adam() -> None:
    """float32 variables used as bfloat16: slots and updates are float32, gradients as good as bfloat16 makes them."""
    with mtf.Graph() as graph:
        v = variables("float32", activation_dtype="bfloat16")
        loss = mtf.cast(model(inputs("bfloat16"), v)["loss"], "float32")
        train = opt.AdamOptimizer(0.02, 0.8, 0.95, 1e-6).minimize(loss)
        kinds = {n: op.output.dtype.name for n, op in graph.variables.items() if n != "step"}
    assert set(kinds.values()) == {"float32"}
    assert not any("master" in n for n in kinds)
    sim = mtf.simulate(mtf.lower({"loss": loss}, train, "data:2", "batch:data;cols:data?"), executor="exact")
    values, states = initial(), {n: {"name": n} for n in initial()}
    first = gradients(values, **feeds(0))[0]
    for t in range(1, 21):
        sim.step(feeds(0, np.float32))
        grads = gradients(values, **feeds(0))[1]
        values = {n: adam()(w, grads[n], states[n], t, 0.02) for n, w in values.items()}
    last = gradients({n: sim.state[n].astype(float) for n in values}, **feeds(0))[0]
    assert last == pytest.approx(gradients(values, **feeds(0))[0], rel=0.05)
    assert last < 0.5 * first


# ---------------------------------------------------------------- loss scaling


@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_loss_scaling_skips_overflows_and_recovers(executor: str) -> None:
    """A gradient of 4 overflows at scales of 2^126 and more; two good steps in a row double the scale."""
    with mtf.Graph():
        g = mtf.input("g", [ROWS])
        w = mtf.variable("w", [ROWS], 0.0)
        scale = opt.DynamicLossScale(initial=2.0**127, growth_steps=2)
        # Without epsilon the first step of Adam is lr sign(g), if the corrections count it as the first.
        train = opt.AdamOptimizer(0.5, 0.5, 0.5, 0.0).minimize(mtf.reduce_sum(w * g), loss_scale=scale, max_norm=1e3)
    sim = mtf.simulate(mtf.lower(None, train, "data:2", "rows:data"), executor=executor)
    grads = np.array([1.0, -1.0, 4.0, -2.0], np.float32)  # the overflow is on one core only

    def step(g: Array) -> tuple[float, int, int]:
        sim.step(g=g)
        assert np.isfinite(sim.state["w"]).all()
        scale, good, applied = (sim.state[f"loss_scale/{n}"] for n in ("scale", "good_steps", "applied_steps"))
        return math.log2(scale), int(good), int(applied)

    before = {n: sim.state[n] for n in ("w", "w/adam_m", "w/adam_v")}
    assert step(grads) == (126, 0, 0)
    assert step(grads) == (125, 0, 0)
    for n, old in before.items():
        np.testing.assert_array_equal(sim.state[n], old)
    assert step(grads) == (125, 1, 1)
    np.testing.assert_allclose(sim.state["w"], -0.5 * np.sign(grads), rtol=1e-6)
    assert step(grads) == (126, 0, 2)
    np.testing.assert_allclose(sim.state["w"], -1.0 * np.sign(grads), rtol=1e-6)
    kept = sim.state["w"]
    assert step(grads) == (125, 0, 2)
    assert step(np.array([1.0, np.nan, 1.0, 1.0], np.float32)) == (124, 0, 2)
    assert step(np.array([1.0, np.inf, 1.0, 1.0], np.float32)) == (123, 0, 2)
    np.testing.assert_array_equal(sim.state["w"], kept)
    assert sim.state["step"] == 7


@pytest.mark.parametrize("layout", some([*LAYOUTS], ["zero 1", "two axes"]))
def test_loss_scaling_changes_no_bit_where_nothing_overflows(layout: str) -> None:
    states = []
    for scale in (None, opt.DynamicLossScale(2.0**10, growth_steps=1)):
        with mtf.Graph():
            loss = model(inputs("float32"), variables("float32"))["loss"]
            train = opt.LarsOptimizer(0.5).minimize(loss, loss_scale=scale)
        sim = mtf.simulate(mtf.lower(None, train, *LAYOUTS[layout], "highest"), executor="exact")
        for t in range(4):
            sim.step(feeds(t, np.float32))
        states.append(sim.state)
    assert states[1]["loss_scale/scale"] == 2.0**14
    for n in states[0]:
        np.testing.assert_array_equal(states[0][n], states[1][n], err_msg=n)


def test_the_loss_scale_keeps_within_its_bounds() -> None:
    with mtf.Graph():
        g, w = mtf.input("g", []), mtf.variable("w", [], 0.0)
        scale = opt.DynamicLossScale(initial=4, growth_steps=1, factor=4, maximum=32)
        sim = mtf.simulate(mtf.lower(None, opt.SgdOptimizer(1.0).minimize(w * g, loss_scale=scale)))
    found = []
    for value in (1, 1, 1, np.inf, np.nan, -np.inf, np.inf, 1):
        sim.step(g=np.float32(value))
        found.append(float(sim.state["loss_scale/scale"]))
    assert found == [16, 32, 32, 8, 2, 1, 1, 4]
    assert sim.state["w"] == -4


# ---------------------------------------------------------------- bad arguments


def minimized(**options: Any) -> Any:
    w = mtf.variable("w", [ROWS], 1.0)
    return opt.SgdOptimizer(0.1).minimize(mtf.reduce_sum(w * w), **options)


def applied(grad: Callable[[], Any] = lambda: mtf.ones([ROWS]), dtype: str = "float32", schedule: Any = 0.1) -> Any:
    w = mtf.variable("w", [ROWS], 1, dtype)
    return opt.SgdOptimizer(schedule).apply_grads([grad()], [w])


def split(features: Any = None, model_fn: Any = None, batch_dim: Any = BATCH, num_splits: Any = 2, **more: Any) -> Any:
    w = mtf.variable("w", [ROWS], 1.0)
    x = mtf.input("x", [BATCH, ROWS])
    return mtf.serialize_training_step(
        {"x": x} if features is None else features,
        (lambda f: {"loss": mtf.reduce_mean(f["x"] * w)}) if model_fn is None else model_fn,
        batch_dim,
        num_splits,
        **more,
    )


def in_a_loop() -> None:
    mtf.while_loop(2, lambda v: split({"x": v})[1]["loss"], [mtf.input("z", [BATCH])])


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "rate of text": (lambda: opt.SgdOptimizer("fast"), r"learning rate must be a number, a tensor or a sched.*'fast'"),
    "no rate": (lambda: opt.AdamOptimizer(None), r"AdamOptimizer .*learning rate must be a number"),
    "infinite rate": (lambda: opt.LionOptimizer(math.inf), r"learning rate must be a finite number, got float inf"),
    "rate with dims": (
        lambda: opt.SgdOptimizer(mtf.ones([ROWS])),
        "must be a float without dims, got ones",
    ),
    "schedule with dims": (
        lambda: applied(schedule=lambda t: mtf.ones([ROWS])),
        r"schedule's result must be a float with.*",
    ),
    "schedule of text": (
        lambda: applied(schedule=lambda t: "x"),
        r"schedule's result must be a finite number, got str",
    ),
    "momentum": (lambda: opt.MomentumOptimizer(0.1, 1.0), r"Momentum.*momentum must be in \[0, 1\), got 1"),
    "beta": (lambda: opt.AdamWOptimizer(0.1, beta_2=-0.5), r"AdamWOptimizer .*beta_2 must be in \[0, 1\), got -0.5"),
    "epsilon": (lambda: opt.AdamOptimizer(0.1, epsilon=-1), r"epsilon must not be negative, got -1"),
    "decay": (lambda: opt.AdamWeightDecayOptimizer(0.1, -2), r"weight_decay_rate must not be negative, got -2"),
    "pattern": (lambda: opt.AdamWOptimizer(0.1, exclude_from_weight_decay="bias"), r"exclude.* must be a list.*'bias'"),
    "bad pattern": (lambda: opt.LarsOptimizer(0.1, exclude=["("]), r"exclude.*'\(' is not a valid regular expression"),
    "patterns": (lambda: opt.LionOptimizer(0.1, exclude_from_weight_decay=[3]), r"must be regular expr.*got int 3"),
    "trust": (lambda: opt.LarsOptimizer(0.1, trust_coefficient=0), r"trust_coefficient must be positive, got 0"),
    "adafactor rate first": (lambda: opt.AdafactorOptimizer(0.01), r"the first argument, must be True or False.*0.01"),
    "adafactor decay": (lambda: opt.AdafactorOptimizer(decay_rate=1.0), r"decay_rate must be in \[0, 1\), got 1"),
    "adafactor clip": (lambda: opt.AdafactorOptimizer(clipping_threshold=0), r"clipping_threshold must be pos.*got 0"),
    "adafactor size": (
        lambda: opt.AdafactorOptimizer(min_dim_size_to_factor=1.5),
        r"must be an integer, got float 1.5",
    ),
    "no dependence": (lambda: opt.SgdOptimizer(0.1).minimize(mtf.constant(1.0)), r"depends on no trainable variable"),
    "max_norm 0": (lambda: minimized(max_norm=0), r"minimize .*max_norm must be positive, got 0"),
    "max_norm text": (lambda: minimized(max_norm="1"), r"max_norm must be a finite number, got str '1'"),
    "loss scale number": (lambda: minimized(loss_scale=2.0), r"must be an mtf.optimize.DynamicLossScale, got 2.0"),
    "numbers": (lambda: opt.SgdOptimizer(0.1).apply_grads([], [mtf.variable("w", [])]), r"0 gradients for 1 variable$"),
    "other dims": (
        lambda: applied(lambda: mtf.ones([COLS])),
        r"gradient ones: f32\[cols:8\] does not have the dims of",
    ),
    "no tensor": (lambda: applied(lambda: 1.0), r"apply_grads .*expected a tensor, got float 1.0"),
    "whole numbers": (lambda: applied(lambda: mtf.ones([ROWS]), "int32"), r"is not a float variable"),
    "clip nothing": (lambda: opt.clip_by_global_norm([None], 1.0), r"needs at least one gradient, got 1 times None"),
    "clip int": (lambda: opt.clip_by_global_norm([mtf.constant(1, [], "int32")], 1.0), r"is not a float tensor"),
    "clip dims": (lambda: opt.clip_by_global_norm([mtf.ones([ROWS])], mtf.ones([ROWS])), r"or a float without dims"),
    "scale": (lambda: opt.DynamicLossScale(initial=0.5), r"needs 1 <= initial <= maximum.*initial 0.5"),
    "growth": (lambda: opt.DynamicLossScale(growth_steps=0), r"growth_steps must be at least 1, got 0"),
    "factor": (lambda: opt.DynamicLossScale(factor=1.0), r"factor must be larger than 1, got 1.0"),
    "warm-up": (lambda: opt.linear_warmup(1.0, 0), r"linear_warmup .*warmup_steps must be at least 1, got 0"),
    "decay steps": (lambda: opt.cosine_decay(1.0, 2.5), r"decay_steps must be an integer, got float 2.5"),
    "decay offset": (lambda: opt.linear_decay(1.0, 5, 5), r"at least 0 and below total_steps, got 5 and 5"),
    "adafactor offset": (lambda: opt.adafactor_decay_rate_pow(0.8, -1), r"offset must not be negative, got -1"),
    "adafactor pattern": (
        lambda: opt.AdafactorOptimizer(exclude_from_parameter_scale="w"),
        r"exclude_from_parameter_scale must be a list",
    ),
    "decay rate": (lambda: opt.exponential_decay(1.0, 5, 0.0), r"decay_rate must be positive, got 0"),
    "pieces": (lambda: opt.piecewise([5], [1.0]), r"got 1 value for 1 boundary"),
    "boundaries": (lambda: opt.piecewise([5, 5], [1, 2, 3]), r"must be positive and increase, got \[5, 5\]"),
    "piece": (lambda: opt.piecewise([], ["x"]), r"each of values, .* must be a finite number, got str 'x'"),
    "empty product": (lambda: opt.product(), r"needs at least one number or schedule"),
    "no features": (lambda: split({}), r"features must be a dict of names to tensors, got \{\}"),
    "no tensors": (lambda: split({"x": 1.0}), r"feature 'x' must be a tensor, got float 1.0"),
    "no batch": (lambda: split(batch_dim=COLS), r"no feature has the dim cols:8: x: f32\[batch:8, rows:4\]"),
    "batch name": (lambda: split(batch_dim="batch"), r"batch_dim must be a Dimension, got 'batch'"),
    "splits": (lambda: split(num_splits=3), r"8 examples can't be cut into 3 equal microbatches"),
    "no splits": (lambda: split(num_splits=0), r"8 examples can't be cut into 0 equal microbatches"),
    "no model": (lambda: split(model_fn=3), r"model_fn must be a function of a dict of features, got 3"),
    "no loss": (lambda: split(model_fn=lambda f: {"y": f["x"]}), r"must return a dict with a tensor 'loss' in it"),
    "loss with dims": (lambda: split(model_fn=lambda f: {"loss": f["x"]}), r"loss must be a float without dims, got "),
    "unused variable": (
        lambda: split(model_fn=lambda f: {"loss": mtf.reduce_mean(f["x"])}),
        r"does not depend on 'w' \(test_optimize.py:\d+\); declare .* trainable=False",
    ),
    "reduction": (lambda: split(reduction="max"), r"reduction must be 'mean' or 'sum', got 'max'"),
    "in a loop": (in_a_loop, r"feature 'x', .*, is used inside a loop; call it outside"),
    "microbatch taken": (
        lambda: split({"x": mtf.input("z", [BATCH, D("microbatch", 2)])}),
        r"feature 'x', z: .* has a dim 'microbatch'; rename it",
    ),
}


@each("make, message", BAD)
def test_a_bad_argument_gives_one_clear_error(make: Callable[[], object], message: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=message) as caught:
        make()
    assert "test_optimize.py:" in str(caught.value)


NO_SLOTS = ("Optimizer", "SgdOptimizer")
WITH_SLOTS = sorted(n for n in public_names(mtf.optimize) if n.endswith("Optimizer") and n not in NO_SLOTS)


@pytest.mark.parametrize("name", WITH_SLOTS)
def test_slots_are_kept_as_asked_for(name: str) -> None:
    """The float32 rule, its slots rounded after each step; without `master` the variable is rounded too."""

    def steps(variable: str, rounding: bool, **kept: object) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
        with mtf.Graph():
            w = mtf.variable("w", [mtf.Dimension("d", 64)], np.arange(-32, 32) / 32 + 1 / 64, variable)
            grad = mtf.input("g", w.shape)
            made = {"AdafactorOptimizer": lambda: mtf.optimize.AdafactorOptimizer(learning_rate=0.1, beta1=0.5, **kept)}
            optimizer = made.get(name, lambda: getattr(mtf.optimize, name)(0.1, **kept))()
            program = mtf.lower(updates=optimizer.apply_grads([grad], [w]), mesh="p:2", layout="d:p")
        sim = mtf.simulate(program)
        for n in range(3):
            sim.step(g=np.sin(np.arange(64.0) * (n + 1)))
            if rounding:
                for kind in sim.state:
                    if kind.startswith("w"):
                        sim.state[kind] = sim.state[kind].astype(ml_dtypes.bfloat16).astype(np.float32)
        return sim.state["w"], dict(sim.state), program.memory.by_kind["slots"]

    whole, state, wide = steps("float32", True)
    found, narrow, half = steps("bfloat16", False, slot_dtype="bfloat16", master_dtype="bfloat16")
    np.testing.assert_array_equal(found.astype(np.float32), whole)
    assert "w/master" not in narrow
    slots = [n for n in narrow if n.startswith("w/")]
    assert slots
    for n in slots:
        assert narrow[n].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(narrow[n].astype(np.float32), state[n])
    assert half * 2 == wide


def test_what_slots_are_kept_in_is_checked() -> None:
    with pytest.raises(mtf.GraphError, match="slot_dtype must be a float dtype to compute in, got int8"):
        mtf.optimize.AdamWOptimizer(0.1, slot_dtype="int8")
    with pytest.raises(mtf.MeshlibError, match="unknown dtype 'bf16'"):
        mtf.optimize.AdafactorOptimizer(slot_dtype="bf16")
    with pytest.raises(TypeError, match="no argument 'slots_dtype'; did you mean 'slot_dtype'"):
        mtf.optimize.SgdOptimizer(0.1, slots_dtype="bfloat16")
