"""Sabotages of what moves inside instructions and of loops: each is refused by the checker, and shows without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from unittest import mock

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.opdef import OPERATIONS, Block, Halo, Summary
from meshlib.ops.movement import ranking
from meshlib.program import exchanges
from meshlib.program.checker import check_program
from meshlib.program.instructions import Compute, Instruction, Loop
from meshlib.program.records import Program
from meshlib.simulation import exact

D = mtf.Dimension
A, N, B = D("a", 3), D("n", 8), D("b", 4)
Lowered = tuple[Program, dict[str, np.ndarray]]


def feeds(*names: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(3, 8)) + 0.1 for name in names}


def along(build: Callable[[mtf.Tensor], mtf.Tensor], mesh: str = "m:4") -> Lowered:
    """A program that works along the split dim n."""
    with mtf.Graph():
        y = build(mtf.input("x", [A, N], "float64"))
        return mtf.lower({"y": y}, mesh=mesh, layout="n:m"), feeds("x")


def shifted() -> Lowered:
    return along(lambda x: mtf.shift(x, 1, N, wrap=False))


def wrapped() -> Lowered:
    return along(lambda x: mtf.shift(x, 3, N, wrap=True))


def sliced() -> Lowered:
    return along(lambda x: mtf.slice(x, 3, 4, "n"))


def padded() -> Lowered:
    return along(lambda x: mtf.pad(x, [3, 1], "n"))


def concatenated() -> Lowered:
    return along(lambda x: mtf.concat([x, mtf.sin(x), x], "n"), "m:2")


def summed() -> Lowered:
    return along(lambda x: mtf.cumsum(x, N))


def recurrent() -> Lowered:
    return along(lambda x: mtf.cumprod(x, N))


def ranked() -> Lowered:
    return along(lambda x: mtf.top_k(x, N, D("k", 1))[0])  # two of a block of two would be all of it


def ranked_by_row() -> Lowered:
    with mtf.Graph():
        y = mtf.argmax(mtf.input("x", [B, N], "float64"), N)
        return mtf.lower({"y": y}, mesh="m:4", layout="n:m"), {"x": np.random.default_rng(3).normal(size=(4, 8))}


def attended() -> Lowered:
    """Four queries on keys that are split over four cores; they see the keys of two of them."""

    def build(x: mtf.Tensor) -> mtf.Tensor:
        q = mtf.constant(np.random.default_rng(2).normal(size=(4, 3)), [D("i", 4), A], "float64")
        return mtf.attention(q, x, mtf.cos(x), "i", N, A, causal=True)

    return along(build)


def convolved(mesh: str = "m:4", layout: str = "n:m", stride: int = 1) -> Lowered:
    """A convolution of an image whose rows, or rows and columns, are split."""
    with mtf.Graph():
        x = mtf.input("x", [A, N, B, D("c", 2)], "float64")
        w = mtf.input("w", [D("k", 3), D("l", 3), D("c", 2), D("o", 2)], "float64")
        program = mtf.lower({"y": mtf.conv2d(x, w, stride)}, mesh=mesh, layout=layout, precision="highest")
    rng = np.random.default_rng(4)
    return program, {"x": rng.normal(size=(3, 8, 4, 2)), "w": rng.normal(size=(3, 3, 2, 2))}


def with_corners() -> Lowered:
    return convolved("m:2;o:2", "n:m;b:o")


def strided() -> Lowered:
    return convolved("m:2", "n:m", 2)


def filters_of_split_images() -> Lowered:
    """The cotangent of filters: a sum over rows and columns that are split, and need each other's."""
    with mtf.Graph():
        x, dy = (mtf.input(n, [A, N, B, D(c, 2)], "float64") for n, c in (("x", "c"), ("dy", "o")))
        w = mtf.input("w", [D("k", 3), D("l", 3), D("c", 2), D("o", 2)], "float64")
        (dw,) = mtf.gradients([mtf.conv2d(x, w)], [w], [dy])
        program = mtf.lower({"dw": dw}, mesh="m:2;p:2", layout="n:m;b:p", precision="highest")
    rng = np.random.default_rng(5)
    return program, {"x": rng.normal(size=(3, 8, 4, 2)), "dy": rng.normal(size=(3, 8, 4, 2))}


def pooled() -> Lowered:
    return along(lambda x: mtf.max_pool(x, {"n": 3}, 1, "SAME"))


def resized() -> Lowered:
    return along(lambda x: mtf.resize(x, {"n": 12}))


def looped() -> Lowered:
    """Two carries, slices of a stacked dim, a tensor from outside, a stacked result; a gather inside."""
    with mtf.Graph():
        x = mtf.input("x", [A, N], "float64")
        w = mtf.input("w", [N, D("n_out", 8)], "float64")

        def body(c: tuple, s: tuple) -> tuple:
            y = mtf.rename_dimension(mtf.einsum([mtf.sin(c[0]), w], [A, D("n_out", 8)]), "n_out", "n")
            return (y * s[0], c[1] + mtf.cos(y)), (mtf.reduce_sum(y * s[0]),)

        steps = mtf.input("steps", [D("time", 3)], "float64")
        (first, second), (sums,) = mtf.scan(body, [x, mtf.sin(x)], [steps], steps.shape[0])
        program = mtf.lower({"y": first + second, "sums": sums}, mesh="m:4", layout="n_out:m")
    rng = np.random.default_rng(1)
    return program, {**feeds("x"), "w": rng.normal(size=(8, 8)) * 0.3, "steps": np.array([0.5, 1.5, 0.9])}


IMAGES = (convolved, with_corners, strided, filters_of_split_images, pooled, resized)
MOVING = (shifted, wrapped, sliced, padded, concatenated, summed, recurrent, ranked, ranked_by_row, attended, *IMAGES)


def run(program: Program, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return mtf.simulate(program, executor="exact", check_nan=False).step(given)


def differs(program: Program, given: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Whether the exact executor notices, by an error or by other numbers."""
    # Memory that nobody writes must not hold what an earlier, right run left there.
    empty = mock.patch.object(Block, "result", lambda b: np.full(b.out.shape.sizes, np.nan, b.out.dtype.storage))
    try:
        with empty:
            found = run(program, given)
    except (mtf.ProgramError, ValueError, IndexError, KeyError):
        return True
    return any(not np.allclose(found[k], right[k], rtol=1e-9) for k in right)


def changed(program: Program, at: Callable[[Instruction], bool], **fields: object) -> Program:
    """The program with fields of the first instruction that `at` picks replaced."""
    instructions = list(program.instructions)
    n = next(n for n, i in enumerate(instructions) if at(i))
    instructions[n] = replace(instructions[n], **fields)
    return program.with_instructions(instructions)


def moves(i: Instruction) -> bool:
    return isinstance(i, Compute) and bool(i.exchanges)


def loops(i: Instruction) -> bool:
    return isinstance(i, Loop)


@pytest.mark.parametrize("build", MOVING, ids=lambda b: b.__name__)
def test_a_lost_exchange(build: Callable[[], Lowered]) -> None:
    program, given = build()
    right = run(program, given)
    broken = changed(program, moves, exchanges=(), reasons=())
    with pytest.raises(mtf.ProgramError, match="sends"):
        check_program(broken, "sabotage")
    assert differs(broken, given, right)


@pytest.mark.parametrize("build", MOVING, ids=lambda b: b.__name__)
def test_wrong_bytes_of_an_exchange(build: Callable[[], Lowered]) -> None:
    program, _ = build()
    moving = next(i for i in program.instructions if moves(i))
    for field in ("payload_bytes", "by_block"):
        less = tuple(replace(e, **{field: _less(getattr(e, field))}) for e in moving.exchanges)
        with pytest.raises(mtf.ProgramError, match="sends"):
            check_program(changed(program, moves, exchanges=less), "sabotage")


def _less(sent: int | tuple[int, ...]) -> int | tuple[int, ...]:
    return sent - 8 if isinstance(sent, int) else (sent[0] - 8, *sent[1:])


@pytest.mark.parametrize("build", [shifted, wrapped, sliced, padded, concatenated, *IMAGES], ids=lambda b: b.__name__)
def test_runs_that_begin_one_too_early(build: Callable[[], Lowered], monkeypatch: pytest.MonkeyPatch) -> None:
    program, given = build()
    right = run(program, given)
    honest = exchanges.runs
    monkeypatch.setattr(exact, "runs", lambda begin, end, *rest: honest(begin - 1, end - 1, *rest))
    assert differs(program, given, right)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_corner(lost: int) -> None:
    """Rows or columns alone: whoever gets the others has corners, too."""
    program, given = with_corners()
    right = run(program, given)
    (i,) = (i for i in program.instructions if moves(i))
    assert [e.dim for e in i.exchanges] == ["n", "b"]
    assert i.exchanges[1].payload_bytes == 8 * 3 * 5 * 2  # 4 rows of its own, one of the neighbour's
    kept = slice(1 - lost, 2 - lost)
    broken = changed(program, moves, exchanges=i.exchanges[kept], reasons=i.reasons[kept])
    with pytest.raises(mtf.ProgramError, match="sends"):
        check_program(broken, "sabotage")
    assert differs(broken, given, right)


def test_columns_that_come_without_the_neighbours_rows() -> None:
    """Every dim moved for itself, as if no window had corners."""
    program, given = with_corners()
    right = run(program, given)
    honest = exact._with_halos

    def apart(instruction: Compute, moving: tuple, axes: dict, operand: int, blocks: list) -> tuple[list, list]:
        whole, starts = honest(instruction, moving, axes, operand, blocks)
        if operand:
            return whole, starts
        rows = honest(instruction, moving[:1], axes, operand, blocks)[0]
        return [np.where(np.isin(w, r), w, 0) for w, r in zip(whole, rows, strict=True)], starts

    with mock.patch.object(exact, "_with_halos", apart):
        assert differs(program, given, right)


@pytest.mark.parametrize("name", ["shift", "slice", "pad", "convolution", "reduce_window", "interpolate"])
def test_needs_that_forget_the_neighbour(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that asks for the own block only lowers to a program without exchanges, which the checker accepts then."""
    build: Callable[[], Lowered] = {
        "shift": shifted,
        "slice": sliced,
        "pad": padded,
        "convolution": convolved,
        "reduce_window": pooled,
        "interpolate": resized,
    }[name]
    right = run(*build())
    record = OPERATIONS[name]
    assert isinstance(record.lower, Halo)
    object.__setattr__(record, "lower", Halo(lambda op, f, i, start, stop: (start, stop), record.lower.wrap))
    try:
        program, given = build()
        assert differs(program, given, right)
    finally:
        monkeypatch.undo()
        object.__setattr__(record, "lower", _HALOS[name])


_HALOS = {name: record.lower for name, record in OPERATIONS.items() if isinstance(record.lower, Halo)}


_SUMMARIES = (("cumsum", summed), ("linear_recurrence", recurrent), ("top_k", ranked), ("argmax", ranked_by_row))


@pytest.mark.parametrize(("name", "build"), _SUMMARIES)
def test_summaries_in_the_wrong_order(name: str, build: Callable[[], Lowered]) -> None:
    program, given = build()
    right = run(program, given)
    record = OPERATIONS[name]
    honest = record.lower
    assert isinstance(honest, Summary)

    def rotated(block: object, gathered: tuple, index: int, *arrays: np.ndarray) -> object:
        return honest.finish(block, tuple(np.roll(g, 1, axis=0)[:-1] for g in gathered), index, *arrays)

    object.__setattr__(record, "lower", replace(honest, finish=rotated))
    try:
        assert differs(program, given, right)
    finally:
        object.__setattr__(record, "lower", honest)


def test_summaries_to_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    program, given = ranked_by_row()
    right = run(program, given)
    honest = exact.summarised
    assert any(
        exact._shared_axes(i, f) for i in program.instructions if moves(i) for f in i.operation.opdef.roles(i.operation)
    )
    monkeypatch.setattr(exact, "summarised", lambda *args: honest(*args)[::-1])  # of their rows, each the others'
    assert differs(program, given, right)


def test_candidates_that_forget_where_their_block_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    program, given = ranked_by_row()
    right = run(program, given)
    monkeypatch.setattr(ranking, "_ranking_factors", lambda op: ())
    assert differs(program, given, right)


def test_candidates_gathered_though_the_program_shares_them_out() -> None:
    program, _ = ranked_by_row()
    moving = next(i for i in program.instructions if moves(i))
    gathers = tuple(replace(e, kind="all_gather", to_dim=None) for e in moving.exchanges)
    with pytest.raises(mtf.ProgramError, match="sends"):
        check_program(changed(program, moves, exchanges=gathers), "sabotage")


def test_a_body_without_its_collective() -> None:
    program, given = looped()
    right = run(program, given)
    loop = next(i for i in program.instructions if loops(i))
    gather = next(i for i in loop.body.instructions if i.is_collective)
    (before,), (after,) = gather.inputs, gather.outputs
    instructions = [
        replace(i, inputs=tuple(before if x is after else x for x in i.inputs))
        for i in loop.body.instructions
        if i is not gather
    ]
    broken = changed(program, loops, body=loop.body.with_instructions(instructions))
    with pytest.raises(mtf.ProgramError):
        check_program(broken, "sabotage")
    assert differs(broken, given, right)


def test_carries_exchanged() -> None:
    program, given = looped()
    right = run(program, given)
    loop = next(i for i in program.instructions if loops(i))
    (a, b), (c, d) = loop.carries
    assert differs(changed(program, loops, carries=((a, d), (c, b))), given, right)
    with pytest.raises(mtf.ProgramError):
        check_program(changed(program, loops, carries=((a, b),)), "sabotage")


def test_a_trip_too_few_and_trips_backwards() -> None:
    program, given = looped()
    right = run(program, given)
    assert differs(changed(program, loops, trips=2), given, right)
    with pytest.raises(mtf.ProgramError, match="2 trips"):
        check_program(changed(program, loops, trips=2), "sabotage")
    loop = next(i for i in program.instructions if loops(i))
    backwards = replace(loop.operation, attrs={"loop": replace(loop.record, reverse=True)})
    assert differs(changed(program, loops, operation=backwards), given, right)


def test_slices_of_the_wrong_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    program, given = looped()
    right = run(program, given)
    honest = np.take
    monkeypatch.setattr(exact.np, "take", lambda x, n, axis: honest(x, (n + 1) % x.shape[axis], axis=axis))
    assert differs(program, given, right)


def test_an_operation_that_depends_on_the_device() -> None:
    """Of devices with equal operands two compute; where they differ, all do, and the outputs show it."""
    with mtf.Graph():
        program = mtf.lower({"y": mtf.sin(mtf.input("x", [A, N], "float64"))}, mesh="m:8")
    honest, numbers = exact.compute, count()

    def biased(*arguments: object) -> tuple[np.ndarray, ...]:
        number = next(numbers)
        return tuple(y + number for y in honest(*arguments))  # type: ignore[arg-type]

    with mock.patch.object(exact, "compute", biased), pytest.raises(mtf.ProgramError, match="hold the same block"):
        run(program, feeds("x"))
    assert next(numbers) == 8
    with mock.patch.object(exact, "compute", side_effect=honest) as computed:
        run(program, feeds("x"))
    assert computed.call_count == 2
