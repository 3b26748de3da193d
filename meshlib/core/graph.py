"""Graph, Tensor, Operation: the program as written, plain data without layouts or numbers.

Operations are appended in the order in which the user's code runs, so the list is a topological order. Each carries
its name scope, source line (see `meshlib.core.source_lines`) and region (forward, backward, update), which the lowering
and every message need.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from layouts import Dimension, Shape
from meshlib.core.dtypes import DType
from meshlib.core.errors import GraphError, nearest
from meshlib.core.foreign_names import OF_GRAPHS, OF_NUMPY, OF_TENSORS
from meshlib.core.loop_record import LoopBody
from meshlib.core.public_calls import record
from meshlib.core.shown import Shown
from meshlib.core.source_lines import source_line
from meshlib.core.text import counted

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
    """Shape and dtype: operands and results of shape rules."""

    shape: Shape
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"

    @property
    def of_cotangents(self) -> TensorType:
        """The type of cotangents of its values."""
        return TensorType(self.shape, self.dtype.of_cotangents)


# NumPy name of an operation -> the reflected method that Python calls on the right operand.
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
        """True if the value is in host memory, as values kept by `mtf.Remat(offload=...)` for a gradient are."""
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
            f"tensor '{self.name}' has no length, but dims {self.shape}: use x.shape.dim(name).size, or len(x.shape)"
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
        if name.startswith("_"):  # protocols that probe for a method of this name
            raise AttributeError(name)
        there = OF_TENSORS.get(name) or (f"mtf.{name}(x, ...)" if hasattr(sys.modules["meshlib"], name) else "")
        hint = f": {there}" if there else nearest(name, dir(type(self)))
        raise AttributeError(f"tensor '{self.name}' has no '{name}'{hint}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """`array * tensor` is the tensor's own product; other NumPy functions refuse tensors."""
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

    # Operators are assigned by meshlib.ops.pointwise.operators, which defines their operations; their types are
    # declared here.
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

    `name` is its scoped name, `source` the user's line; gradient operations take both from the differentiated
    operation, with "/grad" after the name. In the update region `source` is the line that requested the update. `owner`
    is the variable that an update-region operation updates: its values are sharded like that variable's slots.

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
    output: Tensor = field(init=False)  # the first; most operations have only one
    loop: LoopRecord | None = field(init=False)  # the loop record, if this is a loop

    def __post_init__(self) -> None:
        object.__setattr__(self, "loop", self.attrs.get("loop"))
        self.make(self.outputs)

    def make(self, outputs: tuple[Tensor, ...]) -> None:
        """Set the outputs, which refer to this operation."""
        object.__setattr__(self, "outputs", outputs)
        if outputs:
            object.__setattr__(self, "output", outputs[0])

    @property
    def public_outputs(self) -> tuple[Tensor, ...]:
        """The outputs that the user's code sees: not those that a loop stacks for its gradient."""
        loop = self.loop
        return self.outputs if loop is None else self.outputs[: len(loop.results)]

    @property
    def needs(self) -> Sequence[int]:
        """The indices of the operands that are read: for a loop, those that its body computes with.

        The other operands of a loop only carry gradients to the values that the body is given.
        """
        loop = self.loop
        return range(len(self.inputs)) if loop is None else loop.needs

    # Copying one operation copies its graph, which stores operations as a flat list: recursion along chains of operands
    # could overflow the stack.
    def __getstate__(self) -> Graph:
        return self.graph

    def __setstate__(self, graph: Graph) -> None:
        """A no-op: `Graph.__setstate__` restores its operations."""

    def __copy__(self) -> Operation:
        return self

    def __str__(self) -> str:
        return f"{self.opdef.name} '{self.name}' ({self.source})"

    __repr__ = __str__


@dataclass(eq=False, repr=False, kw_only=True)
class Graph(Shown):
    """The list of operations of one program; also the context in which sources (`variable`, `input`, ...) are created.

    >>> import meshlib as mtf
    >>> with mtf.Graph() as graph:
    ...     pass
    >>> len(graph.operations)
    0
    """

    operations: list[Operation] = field(default_factory=list)
    variables: dict[str, Operation] = field(default_factory=dict)
    inputs: dict[str, Operation] = field(default_factory=dict)
    # gradient tensor -> the variable whose assigned sharding (that of its slots) it takes
    gradient_of: dict[Tensor, Operation] = field(default_factory=dict)
    loop_body: LoopBody | None = None  # set if this graph is the body of a loop
    # result of a rewritten operation -> the equal existing tensor. Gradients pass through the copies; the lowering
    # drops those that are no longer needed.
    known: dict[Tensor, Tensor] = field(default_factory=dict)
    # operations whose results are hidden from the user: see `meshlib.core.public_calls`
    inner: set[Operation] = field(default_factory=set)
    # dims whose sizes the user chose, if others were derived: rules must divide only these; None: all dims
    named_dims: frozenset[Dimension] | None = None
    # dim whose size follows from a builder argument -> remedy for that argument, if {blocks} must divide the size
    remedies: dict[str, str] = field(default_factory=dict)
    # recomputed copies, in the backward pass, of forward operations
    again: set[Operation] = field(default_factory=set)
    # groups of operations with a custom gradient, inner ones before outer ones
    rewrites: list[Rewrite] = field(default_factory=list)
    # for the body of a loop: the scope of its operations
    scope: tuple[str, ...] = ()
    _counts: dict[str, int] = field(default_factory=dict)
    _tokens: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        stored = sum(v.output.shape.size for v in self.variables.values())
        sources = f"{counted(len(self.inputs), 'input')} and {counted(len(self.variables), 'variable')}"
        operations, elements = counted(len(self.operations), "operation"), counted(stored, "element")
        return f"<{type(self).__name__} of {operations}, {sources} of {elements}>"

    if not TYPE_CHECKING:  # mypy reports unknown names

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            hint = f": {OF_GRAPHS[name]}" if name in OF_GRAPHS else nearest(name, dir(self))
            raise AttributeError(f"a graph has no '{name}'{hint}")

    def __enter__(self) -> Graph:
        self._tokens.append(_graphs.set((*_graphs.get(), self)))
        return self

    def __exit__(self, *exc: object) -> None:
        _graphs.reset(self._tokens.pop())

    def __getstate__(self) -> dict[str, Any]:
        rows = [[getattr(op, f.name) for f in fields(Operation) if f.init] for op in self.operations]
        # An unpickled graph is not an active context.
        return {**vars(self), "_tokens": [], "rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for op, row in zip(state["operations"], state.pop("rows"), strict=True):
            for f, value in zip([f for f in fields(Operation) if f.init], row, strict=True):
                object.__setattr__(op, f.name, value)
            op.__post_init__()
        vars(self).update(state)

    def __copy__(self) -> Graph:
        raise GraphError("a graph can't share its operations with a copy; use copy.deepcopy")

    @property
    def trainable_variables(self) -> tuple[Tensor, ...]:
        """The values of all trainable variables, in order of declaration."""
        return tuple(v.output for v in self.variables.values() if v.attrs["trainable"])

    @property
    def parent(self) -> Graph | None:
        """The graph with the loop whose body this is, else None."""
        return None if self.loop_body is None else self.loop_body.parent

    @property
    def root(self) -> Graph:
        """The outermost graph, which has the variables and inputs of the program."""
        return self if self.parent is None else self.parent.root

    @property
    def around(self) -> tuple[Graph, ...]:
        """This graph, followed by those of the enclosing loops."""
        return (self,) if self.parent is None else (self, *self.parent.around)

    @property
    def stacking(self) -> tuple[Dimension, ...]:
        """Leading dims of variables created here: those of the enclosing loops that stack or hold them."""
        return () if self.loop_body is None else (*self.loop_body.parent.stacking, *self.loop_body.first_dims)

    def outer_of(self, x: Tensor) -> Tensor | None:
        """The outer tensor for `x`, a stand-in in a loop body; None for other tensors."""
        return None if self.loop_body is None else self.loop_body.outside.get(x)

    def adopt(self, x: Tensor) -> Tensor:
        """`x` in this graph: itself, or the stand-in for a tensor from outside the loop."""
        body = self.loop_body
        if x.graph is self or body is None:
            return x
        outer = body.parent.adopt(x)
        if outer not in body.captured:
            from meshlib.ops.control.sources import INPUT

            attrs = {"shape": x.shape, "dtype": x.dtype, "on_host": x.on_host}
            name = self.unique_name(f"outer/{x.name}")
            op = self.inputs[name] = self.add(INPUT, (), (x.type,), attrs, exact_name=name)
            body.captured[outer] = op.output
            body.outside[op.output] = outer
        return body.captured[outer]

    def unique_name(self, base: str) -> str:
        """`base` in the current scope, with the first free number appended if it is taken."""
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
        """Append an operation of known output types; `last_outputs` names its last outputs, the others are numbered."""
        checked_op_name(name, kind.name)
        region, owner = _region.get()
        full = exact_name or self.unique_name(name or kind.name)
        op = Operation(full, kind, tuple(inputs), attrs, self, region, source_line(), owner)
        parts = [*range(len(types) - len(last_outputs)), *last_outputs]
        names = [f"{full}:{part}" if i else full for i, part in enumerate(parts)]
        op.make(tuple([Tensor(n, _interned(t.shape), t.dtype, op) for n, t in zip(names, types, strict=True)]))
        self.operations.append(op)
        record(op)
        return op


@lru_cache(maxsize=1 << 12)
def _interned(shape: Shape) -> Shape:
    """Interned shape: the types of a model's layers are compared by identity."""
    return shape


def checked_op_name(name: object, what: str) -> None:
    """Refuse operation names other than None and non-empty strings without white space."""
    if name is not None and (not isinstance(name, str) or not name or any(c.isspace() for c in name)):
        raise GraphError(
            f"{what} ({source_line()}): the name must be a non-empty string without white space, got {name!r:.80}"
        )


def current_graph(what: str) -> Graph:
    """The innermost graph context, for sources, which have no operand to take a graph from."""
    graphs = _graphs.get()
    if not graphs:
        raise GraphError(f"{what} ({source_line()}) needs a graph: write it inside `with mtf.Graph() as graph:`")
    return graphs[-1]


def innermost(xs: Sequence[Tensor], what: str) -> Graph:
    """The graph for an operation on `xs`: the innermost loop body among their graphs, which must be nested.

    While a body is being traced it is that body, even if all of `xs` come from outside.
    """
    deepest, *others = dict.fromkeys([x.graph for x in xs])
    if others:
        deepest = max((x.graph for x in xs), key=lambda g: len(g.around))
    for x in xs if others else ():
        if x.graph not in deepest.around:
            innermost_operand = next(y for y in xs if y.graph is deepest)
            raise GraphError(
                f"{what} ({source_line()}): operand {x} ({x.operation.source}) belongs to another graph than "
                f"{innermost_operand} ({innermost_operand.operation.source}); build both in one `with mtf.Graph()`"
            )
    writing = _graphs.get()[-1] if _graphs.get() else deepest
    return writing if deepest in writing.around else deepest


def current_scope() -> tuple[str, ...]:
    """The names of the enclosing scopes, outermost first."""
    return _scopes.get()


def scoped_name(name: str) -> str:
    """`name` in the current scope, without a number and without the scopes of loops."""
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

    With `reuse` every variable declared inside, including nested scopes, is the existing one of that name.
    Raises: GraphError if `name` is not a non-empty string without white space.
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
    """True if an enclosing scope reuses existing variables."""
    return _reuse.get()


def absolute_scope(path: str) -> contextlib.AbstractContextManager[None]:
    """Replace the whole scope, as for gradients and slots, which are named after their tensors, not their caller."""
    return _set(_scopes, tuple(p for p in path.split("/") if p))


def region(name: str, owner: Operation | None = None) -> contextlib.AbstractContextManager[None]:
    """Operations created inside belong to the region `name` (and update the variable `owner`)."""
    return _set(_region, (name, owner))


def find_dim(x: Tensor, dim: Dimension | str, what: str) -> Dimension:
    """The dim of `x` named by `dim`; if a `Dimension` is given, its size must agree."""
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
