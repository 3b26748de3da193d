"""Every operation, by the rows of `tests/cases.py`: values, gradients, every legal layout, both executors, work."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest

import meshlib as mtf
from hardware.numerics import round_to_bfloat16
from layouts import Dimension, Shape
from meshlib.core.dtypes import as_dtype
from meshlib.core.errors import LayoutError
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import ON_MXU, OPERATIONS, RESIDENT, Kind, OpDef, Storage, Work, operation
from meshlib.lowering.assigned import is_inner
from meshlib.ops.pointwise import activations
from meshlib.program.analysis.work import local_work
from meshlib.program.instructions import Compute, Instruction, Loop, Value
from meshlib.program.records import Program
from tests.cases import CASES, IDLE, Array, Case, dims
from tests.effort import deep, draws, each, some
from tests.oracle import UNSHARDED, Layout, assert_close, directions, draw_layout, needed, numeric_slope, run

each_case = each("case", CASES, parts=12)
# One row of each operation, which is tried under more layouts; those in which the MXU rounds are all tried.
FIRST = {str(case) for case in {c.op: c for c in reversed(CASES)}.values()}
ROUNDED = [c for c in CASES if deep() or str(c) in FIRST or OPERATIONS[c.op].kind in ON_MXU]


def rounds_operands(case: Case) -> bool:
    """Whether a row is the one of an operation whose operands the MXU rounds."""
    return str(case) in FIRST and OPERATIONS[case.op].kind in ON_MXU


# Their rows need a layout for each dim that may be split.
BY_OFFSET = ("range", "one_hot", "gather", "scatter_add", "random")


def layouts_of(case: Case) -> int:
    """Legal layouts drawn for a row."""
    return draws(5 if case.op in BY_OFFSET else 2 if str(case) in FIRST else 1, 100)


# ---------------------------------------------------------------- a row as a program


@dataclasses.dataclass
class Built:
    """A row's graph: what to fetch and to update, and what to feed."""

    outputs: dict[str, Tensor]  # "y" and a "d_..." per operand with a gradient
    updates: list[Operation]
    feeds: dict[str, Array]

    def __post_init__(self) -> None:
        self.session = mtf.Session(self.outputs, self.updates)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the program computes."""
        return needed([*self.outputs.values(), *self.updates])

    @property
    def dims(self) -> list[str]:
        """Names of dims, in order of appearance."""
        return list(dict.fromkeys(d.name for t in self.tensors for d in t.shape))

    def lower(self, layout: Layout | None = None, precision: str = "highest") -> Program:
        """The program under a layout, or on one core."""
        mesh, rules = (layout.mesh_text, layout.rules_text) if layout else (UNSHARDED, "")
        return self.session.lower(mesh, rules, precision)


# A sum over this dim gives the operand itself; every part of it is another number, of another sign.
PARTS = Dimension("part", 4)
SHARES = np.array([0.75, 0.5, -0.5, 0.25])  # halves of the mesh: 1.25 and -0.25
WHOLE_SHARES = np.array([3, -1, -2, 1], np.int32)


def built(
    case: Case, dtype: str = "float64", stored: bool = False, summed: bool = False, gradients: bool = True
) -> Built:
    """The row as a graph.

    `stored` holds float operands in variables instead of feeding them; `summed` makes each number operand a sum over
    the dim `part`, so that it may arrive pending.
    """
    values = dict(zip(case.inputs, case.values(), strict=True))
    with mtf.Graph():
        operands = []
        for name, spec in case.inputs.items():
            if summed and adds(spec.dtype):
                shares = WHOLE_SHARES if spec.dtype == "int32" else SHARES
                values[name] = np.multiply.outer(values[name], shares)
                parts = mtf.input(name, [*spec.shape, PARTS], spec.dtype or dtype)
                operands.append(mtf.reduce_sum(parts, output_shape=spec.shape))
            elif stored and spec.dtype is None:
                operands.append(mtf.variable(name, spec.shape, values[name], dtype))
            else:
                operands.append(mtf.input(name, spec.shape, spec.dtype or dtype))
        y = case.build(dtype, *operands)
        if isinstance(y, Operation):
            return Built({}, [y], values)
        outputs = {"y": y}
        if gradients and case.has_gradient and y.dtype.is_float:
            cotangent = mtf.input("cotangent", y.shape, y.dtype.of_cotangents)
            values["cotangent"] = case.rng(1).uniform(0.4, 1.6, y.shape.sizes) * case.rng(2).choice(
                [-1, 1, 1], y.shape.sizes
            )
            floats = {n: x for n, x in zip(case.inputs, operands, strict=True) if x.dtype.is_float}
            found = mtf.gradients([y], list(floats.values()), [cotangent])
            outputs |= {f"d_{n}": dx for n, dx in zip(floats, found, strict=True) if dx is not None}
    return Built(outputs, [], values)


@cache
def unsharded(case: Case) -> tuple[Built, dict[str, Array]]:
    """The row as it stands, and what it gives on one core."""
    b = built(case)
    return b, run(b.lower(), b.feeds)[0]


def has_gradients(case: Case) -> bool:
    """Whether a row is tried under layouts with its gradients: those of attention's gradients are long programs, so of
    these one of each operation is."""
    return deep() or str(case) in FIRST or not case.op.startswith("attention") or "_grad_" not in case.op


def result(out: Mapping[str, Array]) -> Array:
    """The row's value: the fetched one, or the variable's new one."""
    (name,) = (n for n in out if n == "y" or n.startswith("new "))
    return np.asarray(out[name])


# ---------------------------------------------------------------- the table itself


def test_table_covers_every_operation() -> None:
    assert {c.op for c in CASES} == set(OPERATIONS)
    public = {name for name, f in vars(activations).items() if inspect.isfunction(f) and hasattr(mtf, name)}
    assert public <= {c.op for c in CASES} | {c.variant.replace(" ", "_") for c in CASES}  # composed: as variants


@each("record", OPERATIONS)
def test_record_is_complete(record: OpDef) -> None:
    for field in dataclasses.fields(OpDef):
        if field.default is dataclasses.MISSING:  # the others are traits: see test_traits
            assert field.name in ("name", "kind") or callable(getattr(record, field.name))
    assert OPERATIONS[record.name] is record


def test_an_operation_without_a_field_is_refused() -> None:
    fields = {f.name: getattr(OPERATIONS["add"], f.name) for f in dataclasses.fields(OpDef)}
    del fields["work"]
    with pytest.raises(TypeError, match="work"):
        OpDef(**fields)
    with pytest.raises(ValueError, match="'add' is defined twice"):
        operation(work=OPERATIONS["add"].work, **fields)


# ---------------------------------------------------------------- values and gradients on one core


@each_case
def test_value_and_shape(case: Case) -> None:
    b = built(case, gradients=False)
    assert case.op in {t.operation.opdef.name for t in b.tensors} | {u.opdef.name for u in b.updates}
    program = b.lower()
    wanted = np.asarray(case.reference(*case.values()))
    for tensor in b.outputs.values():
        assert tensor.shape.sizes == wanted.shape
    for executor in ("exact", "fast"):
        (out,) = run(program, b.feeds, executor)
        y = result(out)
        assert y.shape == wanted.shape
        assert_close({"y": np.asarray(y, np.float64)}, {"y": np.asarray(wanted, np.float64)}, case.tolerance, case)


@each_case
def test_gradient(case: Case) -> None:
    b, out = unsharded(case)
    given = {n.removeprefix("d_") for n in b.outputs if n != "y"}
    if not case.has_gradient:
        with pytest.raises(mtf.GraphError, match="has no gradient"):
            mtf.gradients([b.outputs["y"]], list(b.outputs["y"].operation.inputs))
    if case.differentiable is None:
        return
    assert given == set(case.differentiable)
    if not given:
        return
    values, cotangent = case.values(), b.feeds["cotangent"]
    for n, name in enumerate(case.inputs):
        if name in given:
            dx = np.asarray(out[f"d_{name}"], np.float64)
            assert dx.shape == values[n].shape
            # One wrong element is a small part of a slope, so what is compared loosely is compared element by element.
            along = directions(case.rng(6), dx.shape, each_element=deep() or case.tolerance > 1e-8)
            wanted = [numeric_slope(case.reference, values, n, cotangent, d) for d in along]
            found = np.tensordot(along, dx, dx.ndim)
            floor = float(np.abs(dx).max())
            about = f"{case}, gradient of {name}"
            tolerance = max(2e-8, case.tolerance)
            assert_close({name: found}, {name: np.array(wanted)}, tolerance, about, floor)


# ---------------------------------------------------------------- every layout


def drawn_layouts(case: Case, b: Built, count: int) -> tuple[list[Layout], list[Layout]]:
    """`count` different legal layouts that split something, or as many as are found, and illegal ones met."""
    rng = case.rng(3)
    shapes = [t.shape for t in b.tensors]
    names = b.dims
    legal: dict[str, Layout] = {}
    illegal: dict[str, Layout] = {}
    for _ in range(max(60, 20 * count)):
        layout = draw_layout(rng, names)
        if not layout.allows(shapes):
            illegal[str(layout)] = layout
        elif layout.rules or not names:
            legal[str(layout)] = layout
        if len(legal) == count:
            break
    return list(legal.values()), list(illegal.values())


@each_case
def test_every_layout(case: Case) -> None:
    count = layouts_of(case)
    fed, plain = unsharded(case)
    if not has_gradients(case):
        fed, plain = built(case, gradients=False), {"y": plain["y"]}
    wanted = {id(fed): plain}
    legal, illegal = drawn_layouts(case, fed, count)
    assert legal, f"no legal layout found for {case}"
    stored = fed
    if len(legal) > 1:
        stored = built(case, stored=True)
        wanted[id(stored)] = run(stored.lower(), stored.feeds)[0]
    tolerance = 0 if case.bitwise else max(1e-10, case.tolerance if case.tolerance > 1e-9 else 0)
    for n, layout in enumerate(legal):
        b = (fed, stored)[n % 2]
        about = f"{case} under {layout}"
        program = b.lower(layout)
        assert not any(v.sharding.pending for v in program.outputs.values()), about
        (exact,) = run(program, b.feeds)
        assert_close(exact, wanted[id(b)], tolerance, about)
        (fast,) = run(program, b.feeds, "fast")
        assert_close(fast, exact, min(tolerance, 1e-12) if not case.tolerance > 1e-9 else tolerance, about)
        check_work(program, about)
    for layout in illegal[:count]:
        if mtf.check(fed.outputs, fed.updates, layout.mesh_text, layout.rules_text).ok:
            # Nothing but what the library makes for itself is at fault.
            assert layout.allows([t.shape for t in fed.tensors if not is_inner(t)]), f"{case} under {layout}"
            program = fed.lower(layout)
            assert any("Nobody named this size" in note for note in program.notes)
            assert_close(run(program, fed.feeds)[0], wanted[id(fed)], tolerance, f"{case} under {layout}")
            continue
        with pytest.raises(LayoutError):
            fed.lower(layout)


def layouts_of_parts(case: Case, b: Built) -> list[Layout]:
    """Legal layouts that split the dim `part`: alone, and next to other dims."""
    rng = case.rng(4)
    names = [n for n in b.dims if n != PARTS.name]
    shapes = [t.shape for t in b.tensors]
    layouts = [Layout((("p", 2),), ((PARTS.name, ("p",), False),))]
    for _ in range(20):
        if len(layouts) >= (layouts_of(case) + 1) // 2:
            break
        drawn = draw_layout(rng, names)
        free = [a for a, _ in drawn.mesh if not any(a in axes for _, axes, _ in drawn.rules)]
        more = Layout(drawn.mesh, (*drawn.rules, (PARTS.name, tuple(free), False)))
        if free and more.allows(shapes):
            layouts.append(more)
    return layouts


def adds(dtype: str | None) -> bool:
    """Whether an operand of a row may be a sum."""
    return as_dtype(dtype or "float64").computes


ADDED = [c for c in CASES if any(adds(x.dtype) for x in c.inputs.values())]


@each("case", some(ADDED, [c for n, c in enumerate(ADDED) if str(c) in FIRST or n % 3 == 0]), parts=8)
def test_every_operation_on_partial_sums(case: Case) -> None:
    """What is not linear waits for the sum; what is linear takes the parts, and the sum comes out right later."""
    # Of its gradients those of one row of each operation: `test_traits` tries what is linear in theirs on every row.
    b = built(case, summed=True, gradients=deep() or str(case) in FIRST)
    wanted, (_, plain) = run(b.lower(), b.feeds)[0], unsharded(case)
    tolerance = max(1e-10, case.tolerance if case.tolerance > 1e-9 else 0)
    assert_close({"y": result(wanted)}, {"y": result(plain)}, tolerance, case)
    layouts = layouts_of_parts(case, b)
    for layout in layouts:
        about = f"{case} of sums under {layout}"
        program = b.lower(layout)
        (exact,) = run(program, b.feeds)
        assert_close(exact, wanted, tolerance, about)
        (fast,) = run(program, b.feeds, "fast")
        assert_close(fast, exact, tolerance, about)
        check_work(program, about)
    if deep() or str(case) in FIRST:  # what else is linear `test_traits` tries on every row
        wait_for_the_total(case, tolerance)


def wait_for_the_total(case: Case, tolerance: float) -> None:
    """A sum over the whole result is one number to reduce, so parts pass the operation if its record lets them."""
    b = built(case, summed=True, gradients=False)
    if "y" not in b.outputs or not b.outputs["y"].dtype.computes:
        return
    y = b.outputs.pop("y")
    with y.graph:
        if y.dtype.is_float:
            weights = mtf.input("weights", y.shape, y.dtype)
            b.feeds["weights"] = case.rng(5).uniform(0.4, 1.6, y.shape.sizes)
            y = mtf.einsum([y, weights], output_shape=[])
        b.outputs["z"] = mtf.reduce_sum(y)
    rounding = {"float32": 1e-5, "bfloat16": 0.04}.get(y.dtype.name, 10 * tolerance)
    wanted = run(b.lower(), b.feeds)[0]
    for layout in layouts_of_parts(case, b)[:2]:
        program = b.lower(layout)
        about = f"total of {case} of sums under {layout}"
        for out in (run(program, b.feeds)[0], run(program, b.feeds, "fast")[0]):
            assert_close(out, wanted, rounding, about)


# In float32 only the MXU rounds more than in float64.
TYPED = [(c, dtype) for c in ROUNDED for dtype in ("float32", "bfloat16")]
IN_BFLOAT16 = [(c, dtype) for c, dtype in TYPED if dtype == "bfloat16"]
TO_ROUND = IN_BFLOAT16 + [(c, dtype) for c, dtype in TYPED if dtype == "float32" and rounds_operands(c)]


@each("case, dtype", some(TYPED, TO_ROUND), parts=8)
def test_layouts_at_default_precision(case: Case, dtype: str) -> None:
    """Rounding on the way into the MXU and of each bfloat16 result: what differs is the order of addition."""
    b = built(case, dtype, gradients=has_gradients(case))
    b.feeds = {n: round_to(x, dtype) for n, x in b.feeds.items()}
    (wanted,) = run(b.lower(precision="default"), b.feeds)
    # Rounding into the MXU turns a last-bit difference into one of 2**-8; so does any bfloat16 result.
    loose = dtype == "bfloat16" or any(t.operation.opdef.kind in ON_MXU for t in b.tensors)
    tolerance = 0 if case.bitwise else 0.04 if loose else 2e-6
    for layout in drawn_layouts(case, b, draws(1, 2))[0]:
        program = b.lower(layout, "default")
        (exact,) = run(program, b.feeds)
        (fast,) = run(program, b.feeds, "fast")
        for out in (exact, fast):
            assert_close(out, wanted, tolerance, f"{case} in {dtype} under {layout}")


def round_to(x: Array, dtype: str) -> Array:
    """Floats as the dtype holds them."""
    return np.asarray(x, as_dtype(dtype).public) if x.dtype.kind == "f" else x


@pytest.mark.parametrize("executor", ["exact", "fast"])
def test_operands_of_products_are_rounded(executor: str) -> None:
    """By 2**-9 at most each: far more than another order of addition makes, and less than the tolerance above."""
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.5, 1, shape).astype(np.float32) for shape in ((8, 64), (64, 4)))
    a, b, c = dims("a:8;b:64;c:4")
    with mtf.Graph():
        y = mtf.einsum([mtf.input("x", [a, b]), mtf.input("w", [b, c])], output_shape=[a, c])
    for precision, held in (
        ("default", [round_to_bfloat16(v).astype(np.float64) for v in (x, w)]),
        ("highest", [x, w]),
    ):
        for mesh, layout in (("p:1", ""), ("p:2;q:2", "a:p;b:q")):
            (found,) = run(
                mtf.lower({"y": y}, mesh=mesh, layout=layout, precision=precision), {"x": x, "w": w}, executor
            )
            np.testing.assert_allclose(found["y"], np.float64(held[0]) @ np.float64(held[1]), rtol=1e-6)


def test_float64_agrees_far_beyond_float32() -> None:
    """The tolerance above means something: another order of addition differs in the last bits, and only there."""
    case = next(c for c in CASES if str(c) == "einsum-network")
    b = built(case)
    (whole,) = run(b.lower(), b.feeds)
    (split,) = run(b.lower(Layout((("p", 2), ("q", 2)), (("b", ("p",), False), ("h", ("q",), False)))), b.feeds)
    assert_close(split, whole, 1e-14, "network")
    assert any(not np.array_equal(split[n], whole[n]) for n in whole)


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_max", "reduce_min", "scatter_add"])
def test_what_leaves_a_pending_value_refuses_bool(name: str) -> None:
    (a,), (n,) = dims("a:4"), dims("n:6")
    with mtf.Graph():
        x, i = mtf.input("x", [a], "bool"), mtf.input("i", dims("b:4"), "int32")
        more = {"scatter_add": (i, n, Shape([n, a]))}.get(name, ())
        with pytest.raises(mtf.ShapeError, match=r"needs numbers, got bool(.|\n)*x: bool\[a:4\]"):
            getattr(mtf, name)(x, *more)


# ---------------------------------------------------------------- work


def idle_factors(i: Instruction) -> set[str]:
    """Factors whose split does not divide an operation's vector work (of einsum: its matrix work)."""
    return IDLE[i.operation.opdef.name](i.operation) if i.operation.opdef.name in IDLE else set()


def check_work(program: Program, about: str) -> None:
    """Local work times devices is the unsharded work, times the size of each axis that divides none of it."""
    mesh = program.mesh
    for i in program.instructions:
        if isinstance(i, Loop):
            check_work(i.body, about)
        if not isinstance(i, Compute):
            continue
        op, out = i.operation, i.outputs[0]
        own = [Value(v.tensor, v.sharding).local for v in (*i.inputs, out)]  # margins are work done besides
        local = op.opdef.work(tuple(own[:-1]), own[-1], op.attrs)
        done = local_work(program, i)
        margins = bool(out.margins)
        assert (done.vpu_ops > local.vpu_ops) is margins or local.vpu_ops == 0, f"{about}: {op} does {done}"
        whole = op.opdef.work(tuple(x.tensor.type for x in i.inputs), out.tensor.type, op.attrs)
        split = dict(i.assignment)
        idle = idle_factors(i)
        dividing = [a for a in mesh.axes if a in split and split[a] not in idle]
        duplicated = mesh.size // prod(mesh.axis_size(a) for a in dividing)
        text = f"{about}: {op} by {split}: {local} on each of {mesh.size}, {whole} in all"
        assert_at_least(local, whole, mesh.size, text)
        if op.opdef.name == "einsum":
            assert local.mxu_flops * mesh.size == whole.mxu_flops * duplicated, text
            assert local.mxu_flops == einsum_flops(i), text
            assert (local.vpu_ops > 0) == bool(idle), text
        elif op.opdef.name == "quantized_ragged_dot":
            a, b = (v.sharding.local_size for v in i.inputs[:2])
            assert local.mxu_flops * prod(mesh.axis_size(a) for a in split) == whole.mxu_flops, text
            assert local.vpu_ops == 3 * (a + b) + 2 * out.sharding.local_size, text
        elif op.opdef.name == "quantized_einsum":
            a, b = (v.sharding.local_size for v in i.inputs[:2])
            assert local.mxu_flops * mesh.size == whole.mxu_flops * duplicated, text
            assert local.mxu_flops == einsum_flops(i), text
            assert local.vpu_ops == 3 * (a + b) + 2 * out.sharding.local_size, text
        elif op.opdef.name == "convolution":
            assert local.mxu_flops == convolution_flops(i), text
            assert local.vpu_ops == 0, text
        elif op.opdef.name.startswith("attention"):
            assert local.mxu_flops * mesh.size == whole.mxu_flops * duplicated, text
            assert local.vpu_ops * mesh.size == whole.vpu_ops * duplicated, text
            assert local.mxu_flops == attention_flops(i), text
        else:
            assert (local.mxu_flops > 0) == (op.opdef.kind in ON_MXU), text
            assert local.mxu_flops * prod(mesh.axis_size(a) for a in split) == whole.mxu_flops, text
            assert local.vpu_ops * mesh.size == whole.vpu_ops * duplicated, text
        nothing = op.opdef.storage is Storage.ALIAS or op.opdef.kind in (*RESIDENT, Kind.COPY)
        assert (local == Work(0, 0)) == nothing, text


def assert_at_least(local: Work, whole: Work, devices: int, text: str) -> None:
    """No work is lost by splitting it."""
    assert local.mxu_flops * devices >= whole.mxu_flops, text
    assert local.vpu_ops * devices >= whole.vpu_ops, text


def einsum_flops(i: Instruction) -> int:
    """Two flops per point of the local iteration space; six passes for float32 kept whole."""
    op = i.operation
    sizes = {d.name: d.size for v in (*i.inputs, *i.outputs) for d in v.local.shape}
    points = prod(size for name, size in sizes.items() if name not in idle_factors(i))
    passes = 6 if op.attrs["precision"] == "highest" and op.output.dtype.itemsize > 2 else 1
    return 2 * points * passes


def convolution_flops(i: Instruction) -> int:
    """Two flops for each element of a window that lies inside, of the block that has most; channels besides."""
    op = i.operation
    local = [{d.name: d.size for d in v.sharding.local_shape} for v in (*i.inputs, *i.outputs)]
    points = 2 * (6 if op.attrs["precision"] == "highest" and op.output.dtype.itemsize > 2 else 1)
    sliding = set()
    for w in op.attrs["windows"]:
        s, dims = w.slide, (w.first, w.second, w.out)
        sliding |= {*dims}
        inside = [
            (j, f, i)
            for j, f, i in product(range(s.first), range(s.second), range(s.out))
            if s.stride * i + s.dilation * f == s.spread * j + s.before
        ]
        sizes = [local[n][dim] for n, dim in enumerate(dims)]
        # The dims that a split of this one cuts: a result's, and of a sum over it one operand's or the other's.
        cuts = [(1, 2)] if w.out == w.first else [(1, 2), (0, 2)]
        points *= max(max(Counter(tuple(t[n] // sizes[n] for n in cut) for t in inside).values()) for cut in cuts)
    sizes_of = {name: size for names in local for name, size in names.items()}
    return points * prod(size for name, size in sizes_of.items() if name not in sliding)


def attention_flops(i: Instruction) -> int:
    """Products of all queries with all keys, which the rows of one tile are, over the elements of keys or values."""
    op = i.operation
    sizes = {d.name: d.size for v in i.inputs for d in v.sharding.local_shape}
    names = {d.name for x in op.inputs[:2] for d in x.shape} - {op.attrs["key_dim"]}
    pairs = prod(sizes[n] for n in names)
    if op.opdef.name.startswith("attention_window"):  # queries here, and all keys of one sequence
        pairs = pairs // sizes[op.attrs["memory_length"]] * op.inputs[1].shape.dim(op.attrs["memory_length"]).size
    key, value = sizes[op.attrs["key_dim"]], sizes[op.attrs["value_dim"]]
    products = {
        "attention": key + value,  # q k, p v
        "attention_grad_query": 2 * key + value,  # q k, dy v, ds k
        "attention_grad_memory": 2 * key + 2 * value,  # q k, dy v, ds q, p dy
    }
    return 2 * pairs * products[op.opdef.name.replace("_window", "")]


def test_data_parallel_divides_all_flops() -> None:
    """2 * 4 * 6 * 8 flops of x w in all: a quarter on each of 4 cores by batch, and by hidden."""
    with mtf.Graph():
        x, w = mtf.input("x", dims("b:4;i:6")), mtf.input("w", dims("i:6;h:8"))
        y = mtf.matmul(x, w, output_shape=dims("b:4;h:8"))
    for layout in ("b:p", "h:p"):
        program = mtf.lower(y, mesh="p:4", layout=layout)
        (i,) = (i for i in program.instructions if i.opcode == "einsum")
        work = i.operation.opdef.work(tuple(v.local for v in i.inputs), i.outputs[0].local, i.operation.attrs)
        assert work.mxu_flops == 2 * 4 * 6 * 8 // 4 == 96


# ---------------------------------------------------------------- random numbers and initial values


def drawn(name: str | None = None, seed: int = 0, steps: int = 1) -> list[Array]:
    """A few uniform numbers per step of a program that counts its steps."""
    with mtf.Graph():
        noise = mtf.random_uniform(dims("a:12"), name=name)
        update = mtf.assign(mtf.variable("v", dims("a:12"), 0.0), noise)
    program = mtf.lower({"noise": noise}, [update], mesh="p:2", layout="a:p")
    return [out["noise"] for out in run(program, {}, steps=steps, seed=seed)]


def test_random_numbers_differ_by_step_seed_and_name() -> None:
    first, second, third = drawn(steps=3)
    seen = [first, second, third, *drawn(seed=1), *drawn("other"), *drawn("other", seed=1)]
    for n, a in enumerate(seen):
        for b in seen[:n]:
            assert not np.intersect1d(a, b).size
    assert np.array_equal(drawn()[0], first)


def test_two_random_operations_are_independent() -> None:
    with mtf.Graph():
        pair = [mtf.random_normal(dims("a:12")) for _ in range(2)]
        with mtf.scope("inner"):
            pair.append(mtf.random_normal(dims("a:12")))
        x = mtf.input("x", dims("a:12"))
        pair += [mtf.dropout(x, True, 0.5) for _ in range(2)]
    (out,) = run(mtf.lower(pair), {"x": np.arange(1.0, 13)})
    found = list(out.values())
    assert len(found) == 5
    for n, a in enumerate(found):
        for b in found[:n]:
            assert not np.array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sigmoid_keeps_its_digits_far_out(dtype: str) -> None:
    """Gates of experts are divided by their sum, however small that is."""
    x = np.linspace(-80, 80, 1001, dtype=dtype)
    with mtf.Graph():
        y = mtf.sigmoid(mtf.input("x", dims("a:1001"), dtype))
    wanted = np.exp(-np.logaddexp(0, -x.astype(np.float64)))
    np.testing.assert_allclose(mtf.simulate(mtf.lower({"y": y})).step(x=x)["y"], wanted, rtol=64 * np.finfo(dtype).eps)


INITIALIZERS = {
    "default": None,
    "number": 0.375,
    "uniform": mtf.initializers.random_uniform(-2, 3),
    "normal": mtf.initializers.random_normal(1, 2),
    "glorot": mtf.initializers.glorot_uniform(dims("i:12")),
    "scaled": mtf.initializers.scaled_normal(dims("i:12"), 2.0),
    "truncated": mtf.initializers.truncated_normal(1, 2),
    "fan_out_scaled": mtf.initializers.variance_scaling(2.0, "fan_out"),
    "fan_averaged": mtf.initializers.variance_scaling(2.0, "fan_avg", "uniform", dims("i:12")),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_initial_values_do_not_depend_on_the_layout(dtype: str) -> None:
    with mtf.Graph():
        values = {n: mtf.variable(n, dims("i:12;h:8"), init, dtype) for n, init in INITIALIZERS.items()}
        train = mtf.optimize.AdamOptimizer(0.1).minimize(mtf.reduce_sum(mtf.square(values["normal"])))
    wanted = run(mtf.lower(values), {}, seed=7)[0]
    assert not np.array_equal(wanted["default"], wanted["glorot"])  # by name
    for mesh, layout in (("p:2", "i:p"), ("p:2;q:4", "h:q;i:p"), ("p:2;q:3", "i:q+p"), ("p:4", "variables/h:p")):
        for executor in ("exact", "fast"):
            (out,) = run(mtf.lower(values, train, mesh, layout), {}, executor, seed=7)
            assert_close({n: out[n] for n in values}, wanted, 0, f"{mesh} {layout}")


def test_a_split_value_is_not_drawn_twice() -> None:
    """Blocks differ: the offset counts. A dim of 12 over 4 devices gives 12 different numbers."""
    with mtf.Graph():
        noise = mtf.random_uniform(dims("a:12;b:2"))
    (out,) = run(mtf.lower({"noise": noise}, mesh="p:2;q:2", layout="a:q+p"), {})
    assert len(np.unique(out["noise"])) == 24


def sequence_of(op: str) -> Sequence[Case]:
    """Rows of one operation."""
    return [c for c in CASES if c.op == op]


def test_every_row_of_a_source_or_split_index_is_met_split() -> None:
    """The drawn layouts do split the dims that need offsets: none of these rows passes for want of a split."""
    for op in BY_OFFSET:
        for case in sequence_of(op):
            b = built(case)
            legal, _ = drawn_layouts(case, b, layouts_of(case))
            programs = (b.lower(layout) for layout in legal)
            assert any(i.assignment for p in programs for i in p.instructions if i.opcode == op), case
