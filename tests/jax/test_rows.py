"""Every operation on JAX, by the rows of `tests/cases.py`: values and gradients under drawn layouts, as simulated.

Compiling costs more than running, so the rows that a layout allows are one program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

import meshlib as mtf
from layouts import Shape
from meshlib.core.graph import Operation
from meshlib.core.opdef import OPERATIONS
from meshlib.jax import step
from meshlib.jax.table import ROWS
from tests.cases import CASES, Array, Case
from tests.effort import deep
from tests.oracle import Layout, draw_layout, needed

DEVICES = 8
LAYOUTS = 6
# Within what a value on JAX may differ from the simulator's, of the largest number of its array. A row in bfloat16, or
# with operands of eight bits, whose cotangents are in bfloat16, rounds what differs in its last bit to neighbours, and
# may do so twice.
TOLERANCE, ROUNDED = 1e-5, 2**-6


def test_every_operation_has_a_row() -> None:
    import meshlib.jax.rows  # noqa: F401

    assert set(ROWS) == set(OPERATIONS)


class Together:
    """Rows of the table as one program."""

    def __init__(self, cases: list[Case], dtype: str) -> None:
        self.outputs: dict[str, mtf.Tensor] = {}
        self.updates: list[Operation] = []
        self.feeds: dict[str, Array] = {}
        self.narrow: set[str] = set()  # rows that round to fewer bits
        with mtf.Graph():
            for n, case in enumerate(cases):
                with mtf.scope(f"row_{n}"):
                    self._add(case, f"row_{n}", dtype)

    def _add(self, case: Case, scope: str, dtype: str) -> None:
        operands = []
        for (name, spec), value in zip(case.inputs.items(), case.values(), strict=True):
            operands.append(mtf.input(name, spec.shape, spec.dtype or dtype))
            self.feeds[f"{scope}/{name}"] = value
        y = case.build(dtype, *operands)
        if any(t.dtype.is_rounded for t in needed([y])):
            self.narrow.add(scope)
        if isinstance(y, Operation):
            self.updates.append(y)
            return
        self.outputs[f"{scope} {case}"] = y
        if case.has_gradient and y.dtype.is_float:
            cotangent = mtf.input("cotangent", y.shape, y.dtype.of_cotangents)
            self.feeds[f"{scope}/cotangent"] = case.rng(1).uniform(0.4, 1.6, y.shape.sizes)
            floats = {n: x for n, x in zip(case.inputs, operands, strict=True) if x.dtype.is_float}
            found = mtf.gradients([y], list(floats.values()), [cotangent])
            self.outputs |= {f"{scope} {case} d_{n}": dx for n, dx in zip(floats, found, strict=True) if dx is not None}

    def program(self, layout: Layout) -> mtf.Program:
        return mtf.lower(self.outputs, self.updates, layout.mesh_text, layout.rules_text, precision="highest")


def chosen() -> list[Case]:
    """The rows of a run: one for each operation, or all."""
    first = {case.op: case for case in reversed(CASES)}
    return list(CASES) if deep() else list(first.values())


def by_layout(dtype: str, seed: int) -> Iterator[tuple[Layout, list[Case]]]:
    """Layouts on eight devices, each with rows that it allows; every row in one, where it can be split."""
    waiting = {}
    for case in chosen():
        alone = Together([case], dtype)
        tensors = needed([*alone.outputs.values(), *alone.updates])
        if not any(t.dtype.name == "float64" for t in tensors):  # not without JAX's own switch
            waiting[case] = [t.shape for t in tensors]
    share = -(-len(waiting) // (LAYOUTS - 2))  # of a layout
    rng = np.random.default_rng(seed)
    for _ in range(LAYOUTS - 1):
        counts = Counter(n for shapes in waiting.values() for n in {d.name for s in shapes for d in s})
        drawn = [draw_layout(rng, [n for n, _ in counts.most_common(12)]) for _ in range(60)]
        full = [x for x in drawn if prod(size for _, size in x.mesh) == DEVICES]
        cases, layout = max(((_allowed(waiting, x), x) for x in full), key=lambda pair: min(len(pair[0]), share))
        cases = cases[:share]
        if not cases:
            continue
        yield _told(layout, {d.name for c in cases for s in waiting.pop(c) for d in s}), cases
    if waiting:  # what no split fits, two times over
        yield Layout((("p", 2),), ()), list(waiting)


def _allowed(waiting: dict[Case, list[Shape]], layout: Layout) -> list[Case]:
    """The rows that a layout allows, and splits."""
    split = {dim for dim, *_ in layout.rules}
    splits = {c: any(d.name in split for s in shapes for d in s) for c, shapes in waiting.items()}
    return [c for c, shapes in waiting.items() if splits[c] and layout.allows(shapes)]


def _told(layout: Layout, dims: set[str]) -> Layout:
    """Without rules for dims that are not there."""
    return Layout(layout.mesh, tuple(rule for rule in layout.rules if rule[0] in dims))


def compared(layout: Layout, cases: list[Case], dtype: str) -> None:
    rows = Together(cases, dtype)
    program = rows.program(layout)
    feeds = {n: rows.feeds[n] for n in program.inputs}
    sim, run = mtf.simulate(program), mtf.on_jax(program)
    wanted, found = sim.step(feeds), run.step(feeds)
    wanted |= {f"new {n}": sim.state[n] for n in program.updates}
    found |= {f"new {n}": run.state[n] for n in program.updates}
    assert found.keys() == wanted.keys()
    far = []
    for name, y in wanted.items():
        x = found[name]
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.abs(a - b).max(initial=0) / (np.abs(b).max(initial=0) or 1)
        narrow = dtype == "bfloat16" or name.split(" ")[0] in rows.narrow
        if not error <= (ROUNDED if narrow else TOLERANCE):
            far.append(f"{name}: {error:.3g}")
    assert not far, f"{layout}: {'; '.join(far)}"


@pytest.mark.parametrize("dtype", ["float32", *(["bfloat16"] if deep() else [])])
def test_rows_equal_the_simulator(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    for layout, cases in by_layout(dtype, 0):
        compared(layout, cases, dtype)


def test_a_run_is_written_at_one_place_as_at_several() -> None:
    compared(Layout((("p", 2),), ()), [case for case in CASES if case.op == "update_slice"][:2], "float32")


@pytest.mark.parametrize(("dtype", "given"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_convolutions_are_of_dtypes_that_gpus_have(dtype: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN returns bfloat16 for bfloat16; what the compiler would otherwise run takes ten times as long."""
    monkeypatch.setattr(step, "platform_of", lambda mesh: "gpu")
    n, height, width, c, d = (mtf.Dimension(*d) for d in (("n", 2), ("h", 6), ("w", 5), ("c", 8), ("d", 4)))
    taps = [mtf.Dimension("a", 3), mtf.Dimension("b", 3)]
    with mtf.Graph():
        x = mtf.input("x", [n, height, width, c], dtype)
        y = mtf.conv2d(x, mtf.input("f", [*taps, c, d], dtype))
        program = mtf.lower({"y": y})
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=v.tensor.shape.sizes).astype(np.float32) for name, v in program.inputs.items()}
    run = mtf.on_jax(program, checked=False)
    (line,) = [line for line in str(run.compiled().lowered().as_text()).splitlines() if "stablehlo.convolution" in line]
    assert line.count(f"x{given}>") == 3
    assert "HIGHEST" not in line
    values, wanted = (np.asarray(on.step(feeds)["y"], np.float32) for on in (run, mtf.simulate(program)))
    assert np.abs(values - wanted).max() <= TOLERANCE * np.abs(wanted).max()
