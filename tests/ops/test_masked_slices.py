"""A slice that a split can't divide takes of each block what is there: bytes by hand, values, what a lost mask does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import meshlib as mtf
from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.core.opdef import OPERATIONS
from meshlib.ops.movement import runs
from meshlib.program.checker import check_program
from meshlib.program.instructions import Compute
from meshlib.program.records import Program
from tests.oracle import run

B, L, D, TWO = (Dimension(name, size) for name, size in (("batch", 8), ("length", 16), ("d", 4), ("two", 2)))
F32 = 4
X = np.random.default_rng(0).normal(size=(8, 16, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
Build = Callable[[Tensor], dict[str, Tensor]]


def lowered(build: Build, mesh: str, layout: str, dtype: str = "float32") -> Program:
    """What `build` makes of x, of whose dim the parts have a name that no rule has."""
    with mtf.Graph():
        made = build(mtf.rename_dimension(mtf.input("x", [B, L, D], dtype), "length", "position"))
    return mtf.lower(made, mesh=mesh, layout=layout, precision="highest")


def moved(program: Program) -> list[tuple[str, int]]:
    return [(c.kind, c.payload_bytes) for c in program.collectives]


def both(program: Program, feeds: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    given = {"w": W, **feeds}
    return [run(program, given, executor)[0] for executor in ("exact", "fast")]


def part(begin: int, size: int) -> Build:
    return lambda x: {"y": mtf.slice(x, begin, size, "position")}


@pytest.mark.parametrize(("begin", "size"), [(15, 1), (0, 1), (3, 3), (6, 5)])
@pytest.mark.parametrize("layout", ["s:4 length:s", "r:2;s:4 length:r+s", "r:2;s:2 batch:r;length:s"])
def test_the_part_is_reduced_in_its_own_size(begin: int, size: int, layout: str) -> None:
    """2 (n - 1)/n of the part, where a gather of x sends (n - 1)/n of all 16; so here a part of up to 7."""
    program = lowered(part(begin, size), *layout.split())
    rows = 4 if "batch" in layout else 8
    assert moved(program) == [("all_reduce", rows * size * 4 * F32)]
    for found in both(program, {"x": X}):
        np.testing.assert_array_equal(found["y"], X[:, begin : begin + size])


def test_a_part_that_is_nearly_all_is_gathered() -> None:
    program = lowered(part(0, 15), "s:4", "length:s")
    assert moved(program) == [("all_gather", 8 * 4 * 4 * F32)]


def test_a_product_takes_the_part_pending() -> None:
    """What is reduced is [batch, two], half of the last token."""

    def build(x: Tensor) -> dict[str, Tensor]:
        last = mtf.reshape(mtf.slice(x, 15, 1, "position"), [B, D])
        return {"y": mtf.einsum([last, mtf.input("w", [D, TWO])], [B, TWO])}

    program = lowered(build, "s:4", "length:s")
    assert moved(program) == [("all_reduce", 8 * 2 * F32)]
    for found in both(program, {"x": X}):
        np.testing.assert_allclose(found["y"], X[:, 15] @ W, rtol=1e-5)


def test_what_wants_the_part_split_scatters_it() -> None:
    """The last tokens, wanted split by rows: half of an all_reduce."""

    def build(x: Tensor) -> dict[str, Tensor]:
        return {"y": mtf.rename_dimension(mtf.slice(x, 15, 1, "position"), "batch", "rows")}

    program = lowered(build, "s:4", "length:s;rows:s")
    assert moved(program) == [("reduce_scatter", 8 * 4 * F32)]
    for found in both(program, {"x": X}):
        np.testing.assert_array_equal(found["y"], X[:, 15:])


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16", "float32"])
def test_each_type_comes_through_exactly(dtype: str) -> None:
    """The largest ints, flags through a maximum, what has no neighbour in bfloat16, infinities."""
    rng = np.random.default_rng(2)
    values = {
        "int32": rng.choice([-(2**31), 2**31 - 1, 2**24 + 1, -1], (8, 16, 4)).astype(np.int32),
        "bool": rng.random((8, 16, 4)) < 0.5,
        "bfloat16": rng.choice(np.float32([1.0078125, -3e38, 1e-38]), (8, 16, 4)),
        "float32": rng.choice(np.float32([np.inf, -np.inf, 1 + 2**-23]), (8, 16, 4)),
    }
    program, plain = (lowered(part(14, 1), mesh, layout, dtype) for mesh, layout in (("s:4", "length:s"), ("s:1", "")))
    assert [c.kind for c in program.collectives] == ["all_reduce"]
    sent = {"x": values[dtype]}
    wanted = run(plain, sent)[0]["y"]
    for found in both(program, sent):
        np.testing.assert_array_equal(np.asarray(found["y"], np.float64), np.asarray(wanted, np.float64))


def test_the_gradient_sends_nothing_more() -> None:
    def build(x: Tensor) -> dict[str, Tensor]:
        y = mtf.slice(x, 15, 1, "position")
        return {"dx": mtf.gradients([mtf.reduce_sum(y * y)], [x.operation.inputs[0]])[0]}

    program = lowered(build, "s:4", "length:s")
    assert moved(program) == [("all_reduce", 8 * 4 * F32)]
    wanted = np.zeros_like(X)
    wanted[:, 15] = 2 * X[:, 15]
    for found in both(program, {"x": X}):
        np.testing.assert_allclose(found["dx"], wanted, rtol=1e-6)


def test_why() -> None:
    (c,) = lowered(part(15, 1), "s:4", "length:s").collectives
    assert c.reason.startswith("slice 'slice' takes elements along 'position', split over s")
    assert c.dim == "position"


# ---------------------------------------------------------------- sabotage


def test_a_lost_mask_shows() -> None:
    """Every device gives the last element of its own block: a sum of four of them."""
    program = lowered(part(15, 1), "s:4", "length:s")
    record = OPERATIONS["slice"]
    honest = record.local
    object.__setattr__(record, "local", lambda block, x: x[:, -1:])
    try:
        found = run(program, {"x": X}, "exact")[0]
    finally:
        object.__setattr__(record, "local", honest)
    assert not np.allclose(found["y"], X[:, 15:])


def test_a_mask_at_the_wrong_place_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered(part(3, 3), "s:4", "length:s")
    honest = runs._place
    monkeypatch.setattr(runs, "_place", lambda out, x, axis, position: honest(out, x, axis, position + 1))
    assert not np.allclose(run(program, {"x": X}, "exact")[0]["y"], X[:, 3:6])


def test_one_dim_in_two_ways_at_once_is_refused() -> None:
    """A checker's error: along one axis by runs, along the other by a mask."""
    with mtf.Graph():
        y = mtf.slice(mtf.input("x", [B, L, D]), 4, 8, "length")
    program = mtf.lower({"y": y}, mesh="r:2;s:2", layout="length:r+s")
    n, i = next((n, i) for n, i in enumerate(program.instructions) if i.opcode == "slice")
    assert isinstance(i, Compute)
    assert i.assignment == (("r", "length"), ("s", "length"))
    instructions = list(program.instructions)
    instructions[n] = Compute(
        i.operation, i.inputs, i.outputs, i.region, (("r", "length"), ("s", "length'")), i.exchanges, i.reasons
    )
    with pytest.raises(mtf.ProgramError, match="in two ways at once"):
        check_program(program.with_instructions(instructions), "sabotage")
