"""Shifts that share what they need of their neighbours: bytes by hand, numbers, sabotage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import meshlib as mtf
from meshlib.lowering import one_layout
from meshlib.lowering.halos import share_halos
from meshlib.lowering.problem import Chosen, Problem
from meshlib.program.checker import check_program
from meshlib.program.exchanges import Margin, needed_margins
from meshlib.program.instructions import Commit, Compute, Instruction, Value, Widen
from meshlib.program.records import Program
from tests.effort import draws
from tests.oracle import Array, assert_close, draw_layout, run

D = mtf.Dimension
B, N, C, H, W = D("b", 4), D("n", 64), D("c", 16), D("h", 32), D("w", 32)
ROW = 4 * 16 * 4  # bytes of an index of n: b x c in float32
TAPS = 4


def moved(program: Program) -> list[tuple[str, str, float]]:
    """Dim, tensor and bytes of what neighbours send each other."""
    return [
        (str(c.dim), c.tensor, c.sent_bytes * c.count) for c in program.collectives if c.kind == "collective_permute"
    ]


def widenings(program: Program) -> list[Widen]:
    return [i for i in program.instructions if isinstance(i, Widen)]


def taps(x: mtf.Tensor, way: str, k: int) -> mtf.Tensor:
    """x moved by k: x[i - k], zeros before."""
    if way == "shift":
        return mtf.shift(x, k, N, wrap=False)
    if way == "pad":
        return mtf.slice(mtf.pad(x, [TAPS, 0], "n"), TAPS - k, N.size, "n")
    return mtf.concat([mtf.zeros([B, D("n", k), C]), mtf.slice(x, 0, N.size - k, "n")], "n") if k else x


def convolution(way: str = "shift", mesh: str = "p:4") -> Program:
    """y[i] = sum of w[k] x[i - k], and its gradients."""
    with mtf.Graph():
        x = mtf.input("x", [B, N, C])
        ws = [mtf.input(f"w{k}", [C]) for k in range(TAPS)]
        y = mtf.add_n([taps(x, way, k) * w for k, w in enumerate(ws)])
        dx, *dws = mtf.gradients([y], [x, *ws], [mtf.input("dy", y.shape)])
        outputs = {"y": y, "dx": dx, **{f"d{k}": dw for k, dw in enumerate(dws)}}
    return mtf.lower(outputs, mesh=mesh, layout="n:p", precision="highest")


def wide(found: dict[str, Array]) -> dict[str, Array]:
    return {name: x.astype(np.float64) for name, x in found.items()}


@pytest.mark.parametrize("way", ["shift", "pad", "concat"])
def test_the_taps_of_a_causal_convolution_share_one_halo(way: str) -> None:
    """Three rows before each block, and for the gradient three rows of dy after it; not 1 + 2 + 3 of each."""
    program = convolution(way)
    assert moved(program) == [("n", "x", 3 * ROW), ("n", "dy", 3 * ROW)]
    rng = np.random.default_rng(0)
    feeds = {v.tensor.name: rng.normal(size=v.tensor.shape.sizes) for v in program.inputs.values()}
    x, dy, w = feeds["x"], feeds["dy"], [feeds[f"w{k}"] for k in range(TAPS)]
    wanted = {n: np.zeros(x.shape) for n in ("y", "dx")}
    for k in range(TAPS):
        inner, later = np.s_[:, : N.size - k], np.s_[:, k:]
        wanted["y"][later] += x[inner] * w[k]
        wanted["dx"][inner] += dy[later] * w[k]
        wanted[f"d{k}"] = (x[inner] * dy[later]).sum((0, 1))
    for executor in ("exact", "fast"):
        assert_close(wide(run(program, feeds, executor)[0]), wanted, 1e-5, executor)


def test_a_padded_sequence_may_be_of_a_length_that_a_split_does_not_divide() -> None:
    """Pads are not there any more: nothing has 67 rows."""
    with mtf.Graph():
        x = mtf.input("x", [B, N, C])
        y = mtf.slice(mtf.pad(x, [3, 0], "n"), 1, N.size, "n")
        assert y.operation.opdef.name == "shift"
        same = mtf.pad(x, [3, 0], "n")
        assert mtf.slice(same, 3, N.size, "n") is x
        assert mtf.slice(same, 0, N.size - 1, "n").operation.opdef.name == "slice"
        ones = mtf.pad(x, [3, 0], "n", 1.0)
        assert mtf.slice(ones, 1, N.size, "n").operation.opdef.name == "slice"
    assert moved(mtf.lower([y], mesh="p:4", layout="n:p")) == [("n", "x", 2 * ROW)]


def test_what_is_no_shift_stays_a_concat() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B, N, C])
        zeros, ones = (mtf.constant(v, [B, D("n", 4), C]) for v in (0.0, 1.0))
        first, last, inner = (mtf.slice(x, begin, 60, "n") for begin in (0, 4, 2))
        kinds = {
            name: mtf.concat(parts, "n").operation.opdef.name
            for name, parts in {
                "to the right": [zeros, first],
                "to the left": [last, zeros],
                "another part": [zeros, last],
                "the middle": [zeros, inner],
                "ones": [ones, first],
                "fewer": [zeros, mtf.slice(x, 0, 50, "n")],
                "three": [zeros, first, zeros],
            }.items()
        }
    assert [name for name, kind in kinds.items() if kind == "shift"] == ["to the right", "to the left"]


def neighbourhood(x: mtf.Tensor, steps: Sequence[tuple[int, int]], wrap: bool) -> mtf.Tensor:
    """A sum over neighbours, all with different weights."""
    return mtf.add_n(
        [mtf.shift(mtf.shift(x, i, H, wrap), j, W, wrap) * (0.5 + n) for n, (i, j) in enumerate(steps)], name="y"
    )


SQUARE = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
CROSS = [(i, j) for i, j in SQUARE if 0 in (i, j)]
SIDE = 8 * 16 * 4  # bytes of a side of a block of 8 x 8, 16 numbers each


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(
    ("steps", "mesh", "rules", "wanted"),
    [
        (SQUARE, "p:4;q:4", "h:p;w:q", 2 * SIDE + 2 * (SIDE + 2 * 16 * 4)),  # with the corners
        (CROSS, "p:4;q:4", "h:p;w:q", 4 * SIDE),
        (SQUARE, "p:4", "h:p", 2 * 4 * SIDE),
    ],
)
def test_a_neighbourhood_sends_each_side_once(
    steps: Sequence[tuple[int, int]], mesh: str, rules: str, wanted: int, wrap: bool
) -> None:
    with mtf.Graph():
        x = mtf.input("x", [H, W, C])
        program = mtf.lower([neighbourhood(x, steps, wrap)], mesh=mesh, layout=rules)
    assert sum(sent for _, _, sent in moved(program)) == wanted
    feeds = np.random.default_rng(0).normal(size=(32, 32, 16))
    filled = np.pad(feeds, ((1, 1), (1, 1), (0, 0)), "wrap" if wrap else "constant")
    y = sum((0.5 + n) * filled[1 - i : 33 - i, 1 - j : 33 - j] for n, (i, j) in enumerate(steps))
    for executor in ("exact", "fast"):
        assert_close(wide(run(program, {"x": feeds}, executor)[0]), {"y": y}, 1e-5, executor)


def test_in_a_loop_each_trip_widens_once() -> None:
    """Steps of a cellular automaton, as in Conway's game, on a mesh of two axes."""
    with mtf.Graph():
        x = mtf.input("x", [H, W], "float64")
        step: Callable = lambda c, s: ((mtf.sin(neighbourhood(c[0], SQUARE, True)),), ())  # noqa: E731
        ((y,), _) = mtf.scan(step, [x], [], D("trips", 5))
    program = mtf.lower({"y": y}, mesh="p:2;q:4", layout="h:p;w:q", precision="highest")
    feeds = np.random.default_rng(0).normal(size=(32, 32))
    wanted = feeds
    for _ in range(5):
        rolled = [(0.5 + n) * np.roll(wanted, step, (0, 1)) for n, step in enumerate(SQUARE)]
        wanted = np.sin(sum(rolled))
    assert sum(sent for *_, sent in moved(program)) == 5 * (2 * 8 + 2 * 18) * 8
    assert_close(run(program, {"x": feeds})[0], {"y": wanted}, 1e-9, "exact")


def test_one_shift_alone_and_two_that_share_nothing_stay_as_they_are() -> None:
    for offsets in ((1,), (1, -1)):
        with mtf.Graph():
            x = mtf.input("x", [B, N, C])
            y = mtf.add_n([mtf.shift(x, k, N, wrap=False) for k in offsets])
        program = mtf.lower([y], mesh="p:4", layout="n:p")
        assert not widenings(program)
        assert program.sent_bytes == len(offsets) * ROW


def test_a_value_and_a_product_of_it_with_itself_share_a_halo() -> None:
    """Flux and field of a conservation law: one index to each side, forward and back, in whatever order of dims."""
    with mtf.Graph():
        x = mtf.input("x", [B, N, C])
        flux = mtf.transpose(x * (x * 0.5), [N, B, C])
        moved_x, moved_flux = ([mtf.shift(t, k, N, wrap=True) for k in (1, -1)] for t in (x, flux))
        y = 0.5 * mtf.add_n(moved_x) + (moved_flux[0] - moved_flux[1])
        (dx,) = mtf.gradients([y], [x], [mtf.input("dy", y.shape)])
    rng = np.random.default_rng(0)
    feeds = {"x": rng.uniform(-1, 1, (4, 64, 16)), "dy": rng.uniform(-1, 1, y.shape.sizes)}
    for outputs in ({"y": y}, {"dx": dx}):
        program = mtf.lower(outputs, mesh="p:4", layout="n:p")
        own = {name: feeds[name] for name in program.inputs}
        assert program.sent_bytes == 2 * ROW, moved(program)
        assert_close(run(program, own)[0], run(mtf.lower(outputs), own)[0], 1e-6, "exact")


def test_what_is_smallest_is_widened() -> None:
    """Flags are a quarter of what they are made of: they are widened, not that."""
    with mtf.Graph():
        x = mtf.input("x", [B, N, C], "float32")
        flags = mtf.greater(x, 0.0)
        y = mtf.add_n([mtf.cast(mtf.shift(flags, k, N, wrap=False), "float32") for k in (1, 2)])
    program = mtf.lower([y], mesh="p:4", layout="n:p")
    assert moved(program) == [("n", flags.name, 2 * ROW / 4)]


def test_random_programs() -> None:
    """Shifts of shifts, element-wise work, sums and running sums between them; never more bytes than without."""
    rng = np.random.default_rng(1)
    saved = corners = 0
    for _ in range(draws(10, 600)):
        outputs, feeds = drawn(rng)
        (wanted,) = run(mtf.lower(outputs, precision="highest"), feeds, "fast")
        for _ in range(2):
            chosen = draw_layout(rng, ["h", "w", "h", "w", "a"])
            try:
                shared, apart = (lowered(outputs, chosen, without) for without in (False, True))
            except mtf.LayoutError:
                continue
            assert shared.sent_bytes <= apart.sent_bytes
            assert not widenings(shared) or shared.sent_bytes < apart.sent_bytes
            saved += apart.sent_bytes - shared.sent_bytes
            corners += any(len(i.outputs[0].margins) > 1 for i in widenings(shared))
            for executor in ("exact", "fast"):
                assert_close(run(shared, feeds, executor)[0], wanted, 1e-10, (str(chosen), executor))
    assert saved > 200
    assert corners


def test_programs_that_are_not_written_twice_would_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, is_same, outcomes = np.random.default_rng(2), Chosen.is_same, []

    def noted(self: Chosen, other: Chosen) -> bool:
        outcomes.append(is_same(self, other))
        return outcomes[-1]

    for _ in range(draws(12, 400)):
        outputs, _ = drawn(rng)
        where = draw_layout(rng, ["h", "w", "h", "w", "a"])
        programs = []
        for compared in (noted, lambda self, other: False):
            monkeypatch.setattr(Chosen, "is_same", compared)
            with contextlib.suppress(mtf.LayoutError):
                programs.append(str(lowered(outputs, where, without=False)))
        assert len({*programs}) <= 1
    assert {*outcomes} == {True, False}


def test_halos_that_no_choice_depends_on_are_not_priced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Window attention over a split length runs one way only; the second call needs fewer of the same rows."""
    batch, length, memory, wide = D("batch", 4), D("length", 16), D("memory", 16), D("d_k", 4)
    with mtf.Graph():
        query, *others = (mtf.input(name, [batch, length, wide]) for name in ("query", "key", "value"))
        key, value = (mtf.rename_dimension(x, "length", "memory") for x in others)
        y = [
            mtf.attention(
                q, key, value, length=length, memory_length=memory, key_dim=wide, value_dim=wide, causal=True, window=n
            )
            for q, n in ((query, 3), (mtf.tanh(query), 2))
        ]
    asked, depends_on = [], Problem.depends_on
    sent = set()
    for answer in (depends_on, lambda *_: True):
        monkeypatch.setattr(
            Problem, "depends_on", lambda *args, answer=answer: asked.append(answer(*args)) or asked[-1]
        )
        sent.add(mtf.lower(y, mesh="p:2", layout="length:p").sent_bytes)
    assert asked == [False, True]
    assert len(sent) == 1


def lowered(outputs: dict[str, mtf.Tensor], chosen, without: bool) -> Program:
    passes = one_layout.PASSES
    one_layout.PASSES = tuple(p for p in passes if not (without and p is share_halos))
    try:
        return mtf.lower(outputs, mesh=chosen.mesh_text, layout=chosen.rules_text, precision="highest")
    finally:
        one_layout.PASSES = passes


def drawn(rng: np.random.Generator) -> tuple[dict[str, mtf.Tensor], dict[str, Array]]:
    a, h, w = D("a", 2), D("h", int(rng.choice([8, 12, 24]))), D("w", int(rng.choice([8, 16])))
    feeds = {"x": rng.normal(size=(2, h.size, w.size)), "y": rng.normal(size=(h.size, w.size)), "s": rng.normal(size=2)}
    with mtf.Graph():
        given = [mtf.input("x", [a, h, w], "float64"), mtf.input("y", [h, w], "float64")]
        pool, scale = [*given], mtf.input("s", [a], "float64")
        wrap = bool(rng.random() < 0.3)
        for _ in range(int(rng.integers(3, 12))):
            x = pool[rng.integers(len(pool))]
            kind = rng.choice(10)
            if kind < 5:
                other = wrap if rng.random() < 0.9 else not wrap
                pool.append(mtf.shift(x, int(rng.integers(-3, 4)), (h, w)[rng.integers(2)], other))
            elif kind == 5:
                pool.append(mtf.sin(x) * scale)
            elif kind == 6:
                pool.append(x * pool[rng.integers(len(pool))])
            elif kind == 7:
                pool.append(mtf.cumsum(x, h))
            elif kind == 8:  # corners
                around = [mtf.shift(mtf.shift(x, i, h, wrap), j, w, wrap) for i, j in SQUARE]
                pool.append(mtf.add_n([mtf.sin(y) for y in around]))
            else:
                pool.append(mtf.relu(x) + mtf.reduce_sum(x, reduced_dim=w))
        whole = mtf.Shape([a, h, w])
        terms = [mtf.broadcast(x, whole) if len(x.shape) < 3 else mtf.transpose(x, whole) for x in pool[2:]]
        outputs = {"total": mtf.add_n(terms)}
        if rng.random() < 0.5:
            gradients = mtf.gradients([mtf.reduce_sum(mtf.sin(outputs["total"]))], given)
            outputs |= {f"d{n}": g for n, g in enumerate(gradients) if g is not None}
        if rng.random() < 0.3:
            outputs["last"] = pool[-1]
    return outputs, feeds


# ---------------------------------------------------------------- what else looks at programs


def test_margins_take_memory_and_are_told() -> None:
    program = convolution()
    widened = widenings(program)[0]
    assert widened.outputs[0].local_bytes == (16 + 3) * ROW
    assert widened.outputs[0].local.shape.sizes == (4, 19, 16)
    assert "n 3+0" in str(program)
    text = mtf.explain(program)
    assert "shift 'shift' and 2 more need indices of 'n' of 'x', split over p: 3 before and 0 after each block" in text
    assert program.sent_bytes == 6 * ROW + sum(c.sent_bytes for c in program.collectives if c.kind == "all_reduce")
    assert {r.kind for r in mtf.estimate(program, "v5e-4").rows} >= {"collective", "compute"}


def test_verify_sees_the_blocks_without_margins() -> None:
    with mtf.Graph():
        x = mtf.input("x", [H, W], "float32")
        y = neighbourhood(mtf.sin(x), SQUARE, False)
    assert widenings(mtf.lower({"y": y}, mesh="p:2;q:2", layout="h:p;w:q"))
    assert mtf.verify({"y": y}, layouts=[("p:2;q:2", "h:p;w:q")], executor="exact").ok


# ---------------------------------------------------------------- sabotage


def changed(program: Program, number: int, **fields: object) -> Program:
    instructions = list(program.instructions)
    instructions[number] = replace(instructions[number], **fields)
    return program.with_instructions(instructions)


def renamed(program: Program, old: Value, new: Value) -> Program:
    """The program with one value in place of another wherever that is used."""
    return program.with_instructions(
        [replace(i, inputs=tuple(new if x is old else x for x in i.inputs)) for i in program.instructions]
    )


def first(program: Program, at: Callable[[Instruction], bool]) -> int:
    return next(n for n, i in enumerate(program.instructions) if at(i))


def test_without_its_margin_a_shift_is_refused() -> None:
    program = convolution()
    widened = widenings(program)[0]
    broken = renamed(program, widened.outputs[0], widened.inputs[0])
    with pytest.raises(mtf.ProgramError, match="inside; the assignment"):
        check_program(broken, "sabotage")


def test_a_margin_that_is_too_narrow_is_refused() -> None:
    program = convolution()
    n = first(program, lambda i: isinstance(i, Widen))
    widened = program.instructions[n]
    assert isinstance(widened, Widen)
    (y,), (step,) = widened.outputs, widened.steps
    narrow = Value(y.tensor, y.sharding, (Margin("n", 2, 0, False),))
    sent = (2 * ROW, 2 * ROW, 2 * ROW, 0)
    less = replace(step, payload_bytes=2 * ROW, sent_bytes=2 * ROW)
    broken = renamed(changed(program, n, outputs=(narrow,), steps=(less,), by_block=sent), y, narrow)
    with pytest.raises(mtf.ProgramError, match=r"its block needs margins n 3\+0"):
        check_program(broken, "sabotage")


@pytest.mark.parametrize("field", ["payload_bytes", "sent_bytes"])
def test_wrong_bytes_of_a_margin_are_refused(field: str) -> None:
    program = convolution()
    n = first(program, lambda i: isinstance(i, Widen))
    widened = program.instructions[n]
    assert isinstance(widened, Widen)
    (step,) = widened.steps
    wrong = replace(step, **{field: getattr(step, field) - ROW})
    for broken in (changed(program, n, steps=(wrong,)), changed(program, n, by_block=(ROW,) * 4)):
        with pytest.raises(mtf.ProgramError, match="bytes sent; margins n 3"):
            check_program(broken, "sabotage")


def test_a_cut_with_too_little_of_what_is_whole_is_refused() -> None:
    """Keys lie everywhere; each device cuts those in reach of its queries, which sends nothing."""
    with mtf.Graph():
        q, k, v = (mtf.input(n, [D(dim, 64), C]) for n, dim in (("q", "n"), ("k", "m"), ("v", "m")))
        program = mtf.lower([mtf.attention(q, k, v, "n", "m", C, window=5)], mesh="p:4", layout="n:p")
    assert not program.collectives
    n = first(program, lambda i: i.opcode == "slice")
    (y,) = program.instructions[n].outputs
    assert y.margins == (Margin("m", 4, 4, False),)
    narrow = Value(y.tensor, y.sharding, (Margin("m", 4, 3, False),))
    with pytest.raises(mtf.ProgramError, match=r"its block needs margins m 4\+4"):
        check_program(renamed(changed(program, n, outputs=(narrow,)), y, narrow), "sabotage")


def test_margins_bear_the_name_of_the_operands_dim() -> None:
    n, m = mtf.Dimension("n", 8), mtf.Dimension("m", 8)
    with mtf.Graph():
        op = mtf.rename_dimension(mtf.input("x", [n]), "n", m.name).operation
    factors = op.opdef.roles(op)
    (factor,) = factors
    found = needed_margins(op, factors, 0, {"m": Margin("m", 2, 1, False)}, {factor.name: 1})
    assert found == {"n": Margin("n", 2, 1, False)}


def test_margins_do_not_leave_a_program() -> None:
    with mtf.Graph():
        x = mtf.input("x", [B, N, C])
        y = mtf.add_n([mtf.shift(mtf.sin(x) * float(k), k, N, wrap=False) for k in (1, 2)])
    program = mtf.lower({"y": y}, mesh="p:4", layout="n:p")
    wide = next(v for i in program.instructions if isinstance(i, Compute) for v in i.outputs if v.margins)
    with pytest.raises(mtf.ProgramError, match="is still"):
        check_program(replace(program, outputs={"y": wide}), "sabotage")


def test_margins_are_not_committed() -> None:
    with mtf.Graph():
        v = mtf.variable("v", [N, C])
        y = mtf.add_n([mtf.shift(mtf.sin(v) * float(k), k, N, wrap=False) for k in (1, 2)])
        program = mtf.lower({}, [mtf.assign(v, y)], mesh="p:4", layout="n:p")
    wide = next(x for i in program.instructions if isinstance(i, Compute) for x in i.outputs if x.margins)
    n = first(program, lambda i: isinstance(i, Commit))
    with pytest.raises(mtf.ProgramError, match="takes an operand with margins"):
        check_program(changed(program, n, inputs=(wide,)), "sabotage")


@pytest.mark.parametrize("which", range(4))
def test_a_wrong_halo_shows_in_the_numbers(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker aside: margins of other rows, or corners left out, make other numbers."""
    with mtf.Graph():
        x = mtf.input("x", [H, W], "float64")
        program = mtf.lower({"y": neighbourhood(x, SQUARE, True)}, mesh="p:2;q:4", layout="h:p;w:q")
    feeds = {"x": np.random.default_rng(0).normal(size=(32, 32))}
    (right,) = run(program, feeds)
    honest = Margin.run

    def wrong(m: Margin, index: int, block: int, size: int) -> tuple[int, int]:
        begin, end = honest(m, index, block, size)
        if which == 0 and m.dim == "h":
            return begin - 1, end - 1
        if which == 1 and m.dim == "w":
            return begin + 1, end + 1
        if which == 2 and index == 1:
            return begin + 1, end + 1
        return (begin - block, end - block) if which == 3 else (begin, end)

    from meshlib.simulation import exact

    made = exact.widened

    def moved_wrongly(i: Widen, blocks: list[Array]) -> list[Array]:
        with monkeypatch.context() as m:
            m.setattr(Margin, "run", wrong)
            return made(i, blocks)

    monkeypatch.setattr(exact, "widened", moved_wrongly)
    (found,) = run(program, feeds)
    assert abs(found["y"] - right["y"]).max() > 0.1


def test_who_is_served_besides_may_have_other_ends() -> None:
    """Widened for the pool and its gradients, maxima serve a shift, too, that goes round where the pool does not."""
    rng = np.random.default_rng(2)
    filters = {"f": "kh:1;kw:1;c:2;i:2", "g": "kh:3;kw:1;i:2;c:2"}
    with mtf.Graph():
        x = mtf.input("x", mtf.Shape("b:2;h:12;w:8;c:2").dims, "float64")
        f, g = (mtf.input(name, mtf.Shape(dims).dims, "float64") for name, dims in filters.items())

        def block(x: mtf.Tensor) -> mtf.Tensor:
            pooled = mtf.max_pool(mtf.conv2d(x, f), {"h": 3, "w": 2}, 1, "SAME")
            return mtf.conv2d(mtf.shift(pooled, 1, D("h", 12), wrap=True), g)

        loss = mtf.reduce_sum(mtf.square(mtf.recompute_grad(block, [x])))
        found = dict(zip(("dx", "df", "dg"), mtf.gradients([loss], [x, f, g]), strict=True))
        split, whole = (
            mtf.lower(found, mesh="p:4;q:2", layout=rules, precision="highest") for rules in ("w:p;h:q", "")
        )
    feeds = {t.name: rng.normal(size=t.shape.sizes) for t in (x, f, g)}
    (wanted,) = run(whole, feeds)
    for executor in ("exact", "fast"):
        assert_close(run(split, feeds, executor)[0], wanted, 1e-10, executor)
