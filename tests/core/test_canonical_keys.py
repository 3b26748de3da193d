"""Canonical keys: every change to a program, machine, compiler record or objective gives another; nothing else does."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from hardware.checks import HardwareError
from hardware.chips import CHIPS, Chip
from hardware.slices import Slice
from meshlib.core.canonical_keys import key_of
from meshlib.estimation.time.physics import CALIBRATED, Physics
from meshlib.searching import resume_file
from tests.effort import deep, draws, each

FACTOR = 2.0
TOOLS = types.SimpleNamespace(factor=2.0)
Change = tuple[str, Callable[[], Any]]

# One program of many parts; each of the others is it with one thing changed.
BASE: dict[str, Any] = {
    "batch": 16, "inner": 8, "hidden": 32, "trips": 3, "dtype": "float32", "activation": "relu", "scale": 0.5,
    "table": (1.0, 2.0, 3.0), "order": (0, 1), "body": "tanh", "body_scale": 0.25, "reverse": False, "remat": "full",
    "name": "loss", "rate": 0.1, "optimizer": "sgd", "kept": 0.9, "initial": 1.0, "reduction": "mean", "mask": True,
    "split": "", "function": 1, "trainable": True, "extra": 0,
}  # fmt: skip
CHANGED: dict[str, tuple[Any, ...]] = {
    "batch": (32, 64, 8), "inner": (16, 24), "hidden": (64, 16), "trips": (2, 4, 5), "dtype": ("bfloat16",),
    "activation": ("gelu", "tanh", "sigmoid", "square"), "scale": (0.25, -0.5, 0.0, -0.0, 0.50001),
    "table": ((1.0, 2.0, 3.5), (2.0, 1.0, 3.0), (0.0, 2.0, 3.0), (-0.0, 2.0, 3.0)), "order": ((1, 0), (0, 0), (1, 1)),
    "body": ("relu", "sigmoid", "square"), "body_scale": (0.125, 0.75), "reverse": (True,),
    "remat": ("none", "matmuls", mtf.Remat(save=["y"]), mtf.Remat(offload=["y"])), "name": ("cost",),
    "rate": (0.2, 0.01), "optimizer": ("momentum", "adam"), "kept": (0.8, 0.5), "initial": (2.0, 0.0, -0.0),
    "reduction": ("sum", "max"), "mask": (False,), "split": ("batch:data", "batch:model"), "function": (2, 3),
    "trainable": (False,), "extra": (1, 2),
}  # fmt: skip


def program(**changed: Any) -> tuple[Any, Any]:
    """A network with a loop, a table, a function of the user's own, dropout and an optimizer."""
    p = types.SimpleNamespace(**{**BASE, **changed})
    batch, inner, hidden = (mtf.Dimension(n, getattr(p, n)) for n in ("batch", "inner", "hidden"))
    trips, three = mtf.Dimension("trips", p.trips), mtf.Dimension("three", 3)
    x = mtf.input("x", [batch, inner], p.dtype)
    first = mtf.initializers.constant(p.initial)
    both = [mtf.variable(f"w{n}", [inner, hidden], first, dtype=p.dtype, trainable=p.trainable) for n in (0, 1)]
    h = mtf.einsum([x, both[p.order[0]]], [batch, hidden]) * p.scale
    h = getattr(mtf, p.activation)(h) + mtf.einsum([x, both[p.order[1]]], [batch, hidden])
    if p.split:
        h = mtf.constrain(h, p.split)
    if p.mask:
        h = mtf.dropout(h, is_training=True, keep_prob=p.kept)
    across = mtf.variable("v", [trips, hidden], dtype=p.dtype)
    narrow = mtf.variable("u", [hidden, three], dtype=p.dtype)

    def body(carries: Any, slices: Any) -> Any:
        y = getattr(mtf, p.body)(carries[0] * slices[0] * p.body_scale, name="y")
        return [carries[0] + mtf.einsum([mtf.einsum([y, narrow], [batch, three]), narrow], [batch, hidden])], []

    (h,), _ = mtf.scan(body, [h], [across], trips, reverse=p.reverse, remat=p.remat)
    number = p.function
    own = mtf.slicewise(lambda a: a * number, [h], splittable_dims=[batch, hidden], grad_function=lambda op, dy: dy)
    loss = getattr(mtf, f"reduce_{p.reduction}")(own, name=p.name)
    table = mtf.constant(np.array(p.table, np.float32), [three])
    loss = loss + mtf.cast(mtf.reduce_sum(table, name="table"), p.dtype)
    for _ in range(p.extra):
        loss = loss + mtf.reduce_mean(x)
    optimizers = {"sgd": mtf.optimize.SgdOptimizer, "adam": mtf.optimize.AdamWOptimizer}
    rule = mtf.optimize.MomentumOptimizer(p.rate, 0.9) if p.optimizer == "momentum" else optimizers[p.optimizer](p.rate)
    return {"loss": loss}, rule.minimize(loss) if p.trainable else []


def program_changes() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, values in CHANGED.items():
        for value in values:
            if (name, value) not in (("kept", 0.9),):
                yield f"{name}={value!r}", {name: value}


def chip_changes() -> Iterator[tuple[str, Chip]]:
    """Every figure of a chip, one at a time."""
    base = dataclasses.replace(CHIPS["v5e"], usd_per_chip_hour=1.2)
    for f in dataclasses.fields(Chip):
        old = getattr(base, f.name)
        candidates: list[Any] = []
        if isinstance(old, bool):
            candidates = [not old]
        elif isinstance(old, int):
            candidates = [2 * old, old + 1, max(1, old // 2)]
        elif isinstance(old, float):
            candidates = [old * 0.5, old * 0.9, old * (1 + 1e-15)]
        elif old is None:
            candidates = [1, 1e14]
        elif f.name == "pod_shape":
            candidates = [(8, 8)]
        for value in candidates:
            try:
                made = dataclasses.replace(base, **{f.name: value})
                Slice("v5e-4", made)
            except HardwareError:
                continue
            if getattr(made, f.name) != old:
                yield f"chip {f.name}={value}", made


def objectives() -> list[Change]:
    """Functions that differ in one thing each; the first is what the others were made of."""

    def closing(n: float) -> Any:
        return lambda est: est.step_seconds * n

    def defaulting(n: float) -> Any:
        def by(est: Any, times: float = n) -> float:
            return float(est.step_seconds * times)

        return by

    def through(f: Any) -> Any:
        return lambda est: f(est) + 1

    def listed(*ns: float) -> Any:
        held = list(ns)
        return lambda est: est.step_seconds * sum(held)

    class Weighed:
        def __init__(self, n: float) -> None:
            self.n = n

        def __call__(self, est: Any) -> float:
            return float(est.step_seconds * self.n)

    names = ("step_seconds", "memory", "usd", "mfu", "exposed_comm_seconds", "sent_bytes")
    return [
        *((f"objective {name}", partial(str, name)) for name in names),
        *((f"closure {n}", partial(closing, n)) for n in (1.0, 2.0, 3, 3.0, -0.0, 0.0)),
        *((f"default {n}", partial(defaulting, n)) for n in (1.0, 2.0)),
        *((f"nested {n}", lambda n=n: through(closing(n))) for n in (1.0, 2.0)),
        *((f"object {n}", partial(Weighed, n)) for n in (1.0, 2.0)),
        *((f"list {ns}", partial(listed, *ns)) for ns in ((1.0,), (1.0, 1.0), (2.0,))),
        *((f"partial {n}", lambda n=n: partial(_times, n=n)) for n in (1.0, 2.0)),
        ("constant 1", lambda: lambda est: est.step_seconds + 1),
        ("constant 2", lambda: lambda est: est.step_seconds + 2),
        ("constant 1.0", lambda: lambda est: est.step_seconds + 1.0),
        ("attribute", lambda: lambda est: est.mfu + 1),
        ("bytes", lambda: lambda est: est.memory.peak_bytes),
        ("operator", lambda: lambda est: est.step_seconds - 1),
        ("max", lambda: lambda est: max(est.step_seconds, est.mfu)),
        ("min", lambda: lambda est: min(est.step_seconds, est.mfu)),
        ("NumPy", lambda: lambda est: np.log(est.step_seconds)),
        ("NumPy's other", lambda: lambda est: np.exp(est.step_seconds)),
        ("method", lambda: Weighed(1.0).__call__),
        ("a set", lambda: lambda est: est.step_seconds in {"a", "b", "c"}),
        ("another set", lambda: lambda est: est.step_seconds in {"a", "b", "d"}),
    ]


def _times(est: Any, n: float) -> float:
    return float(est.step_seconds * n)


def _global(est: Any) -> float:
    return float(est.step_seconds * FACTOR)


def _global_attribute(est: Any) -> float:
    return float(est.step_seconds * TOOLS.factor)


def network() -> tuple[Any, Any]:
    batch, inner = mtf.Dimension("batch", 16), mtf.Dimension("inner", 8)
    x, w = mtf.input("x", [batch, inner]), mtf.variable("w", [inner])
    return {"loss": mtf.reduce_mean(mtf.einsum([x, w], [batch]))}, []


def test_no_kept_search_answers_for_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[tuple[str, dict[str, Any]]] = []
    base = {"build": partial(program), "slice": Slice("v5e-4"), "objective": "step_seconds"}
    changes += [(what, {"build": partial(program, **change)}) for what, change in program_changes()]
    changes += [(what, {"slice": Slice("v5e-4", chip)}) for what, chip in chip_changes()]
    changes += [(f"slice {name}", {"slice": Slice(name)}) for name in ("v5e-8", "v5e-16", "v6e-4", "v4-8", "2*v5e-4")]
    changes += [(what, {"objective": make()}) for what, make in objectives()[1:]]
    changes += [("per", {"per": "batch"}), ("per", {"per": "hidden"}), ("choices", {"choices": {"scale": [0.5, 0.25]}})]
    for f in dataclasses.fields(Physics):
        changes.append((f"physics {f.name}", {"physics": f.name}))
    assert len(changes) >= 200, len(changes)
    path = tmp_path / "kept.json"
    kept = mtf.search(**base, axes=1, seconds=None, resume=path)
    before = path.read_bytes()
    assert mtf.search(**base, axes=1, seconds=None, resume=path).best.value == kept.best.value
    rng = random.Random(7)
    tried = changes if deep() else rng.sample(changes, draws(40, 200))
    for what, change in tried:
        if name := change.pop("physics", None):
            low, high = Physics.field(name).metadata["range"]
            other = dataclasses.replace(CALIBRATED, **{name: low + 0.3 * (high - low)})
            monkeypatch.setattr(resume_file, "CALIBRATED", other)
        with pytest.raises(mtf.GraphError, match="has the estimates of another"):
            pytest.fail(f"{what}: {mtf.search(**{**base, **change}, axes=1, seconds=None, resume=path)}")
        monkeypatch.undo()
        assert path.read_bytes() == before


def test_keys_of_equal_things_are_equal_in_every_process() -> None:
    code = (
        "import json, meshlib as mtf\n"
        "from meshlib.core.canonical_keys import key_of\n"
        "from tests.core.test_canonical_keys import *\n"
        "with mtf.Graph():\n"
        "    made = program(remat=mtf.Remat(save=['y']))\n"
        "keys = [key_of('t', *made), key_of('t', Slice('v5e-4')), key_of('t', {'a', 'b', 'c', 'd'})]\n"
        "print(json.dumps(keys + [key_of('t', make()) for _, make in objectives()]))\n"
    )
    answers = []
    for seed in ("1", "2") if deep() else ("1",):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    space: dict[str, Any] = {}
    exec(code.replace("print(json.dumps(", "found = ((").replace("tests.core.test_canonical_keys", __name__), space)
    answers.append(space["found"])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(answers[0])


def test_globals_that_an_objective_names_are_part_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of("t", _global), key_of("t", _global_attribute), key_of("t", lambda est: _global(est))
    monkeypatch.setitem(_global.__globals__, "FACTOR", 3.0)
    monkeypatch.setattr(TOOLS, "factor", 3.0)
    after = key_of("t", _global), key_of("t", _global_attribute), key_of("t", lambda est: _global(est))
    assert all(a != b for a, b in zip(before, after, strict=True))


# Source of an objective, in which X is 1 in one run and 2 in the next.
WRITTEN = {
    "an attribute of a record": (
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n  w: int = 0\n"
        "W = P()\nW.more = X\ndef objective(est): return W.more"
    ),
    "an attribute of a list": "class L(list): pass\nW = L()\nW.w = X\ndef objective(est): return W.w",
    "an attribute of a dict": "class L(dict): pass\nW = L()\nW.w = X\ndef objective(est): return W.w",
    "an attribute of a class of classes": (
        "class M(type):\n  w = X\nclass C(metaclass=M):\n"
        "  def __call__(self, est): return type(self).w\nobjective = C()"
    ),
    "an attribute of a module": (
        "import sys, types\nm = sys.modules['own_module'] = types.ModuleType('own_module')\nm.w = X\n"
        "def objective(est):\n  import own_module\n  return own_module.w"
    ),
    "a cached property's function": (
        "import functools\nclass C:\n  @functools.cached_property\n  def w(self): return X\n"
        "  def __call__(self, est): return self.w\nobjective = C()"
    ),
}


@each("source", WRITTEN)
def test_what_an_objective_reads_is_part_of_its_key(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for x in ("1", "2", "1"):
        module = types.ModuleType("own")
        monkeypatch.setitem(sys.modules, "own", module)
        monkeypatch.setitem(sys.modules, "own_module", module)
        exec(source.replace("X", x), vars(module))
        keys.append(key_of("t", module.objective))
    assert keys[0] == keys[2] != keys[1]


def test_where_a_function_is_written_is_no_part_of_its_key() -> None:
    made = []
    for blanks in ("", "\n\n\n"):
        space: dict[str, Any] = {"__name__": "own"}
        exec(compile(f"{blanks}def of(est):\n    return est.mfu", f"file{len(blanks)}", "exec"), space)
        made.append(key_of("t", space["of"]))
    assert made[0] == made[1]


def test_functions_that_call_themselves_and_each_other_have_keys() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    held: list[Any] = [1]
    held.append(held)
    assert key_of("t", even) == key_of("t", even) != key_of("t", odd)
    assert key_of("t", held) != key_of("t", [1])


@pytest.mark.parametrize(
    "held", [threading.Lock(), (n for n in range(3)), sys.stdout], ids=["lock", "generator", "file"]
)
def test_what_has_no_key_is_refused_by_name(held: Any, tmp_path: Path) -> None:
    with pytest.raises(mtf.GraphError, match=r"search: objective: .* in .*held has no key"):
        mtf.search(network, "v5e-4", objective=lambda est: est.mfu if held else 0, resume=tmp_path / "kept")
    assert mtf.search(network, "v5e-4", objective=lambda est: est.mfu if held else 0, seconds=None).best.fits


def test_slices_of_one_name_with_different_chips_have_estimates_of_their_own(tmp_path: Path) -> None:
    slow = dataclasses.replace(CHIPS["v5e"], hbm_bytes_per_second=CHIPS["v5e"].hbm_bytes_per_second / 100)
    both = [Slice("v5e-4"), Slice("v5e-4", slow)]
    path = tmp_path / "kept"
    first = mtf.search(network, both, axes=1, seconds=None, resume=path)
    again = mtf.search(network, both, axes=1, seconds=None, resume=path)
    seconds = [[o.value for o in found.outcomes] for found in (first, again)]
    assert seconds[0] == seconds[1]
    assert again.best.candidate.slice == both[0]


def test_minus_zero_is_another_constant_than_zero() -> None:
    with mtf.Graph():
        above = mtf.divide(mtf.constant(1.0), mtf.constant(0.0))
        below = mtf.divide(mtf.constant(1.0), mtf.constant(-0.0))
        found = mtf.simulate(mtf.lower({"above": above, "below": below}), check_nan=False).step()
    assert (found["above"], found["below"]) == (np.inf, -np.inf)
