"""What is verified: legal layouts, all or a random sample, with default inputs, cotangents and variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from layouts import LayoutRules, Mesh
from layouts.rules import place
from meshlib.core.dtypes import BOOL
from meshlib.core.errors import FeedError, GraphError, nearest
from meshlib.core.graph import BACKWARD, Graph, Operation, Tensor
from meshlib.core.opdef import RESIDENT, Home, Kind
from meshlib.core.replay import all_operations
from meshlib.lowering.assigned import scope_of
from meshlib.lowering.simplification import simplify
from meshlib.ops.control.sources import STEP
from meshlib.ops.control.sources import input as declare_input
from meshlib.ops.gradients import gradients
from meshlib.ops.movement.indexing import index_count
from meshlib.program.instructions import Move
from meshlib.program.records import Program
from meshlib.simulation.state import State, to_storage

AxesOfTensors = tuple[tuple[tuple[str, ...], ...], ...]  # axes per tensor and dim

MOST_LAYOUTS = 20_000  # limit of an exhaustive enumeration
Claim: TypeAlias = tuple[str, str]  # a dim that takes an axis, and one with an optional claim; "": none
COTANGENT = "verify_cotangent_"  # inputs of the program being verified


def legal_layouts(
    operations: Sequence[Operation], mesh: Mesh, number: int | None = None, seed: int = 0
) -> list[LayoutRules]:
    """Layouts over `mesh` under which every tensor of `operations` can be sharded.

    Each axis goes to no dim, to one, or to one and optionally to a second one (`batch:data;hidden:data?`); a dim may
    take several axes, in any order. Layouts with equal shardings of all tensors are listed once, and so are layouts
    that differ only by exchanging axes of equal size (unless the program binds a tensor to axes by name).

    Args:
      operations: the operations of a program, of one graph; loop bodies are included.
      mesh: the mesh; axes of size 1 are ignored.
      number: size of a random sample; by default all. May return fewer if there are not as many.
      seed: seed of the sample.
    Raises: GraphError if all are requested and there are more than 20,000 combinations.
    """
    tensors = _sharded_shapes(operations)
    names = list(dict.fromkeys(d.name for shape, _ in tensors for d in shape))
    axes = [a for a in mesh.axes if mesh.axis_size(a) > 1]
    claims = [_choices([n for n in names if _may_split(n, mesh.axis_size(a), tensors)]) for a in axes]
    total = prod(map(len, claims))
    bound = any(op.opdef.home is Home.GIVEN for op in all_operations(operations))
    swaps = [dict(zip(axes, axes, strict=True))] if bound else _symmetries(axes, mesh)
    collection = _Collection(mesh, axes, tensors, swaps)
    rng = np.random.default_rng([seed, 1])
    if total <= MOST_LAYOUTS:
        for choice in product(*claims):
            collection.take(choice)
        layouts = collection.layouts
        if number is not None and number < len(layouts):
            return [layouts[i] for i in sorted(rng.choice(len(layouts), number, replace=False))]
        return layouts
    if number is None:
        raise GraphError(
            f"{len(names)} dims on {len(axes)} axes make {total} layouts, more than {MOST_LAYOUTS}; "
            "give a number of them to draw, as in layouts=50"
        )
    collection.draw(claims, number, rng)
    return collection.layouts[:number] or [LayoutRules("")]


def _choices(dims: Sequence[str]) -> list[Claim]:
    """The dims to which an axis may go, given the dims that it may split."""
    return [("", ""), *((d, o) for d in dims for o in ("", *(x for x in dims if x != d)))]


class _Collection:
    """Layouts that are legal for some tensors, one per class of equal shardings up to exchanges of axes."""

    def __init__(
        self, mesh: Mesh, axes: list[str], tensors: Sequence[tuple[Any, str]], swaps: Sequence[dict[str, str]]
    ) -> None:
        self.mesh, self.axes, self.tensors, self.swaps = mesh, axes, tensors, swaps
        self.layouts: list[LayoutRules] = []
        self._seen: set[object] = set()

    def take(self, choice: Sequence[Claim]) -> None:
        """Add the layouts of one choice per axis."""
        for rules in _layouts_of(self.axes, choice):
            placed = tuple(place(rules, shape, self.mesh, scope) for shape, scope in self.tensors)
            axes_of_tensors = tuple(where for where, _ in placed)
            alike = min(_exchanged(axes_of_tensors, swap) for swap in self.swaps)
            if not any(faults for _, faults in placed) and alike not in self._seen:
                self._seen.add(alike)
                self.layouts.append(rules)

    def draw(self, claims: Sequence[Sequence[Claim]], number: int, rng: np.random.Generator) -> None:
        """Add random layouts until there are enough, or until draws rarely yield new ones."""
        for _ in range(50 * number + 1000):
            self.take([c[int(rng.integers(len(c)))] if rng.random() < 0.8 else c[0] for c in claims])
            if len(self.layouts) >= number:
                break


def _symmetries(axes: Sequence[str], mesh: Mesh) -> list[dict[str, str]]:
    """All permutations of axes of equal size, as renamings; the first is the identity."""
    same = [[a for a in axes if mesh.axis_size(a) == size] for size in dict.fromkeys(map(mesh.axis_size, axes))]
    before = [a for group in same for a in group]
    permuted = product(*(permutations(group) for group in same))
    return [dict(zip(before, (b for order in orders for b in order), strict=True)) for orders in permuted]


def _exchanged(axes: AxesOfTensors, swap: dict[str, str]) -> AxesOfTensors:
    return tuple(tuple(tuple(swap[a] for a in of_dim) for of_dim in of_tensor) for of_tensor in axes)


def _sharded_shapes(operations: Sequence[Operation]) -> list[tuple[Any, str]]:
    """The distinct (shape, scope) of tensors that are sharded by rules."""
    shapes_and_scopes: dict[tuple[Any, str], None] = {}
    for op in all_operations(operations):
        if op.opdef.home is not Home.RULES:
            continue
        for y in op.public_outputs:
            shapes_and_scopes[y.shape, scope_of(y)] = None
    return list(shapes_and_scopes)


def _may_split(name: str, size: int, tensors: Sequence[tuple[Any, str]]) -> bool:
    return all(shape.dim(name).size % size == 0 for shape, _ in tensors if name in shape)


def _layouts_of(axes: Sequence[str], choice: Sequence[tuple[str, str]]) -> Iterator[LayoutRules]:
    """The layouts of one choice of (required dim, optional dim) per axis: one for each order of a dim's axes."""
    required: dict[str, list[str]] = {}
    optional: dict[str, list[str]] = {}
    for axis, (dim, claim) in zip(axes, choice, strict=True):
        if dim:
            required.setdefault(dim, []).append(axis)
        if claim:
            optional.setdefault(claim, []).append(axis)
    for orders in product(*(permutations(entry) for entry in required.values())):
        rules = [f"{d}:{'+'.join(entry)}" for d, entry in zip(required, orders, strict=True)]
        rules += [f"{d}:{'+'.join(entry)}?" for d, entry in optional.items()]
        yield LayoutRules(";".join(rules))


Array = np.ndarray[Any, Any]


def draw_feeds(
    program: Program, known: Iterable[str], given: Mapping[str, Any], seed: int, narrow: int
) -> dict[str, Array]:
    """The given feeds, and random ones for the others."""
    own = [n for n in known if not n.startswith(COTANGENT)]
    unknown = [f"unknown input '{n}'{nearest(n, own)}" for n in given if n not in own]
    if unknown:
        raise FeedError(f"verify: {'; '.join(unknown)}; the graph's inputs: {', '.join(own) or 'none'}")
    operations = [i.operation for i in program.instructions if not isinstance(i, Move)]
    all_feeds = {}
    for n, (name, v) in enumerate(sorted(program.inputs.items())):
        op, t = v.tensor.operation, v.tensor
        x = given[name] if name in given else _drawn(op, np.random.default_rng([seed, 0, n]), operations, narrow)
        all_feeds[name] = to_storage(x, t.shape, t.dtype, f"input '{name}' ({op.source})")
    return all_feeds


def initial_state(program: Program, given: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """The given variables, and initial values of the others, with noise on constant trainable ones."""
    state = State(seed)
    operations = {n: v.tensor.operation for n, v in program.variables.items() if n != STEP}
    state.declare(operations)
    for name, op in sorted(operations.items()):
        x = state.arrays[name]
        if name not in given and op.attrs["trainable"] and x.dtype.kind == "f" and np.all(x == x.flat[0]):
            rng = np.random.default_rng([seed, 3, *name.encode()])
            noisy, y = x + 0.1 * rng.normal(size=x.shape), op.output
            state.arrays[name] = to_storage(noisy, y.shape, y.dtype, f"variable '{name}'")
    for name, x in given.items():
        state[name] = x
    return dict(state.arrays)


def _drawn(op: Operation, rng: np.random.Generator, operations: Sequence[Operation], narrow: int) -> Array:
    """Random values of an input; `narrow` halves the range of integers that many times."""
    shape, dtype = op.attrs["shape"].sizes, op.attrs["dtype"]
    if dtype.is_float:
        return np.asarray(rng.normal(size=shape))
    if dtype is BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.integers(0, max(1, (_index_bound(op.output, operations) or 8) >> narrow), shape))


def _index_bound(x: Tensor, operations: Sequence[Operation]) -> int | None:
    """The smallest dim indexed by an integer, or by a value derived from it."""
    reached, bounds = {x}, []
    for op in all_operations(operations):
        if op.loop is not None:
            reached |= {b for a, b in zip(op.inputs, op.loop.stand_ins, strict=True) if a in reached}
        elif op.opdef.indices is not None and op.inputs[op.opdef.indices] in reached:
            bounds.append(index_count(op))
        elif any(y in reached for y in op.inputs):
            reached |= {y for y in op.outputs if not y.dtype.is_float and y.dtype is not BOOL}
    return min(bounds, default=None)


class Borrowed:
    """A context that adds operations to a graph and removes them on exit.

    A class instead of a generator, because the user's source line is looked up in frames outside this package.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        g = self.graph
        self.lists = [(held, len(held)) for held in (g.operations, g.rewrites)]
        of_loop = () if g.loop_body is None else (g.loop_body.captured, g.loop_body.outside)
        tables: tuple[dict[Any, Any], ...] = (g.gradient_of, g.inputs, g.variables, *of_loop, g._counts)
        self.tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(held, dict(held)) for held in tables]

    def __exit__(self, *exc: object) -> None:
        for held, count in self.lists:
            del held[count:]
        for table, before in self.tables:
            table.clear()
            table.update(before)


def all_gradients(graph: Graph, fetched: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Gradients of the float outputs by name."""
    ys = [y for y in dict.fromkeys(fetched.values()) if y.dtype.is_float and y.operation.region != BACKWARD]
    xs = [
        op.output
        for op in simplify(graph, ys, ()).operations
        if op.opdef.kind in RESIDENT and op.output.dtype.is_float and op.attrs.get("trainable", True)
    ]
    if not xs:
        return {}
    try:
        return _gradients(graph, ys, xs)
    except GraphError as fault:
        notes.append(f"gradients are not compared: {str(fault).splitlines()[0]}")
        return {}


def _gradients(graph: Graph, ys: Sequence[Tensor], xs: Sequence[Tensor]) -> dict[str, Tensor]:
    with graph:
        # Ones would hide faults: the rows of a softmax sum to one whatever it computes.
        seeds = [declare_input(f"{COTANGENT}{n}", y.shape, y.dtype.of_cotangents) for n, y in enumerate(ys)]
        cotangents = gradients(ys, xs, seeds)
    order = sorted(zip(xs, cotangents, strict=True), key=lambda pair: pair[0].operation.opdef.kind is not Kind.VARIABLE)
    return {f"d {x.operation.name}": dx for x, dx in order if dx is not None}
