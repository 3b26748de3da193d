"""Many layouts of one program against the unsharded program: values, new variables, gradients.

What may differ is rounding alone, so the allowed difference is derived, not guessed. A sum of n terms, added in any
order, is the exact sum of terms each changed by a relative n u at most, where u is half the dtype's eps (backward
error analysis). So the unsharded program runs in float64 once as it is, and a few times with every operand of every
operation changed at random by as much as its rounding may amount to:

    operands   of sums, n u32 for n terms; in bfloat16 besides u16 for each partial sum that the mesh may make;
               u16 for float32 operands of the MXU unless the precision is "highest"
    results    4 u32 (NumPy's functions are not exact to the last bit), u16 besides if they are bfloat16

Operations that only choose among their operands' elements round nothing and are left alone. Here u32 and u16 are the
units of float32 (float64 for float64) and bfloat16. What is allowed for a tensor is `SAFETY` times the largest change
that this brought about anywhere in it, and 4 u32 of its largest element. Cancellation and steep functions need no
rules of their own: they amplify the changes as they amplify rounding. Integers and booleans must be equal, unless
such changes turned them over, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np

from layouts import LayoutRules, Mesh
from layouts.rules import place
from meshlib.dtypes import BFLOAT16, BOOL, FLOAT32, FLOAT64, INT32, DType
from meshlib.errors import FeedError, GraphError, LayoutError, MeshlibError, ProgramError, nearest
from meshlib.gradients import gradients
from meshlib.graph import BACKWARD, Graph, Operation, Tensor, TensorType
from meshlib.lower import _fetched, lower
from meshlib.lower.homes import Homes, all_operations
from meshlib.lower.program import Instruction, Program, Value, bytes_text
from meshlib.lower.simplify import simplify
from meshlib.operation import Block, Kind, Role
from meshlib.ops.sources import STEP
from meshlib.ops.sources import input as declare_input
from meshlib.ops.state import assigned
from meshlib.simulate.engine import Engine
from meshlib.simulate.exact import Blocks, run_exact
from meshlib.simulate.fast import FastExecutor
from meshlib.simulate.state import State, to_storage

__all__ = ["Divergence", "Row", "Verification", "legal_layouts", "verify"]

Array = np.ndarray[Any, Any]
Key = tuple[Tensor, int]  # a tensor, and how many times it was made before in the step: loops make theirs often

SAFETY = 4.0
SAMPLES = 4  # runs with changed operands
WEAK = 0.25  # allowed share of the largest magnitude from which on a comparison proves little
NARROWINGS = 12  # how often drawn indices that are out of range are drawn again from half the range
MOST_LAYOUTS = 20_000  # that "all" looks through


# ---------------------------------------------------------------- the report


@dataclass(frozen=True)
class Divergence:
    """The first operation, in the program's order, whose value is not that of the unsharded program.

    `op` is the one that makes the value, and `kind` what went wrong with it: the operation itself, or a collective.
    Of a pending sum `devices` hold a part each; `trip` counts the runs of a loop's body.
    """

    op: str
    kind: str
    source: str
    phase: str
    tensor: str
    value: str  # type and sharding
    split: str
    instruction: str
    mesh: str
    layout: str
    devices: tuple[int, ...]
    coordinate: dict[str, int]
    index: dict[str, int]
    found: float
    wanted: float
    allowed: float
    trip: int | None = None

    def __str__(self) -> str:
        where = ", ".join(f"{a}={i}" for a, i in self.coordinate.items())
        cores = f"core {self.devices[0]}" if len(self.devices) == 1 else f"cores {', '.join(map(str, self.devices))}"
        summed = "" if len(self.devices) == 1 else ", parts together"
        at = ", ".join(f"{d}={i}" for d, i in self.index.items())
        trip = "" if self.trip is None else f", trip {self.trip}"
        lines = [
            f"first to diverge: {self.instruction}, {self.phase}{trip}",
            f"  {self.tensor}: {self.value}{f', split {self.split}' if self.split else ''}",
            f"  on {cores}{f' ({where})' if where else ''}{summed}{f', at {at}' if at else ''}: "
            f"{self.found:.9g}, not {self.wanted:.9g} (allowed: {self.allowed:.2g})",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """One layout. `error` is the largest difference over the largest magnitude in its array, `allowed` on that scale.

    `worst` names the array that comes nearest to what is allowed, or exceeds it most; `fault` says what stopped a run.
    """

    mesh: str
    layout: str
    ok: bool
    error: float
    allowed: float
    worst: str
    collectives: int
    sent_bytes: float
    wrong: tuple[str, ...] = ()  # one text per array that is off
    fault: str = ""
    divergence: Divergence | None = None

    def __str__(self) -> str:
        lines = [f"mesh {self.mesh}   layout {self.layout or '(none)'}", *(f"  {w}" for w in self.wrong)]
        lines += [f"  {line}" for line in self.fault.splitlines()]
        if self.divergence is not None:
            lines += [f"  {line}" for line in str(self.divergence).splitlines()]
        elif not self.ok:
            lines.append("  no operation diverges by itself in the exact executor")
        return "\n".join(lines)


@dataclass(frozen=True)
class Verification:
    """What `mtf.verify` found: one row per layout, in the order in which they ran.

    `compared` names the arrays; `notes` says what weakens the proof; `refused` are layouts that were found by search
    and that the lowering refuses, each with the first line of its reason.
    """

    rows: tuple[Row, ...]
    compared: tuple[str, ...]
    precision: str
    executor: str
    seed: int
    steps: int
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every layout gives the unsharded numbers."""
        return all(r.ok for r in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The layouts that do not."""
        return tuple(r for r in self.rows if not r.ok)

    def raise_for_failures(self) -> None:
        """Raise one ProgramError that holds every failing layout; do nothing if there is none."""
        if not self.ok:
            raise ProgramError("\n".join([self._head(), *(str(r) for r in self.failures)]))

    def table(self) -> str:
        """One line per layout; errors and what is allowed are relative to the largest magnitude in the array."""
        head = ("", "mesh", "layout", "collectives", "sent a core", "largest error", "allowed", "in")
        cells = [
            (
                "ok" if r.ok else "FAIL",
                r.mesh,
                r.layout or "(none)",
                str(r.collectives),
                bytes_text(r.sent_bytes),
                f"{r.error:.2g}",
                f"{r.allowed:.2g}",
                r.worst,
            )
            for r in self.rows
        ]
        widths = [max(len(row[k]) for row in (head, *cells)) for k in range(len(head))]
        return "\n".join(
            "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *cells)
        )

    def _head(self) -> str:
        bad = len(self.failures)
        layouts = "1 layout" if len(self.rows) == 1 else f"{len(self.rows)} layouts"
        verdict = "all equal up to rounding" if not bad else f"{bad} NOT equal"
        return f"{layouts} against the unsharded program: {verdict}"

    def __str__(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        lines = [
            self._head(),
            f"compared in {steps}: {', '.join(self.compared)}",
            f"{self.executor} executor, precision {self.precision}, seed {self.seed}",
            *(f"note: {n}" for n in self.notes),
            *(f"refused by the lowering: {r}" for r in self.refused),
            self.table(),
            *(str(r) for r in self.failures),
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------- entrance


def verify(
    outputs: Any = None,
    updates: Sequence[Operation] = (),
    inputs: Mapping[str, Any] | None = None,
    layouts: Any = "all",
    mesh: Any = None,
    *,
    precision: str = "highest",
    executor: str = "exact",
    state: Mapping[str, Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
) -> Verification:
    """Run many layouts and compare each with the unsharded program, naming the first operation that diverges.

    Compared are the fetched values, the new values of variables, and, where there are no updates, the gradients of
    the float outputs (for random cotangents) with respect to trainable variables and float inputs. A layout that is
    good for everything but these gradients is compared without them, and a note says so.

    Args:
      outputs, updates: as `mtf.lower` takes them.
      inputs: feeds by name; those that are not needed are passed over. What is not given is drawn from the seed:
        floats normal, booleans even, integers below the size of the dims that one_hot, gather and the like look them
        up in (below 8 where nothing tells).
      layouts: (mesh, layout) pairs; or, with `mesh`, a list of layouts, "all" or a number of legal layouts to draw
        from all (see `legal_layouts`).
      mesh: see `layouts`. The exact executor is meant for up to about 16 cores.
      precision: "highest", or "default", whose rounding into the MXU makes the comparison 2**8 times coarser.
      executor: "exact" or "fast".
      state: values of variables by name. Others have their initial values; trainable ones that are the same
        everywhere (zeros, ones) get normal noise of 0.1 on top, because constants hide faults.
      steps: how many steps to run, each from the unsharded program's state; 2 with updates (slots are zero in the
        first), else 1.
      seed: of drawn inputs, initial values, random operations and drawn layouts.
      rtol: allowed difference relative to the largest magnitude in each array; derived unless given (see the
        module's docstring).
    Returns: a Verification: `.ok`, `.rows`, `.table()`, `.raise_for_failures()`. The graph is left as it was.
    Raises: LayoutError for a given layout that cannot be; FeedError for feeds; GraphError for other arguments. A
      layout whose run fails otherwise is a failing row.
    Example:
      >>> import meshlib as mtf
      >>> batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", 6)
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [batch, d])
      ...     y = mtf.reduce_sum(mtf.tanh(x) * mtf.variable("w", [d]), reduced_dim=d, name="y")
      >>> found = mtf.verify({"y": y}, layouts="all", mesh="p:2")
      >>> found.ok, found.compared
      (True, ('y', 'd w', 'd x'))
      >>> [row.layout for row in found.rows]
      ['', 'batch:p', 'batch:p;d:p?', 'd:p', 'd:p;batch:p?']
    """
    _check_arguments(inputs, state, precision, executor, steps, seed, rtol)
    fetched, graph = _fetched(outputs, updates)
    written = assigned(updates)
    pairs = _given_pairs(layouts, mesh)
    searched = mesh is not None and not pairs
    notes: list[str] = []
    with _Borrowed(graph):
        extra = {} if written else _all_gradients(graph, fetched, notes)
        compared = {**fetched, **extra}
        if searched:
            simple = simplify(graph, compared.values(), written.values())
            number = None if layouts == "all" else layouts
            pairs = [(Mesh(mesh), rules) for rules in legal_layouts(simple.operations, Mesh(mesh), number, seed)]
        job = _Job.prepare(
            graph,
            compared,
            tuple(extra),
            list(written.values()),
            [m for m, _ in pairs],
            inputs or {},
            state or {},
            steps or (2 if written else 1),
            precision,
            executor,
            seed,
            rtol,
        )
        found = [job.row(one, rules, searched) for one, rules in pairs]
    rows = tuple(r for r in found if isinstance(r, Row))
    refused = tuple(r for r in found if isinstance(r, str))
    notes += [*job.notes, *job.weaknesses()]
    return Verification(rows, job.names, precision, executor, seed, job.steps, tuple(notes), refused)


def _check_arguments(
    inputs: object, state: object, precision: object, executor: object, steps: object, seed: object, rtol: object
) -> None:
    for name, value in (("inputs", inputs), ("state", state)):
        if value is not None and not isinstance(value, Mapping):
            raise FeedError(f"verify: {name} must be a dict of names to arrays, got {type(value).__name__}")
    if not isinstance(precision, str) or precision not in ("default", "highest"):
        raise GraphError(f"verify: precision must be 'default' or 'highest', got {precision!r}")
    if not isinstance(executor, str) or executor not in ("exact", "fast"):
        raise GraphError(f"verify: executor must be 'exact' or 'fast', got {executor!r}")
    for name, number, least in (("steps", steps, 1), ("seed", seed, 0)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise GraphError(f"verify: {name} must be an integer of at least {least}, got {number!r}")
    if rtol is not None and (isinstance(rtol, bool) or not isinstance(rtol, int | float) or not 0 <= rtol < np.inf):
        raise GraphError(f"verify: rtol must be a finite number of at least 0, got {rtol!r}")


def _given_pairs(layouts: Any, mesh: Any) -> list[tuple[Mesh, LayoutRules]]:
    """The layouts that were named; none where they are to be searched."""
    if mesh is not None:
        if isinstance(layouts, list | tuple):
            if not layouts:
                raise GraphError("verify: the list of layouts is empty")
            return [(Mesh(mesh), LayoutRules(x)) for x in layouts]
        if layouts != "all" and (isinstance(layouts, bool) or not isinstance(layouts, int) or layouts < 1):
            raise GraphError(f"verify: layouts must be 'all', a number of at least 1, or a list, got {layouts!r:.80}")
        return []
    wanted = "give layouts=[(mesh, layout), ...], or mesh=... with layouts='all' or a number"
    if not isinstance(layouts, list | tuple) or not layouts:
        raise GraphError(f"verify: {wanted}; got layouts={layouts!r:.80} and no mesh")
    for x in layouts:
        if not isinstance(x, list | tuple) or len(x) != 2:
            raise GraphError(f"verify: {wanted}; {x!r:.80} is no pair")
    return [(Mesh(m), LayoutRules(x)) for m, x in layouts]


class _Borrowed:
    """A graph that takes operations while the context lasts, and is then as it was.

    A class, because the line of the user's code is sought among the frames outside this package.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        g = self.graph
        self.lists = [(held, len(held)) for held in (g.operations, g.rewrites)]
        tables = (g.gradient_of, g.inputs, g.variables, g.captured, g._counts)
        self.tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(held, dict(held)) for held in tables]

    def __exit__(self, *exc: object) -> None:
        for held, count in self.lists:
            del held[count:]
        for table, before in self.tables:
            table.clear()
            table.update(before)


def _all_gradients(graph: Graph, fetched: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Gradients of the float outputs by name."""
    ys = [y for y in dict.fromkeys(fetched.values()) if y.dtype.is_float and y.operation.region != BACKWARD]
    xs = [
        op.output
        for op in simplify(graph, ys, ()).operations
        if op.kind.name in ("input", "variable") and op.output.dtype.is_float and op.attrs.get("trainable", True)
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
        # Ones would hide much: the rows of a softmax sum to one whatever it does.
        seeds = [declare_input(f"{_COTANGENT}{n}", y.shape, y.dtype) for n, y in enumerate(ys)]
        found = gradients(ys, xs, seeds)
    order = sorted(zip(xs, found, strict=True), key=lambda pair: pair[0].operation.kind.name != "variable")
    return {f"d {x.operation.name}": dx for x, dx in order if dx is not None}


_COTANGENT = "verify_cotangent_"


# ---------------------------------------------------------------- legal layouts


def legal_layouts(
    operations: Sequence[Operation], mesh: Mesh, number: int | None = None, seed: int = 0
) -> list[LayoutRules]:
    """Layouts over `mesh` under which every tensor of `operations` can be laid out.

    Each axis goes to no dim, to one, or to one with another as an optional second claim (`batch:data;hidden:data?`);
    a dim may take several axes, in any order. Of layouts that lay every tensor alike, one is kept.

    Args:
      operations: of one graph, those that a program needs; bodies of loops are looked into.
      mesh: axes of size 1 are passed over.
      number: how many to draw at random; all unless given. Fewer come back where there are not that many.
      seed: of the draw.
    Raises: GraphError if all are asked for and there are more than 20,000 to look through.
    """
    tensors = _laid_out(operations)
    names = list(dict.fromkeys(d.name for shape, _ in tensors for d in shape))
    axes = [a for a in mesh.axes if mesh.axis_size(a) > 1]
    able = {a: [n for n in names if _may_split(n, mesh.axis_size(a), tensors)] for a in axes}
    claims = [[("", ""), *((d, o) for d in able[a] for o in ("", *(x for x in able[a] if x != d)))] for a in axes]
    total = prod(map(len, claims))
    seen: set[object] = set()
    kept: list[LayoutRules] = []

    def take(choice: Sequence[tuple[str, str]]) -> None:
        for rules in _written(axes, choice):
            placed = tuple(place(rules, shape, mesh, scope) for shape, scope in tensors)
            lies = tuple(where for where, _ in placed)
            if not any(faults for _, faults in placed) and lies not in seen:
                seen.add(lies)
                kept.append(rules)

    rng = np.random.default_rng([seed, 1])
    if total <= MOST_LAYOUTS:
        for choice in product(*claims):
            take(choice)
        if number is not None and number < len(kept):
            return [kept[i] for i in sorted(rng.choice(len(kept), number, replace=False))]
        return kept
    if number is None:
        raise GraphError(
            f"{len(names)} dims on {len(axes)} axes make {total} layouts, more than {MOST_LAYOUTS}; "
            "give a number of them to draw, as in layouts=50"
        )
    for _ in range(50 * number + 1000):
        take([c[rng.integers(len(c))] if rng.random() < 0.8 else c[0] for c in claims])
        if len(kept) >= number:
            break
    return kept[:number]


def _laid_out(operations: Sequence[Operation]) -> list[tuple[Any, str]]:
    """(shape, scope) of every tensor whose layout the rules decide, each once."""
    found: dict[tuple[Any, str], None] = {}
    homes: dict[Graph, Homes] = {}
    for op in all_operations(operations):
        if op.kind.name in ("constrain", "assign"):
            continue
        home = homes.setdefault(op.graph, Homes(op.graph, Mesh("all:1"), LayoutRules("")))
        for y in op.outputs:
            found[y.shape, home.scope_of(y)] = None
    return list(found)


def _may_split(name: str, size: int, tensors: Sequence[tuple[Any, str]]) -> bool:
    return all(shape.dim(name).size % size == 0 for shape, _ in tensors if name in shape)


def _written(axes: Sequence[str], choice: Sequence[tuple[str, str]]) -> Iterator[LayoutRules]:
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


# ---------------------------------------------------------------- drawing inputs


def _drawn(op: Operation, rng: np.random.Generator, operations: Sequence[Operation], narrow: int) -> Array:
    """Values of an input; `narrow` halves the range of integers so many times."""
    shape, dtype = op.attrs["shape"].sizes, op.attrs["dtype"]
    if dtype.is_float:
        return np.asarray(rng.normal(size=shape))
    if dtype is BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(rng.integers(0, max(1, (_index_bound(op.output, operations) or 8) >> narrow), shape))


def _index_bound(x: Tensor, operations: Sequence[Operation]) -> int | None:
    """The smallest dim in which an integer, or what is made of it, is looked up."""
    reached, bounds = {x}, []
    for op in all_operations(operations):
        if "body" in op.attrs:
            body: Graph = op.attrs["body"]
            inner = [body.inputs[n].output for n in (*op.attrs["carried"], *op.attrs["sliced"])]
            inner += body.captured.values()
            reached |= {b for a, b in zip(op.inputs, inner, strict=False) if a in reached}
        elif any(y in reached for y in op.inputs[_LOOKED_UP.get(op.kind.name, len(op.inputs)) :]):
            bounds.append(op.attrs["dim"].size)
        elif any(y in reached for y in op.inputs):
            reached |= {y for y in op.outputs if not y.dtype.is_float and y.dtype is not BOOL}
    return min(bounds, default=None)


_LOOKED_UP = {"one_hot": 0, "gather": 1, "scatter_add": 1}  # from which operand on the operands are indices


# ---------------------------------------------------------------- the unsharded program, and what may differ


@dataclass(frozen=True)
class _Step:
    """One step of the unsharded program: where it began, every value it made, and what may differ in each."""

    state: dict[str, Array]
    values: dict[Key, Array]
    allowed: dict[Key, float]
    ends: dict[str, tuple[Array, float]]  # what is compared, by name, with what may differ in it


class _Counted:
    """How many times each value was made so far: which trip of which loops a value of a body belongs to."""

    def __init__(self) -> None:
        self.made: dict[Value, int] = {}

    def next(self, v: Value) -> int:
        n = self.made.get(v, 0)
        self.made[v] = n + 1
        return n


def _unit(dtype: DType) -> float:
    return {FLOAT64: 2.0**-53, FLOAT32: 2.0**-24, BFLOAT16: 2.0**-9}.get(dtype, 0.0)


def _accumulated(dtype: DType) -> float:
    """The unit of sums: bfloat16 values are added in float32."""
    return _unit(FLOAT32) if dtype is BFLOAT16 else _unit(dtype)


def _terms(op: Operation) -> int:
    """How many terms an element of the result is the sum of, at most."""
    return prod(f.size for f in op.kind.roles(op) if f.role not in (Role.PARALLEL, Role.MAX, Role.MIN))


def _only_chosen(op: Operation, y: Array, inputs: Sequence[Array]) -> bool:
    """Whether a result holds nothing but elements of the operands, of either sign, zeros, ones and given numbers.

    Then nothing was rounded, and a later comparison with what it was chosen from must find it equal.
    """
    if op.kind.kind is Kind.CONTRACTION:
        return False
    given = [x for a in op.attrs.values() for x in (a if isinstance(a, tuple) else (a,)) if isinstance(x, int | float)]
    known = np.concatenate(
        [np.array([0, 1, *given], np.float64), *(np.ravel(x) for x in inputs if x.dtype.kind != "b")]
    )
    return bool(np.isin(np.abs(y), np.abs(known)).all() or not y.size)


@dataclass(eq=False)
class _Wide:
    """The unsharded program in float64; with `rng`, every operand changed by as much as its rounding may amount to."""

    highest: bool
    parts: int  # of a sum, at most: the cores of the largest mesh
    rng: np.random.Generator | None
    counted: _Counted = field(default_factory=_Counted)
    values: dict[Key, Array] = field(default_factory=dict)

    def run(self, program: Program, given: Mapping[Value, Array], engine: Engine) -> dict[Value, Array]:
        arrays = {v: self._widened(x, v.tensor.dtype) for v, x in given.items()}
        for i in program.instructions:
            inputs = [arrays[x] for x in i.inputs]
            if i.is_reshard:
                arrays.update(zip(i.outputs, inputs, strict=True))
            elif i.body is not None:
                arrays.update(zip(i.outputs, self._loop(i, i.body, inputs, engine), strict=True))
            elif i.opcode not in ("input", "variable", "assign"):
                arrays.update(zip(i.outputs, self._compute(i, inputs, engine), strict=True))
            for y in i.outputs:
                self.values.setdefault((y.tensor, self.counted.next(y)), arrays[y])
        return arrays

    def _loop(self, i: Instruction, body: Program, inputs: list[Array], engine: Engine) -> list[Array]:
        given = dict(zip(body.inputs.values(), inputs, strict=True))
        sliced = {body.inputs[n]: (given[body.inputs[n]], i.slice_axis(n)) for n in i.slices}
        stacks: dict[str, list[Array]] = {n: [np.empty(0)] * i.trips for n in i.stacks}
        for trip in i.trip_order:
            given.update({v: np.take(x, trip, axis=axis) for v, (x, axis) in sliced.items()})
            made = self.run(body, given, engine.in_trip(trip))
            for n, parts in stacks.items():
                parts[trip] = made[body.outputs[n]]
            given.update({body.inputs[begin]: made[body.outputs[end]] for begin, end in i.carries})
        return [*(given[body.inputs[begin]] for begin, _ in i.carries), *map(np.stack, stacks.values())]

    def _compute(self, i: Instruction, inputs: list[Array], engine: Engine) -> list[Array]:
        op = i.operation
        types = tuple(_wide_type(v.tensor) for v in i.inputs)
        zeros = {f.name: 0 for f in op.kind.roles(op)}
        block = Block(op, types, _wide_type(op.output), zeros, engine, None, (0,) * len(types))

        def local(arrays: Sequence[Array]) -> list[Array]:
            with np.errstate(all="ignore"):
                made: Any = op.kind.local(block, *arrays)
            made = made if isinstance(made, tuple) else (made,)
            return [self._widened(np.asarray(y), t.dtype) for y, t in zip(made, op.outputs, strict=True)]

        plain = local(inputs)
        if self.rng is None or op.kind.kind is Kind.VIEW:
            return plain
        changed = local([self._changed(x, self._by(op, v.tensor.dtype)) for v, x in zip(i.inputs, inputs, strict=True)])
        units = [_unit(v.tensor.dtype) for v in i.inputs if v.tensor.dtype.is_float]
        results = []
        for t, y, other in zip(op.outputs, plain, changed, strict=True):
            if not t.dtype.is_float:
                results.append(y)  # a choice: it turns over when what it is made of changes
            elif _only_chosen(op, y, inputs):
                results.append(self._changed(y, _unit(t.dtype) if units and _unit(t.dtype) > max(units) else 0))
            else:
                by = 4 * _accumulated(t.dtype) + (_unit(t.dtype) if t.dtype is BFLOAT16 else 0)
                results.append(self._changed(other, by))
        return results

    def _by(self, op: Operation, dtype: DType) -> float:
        terms, change = _terms(op), 0.0
        if terms > 1:
            change = terms * _accumulated(dtype) + (self.parts * _unit(dtype) if dtype is BFLOAT16 else 0)
        if op.kind.kind is Kind.CONTRACTION and dtype is FLOAT32 and not self.highest:
            change += _unit(BFLOAT16)
        return change

    def _changed(self, x: Array, by: float) -> Array:
        if self.rng is None or not by or x.dtype.kind != "f":
            return x
        with np.errstate(all="ignore"):
            return np.asarray(x * (1 + by * self.rng.uniform(-1, 1, x.shape)))

    @staticmethod
    def _widened(x: Array, dtype: DType) -> Array:
        return np.asarray(x, np.float64) if dtype.is_float else np.asarray(x)


def _wide_type(t: Tensor) -> TensorType:
    return TensorType(t.shape, FLOAT64) if t.dtype.is_float else t.type


def _difference(a: Array, b: Array) -> Array:
    """|a - b|; equal infinities and NaNs in the same place do not differ, others differ without bound."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(all="ignore"):
        d = np.abs(x - y)
    d = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, d)
    return np.where(np.isnan(d), np.inf, d)


def _largest(x: Array) -> float:
    """The largest finite magnitude."""
    magnitudes = np.abs(np.asarray(x, np.float64))
    return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))


# ---------------------------------------------------------------- the comparison


class _Diverged(Exception):
    """Ends a run at the first value that is wrong."""

    def __init__(self, found: Divergence) -> None:
        self.found = found


@dataclass(eq=False)
class _Job:
    """The unsharded program, run; and everything needed to run a layout of it and compare."""

    outputs: dict[str, Tensor]
    updates: list[Operation]
    precision: str
    executor: str
    seed: int
    steps: int
    rtol: float | None
    feeds: dict[str, Array]
    program: Program
    added: tuple[str, ...] = ()  # outputs that are gradients asked for by nobody but us
    reference: list[_Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def prepare(
        cls,
        graph: Graph,
        outputs: dict[str, Tensor],
        added: tuple[str, ...],
        updates: list[Operation],
        meshes: Sequence[Mesh],
        inputs: Mapping[str, Any],
        state: Mapping[str, Any],
        steps: int,
        precision: str,
        executor: str,
        seed: int,
        rtol: float | None,
    ) -> _Job:
        """Lower the unsharded program (on a mesh with all axes, of size 1, that constraints may name) and run it."""
        alone = ";".join(f"{a}:1" for a in dict.fromkeys(a for m in meshes for a in m.axes))
        program = lower(outputs, updates, alone, "", precision)
        drawn = [v for n, v in program.inputs.items() if n not in inputs and v.tensor.dtype is INT32]
        for narrow in range(NARROWINGS):
            feeds = _feeds(program, graph.inputs, inputs, seed, narrow)
            job = cls(outputs, updates, precision, executor, seed, steps, rtol, feeds, program, added)
            arrays = _initial_state(program, state, seed)
            try:
                for number in range(steps):
                    arrays = job._run_reference(arrays, number, max(m.size for m in meshes))
                break
            except FeedError as fault:  # an index out of range
                if not drawn or narrow == NARROWINGS - 1:
                    raise FeedError(f"verify: the unsharded program refuses its inputs; give others\n{fault}") from None
        return job

    @property
    def names(self) -> tuple[str, ...]:
        """What is compared."""
        return tuple(self.reference[0].ends)

    def engine(self, step: Mapping[str, Array], in_order: bool) -> Engine:
        """The arithmetic of one step."""
        return Engine(self.seed, int(step[STEP]), self.precision == "highest", in_order)

    def _run_reference(self, state: dict[str, Array], number: int, parts: int) -> dict[str, Array]:
        """Run one unsharded step, as it is, wide, and wide with changes; the state after it."""
        program, counted = self.program, _Counted()
        values: dict[Key, Array] = {}

        def watch(instruction: Instruction, value: Value, blocks: Blocks) -> None:
            values.setdefault((value.tensor, counted.next(value)), np.array(blocks[0]))

        outputs, updates = run_exact(program, state, self.feeds, self.engine(state, True), watch)
        given = {v: self.feeds[name] for name, v in program.inputs.items()}
        given |= {v: state[name] for name, v in program.variables.items()}
        runs = []
        for sample in range(SAMPLES + 1):
            rng = np.random.default_rng([self.seed, 2, number, sample]) if sample else None
            wide = _Wide(self.precision == "highest", parts, rng)
            wide.run(program, given, self.engine(state, False))
            runs.append(wide.values)
        allowed = {key: self._allowed(key[0], x, [r[key] for r in runs]) for key, x in values.items()}
        ends = {n: (y, allowed[program.outputs[n].tensor, 0]) for n, y in outputs.items()}
        ends |= {f"new {n}": (y, allowed[program.updates[n].tensor, 0]) for n, y in updates.items()}
        self.reference.append(_Step(state, values, allowed, ends))
        after = {**state, **updates}
        if program.counts_steps:
            after[STEP] = np.asarray(after[STEP] + np.int32(1), np.int32)
        return after

    def _allowed(self, t: Tensor, x: Array, runs: Sequence[Array]) -> float:
        if self.rtol is not None:
            return self.rtol * (_largest(x) or 1.0)
        plain, changed = runs[0], runs[1:]
        rounding = 4 * _accumulated(t.dtype) * _largest(x)
        return SAFETY * max(float(_difference(c, plain).max(initial=0.0)) for c in changed) + rounding

    def weaknesses(self) -> list[str]:
        """What the unsharded numbers can't prove."""
        notes = []
        for name in self.names:
            arrays = [step.ends[name][0] for step in self.reference]
            if any(x.dtype.kind == "f" and not np.isfinite(x).all() for x in arrays):
                notes.append(f"'{name}' is not finite in the unsharded program; give inputs within its domain")
            elif all(x.size and not x.any() for x in arrays):
                notes.append(f"'{name}' is zero everywhere in the unsharded program, which hides faults")
            share = max(step.ends[name][1] / (_largest(step.ends[name][0]) or 1.0) for step in self.reference)
            if share > WEAK:
                notes.append(f"'{name}' proves little: rounding alone may change it by {share:.2g} of its magnitude")
        return notes

    # ------------------------------------------------------------ one layout

    def row(self, mesh: Mesh, rules: LayoutRules, searched: bool) -> Row | str:
        """Lower, run and compare one layout; a text if it was searched and the lowering refuses it."""
        try:
            program = self._lowered(mesh, rules)
        except LayoutError as fault:
            if not searched:
                raise
            return f"{rules}: {str(fault).splitlines()[0]}"
        except _FAULTS as fault:
            text = f"the lowering fails: {type(fault).__name__}: {fault}"
            return self._row(mesh, rules, None, float("inf"), 0.0, "", (), text)
        run = self._runner(program)
        error = allowed = 0.0
        nearness, worst, wrong = -1.0, "", []
        first: int | None = None  # step with a wrong value
        for number, step in enumerate(self.reference):
            try:
                outputs, updates = run(step)
            except _FAULTS as fault:
                text = f"step {number}: {type(fault).__name__}: {fault}"
                found = self._first(program, number)
                return self._row(mesh, rules, program, float("inf"), 0.0, "", (), text, found)
            made = {**outputs, **{f"new {n}": y for n, y in updates.items()}}
            for name, (wanted, limit) in step.ends.items():
                if name not in made:  # a gradient that this layout can't lay out
                    continue
                off = _difference(made[name], wanted)
                largest, scale = float(off.max(initial=0.0)), _largest(wanted) or 1.0
                near = largest / limit if limit else float("inf") if largest else 0.0
                if near > nearness:
                    nearness, worst, error, allowed = near, name, largest / scale, limit / scale
                if largest > limit:
                    first = number if first is None else first
                    wrong.append(self._wrong(name, number, made[name], wanted, off, limit))
        if first is None:
            return self._row(mesh, rules, program, error, allowed, worst)
        return self._row(mesh, rules, program, error, allowed, worst, tuple(wrong), "", self._first(program, first))

    def _lowered(self, mesh: Mesh, rules: LayoutRules) -> Program:
        """The program; without the gradients added here where a layout is good for all but them."""
        try:
            return lower(self.outputs, self.updates, mesh, rules, self.precision)
        except LayoutError as fault:
            own = {n: y for n, y in self.outputs.items() if n not in self.added}
            if len(own) == len(self.outputs):
                raise
            program = lower(own, self.updates, mesh, rules, self.precision)
            self.notes.append(f"gradients are not compared under {rules}: {str(fault).splitlines()[0]}")
            return program

    def _runner(self, program: Program) -> Callable[[_Step], tuple[dict[str, Array], dict[str, Array]]]:
        if self.executor == "exact":
            return lambda step: run_exact(program, step.state, self.feeds, self.engine(step.state, True))
        fast = FastExecutor(program)

        def run(step: _Step) -> tuple[dict[str, Array], dict[str, Array]]:
            outputs, updates = fast.run(step.state, self.feeds, self.engine(step.state, False))
            return {n: y.copy() for n, y in outputs.items()}, updates

        return run

    @staticmethod
    def _wrong(name: str, number: int, found: Array, wanted: Array, off: Array, limit: float) -> str:
        at = np.unravel_index(int(off.argmax()), off.shape)
        place_ = f"[{', '.join(map(str, map(int, at)))}]" if at else ""
        bad = int((off > limit).sum())
        share = f", {bad} of {off.size} elements" if off.size > 1 else ""
        return (
            f"'{name}'{place_} in step {number} is {float(found[at]):.9g}, not {float(wanted[at]):.9g} "
            f"(allowed: {limit:.2g}{share})"
        )

    @staticmethod
    def _row(
        mesh: Mesh,
        rules: LayoutRules,
        program: Program | None,
        error: float,
        allowed: float,
        worst: str,
        wrong: tuple[str, ...] = (),
        fault: str = "",
        divergence: Divergence | None = None,
    ) -> Row:
        collectives = program.collectives if program is not None else ()
        sent = float(program.sent_bytes) if program is not None else 0.0
        ok = not wrong and not fault
        return Row(str(mesh), str(rules), ok, error, allowed, worst, len(collectives), sent, wrong, fault, divergence)

    # ------------------------------------------------------------ the first operation that diverges

    def _first(self, program: Program, number: int) -> Divergence | None:
        """Run a step again in the exact executor, up to the first value that is not the unsharded one."""
        step = self.reference[number]
        search = _Search(program, step.values, step.allowed)
        try:
            run_exact(program, step.state, self.feeds, self.engine(step.state, True), search.watch)
        except _Diverged as end:
            return end.found
        except _FAULTS:
            return None
        return None


_FAULTS = (MeshlibError, ValueError, IndexError, TypeError, AssertionError, KeyError)


@dataclass(eq=False)
class _Search:
    """Compares every value a run makes with the unsharded one, and stops at the first that is off."""

    program: Program
    values: Mapping[Key, Array]
    allowed: Mapping[Key, float]
    counted: _Counted = field(default_factory=_Counted)
    partial: set[Value] = field(default_factory=set)
    parts: dict[Value, tuple[Array, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.partial = set(_partial_sums(self.program))

    def watch(self, instruction: Instruction, value: Value, blocks: Blocks) -> None:
        """What `run_exact` calls with every value made."""
        trip = self.counted.next(value)
        known = self._expected(instruction, value, trip)
        if known is None or instruction.opcode in ("input", "variable"):
            return
        wanted, limit = known
        sharding = value.sharding
        kinds = {kind for _, kind in sharding.pending}
        merge = {"sum": np.add, "max": np.maximum, "min": np.minimum}[kinds.pop() if kinds else "sum"]
        for group in sharding.mesh.groups(sharding.pending_axes):
            at = sharding.mesh.coordinate(group[0])
            block = np.asarray(merge.reduce([np.asarray(blocks[d], np.float64) for d in group]))
            expected = wanted[sharding.slices(at)]
            if block.shape != expected.shape:
                return  # the run itself says more
            off = _difference(block, expected)
            if off.max(initial=0.0) > limit:
                index = np.unravel_index(int(off.argmax()), off.shape)
                raise _Diverged(self._report(instruction, value, group, index, block, expected, limit, trip))

    def _expected(self, instruction: Instruction, value: Value, trip: int) -> tuple[Array, float] | None:
        """The unsharded value and what may differ in it; of a sum of some operands only, the sum of theirs."""
        if value not in self.partial:
            key = (value.tensor, trip)
            return (self.values[key], self.allowed[key]) if key in self.values else None
        if instruction.is_reshard:
            x = instruction.inputs[instruction.outputs.index(value)]
            self.parts[value] = self.parts[x]
            return self.parts[value]
        keys = [(x.tensor, trip if (x.tensor, trip) in self.values else 0) for x in instruction.inputs]
        if any(key not in self.values for key in keys):
            return None
        total = np.add.reduce([np.asarray(self.values[key], np.float64) for key in keys])
        self.parts[value] = total, sum(self.allowed[key] for key in keys)
        return self.parts[value]

    def _report(
        self,
        instruction: Instruction,
        value: Value,
        group: Sequence[int],
        index: tuple[Any, ...],
        block: Array,
        expected: Array,
        limit: float,
        trip: int,
    ) -> Divergence:
        sharding, op = value.sharding, instruction.operation
        mesh = sharding.mesh
        coordinate = mesh.coordinate(group[0])
        summed = sharding.pending_axes
        start = sharding.offsets(coordinate)
        what = str(op)
        if instruction.is_reshard:
            made, over = value.tensor.operation, "+".join(a for s in instruction.steps[:1] for a in s.axes)
            what = f"{instruction.opcode} of {made} over {over}"
            what, op = (what if made is op else f"{what}, for {op}"), made
        return Divergence(
            op.name,
            instruction.opcode,
            op.source,
            instruction.region,
            value.tensor.name,
            str(value),
            ", ".join(f"{f}@{a}" for a, f in instruction.assignment),
            what,
            str(mesh),
            str(self.program.layout),
            tuple(group),
            {a: c for a, c in zip(mesh.axes, coordinate, strict=True) if a not in summed},
            {d.name: int(o + i) for d, o, i in zip(sharding.shape, start, index, strict=True)},
            float(block[index]),
            float(expected[index]),
            limit,
            trip if op.graph.parent is not None else None,
        )


def _partial_sums(program: Program) -> Iterator[Value]:
    """Values that carry an n-ary sum's tensor but hold some of its operands only: the sum itself takes them up."""
    found: set[Value] = set()
    for i in reversed(program.instructions):
        if i.body is not None:
            yield from _partial_sums(i.body)
        elif i.is_reshard:
            found.update(x for x, y in zip(i.inputs, i.outputs, strict=True) if y in found)
        elif i.outputs:
            found.update(x for x in i.inputs if x.tensor is i.outputs[0].tensor)
    yield from found


# ---------------------------------------------------------------- feeds and state


def _feeds(
    program: Program, known: Iterable[str], given: Mapping[str, Any], seed: int, narrow: int
) -> dict[str, Array]:
    """The feeds as given, the others drawn."""
    own = [n for n in known if not n.startswith(_COTANGENT)]
    unknown = [f"unknown input '{n}'{nearest(n, own)}" for n in given if n not in own]
    if unknown:
        raise FeedError(f"verify: {'; '.join(unknown)}; the graph's inputs: {', '.join(own) or 'none'}")
    operations = [i.operation for i in program.instructions if not i.is_reshard]
    fed = {}
    for n, (name, v) in enumerate(sorted(program.inputs.items())):
        op, t = v.tensor.operation, v.tensor
        x = given[name] if name in given else _drawn(op, np.random.default_rng([seed, 0, n]), operations, narrow)
        fed[name] = to_storage(x, t.shape, t.dtype, f"input '{name}' ({op.source})")
    return fed


def _initial_state(program: Program, given: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """The variables as given, the others initial, with noise on trainable ones that are the same everywhere."""
    state = State(seed)
    operations = {n: v.tensor.operation for n, v in program.variables.items() if n != STEP}
    state.declare(operations)
    for name, op in sorted(operations.items()):
        x = state.arrays[name]
        if name not in given and op.attrs["trainable"] and x.dtype.kind == "f" and np.all(x == x.flat[0]):
            rng = np.random.default_rng([seed, 3, *name.encode()])
            state.arrays[name] = to_storage(
                x + 0.1 * rng.normal(size=x.shape), op.output.shape, op.output.dtype, f"variable '{name}'"
            )
    for name, x in given.items():
        state[name] = x
    return dict(state.arrays)
