"""Graph, Tensor, Operation: the program as written, plain data without layouts or numbers.

Operations are appended in the order in which the user's code runs, so the list is already a topological order.
Each carries the name scope, the source line (`meshlib.core.source_lines` says whose) and the region (forward, backward,
update) it belongs to: the lowering and every message need them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from layouts import Dimension, Shape
from meshlib.core.dtypes import DType
from meshlib.core.errors import GraphError, nearest
from meshlib.core.foreign_names import OF_NUMPY, OF_TENSORS
from meshlib.core.loop_body import LoopBody
from meshlib.core.public_calls import record
from meshlib.core.shown import Shown
from meshlib.core.source_lines import source_line

if TYPE_CHECKING:
    from meshlib.core.loop_record import LoopRecord
    from meshlib.core.opdef import OpDef
    from meshlib.core.replay import Rewrite

T = TypeVar("T")

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

_graphs: ContextVar[tuple[Graph, ...]] = ContextVar("graphs", default=())
_scopes: ContextVar[tuple[str, ...]] = ContextVar("scopes", default=())
_reuse: ContextVar[bool] = ContextVar("reuse", default=False)
_region: ContextVar[tuple[str, Operation | None]] = ContextVar("region", default=(FORWARD, None))


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype: what shape rules take and return."""

    shape: Shape
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"

    @property
    def of_cotangents(self) -> TensorType:
        """The type of cotangents of its values."""
        return TensorType(self.shape, self.dtype.of_cotangents)


# What Python calls of the right operand, by NumPy's name of the operation.
_REFLECTED = {
    "add": "__radd__", "subtract": "__rsub__", "multiply": "__rmul__", "true_divide": "__rtruediv__",
    "divide": "__rtruediv__", "floor_divide": "__rfloordiv__", "remainder": "__rmod__",
}  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Tensor(Shown):
    """One value of the program: global shape with named dims, and the operation that makes it.

    Python operators work by dim name: `x + y` broadcasts over the dims that one side lacks.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, b = mtf.input("x", "batch:8;d:4"), mtf.input("b", "d:4")
      ...     y = x + b
      >>> print(y.shape, y.dtype, y.operation.opdef.name)
      [batch:8, d:4] f32 add
    """

    name: str
    shape: Shape
    dtype: DType
    operation: Operation

    @property
    def graph(self) -> Graph:
        """The graph that holds this tensor."""
        return self.operation.graph

    @property
    def type(self) -> TensorType:
        """Shape and dtype as one value."""
        return TensorType(self.shape, self.dtype)

    @property
    def on_host(self) -> bool:
        """Whether the value lies in host memory: what `mtf.Remat(offload=...)` keeps for a gradient."""
        loop = self.operation.loop
        if loop is None:
            return bool(self.operation.attrs.get("on_host"))
        number = self.operation.outputs.index(self) - loop.carries
        return number >= 0 and loop.stacked[number].on_host

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{self.shape}"

    def __repr__(self) -> str:
        text = str(self)
        return text if len(text) <= 200 else f"{text[:197]}..."

    def __bool__(self) -> bool:
        raise GraphError(
            f"tensor '{self.name}' ({self.operation.source}) has no truth value while the program is being written; "
            "use mtf.where(condition, x, y) to choose by value"
        )

    def __len__(self) -> int:
        raise GraphError(
            f"tensor '{self.name}' has no length, but dims {self.shape}: take x.shape.dim(name).size, or len(x.shape)"
        )

    def __float__(self) -> float:
        raise GraphError(
            f"tensor '{self.name}' ({self.operation.source}) has no number while the program is being written; take it "
            "from what a step of mtf.simulate(mtf.lower({'x': x})) returns"
        )

    def __int__(self) -> int:
        return int(float(self))

    def __iter__(self) -> Iterator[Any]:
        raise GraphError(f"tensor '{self.name}' can't be iterated; address its dims {self.shape} by name")

    def __getitem__(self, key: object) -> Any:
        raise GraphError(
            f"tensor '{self.name}' can't be indexed with {key!r:.40}; use mtf.slice, mtf.gather or mtf.one_hot on one "
            f"of its dims {self.shape}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols that ask whether there is such a method
            raise AttributeError(name)
        there = OF_TENSORS.get(name) or f"mtf.{name}(x, ...), if there is one"
        raise AttributeError(f"tensor '{self.name}' has no '{name}': {there}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """`array * tensor` is the tensor's own product; no other function of NumPy takes a tensor."""
        reflected = _REFLECTED.get(ufunc.__name__)
        if method == "__call__" and reflected and len(inputs) == 2 and inputs[1] is self and not options:
            return getattr(self, reflected)(inputs[0])
        name = OF_NUMPY.get(ufunc.__name__, ufunc.__name__)
        raise GraphError(f"np.{ufunc.__name__} takes no tensor ('{self.name}'); write mtf.{name}")

    def __array__(self, *args: object, **options: object) -> Any:
        raise GraphError(
            f"tensor '{self.name}' has no numbers while the program is being written; lower it, simulate the program "
            "and take what sim.step() returns"
        )

    # The operators are set by meshlib.ops.pointwise.operators, where the operations they build are defined; their
    # types are declared here.
    if TYPE_CHECKING:

        def __add__(self, other: Tensor | float) -> Tensor: ...
        def __radd__(self, other: float) -> Tensor: ...
        def __sub__(self, other: Tensor | float) -> Tensor: ...
        def __rsub__(self, other: float) -> Tensor: ...
        def __mul__(self, other: Tensor | float) -> Tensor: ...
        def __rmul__(self, other: float) -> Tensor: ...
        def __truediv__(self, other: Tensor | float) -> Tensor: ...
        def __rtruediv__(self, other: float) -> Tensor: ...
        def __floordiv__(self, other: Tensor | float) -> Tensor: ...
        def __rfloordiv__(self, other: float) -> Tensor: ...
        def __mod__(self, other: Tensor | float) -> Tensor: ...
        def __rmod__(self, other: float) -> Tensor: ...
        def __pow__(self, other: Tensor | float) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __and__(self, other: Tensor) -> Tensor: ...
        def __or__(self, other: Tensor) -> Tensor: ...
        def __lt__(self, other: Tensor | float) -> Tensor: ...
        def __le__(self, other: Tensor | float) -> Tensor: ...
        def __gt__(self, other: Tensor | float) -> Tensor: ...
        def __ge__(self, other: Tensor | float) -> Tensor: ...


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """One step of the program: a record (`opdef`), its operands and attributes, and where it was written.

    `name` is its path of scopes, `source` a line of the user's; in a gradient both are those of the operation whose
    gradient it is, with "/grad" after the name. In the update region `source` is the line that asked for the update.
    `owner` is the variable an update-region operation works for: its values live where that variable's slots do.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph(), mtf.scope("block"):
      ...     op = mtf.exp(mtf.input("x", "d:4")).operation
      >>> op.name, op.opdef.name, [x.name for x in op.inputs]
      ('block/exp', 'exp', ['block/x'])
    """

    name: str
    opdef: OpDef
    inputs: tuple[Tensor, ...]
    attrs: Mapping[str, Any]
    graph: Graph
    region: str
    source: str
    owner: Operation | None = None
    outputs: tuple[Tensor, ...] = ()

    @property
    def output(self) -> Tensor:
        """The first output; most operations have no other."""
        return self.outputs[0]

    @property
    def loop(self) -> LoopRecord | None:
        """What is repeated, if this is a loop."""
        return self.attrs.get("loop")

    @property
    def public_outputs(self) -> tuple[Tensor, ...]:
        """The outputs that the user knows of: not what a loop stacks up for its gradient."""
        loop = self.loop
        return self.outputs if loop is None else self.outputs[: len(loop.results)]

    @property
    def needs(self) -> Sequence[int]:
        """The operands whose values it needs, by number: of a loop only those that its body computes with.

        The others matter to gradients: they led to what the body is given.
        """
        loop = self.loop
        return range(len(self.inputs)) if loop is None else loop.needs

    # A copy of one operation is a copy of its graph, which holds them in a row: chains of operands may be too long to
    # be followed one call within another.
    def __getstate__(self) -> Graph:
        return self.graph

    def __setstate__(self, graph: Graph) -> None:
        """Nothing to do: `Graph.__setstate__` fills its operations in."""

    def __copy__(self) -> Operation:
        return self

    def __str__(self) -> str:
        return f"{self.opdef.name} '{self.name}' ({self.source})"

    __repr__ = __str__


@dataclass(eq=False, repr=False)
class Graph(Shown):
    """The list of operations of one program; a context in which sources (`variable`, `input`, ...) are made.

    >>> with Graph() as graph:
    ...     pass
    >>> len(graph.operations)
    0
    """

    operations: list[Operation] = field(default_factory=list)
    variables: dict[str, Operation] = field(default_factory=dict)
    inputs: dict[str, Operation] = field(default_factory=dict)
    # gradient tensor -> the variable whose home (its slots') it takes
    gradient_of: dict[Tensor, Operation] = field(default_factory=dict)
    loop_body: LoopBody | None = None  # of a loop's body: what it is to the loop
    # results of operations that were written again, of which the value is there already: what to take in their place.
    # Gradients pass through the copies; the lowering drops those that nobody needs any more.
    known: dict[Tensor, Tensor] = field(default_factory=dict)
    # operations whose results the user never sees: see `meshlib.core.public_calls`
    inner: set[Operation] = field(default_factory=set)
    # the dims whose sizes the user named, where others came from elsewhere: a rule need not divide those; None: all
    named_dims: frozenset[Dimension] | None = None
    # dims whose size follows from an argument of what built the graph: how to choose it where {blocks} must divide them
    remedies: dict[str, str] = field(default_factory=dict)
    # copies of operations of the forward pass that a backward pass computes again
    again: set[Operation] = field(default_factory=set)
    # runs of operations with a gradient of their own; inner ones come before those around them
    rewrites: list[Rewrite] = field(default_factory=list)
    # of a loop's body: the scope that names its operations
    scope: tuple[str, ...] = ()
    _counts: dict[str, int] = field(default_factory=dict)
    _tokens: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        stored = sum(v.output.shape.size for v in self.variables.values())
        return (
            f"<Graph of {len(self.operations):,} operations, {len(self.inputs):,} inputs and {len(self.variables):,} "
            f"variables of {stored:,} elements>"
        )

    def __enter__(self) -> Graph:
        self._tokens.append(_graphs.set((*_graphs.get(), self)))
        return self

    def __exit__(self, *exc: object) -> None:
        _graphs.reset(self._tokens.pop())

    def __getstate__(self) -> dict[str, Any]:
        rows = [[getattr(op, f.name) for f in fields(Operation)] for op in self.operations]
        # Whoever loads it is not inside its `with`.
        return {**vars(self), "_tokens": [], "rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for op, row in zip(state["operations"], state.pop("rows"), strict=True):
            for f, value in zip(fields(Operation), row, strict=True):
                object.__setattr__(op, f.name, value)
        vars(self).update(state)

    def __copy__(self) -> Graph:
        raise GraphError("a graph can't share its operations with a copy; use copy.deepcopy")

    @property
    def trainable_variables(self) -> tuple[Tensor, ...]:
        """The stored values of all trainable variables, in the order in which they were declared."""
        return tuple(v.output for v in self.variables.values() if v.attrs["trainable"])

    @property
    def parent(self) -> Graph | None:
        """Of a loop's body: the graph that holds the loop."""
        return None if self.loop_body is None else self.loop_body.parent

    @property
    def root(self) -> Graph:
        """The outermost graph, which holds the variables and inputs of the program."""
        return self if self.parent is None else self.parent.root

    @property
    def around(self) -> tuple[Graph, ...]:
        """This graph, and those of the loops around it."""
        return (self,) if self.parent is None else (self, *self.parent.around)

    @property
    def stacking(self) -> tuple[Dimension, ...]:
        """The dims that variables made here have before their own: those of the loops that stack or hold them."""
        return () if self.loop_body is None else (*self.loop_body.parent.stacking, *self.loop_body.first_dims)

    def outer_of(self, x: Tensor) -> Tensor | None:
        """What `x`, a stand-in in a loop's body, stands for outside; None of other tensors."""
        return None if self.loop_body is None else self.loop_body.outside.get(x)

    def adopt(self, x: Tensor, name: str | None = None) -> Tensor:
        """`x` as this graph sees it: itself, or the stand-in of a tensor from outside the loop."""
        body = self.loop_body
        if x.graph is self or body is None:
            return x
        outer = body.parent.adopt(x)
        if outer not in body.captured:
            from meshlib.ops.control.sources import INPUT

            attrs = {"shape": x.shape, "dtype": x.dtype, "on_host": x.on_host}
            full = name or self.unique_name(f"outer/{x.name}")
            op = self.inputs[full] = self.add(INPUT, (), (x.type,), attrs, exact_name=full)
            body.captured[outer] = op.output
            body.outside[op.output] = outer
        return body.captured[outer]

    def unique_name(self, base: str) -> str:
        """`base` inside the current scope, from the second use on with the first number that nobody took."""
        scoped = "/".join((*_scopes.get(), base))
        name, n = scoped, self._counts.get(scoped, 0)
        if n:
            while (name := f"{scoped}_{n}") in self._counts:
                n += 1
            self._counts[name] = 1
        self._counts[scoped] = n + 1
        return name

    def add(
        self,
        kind: OpDef,
        inputs: Sequence[Tensor],
        types: Sequence[TensorType],
        attrs: Mapping[str, Any],
        name: str | None = None,
        exact_name: str | None = None,
        last_outputs: Sequence[str] = (),
    ) -> Operation:
        """Append an operation of known output types; `last_outputs` names the last of these, others are numbered."""
        checked_op_name(name, kind.name)
        region, owner = _region.get()
        full = exact_name or self.unique_name(name or kind.name)
        op = Operation(full, kind, tuple(inputs), attrs, self, region, source_line(), owner)
        parts = [*range(len(types) - len(last_outputs)), *last_outputs]
        names = [f"{full}:{part}" if i else full for i, part in enumerate(parts)]
        outputs = tuple(Tensor(n, _one(t.shape), t.dtype, op) for n, t in zip(names, types, strict=True))
        object.__setattr__(op, "outputs", outputs)
        self.operations.append(op)
        record(op)
        return op


@lru_cache(maxsize=1 << 12)
def _one(shape: Shape) -> Shape:
    """The first of all equal shapes: the types of a model's layers are compared by identity."""
    return shape


def checked_op_name(name: object, what: str) -> None:
    """Refuse the name of an operation that is neither None nor a word."""
    if name is not None and (not isinstance(name, str) or not name or any(c.isspace() for c in name)):
        raise GraphError(
            f"{what} ({source_line()}): the name must be a non-empty string without white space, got {name!r:.80}"
        )


def current_graph(what: str) -> Graph:
    """The innermost graph context; sources need it because they have no operand to find it through."""
    graphs = _graphs.get()
    if not graphs:
        raise GraphError(f"{what} ({source_line()}) needs a graph: write it inside `with mtf.Graph() as graph:`")
    return graphs[-1]


def innermost(xs: Sequence[Tensor], what: str) -> Graph:
    """The graph of an operation on `xs`: the deepest loop body among theirs, which must lie in one another.

    In the function that writes a body it is that body, even if all of them come from outside.
    """
    deepest = max((x.graph for x in xs), key=lambda g: len(g.around))
    for x in xs:
        if x.graph not in deepest.around:
            kept = next(y for y in xs if y.graph is deepest)
            raise GraphError(
                f"{what} ({source_line()}): operand {x} ({x.operation.source}) belongs to another graph than "
                f"{kept} ({kept.operation.source}); build both in one `with mtf.Graph()`"
            )
    writing = _graphs.get()[-1] if _graphs.get() else deepest
    return writing if deepest in writing.around else deepest


def current_scope() -> tuple[str, ...]:
    """The names of the scopes around, outermost first."""
    return _scopes.get()


def scoped_name(name: str) -> str:
    """`name` inside the current scope, never numbered; loops around it do not show in it."""
    scope = _scopes.get()
    graph = _graphs.get()[-1] if _graphs.get() else None
    while graph is not None and graph.loop_body is not None:
        if scope[: len(graph.scope)] == graph.scope:
            scope = (*graph.loop_body.scope_around, *scope[len(graph.scope) :])
        graph = graph.parent
    return "/".join((*scope, name))


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def scope(name: str, reuse: bool = False) -> Iterator[None]:
    """Prefix the names of operations and variables made inside: `with mtf.scope("layer_0"):`.

    With `reuse` every variable declared inside, and in scopes inside it, is the one that bears its name already.
    Raises: GraphError if `name` is no non-empty string without white space.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     with mtf.scope("layer_0"):
      ...         y = mtf.relu(mtf.input("x", "d:2"), name="h")
      >>> y.operation.name
      'layer_0/h'
    """
    if not isinstance(reuse, bool):
        raise GraphError(f"scope '{name}' ({source_line()}): reuse must be True or False, got {reuse!r:.80}")
    if not isinstance(name, str) or not name.strip("/") or any(c.isspace() for c in name):
        raise GraphError(f"scope name must be a non-empty string without white space, got {name!r}")
    with _set(_scopes, (*_scopes.get(), name.strip("/"))), _set(_reuse, reuse or _reuse.get()):
        yield


def reusing() -> bool:
    """Whether a scope around says that variables are those that are there already."""
    return _reuse.get()


def absolute_scope(path: str) -> contextlib.AbstractContextManager[None]:
    """Replace the whole scope: gradients and slots take the names of what they belong to, not of the caller."""
    return _set(_scopes, tuple(p for p in path.split("/") if p))


def region(name: str, owner: Operation | None = None) -> contextlib.AbstractContextManager[None]:
    """Operations made inside belong to the region `name` (and work for the variable `owner`)."""
    return _set(_region, (name, owner))


def find_dim(x: Tensor, dim: Dimension | str, what: str) -> Dimension:
    """The dim of `x` that `dim` names; sizes must agree when a `Dimension` is given."""
    name = dim.name if isinstance(dim, Dimension) else dim
    if not isinstance(name, str):
        raise GraphError(f"{what} ({source_line()}): expected a dim or its name, got {type(dim).__name__} {dim!r:.80}")
    if name not in x.shape:
        raise GraphError(f"{what} ({source_line()}): {x} has no dim '{name}'{nearest(str(name), x.shape.names)}")
    own_dim = x.shape.dim(name)
    if isinstance(dim, Dimension) and dim.size != own_dim.size:
        raise GraphError(
            f"{what} ({source_line()}): dim '{name}' has size {own_dim.size} in {x}, but {dim.size} was given"
        )
    return own_dim
