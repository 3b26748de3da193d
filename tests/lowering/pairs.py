"""Random small programs under random layouts, to measure the partitioner on. A number makes the same pair again.

Programs are of the families in `FAMILIES`, three to a dozen operations before gradients. Half of the layouts have
optional rules, some have rules for variables alone; all can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import lcm
from random import Random

import meshlib as mtf
from layouts import Dimension
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import RESIDENT

AXES = ("x", "y", "z")


@dataclass
class Writer:
    """A program being written: sizes and choices come from `rng`."""

    rng: Random
    unit: int  # a multiple of which most sizes are
    dtype: str
    dims: dict[str, Dimension] = field(default_factory=dict)

    def dim(self, name: str) -> Dimension:
        """The dim of that name, of the same size throughout a program."""
        if name not in self.dims:
            size = self.unit * self.rng.choice((1, 1, 2, 2, 3, 4, 6, 8))
            self.dims[name] = Dimension(name, size)
        return self.dims[name]

    def shape(self, names: str) -> list[Dimension]:
        return [self.dim(n) for n in names.split()]

    def input(self, name: str, names: str) -> Tensor:
        return mtf.input(name, self.shape(names), self.dtype)

    def weight(self, name: str, names: str) -> Tensor:
        return mtf.variable(name, self.shape(names), dtype=self.dtype)

    def product(self, xs: Sequence[Tensor], names: str) -> Tensor:
        return mtf.einsum(list(xs), output_shape=self.shape(names))

    def maybe(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def curve(self, x: Tensor) -> Tensor:
        """An elementwise function of one tensor."""
        return self.rng.choice((mtf.relu, mtf.tanh, mtf.square, mtf.negative))(x)

    def norm(self, x: Tensor, names: str) -> Tensor:
        """Root mean square over the last dim taken out, with a scale or without."""
        last = self.dim(names.split()[-1])
        y = x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=last) + 1e-6)
        return y * self.weight("scale", last.name) if self.maybe(0.3) else y


Family = Callable[[Writer], Tensor]


def chain(w: Writer) -> Tensor:
    """Matrix products in a row, some with a bias or a function between them."""
    y, last = w.input("a", "b d"), "d"
    for n in range(w.rng.choice((2, 2, 3, 4))):
        new = w.rng.choice([x for x in ("d", "h", "k", "n") if x != last])
        y = w.product([y, w.weight(f"w{n}", f"{last} {new}")], f"b {new}")
        last = new
        if w.maybe(0.25):
            y = y + w.weight(f"bias{n}", new)
        if w.maybe(0.25):
            y = w.curve(y)
    return y


def mlp(w: Writer) -> Tensor:
    """Two or three layers with a function between them."""
    y, last = w.input("a", "b d"), "d"
    layers = w.rng.choice((2, 2, 3))
    for n, new in enumerate(("h", "k", "n")[:layers]):
        y = w.product([y, w.weight(f"w{n}", f"{last} {new}")], f"b {new}")
        last = new
        if n < layers - 1:
            y = w.curve(y + w.weight(f"bias{n}", new) if w.maybe(0.4) else y)
    return y


def ffn(w: Writer) -> Tensor:
    """Feed-forward blocks with residuals."""
    x = w.input("a", "b l d" if w.maybe() else "b d")
    names = " ".join(x.shape.names)
    inner = " ".join([*x.shape.names[:-1], "h"])
    for n in range(w.rng.choice((1, 1, 2))):
        y = w.norm(x, names) if n == 0 and w.maybe(0.4) else x
        y = w.curve(w.product([y, w.weight(f"in{n}", "d h")], inner))
        if w.maybe(0.3):
            y = y * w.product([x, w.weight(f"gate{n}", "d h")], inner)
        x = x + w.product([y, w.weight(f"out{n}", "h d")], names)
    return x


def attention(w: Writer) -> Tensor:
    """Attention of several heads, written in einsums."""
    x = w.input("a", "b l d")
    w.dims["m"] = Dimension("m", w.dim("l").size)
    memory = mtf.rename_dimension(x, "l", "m") if w.maybe(0.7) else w.input("memory", "b m d")
    q = w.product([x, w.weight("wq", "d h k")], "b h l k")
    k = w.product([memory, w.weight("wk", "d h k")], "b h m k")
    v = w.product([memory, w.weight("wv", "d h k")], "b h m k")
    mixed = w.product([mtf.softmax(w.product([q, k], "b h l m"), w.dim("m")), v], "b h l k")
    y = w.product([mixed, w.weight("wo", "h k d")], "b l d")
    return x + y if w.maybe() else y


def grouped(w: Writer) -> Tensor:
    """Attention in which several heads share their keys and values."""
    x = w.input("a", "b l d")
    w.dims["m"] = Dimension("m", w.dim("l").size)
    memory = mtf.rename_dimension(x, "l", "m")
    shared = w.rng.choice(("g ", ""))  # groups, or one for all heads
    q = w.product([x, w.weight("wq", "d g h k" if shared else "d h k")], f"b {shared}h l k")
    k = w.product([memory, w.weight("wk", f"d {shared}k")], f"b {shared}m k")
    v = w.product([memory, w.weight("wv", f"d {shared}k")], f"b {shared}m k")
    weights = mtf.softmax(w.product([q, k], f"b {shared}h l m"), w.dim("m"))
    mixed = w.product([weights, v], f"b {shared}h l k")
    return w.product([mixed, w.weight("wo", f"{shared}h k d")], "b l d")


def adapter(w: Writer) -> Tensor:
    """A product with a low-rank product beside it."""
    x = w.input("a", "b d")
    w.dims["r"] = Dimension("r", w.rng.choice((2, 4, w.unit)))
    y = x
    if w.maybe(0.3):
        y = w.curve(w.product([x, w.weight("w0", "d k")], "b k"))
    start = y.shape.names[-1]
    whole = w.product([y, w.weight("w", f"{start} h")], "b h")
    low = w.product([w.product([y, w.weight("down", f"{start} r")], "b r"), w.weight("up", "r h")], "b h")
    y = whole + low * 0.5 if w.maybe() else whole + low
    return w.product([w.curve(y), w.weight("w2", "h n")], "b n") if w.maybe() else y


def branches(w: Writer) -> Tensor:
    """A value with several users, whose results meet again or not."""
    x = w.input("a", "b d")
    y = w.product([x, w.weight("w", "d h")], "b h")
    if w.maybe(0.4):
        y = w.curve(y)
    ends = [w.product([y, w.weight(f"w{n}", "h k")], "b k") for n in range(w.rng.choice((2, 2, 3)))]
    if w.maybe(0.3):
        ends[0] = ends[0] + w.product([x, w.weight("skip", "d k")], "b k")
    if w.maybe(0.3):
        return mtf.add_n(ends)
    if w.maybe():
        return ends[0] * w.curve(ends[1])
    return w.curve(ends[0]) + w.product([ends[1], w.weight("last", "k n"), w.weight("back", "n k")], "b k")


def mixture(w: Writer) -> Tensor:
    """Elementwise operations on tensors of different dims."""
    made = [w.input("a", "b d"), w.input("c", "b l"), w.input("e", "d"), w.weight("f", "l d"), w.weight("g", "b")]
    for _ in range(w.rng.choice((3, 4, 5))):
        one, other = w.rng.sample(made, 2)
        kind = w.rng.randrange(5)
        if kind == 0:
            made.append(w.curve(one))
        elif kind == 1:
            made.append(mtf.where(mtf.greater(one, 0.0), one, other))
        elif kind == 2 and len(one.shape) > 1:
            made.append(mtf.reduce_sum(one, reduced_dim=w.rng.choice(list(one.shape))))
        elif kind == 3:
            made.append(one + other)
        else:
            made.append(one * other)
        if w.maybe(0.7):  # go on with it
            made.remove(one)
    return mtf.add_n(w.rng.sample(made[-3:], 2)) if w.maybe(0.3) else made[-1]


def reductions(w: Writer) -> Tensor:
    """Statistics over dims and what is made of them."""
    x = w.input("a", "b l d")
    y = w.product([x, w.weight("w", "d h")], "b l h") if w.maybe(0.6) else x
    for _ in range(w.rng.choice((1, 2, 2))):
        reduced = w.rng.choice(list(y.shape))
        kind = w.rng.randrange(4)
        if kind == 0:
            y = y - mtf.reduce_mean(y, reduced_dim=reduced)
        elif kind == 1:
            y = y * mtf.rsqrt(mtf.reduce_mean(mtf.square(y), reduced_dim=reduced) + 1e-6)
        elif kind == 2:
            y = mtf.softmax(y, reduced)
        elif len(y.shape) > 1:
            y = w.rng.choice((mtf.reduce_max, mtf.reduce_sum))(y, reduced_dim=reduced)
    return y


def entropy(w: Writer) -> Tensor:
    """Cross-entropy of a small classifier."""
    x = w.input("a", "b d")
    if w.maybe(0.4):
        x = w.curve(w.product([x, w.weight("w0", "d h")], "b h"))
    logits = w.product([x, w.weight("w", f"{x.shape.names[-1]} v")], "b v")
    labels = mtf.one_hot(mtf.input("labels", [w.dim("b")], "int32"), w.dim("v"), dtype=w.dtype)
    return mtf.layers.softmax_cross_entropy_with_logits(logits, labels, w.dim("v"))


FAMILIES: dict[str, Family] = {
    f.__name__: f
    for f in (chain, mlp, ffn, attention, grouped, adapter, branches, mixture, reductions, entropy)
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """One program under one layout."""

    number: int
    family: str
    outputs: dict[str, Tensor]
    updates: list[Operation]
    mesh: str
    layout: str

    @property
    def text(self) -> str:
        """What the user wrote, one operation a line, and the layout."""
        graph = next(iter(self.outputs.values())).graph
        inner = graph.inner
        lines = []
        for op in graph.operations:
            if op.region != "forward" or (op in inner and op.opdef.kind not in RESIDENT):
                continue
            operands = ", ".join(x.name for x in op.inputs)
            lines.append(f"  {op.output.name}: {op.output.type} = {op.opdef.name}({operands})")
        what = f"{', '.join(self.outputs)}{' and updates' if self.updates else ''}"
        return "\n".join([f"{self.number} ({self.family}): {what} on {self.mesh} under {self.layout}", *lines])


def pair(number: int, family: str | None = None) -> Pair:
    """The pair of that number."""
    rng = Random(number)
    name = family or list(FAMILIES)[number % len(FAMILIES)]
    while True:
        axes = AXES[: rng.choices((1, 2, 3), (15, 55, 30))[0]]
        sizes = [rng.choice((2, 2, 3, 4)) for _ in axes]
        unit = lcm(*sizes) * rng.choice((1, 1, 2))
        w = Writer(rng, unit, rng.choice(("float32", "bfloat16")))
        with mtf.Graph() as graph:
            outputs, updates = _ended(w, FAMILIES[name](w))
        dims = list(dict.fromkeys(d.name for op in graph.operations for y in op.outputs for d in y.shape if d.size > 1))
        mesh = ";".join(f"{a}:{n}" for a, n in zip(axes, sizes, strict=True))
        for _ in range(30):
            layout = _layout(rng, dims, axes)
            if mtf.check(outputs, updates, mesh, layout).ok:
                return Pair(number, name, outputs, updates, mesh, layout)


def _ended(w: Writer, y: Tensor) -> tuple[dict[str, Tensor], list[Operation]]:
    """What is fetched: the result, or a loss with gradients or updates of all weights."""
    kind = w.rng.choices(("result", "gradients", "updates"), (40, 20, 40))[0]
    weights = list(y.graph.trainable_variables)
    found = [] if kind == "result" else [g for g in mtf.gradients([y], weights) if g is not None]
    if not found:
        return {"y": y}, []
    if w.maybe(0.3):
        y = y * w.rng.choice((0.5, 2.0))
    loss = mtf.reduce_mean(mtf.square(y)) if w.maybe(0.6) else mtf.reduce_sum(y)
    if kind == "updates":
        return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    found = [g for g in mtf.gradients([loss], weights) if g is not None]
    return {"loss": loss} | {f"gradient{n}": g for n, g in enumerate(found)}, []


def _layout(rng: Random, dims: Sequence[str], axes: Sequence[str]) -> str:
    """Rules for some dims: each axis on one or two of them, optional ones on more."""
    optional = rng.random() < 0.5
    rules: dict[tuple[str, str, bool], list[str]] = {}
    for axis in axes:
        count = rng.choice((1, 2, 2, 3) if optional else (1, 1, 2))
        for n, dim in enumerate(rng.sample(dims, min(count, len(dims)))):
            scope = "variables/" if rng.random() < 0.08 else ""
            loose = optional and (n > 0 or rng.random() < 0.4)
            rules.setdefault((scope, dim, loose), []).append(axis)
    texts = [f"{scope}{dim}:{'+'.join(on)}{'?' if loose else ''}" for (scope, dim, loose), on in rules.items()]
    rng.shuffle(texts)
    return ";".join(texts)
