"""Random programs, meshes and layouts: whatever is composed, every core's part adds up to the unsharded program.

Programs share values, reshape, rename, reduce, contract, look up, draw random numbers, take gradients and update
variables. Values stay of order one, and what has a kink or a jump gets noise of its own, so that rounding decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import pytest
from hypothesis import event, given, seed, settings
from hypothesis import strategies as st

import meshlib as mtf
from layouts import Dimension, Shape
from meshlib.core.graph import Operation, Tensor
from meshlib.program.instructions import Move
from meshlib.program.records import Program
from tests.effort import DEEP_EXAMPLES, deep, draws
from tests.oracle import AXES, MAX_DEVICES, Array, assert_close, computed_by_part, needed, run

UNSHARDED = ";".join(f"{a}:1" for a in AXES)  # programs may name any axis in mtf.constrain
SIZES = {"a": 4, "b": 6, "c": 2, "d": 8, "e": 12}
MAX_ELEMENTS = 600
MAX_POINTS = 6_000  # of a contraction

Draw = Callable[[st.SearchStrategy], object]


# ---------------------------------------------------------------- writing a program


@dataclass
class Writer:
    """A program being written: `draw` decides, `tensors` are what later steps may use."""

    draw: Draw
    mesh: dict[str, int]
    rng: np.random.Generator
    feeds: dict[str, Array] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    names: int = 0

    def choose(self, options: Sequence) -> object:
        return self.draw(st.sampled_from(list(options)))

    def pick(self, good: Callable[[Tensor], bool] = lambda t: True) -> Tensor | None:
        """A tensor made so far, the latest first when examples shrink."""
        found = [t for t in reversed(self.tensors) if good(t)]
        return self.choose(found) if found else None

    def some(self, items: Sequence, least: int = 0) -> list:
        """A random part of `items`, in random order."""
        kept = [x for x in items if self.draw(st.booleans())]
        while len(kept) < least:
            kept.append(self.choose([x for x in items if x not in kept]))
        return self.draw(st.permutations(kept))

    def fresh(self, base: str) -> str:
        self.names += 1
        return f"{base}{self.names}"

    def noise(self, shape: Sequence[Dimension]) -> Tensor:
        """An input without ties, of order one."""
        name = self.fresh("noise")
        self.feeds[name] = self.rng.uniform(0.2, 1.4, Shape(shape).sizes) * self.rng.choice([-1, 1, 1])
        return mtf.input(name, shape, "float64")

    def indices(self, shape: Sequence[Dimension], below: int) -> Tensor:
        name = self.fresh("index")
        self.feeds[name] = self.rng.integers(0, below, Shape(shape).sizes)
        return mtf.input(name, shape, "int32")

    def dims(self, least: int) -> list[Dimension]:
        """Up to three dims of the pool."""
        names = self.draw(st.lists(st.sampled_from(list(SIZES)), min_size=least, max_size=3, unique=True))
        return [Dimension(n, SIZES[n]) for n in names]


def together(*tensors: Tensor) -> Shape | None:
    """The union of the shapes, or None where one name has two sizes."""
    sizes: dict[str, int] = {}
    for t in tensors:
        for d in t.shape:
            if sizes.setdefault(d.name, d.size) != d.size:
                return None
    return Shape(sizes)


def fitting(w: Writer, x: Tensor, limit: int = MAX_ELEMENTS) -> Tensor | None:
    """A partner for `x` that broadcasts with it into no more than `limit` elements."""

    def good(t: Tensor) -> bool:
        both = together(x, t)
        return both is not None and both.size <= limit

    return w.pick(good)


def unary(w: Writer, x: Tensor) -> Tensor:
    return getattr(mtf, w.choose(("tanh", "sin", "sigmoid", "negative", "cos")))(x)


def scaled(w: Writer, x: Tensor) -> Tensor:
    return w.choose((lambda: x * 0.5, lambda: 1.25 - x, lambda: x / 3, lambda: mtf.square(mtf.tanh(x))))()


def kinked(w: Writer, x: Tensor) -> Tensor:
    return w.choose((mtf.relu, mtf.abs))(x + w.noise(x.shape))


def binary(w: Writer, x: Tensor) -> Tensor | None:
    y = fitting(w, x)
    kind = w.choose(("add", "subtract", "multiply", "divide", "maximum", "where"))
    if y is None:
        return None
    if kind == "divide":
        return x / (mtf.sigmoid(y) + 1)
    if kind == "maximum":
        return mtf.maximum(x, y + w.noise(y.shape))
    if kind == "where":
        return mtf.where(mtf.greater(x, w.noise(x.shape)), x, y)
    return getattr(mtf, kind)(x, y)


def added(w: Writer, x: Tensor) -> Tensor | None:
    terms = [x]
    for _ in range(w.choose((1, 2, 3))):
        y = fitting(w, mtf.add_n(terms))
        if y is not None:
            terms.append(y)
    return mtf.add_n(terms) if len(terms) > 1 else None


def contracted(w: Writer, x: Tensor) -> Tensor | None:
    operands = [x]
    for _ in range(w.choose((1, 1, 2))):
        y = w.pick(lambda t: (u := together(*operands, t)) is not None and u.size <= MAX_POINTS)
        if y is not None:
            operands.append(y)
    points = together(*operands)
    out = Shape(w.some(list(points)))
    if out.size > MAX_ELEMENTS:
        return None
    return mtf.einsum(operands, output_shape=out) * (out.size / points.size)


def reduced(w: Writer, x: Tensor) -> Tensor | None:
    kept = w.some(list(x.shape))
    kind = w.choose(("reduce_sum", "reduce_mean", "reduce_max", "reduce_min"))
    if kind in ("reduce_max", "reduce_min"):
        x = x + w.noise(x.shape)
    y = getattr(mtf, kind)(x, output_shape=kept)
    return y * (y.shape.size / x.shape.size) if kind == "reduce_sum" else y


def normalised(w: Writer, x: Tensor) -> Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(list(x.shape))
    return w.choose((mtf.softmax, mtf.log_softmax, mtf.reduce_logsumexp))(x, dim)


def reshaped(w: Writer, x: Tensor) -> Tensor | None:
    shape = list(x.shape)
    kind = w.choose(("merge", "split", "one", "all"))
    if kind == "one":
        shape.insert(w.choose(range(len(shape) + 1)), Dimension(w.fresh("one"), 1))
    elif kind == "all" or not shape:
        shape = [Dimension(w.fresh("flat"), x.shape.size)]
    elif kind == "merge":
        if len(shape) < 2:
            return None
        n = w.choose(range(len(shape) - 1))
        shape[n : n + 2] = [Dimension(w.fresh("merged"), shape[n].size * shape[n + 1].size)]
    else:
        n = w.choose(range(len(shape)))
        parts = [k for k in range(2, shape[n].size) if shape[n].size % k == 0]
        if not parts:
            return None
        major = w.choose(parts)
        shape[n : n + 1] = [
            Dimension(w.fresh("major"), major),
            Dimension(w.fresh("minor"), shape[n].size // major),
        ]
    return mtf.reshape(x, shape)


def renamed(w: Writer, x: Tensor) -> Tensor | None:
    if not len(x.shape):
        return None
    old = w.choose(x.shape.names)
    y = mtf.rename_dimension(x, old, w.fresh(old))
    both = together(x, y)
    # A dim meets itself under its new name.
    return x * y if both.size <= MAX_ELEMENTS and w.draw(st.booleans()) else y


def moved(w: Writer, x: Tensor) -> Tensor | None:
    kind = w.choose(("transpose", "broadcast", "slice", "pad"))
    if kind == "transpose" or not len(x.shape):
        return mtf.transpose(x, w.draw(st.permutations(list(x.shape))))
    if kind == "broadcast":
        new = [Dimension(n, s) for n, s in SIZES.items() if n not in x.shape and s * x.shape.size <= MAX_ELEMENTS]
        return mtf.broadcast(x, [*x.shape, w.choose(new)][:: w.choose((1, -1))]) if new else None
    dim = w.choose(list(x.shape))
    if kind == "slice":
        size = w.choose(range(1, dim.size + 1))
        y = mtf.slice(x, w.choose(range(dim.size - size + 1)), size, dim.name)
    else:
        y = mtf.pad(x, [w.choose((0, 1, 2)), w.choose((0, 2, 4))], dim.name, w.choose((0.0, 0.75)))
    # Another size under the old name would fit few partners.
    return mtf.rename_dimension(y, dim.name, w.fresh(dim.name)) if w.draw(st.booleans()) else y


def looked_up(w: Writer, x: Tensor) -> Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(list(x.shape))
    others = [
        Dimension(n, s) for n, s in SIZES.items() if n != dim.name and (n not in x.shape or s == x.shape.dim(n).size)
    ]
    where = w.some(others)[:2]
    if together(x).size // dim.size * Shape(where).size > MAX_ELEMENTS:
        return None
    index = w.indices(where, dim.size)
    kind = w.choose(("gather", "one_hot", "scatter_add"))
    if kind == "gather":
        return mtf.gather(x, index, dim)
    if kind == "one_hot":
        return mtf.einsum([mtf.one_hot(index, dim, 0.75, 0.25, dtype="float64"), x]) * (1 / dim.size)
    rows = Dimension(w.fresh("rows"), w.choose((4, 6)))
    index = w.indices([dim], rows.size)
    kept = [d for d in x.shape if d != dim]
    return mtf.scatter_add(x, index, rows, Shape(w.draw(st.permutations([*kept, rows])))) * (1 / dim.size)


def random(w: Writer, x: Tensor) -> Tensor:
    if w.draw(st.booleans()):
        noise = w.some(list(x.shape))
        return mtf.dropout(x, True, keep_prob=0.75, noise_shape=noise)
    return x * mtf.random_normal(w.draw(st.permutations(list(x.shape))), 0.5, 0.5, "float64")


def counted(w: Writer, x: Tensor) -> Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(list(x.shape))
    return x * mtf.range(dim, "float64") * (1 / dim.size) + mtf.constant(0.25, w.some(list(x.shape)), "float64")


def marked(w: Writer, x: Tensor) -> Tensor:
    kind = w.choose(("identity", "stop_gradient", "constrain"))
    if kind != "constrain":
        return getattr(mtf, kind)(x)
    rules: dict[str, list[str]] = {}
    for axis, size in w.mesh.items():
        able = [d.name for d in x.shape if d.size % (size * prod(w.mesh[a] for a in rules.get(d.name, []))) == 0]
        if able and w.draw(st.booleans()):
            rules.setdefault(w.choose(able), []).append(axis)
    return mtf.constrain(x, rules)


def looped(w: Writer, x: Tensor) -> Tensor:
    outside = w.pick(lambda t: set(t.shape) <= set(x.shape))

    def body(v: Tensor) -> Tensor:
        return mtf.sin(v * (outside if outside is not None else 0.5)) + mtf.reduce_mean(v, output_shape=kept)

    kept = w.some(list(x.shape))
    if Shape(kept) == x.shape:
        kept = []
    (y,) = mtf.while_loop(w.choose((1, 2, 3)), body, [x])
    return y


def policy(w: Writer) -> object:
    """A policy of rematerialisation for what names a value "wave"."""
    kept = w.choose(({}, {"save": ["wave"]}, {"offload": ["wave"]}))
    return w.choose(("full", "none", "matmuls", mtf.Remat(**kept, offload_carries=w.draw(st.booleans()))))


def scanned(w: Writer, x: Tensor) -> Tensor | None:
    if not len(x.shape):
        return None
    dim = w.choose(list(x.shape))
    rest = [d for d in x.shape if d != dim]
    start = w.noise(w.some(rest)) if w.draw(st.booleans()) else mtf.reduce_mean(x, output_shape=rest)
    outside = w.pick(lambda t: set(t.shape) <= set(start.shape))

    def body(c: Sequence[Tensor], s: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        y = mtf.tanh(c[0]) + mtf.reduce_mean(s[0], output_shape=start.shape)
        return [y * outside if outside is not None else y], [mtf.sin(s[0] + y, name="wave")]

    (last,), (stacked,) = mtf.scan(body, [start], [x], dim, w.draw(st.booleans()), remat=policy(w))
    return w.choose((last, stacked))


def recomputed(w: Writer, x: Tensor) -> Tensor:
    y = fitting(w, x)
    if y is None:
        return mtf.recompute_grad(lambda v: mtf.sin(v, name="wave") * v, [x], policy(w))
    return mtf.recompute_grad(lambda v, u: mtf.tanh(v * mtf.sin(u, name="wave")), [x, y], policy(w))


def activated(w: Writer, x: Tensor) -> Tensor:
    name = w.choose(("gelu", "swish", "softplus", "erf", "selu", "leaky_relu", "floor", "mod", "clip_by_value"))
    if name in ("selu", "leaky_relu", "floor"):
        return getattr(mtf, name)(x + w.noise(x.shape))
    if name == "mod":
        return mtf.mod(w.noise(x.shape), 1.75) * x
    if name == "clip_by_value":
        return mtf.clip_by_value(x + w.noise(x.shape), -0.875, 1.125)
    return getattr(mtf, name)(x)


def decided(w: Writer, x: Tensor) -> Tensor | None:
    if not len(x.shape):
        return None
    larger = mtf.greater(x, w.noise(x.shape))
    kept = w.some(list(x.shape))
    if w.draw(st.booleans()):
        larger = mtf.logical_xor(larger, mtf.less(w.noise(x.shape), 0.5))
    found = w.choose((mtf.reduce_all, mtf.reduce_any))(larger, output_shape=kept)
    return mtf.where(found, x * 0.5, x)


ALONG = (
    *("shift", "concat", "strided", "split", "cumsum", "cumprod", "top_k"),
    *("sort", "nth", "stack", "unstack", "dynamic", "update", "argmax"),
)


def along(w: Writer, x: Tensor) -> Tensor | None:
    """What works along a dim: runs, running sums, ranking, stacking."""
    if not len(x.shape):
        return None
    dim = w.choose(list(x.shape))
    kind = w.choose(ALONG)
    if kind == "shift":
        return mtf.shift(x, w.choose(range(-dim.size, dim.size + 1)), dim, w.draw(st.booleans()))
    if kind == "concat":
        if 2 * x.shape.size > MAX_ELEMENTS:
            return None
        size = w.choose(range(1, dim.size + 1))
        return mtf.rename_dimension(
            mtf.concat([x, mtf.slice(mtf.sin(x), 0, size, dim.name)], dim.name), dim.name, w.fresh(dim.name)
        )
    if kind == "strided":
        stride = w.choose((2, 3))
        size = (dim.size + stride - 1) // stride
        return mtf.rename_dimension(mtf.strided_slice(x, 0, size, stride, dim.name), dim.name, w.fresh(dim.name))
    if kind == "split":
        first = w.choose(range(1, dim.size)) if dim.size > 1 else None
        if first is None:
            return None
        a, b = mtf.split(x, dim, [first, dim.size - first])
        return mtf.reduce_mean(a, reduced_dim=[d for d in a.shape if d.name == dim.name]) * mtf.reduce_mean(
            b, reduced_dim=[d for d in b.shape if d.name == dim.name]
        )
    if kind == "cumsum":
        return mtf.cumsum(x, dim, w.draw(st.booleans()), w.draw(st.booleans())) * (1 / dim.size)
    if kind == "cumprod":
        return mtf.cumprod(mtf.sin(x) + 0.25, dim, w.draw(st.booleans()), w.draw(st.booleans()))
    if kind == "stack":
        if 2 * x.shape.size > MAX_ELEMENTS:
            return None
        return mtf.stack([x, mtf.sin(x)], w.fresh("stack"), w.choose(range(len(x.shape) + 1)))
    if kind == "unstack":
        parts = mtf.unstack(x, dim)
        return mtf.sin(w.choose(parts)) + w.choose(parts)
    size = w.choose(range(1, dim.size + 1))
    start = w.indices([], dim.size - size + 1)
    if kind == "dynamic":
        return mtf.rename_dimension(mtf.dynamic_slice(x, start, size, dim), dim.name, w.fresh(dim.name))
    if kind == "update":
        part = w.noise([Dimension(d.name, size) if d == dim else d for d in x.shape])
        return mtf.update_slice(x, part, dim, start)
    apart = x + w.noise(x.shape)  # ties would be broken by rounding
    if kind == "sort":
        return mtf.sort(apart, dim, w.draw(st.booleans()))
    if kind == "nth":
        return mtf.nth_largest_element(apart, w.choose(range(dim.size)), dim)
    if kind == "argmax":
        return mtf.cast(mtf.argmax(apart, dim), "float64") * 0.25 + mtf.reduce_mean(x, reduced_dim=dim)
    return mtf.top_k(apart, dim, Dimension(w.fresh("best"), size))[0]


STEPS = (
    unary,
    scaled,
    kinked,
    binary,
    binary,
    added,
    contracted,
    contracted,
    contracted,
    reduced,
    reduced,
    normalised,
    reshaped,
    reshaped,
    renamed,
    moved,
    looked_up,
    random,
    counted,
    marked,
    looped,
    scanned,
    recomputed,
    activated,
    decided,
    along,
    along,
    along,
)


@dataclass
class Written:
    """A finished program and a layout for it."""

    outputs: dict[str, Tensor]
    updates: list[Operation]
    feeds: dict[str, Array]
    mesh: str
    layout: str

    def __repr__(self) -> str:
        shown = needed([*self.outputs.values(), *self.updates])
        forward = [t for t in self.outputs["loss"].graph.operations if t.outputs and t.output in shown]
        text = "\n".join(
            f"  {op.output} = {op.opdef.name}({', '.join(x.name for x in op.inputs)})"
            for op in forward
            if op.region == "forward"
        )
        return f"mesh {self.mesh!r} layout {self.layout!r} updates {len(self.updates)} outputs {self.outputs}\n{text}"

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(repr(self))


OPTIMIZERS = {
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.05),
    "momentum": lambda: mtf.optimize.MomentumOptimizer(mtf.optimize.warmup_then_decay(0.05, 2)),
    "adam": lambda: mtf.optimize.AdamOptimizer(0.01),
}


@st.composite
def programs(draw: Draw, most: int = 12, least: int = 3, count: int = 1) -> Written:
    """A program of `least` to `most` steps with a mesh and a legal layout; or `count` of them, beside each other."""
    sizes = draw(
        st.lists(st.sampled_from((2, 2, 4, 3, 1)), min_size=1, max_size=3).filter(lambda s: prod(s) <= MAX_DEVICES)
    )
    mesh = dict(zip(AXES, sizes, strict=False))
    w = Writer(draw, mesh, np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    outputs, losses = {}, []
    with mtf.Graph():
        for k in range(count):
            some = _written(w, k, most, least)
            losses.append(some["loss"])
            outputs |= {name if count == 1 else f"{k}/{name}": y for name, y in some.items()}
        loss = losses[0] if count == 1 else mtf.add_n(losses)
        kind = w.choose((*OPTIMIZERS, None) if count == 1 else ("sgd", None))
        updates = OPTIMIZERS[kind]().minimize(loss) if kind else []
        if w.draw(st.booleans()):
            wanted = [t for t in w.some(w.tensors)[:3] if t.dtype.is_float]
            found = mtf.gradients([loss], wanted)
            outputs |= {f"d{n}": g for n, g in enumerate(found) if g is not None}
        if not kind and w.draw(st.booleans()):
            v = loss.graph.variables["v0"].output
            updates = [mtf.assign(v, v * 0.5 + mtf.reduce_mean(loss) * 0.25)]
    text = ";".join(f"{a}:{s}" for a, s in mesh.items())
    return Written(
        {"loss": loss, **outputs}, updates, w.feeds, text, draw_rules(w, {"loss": loss, **outputs}, updates, text)
    )


def _written(w: Writer, number: int, most: int, least: int) -> dict[str, Tensor]:
    """What a program of random steps returns, its loss among them."""
    variables = []
    for n in range(w.choose((1, 2, 3) if least > 1 else (1, 2))):
        shape = w.dims(least=n % 2)
        name = f"v{n}" if number == 0 else f"v{n}_{number}"
        variables.append(mtf.variable(name, shape, w.rng.uniform(-1.0, 1.5, Shape(shape).sizes), "float64"))
    w.tensors = [*variables, *(w.noise(w.dims(least=2)) for _ in range(w.choose((1, 2))))]
    for _ in range(w.choose(range(least, most + 1))):
        y = w.choose(STEPS)(w, w.pick())
        if y is not None:
            w.tensors.append(y)
    ends = w.some(w.tensors[-4:], least=1)
    loss = mtf.add_n([mtf.reduce_mean(mtf.sin(t)) for t in [variables[0], *ends]])
    return {"loss": loss, **{f"y{n}": t for n, t in enumerate(w.some(w.tensors)[:2])}}


def draw_rules(w: Writer, outputs: dict[str, Tensor], updates: list[Operation], mesh: str) -> str:
    """Rules added one by one wherever the layout stays legal: optional and scoped ones, several axes per dim."""
    dims = list(dict.fromkeys(d for t in needed([*outputs.values(), *updates]) for d in t.shape))
    session = mtf.Session(outputs, updates)
    rules: dict[tuple[str, str], tuple[list[str], str]] = {}

    def text() -> str:
        return ";".join(f"{scope}{dim}:{'+'.join(axes)}{mark}" for (scope, dim), (axes, mark) in rules.items())

    for _ in range(w.choose((0, 1, 2, 3, 4, 5, 6, 7, 8))):
        axis = w.choose(list(w.mesh))
        able = [d.name for d in dims if d.size % w.mesh[axis] == 0]
        if not able:
            continue
        key = (w.choose(("", "", "", "variables/", "slots/", "activations/")), w.choose(able))
        before = rules.get(key)
        axes = [*(before[0] if before else []), axis]
        rules[key] = (list(dict.fromkeys(axes)), w.choose(("", "", "?")))
        if not session.check(mesh, text()).ok:
            with pytest.raises(mtf.LayoutError):
                session.lower(mesh, text())
            rules.pop(key) if before is None else rules.update({key: before})
    return text()


# ---------------------------------------------------------------- properties


SHARDS = 4  # which run beside each other


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_layout_gives_the_unsharded_numbers(shard: int) -> None:
    found = settings(max_examples=draws(32, DEEP_EXAMPLES) // SHARDS)(given(programs())(check_layout))
    (found if deep() else seed(shard)(found))()  # in depth other programs each time


def check_layout(p: Written) -> None:
    """The program under its layout, by each executor, against the program on one core."""
    session = mtf.Session(p.outputs, p.updates)
    whole = session.lower(UNSHARDED, precision="highest")
    program = session.lower(p.mesh, p.layout, "highest")
    wanted = run(whole, p.feeds, steps=2)
    event(f"collectives: {'some' if program.collectives else 'none'}")
    check_program_ends(program)
    exact = run(program, p.feeds, steps=2)
    compare(exact, wanted, "exact against unsharded")
    fast = run(program, p.feeds, "fast", steps=2)
    compare(fast, exact, "fast against exact")
    with computed_by_part():
        parts = run(program, p.feeds, "fast", steps=2)
    for whole, part in zip(fast, parts, strict=True):
        assert_close(part, whole, 0, "chains computed by part")


def compare(found: list[dict[str, Array]], wanted: list[dict[str, Array]], about: str) -> None:
    """The first step to float64's rounding; what optimizers wrote, and what follows from it, to float32's."""
    first = {n for n in wanted[0] if not n.startswith("new ")}
    assert_close({n: found[0][n] for n in first}, {n: wanted[0][n] for n in first}, 1e-9, about, floor=1.0)
    for step in (0, 1):
        assert_close(found[step], wanted[step], 1e-4, f"{about}, step {step}", floor=1.0)


def check_program_ends(program: Program) -> None:
    """Nothing fetched or written is pending, and no collective moves what nobody needs."""
    ends = {*program.outputs.values(), *program.updates.values()}
    assert not any(v.sharding.pending for v in ends)
    used = ends | {x for i in program.instructions for x in i.inputs}
    for i in program.instructions:
        if isinstance(i, Move):
            assert all(y in used for y in i.outputs), i
    homes = program.layout.rules or any(i.opcode == "constrain" for i in program.instructions)
    assert homes or not program.collectives
    for c in program.collectives:
        assert c.sent_bytes >= 0
        assert c.reason
