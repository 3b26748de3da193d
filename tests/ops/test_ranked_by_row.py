"""Candidates of a split dim go to the devices that rank their rows: bytes by hand, values of both executors."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import meshlib as mtf
from layouts import Dimension
from meshlib.core.graph import Tensor
from meshlib.program.instructions import Compute
from meshlib.program.records import Program
from tests.oracle import run

B, C, K = Dimension("batch", 64), Dimension("classes", 32), Dimension("k", 3)
F32 = I32 = 4
LOGITS = np.random.default_rng(0).integers(-9, 9, (64, 32)).astype(np.float32)  # with ties
LABELS = np.random.default_rng(1).integers(0, 32, 64).astype(np.int32)


def lowered(build: object, mesh: str, layout: str) -> Program:
    with mtf.Graph():
        made = build(mtf.input("x", [B, C]))  # type: ignore[operator]
    return mtf.lower(made if isinstance(made, dict) else {"y": made}, mesh=mesh, layout=layout)


def moved(program: Program) -> list[tuple[str, int]]:
    return [(c.kind, c.payload_bytes) for c in program.collectives]


def agrees(program: Program, wanted: dict[str, np.ndarray]) -> None:
    for executor in ("exact", "fast"):
        (found,) = run(program, {"x": LOGITS, "labels": LABELS}, executor)
        for name, y in wanted.items():
            np.testing.assert_array_equal(found[name], y)


def drawn(x: Tensor) -> Tensor:
    return mtf.sample_with_temperature(x, C, 0.5)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("build", [lambda x: mtf.argmax(x, C), drawn], ids=["argmax", "sampling"])
def test_argmax(build: object, n: int) -> None:
    """Of its best of each row, value and index, a device keeps 1/n; the rest, and the winners' indices, go once."""
    program = lowered(build, f"m:{n}", "classes:m")
    candidates, winners = 64 * (F32 + I32), 64 * I32
    assert moved(program) == [("all_to_all", candidates), ("all_gather", winners // n)]
    assert program.sent_bytes == (n - 1) * (candidates + winners) // n
    (plain,) = run(lowered(build, "m:1", ""), {"x": LOGITS})
    agrees(program, plain)


@pytest.mark.parametrize("n", [4, 8])
def test_top_k(n: int) -> None:
    """2 (n - 1)/n of all candidates, where all to all were n - 1."""

    def build(x: Tensor) -> dict[str, Tensor]:
        return dict(zip("vi", mtf.top_k(x, C, K), strict=True))

    program = lowered(build, f"m:{n}", "classes:m")
    assert moved(program) == [("all_to_all", 64 * 3 * 8), *[("all_gather", 64 * 3 * 4 // n)] * 2]
    assert program.sent_bytes == 2 * (n - 1) * 64 * 3 * 8 // n
    order = np.argsort(-LOGITS, axis=1, kind="stable")[:, :3]
    agrees(program, {"v": np.take_along_axis(LOGITS, order, 1), "i": order})


def test_top_k_of_two_blocks() -> None:
    """No fewer bytes by rows than all to all, so one collective; of the values alone by rows sends 3/4."""
    program = lowered(lambda x: dict(zip("vi", mtf.top_k(x, C, K), strict=True)), "m:2", "classes:m")
    assert moved(program) == [("all_gather", 64 * 3 * 8)]
    values = lowered(lambda x: {"v": mtf.top_k(x, C, K)[0]}, "m:2", "classes:m")
    assert moved(values) == [("all_to_all", 64 * 3 * 8), ("all_gather", 64 * 3 * 4 // 2)]


def test_a_result_that_may_stay_split_is_not_gathered() -> None:
    program = lowered(lambda x: mtf.argmax(x, C), "m:4", "classes:m;batch:m?")
    assert moved(program) == [("all_to_all", 64 * 8)]
    agrees(program, {"y": LOGITS.argmax(1)})


def test_rows_that_are_split_already() -> None:
    """Of 32 rows of its own each device ranks 8; the batch then is split over both axes, the rows' first."""
    program = lowered(lambda x: mtf.argmax(x, C), "r:2;c:4", "batch:r;classes:c")
    assert moved(program) == [("all_to_all", 32 * 8), ("all_gather", 8 * 4)]
    (ranks,) = (i for i in program.instructions if isinstance(i, Compute) and i.exchanges)
    assert ranks.outputs[0].sharding.of("batch") == ("r", "c")
    agrees(program, {"y": LOGITS.argmax(1)})


def test_rows_that_do_not_divide_are_told_to_all() -> None:
    """Three rows can't be shared out among four devices: each hears of all candidates."""
    with mtf.Graph():
        rows = Dimension("rows", 3)
        y = mtf.argmax(mtf.input("x", [rows, C]), C)
    program = mtf.lower({"y": y}, mesh="m:4", layout="classes:m")
    assert moved(program) == [("all_gather", 3 * 8)]
    (found,) = run(program, {"x": LOGITS[:3]})
    np.testing.assert_array_equal(found["y"], LOGITS[:3].argmax(1))


@pytest.mark.parametrize(("mesh", "layout"), [("m:8", "classes:m"), ("r:2;c:4", "batch:r;classes:c")])
def test_accuracy_sends_no_more_than_argmax(mesh: str, layout: str) -> None:
    def accuracy(x: Tensor) -> Tensor:
        right = mtf.equal(mtf.argmax(x, C), mtf.input("labels", [B], "int32"))
        return mtf.reduce_mean(mtf.cast(right, "float32"))

    program, alone = lowered(accuracy, mesh, layout), lowered(lambda x: mtf.argmax(x, C), mesh, layout)
    total = [c for c in program.collectives if c.kind == "all_reduce"]
    assert program.sent_bytes - sum(c.sent_bytes for c in total) <= alone.sent_bytes
    assert all(c.payload_bytes == F32 for c in total)
    agrees(program, {"y": np.float32((LOGITS.argmax(1) == LABELS).mean())})


def test_why_and_how_long() -> None:
    program = lowered(lambda x: mtf.argmax(x, C, name="best"), "m:8", "classes:m")
    first = program.collectives[0]
    assert first.reason == (
        "argmax 'best' runs along 'classes', split over m: every core needs a summary of all blocks for its share of "
        "'batch'"
    )
    assert "rule classes:m" in first.avoid
    assert "split classes to batch@m, sends 448 B: argmax 'best' runs" in str(program)
    estimate = mtf.estimate(program, "v3-8")
    (row,) = (r for r in estimate.rows if r.opcode == "all_to_all")
    assert (row.payload_bytes, row.sent_bytes) == (512, 448)
    assert 0 < row.seconds < estimate.step_seconds


@pytest.mark.parametrize("layout", ["", "classes:m", "batch:m"])
def test_no_nan_is_ranked_away(layout: str) -> None:
    """NaN, of either sign, comes before all numbers, infinity too, and stands at its own place."""
    x = LOGITS.copy()
    x[0, 3], x[1, 30], x[2, [1, 20]], x[2, 5] = np.nan, -np.nan, np.nan, np.inf

    def build(t: Tensor) -> dict[str, Tensor]:
        return dict(zip("vi", mtf.top_k(t, C, K), strict=True)) | {"best": mtf.argmax(t, C)}

    program = lowered(build, "m:2", layout)
    runs = [mtf.simulate(program, executor=e, check_nan=False) for e in ("fast", "exact")]
    if importlib.util.find_spec("jax") is not None and layout == "":
        runs.append(mtf.on_jax(lowered(build, "m:1", layout), checked=False))
    for sim in runs:
        found = sim.step(x=x)
        assert found["i"][:3, 0].tolist() == found["best"][:3].tolist() == [3, 30, 1]
        assert found["i"][2].tolist() == [1, 20, 5]
        assert np.isnan(found["v"][:3, 0]).all()
        np.testing.assert_array_equal(found["v"][3:], -np.sort(-x[3:], axis=1)[:, :3])
    with pytest.raises(mtf.NotFiniteError, match=r"feed 'x' holds a NaN, first at index \[0, 3\]"):
        mtf.simulate(program).step(x=x)
