"""Sources: constants, inputs, variables, the step counter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import copysign
from typing import Any

import numpy as np

from layouts import Dimension, Shape
from meshlib.core import initializers
from meshlib.core.arguments import at, fitting, flag
from meshlib.core.dtypes import DType, as_dtype
from meshlib.core.errors import GraphError, ShapeError, nearest
from meshlib.core.graph import (
    Graph,
    Operation,
    Tensor,
    TensorType,
    absolute_scope,
    current_graph,
    innermost,
    reusing,
    scoped_name,
)
from meshlib.core.names import relative_name
from meshlib.core.opdef import Array, Block, Kind, OpDef, PowerProduct, Storage, Work, operation
from meshlib.core.source_lines import source_line
from meshlib.ops.building import as_dims, build_source, named_factors, no_work, tensor, vector_work
from meshlib.ops.movement.tables import TABLE, table

STEP = "step"


def _shape(types: tuple[TensorType, ...], attrs: Mapping[str, Any]) -> TensorType:
    return TensorType(attrs["shape"], attrs["dtype"])


def _no_local(block: Block) -> Array:
    raise AssertionError(f"{block.operation.opdef.name} values come from the state or the feeds")


def source(name: str, kind: Kind, local: Callable[..., Array], work: Callable[..., Work], **traits: Any) -> OpDef:
    """Define an operation without operands, with the attributes `shape` and `dtype`."""
    return operation(
        name, kind=kind, shape=_shape, roles=named_factors, local=local, grad=lambda op, dy: [], work=work, **traits
    )


# ---------------------------------------------------------------- constants


def _constant_local(block: Block) -> Array:
    value = block.attrs["value"]
    return _filled(value, copysign(1.0, value), block.out.dtype.storage, block.out.shape.sizes)


@lru_cache(maxsize=4096)
def _filled(value: float, sign: float, dtype: np.dtype[Any], sizes: tuple[int, ...]) -> Array:
    """A read-only broadcast view of one number; `sign` distinguishes zeros."""
    return np.broadcast_to(np.asarray(value, dtype), sizes)


CONSTANT = source(
    "constant",
    Kind.SOURCE,
    _constant_local,
    vector_work,
    form=lambda op: PowerProduct((), float(op.attrs["value"])),
    storage=Storage.VIEW,
    remade=True,
)


def _constant(graph: Graph, value: float, shape: Shape, dtype: DType, name: str | None) -> Tensor:
    return build_source(graph, CONSTANT, {"value": value, "shape": shape, "dtype": dtype}, name).output


def beside(x: Tensor) -> Graph:
    """The graph in which a source next to `x` is created: inside a loop body if `x` is used there."""
    return innermost([x], "constant")


def is_zero(op: Operation) -> bool:
    """True if all elements of the result are zero."""
    if op.opdef is TABLE:
        return not op.attrs["value"].array.any()
    return op.opdef is CONSTANT and op.attrs["value"] == 0


def scalar(value: object, like: Tensor) -> Tensor:
    """A number as a tensor without dims, with the graph and dtype of `like`."""
    return _constant(beside(like), fitting(value, like.dtype, f"beside {like}"), Shape([]), like.dtype, None)


def constant_full(value: float, like: Tensor, dtype: DType | None = None) -> Tensor:
    """A tensor of one number everywhere, with the graph and shape of `like`, and its dtype by default."""
    return _constant(beside(like), value, like.shape, dtype or like.dtype, None)


def constant_shaped(value: float, shape: Shape, like: Tensor) -> Tensor:
    """A tensor of one number everywhere, with the graph and dtype of `like` and a given shape."""
    return _constant(beside(like), value, shape, like.dtype, None)


def constant_like(value: float, like: Tensor, dtype: object) -> Tensor:
    """A number as a tensor without dims, with the graph of `like` and a given dtype."""
    return _constant(beside(like), value, Shape([]), as_dtype(dtype), None)


def constant(
    value: float | Array | Sequence[Any],
    shape: Shape | Sequence[Dimension] | Dimension = (),
    dtype: object = "float32",
    name: str | None = None,
) -> Tensor:
    """A constant tensor: one number everywhere, or the elements of an array or nested lists with dims `shape`.

    Numbers are generated inside consuming kernels. An array, of up to 16 MiB, is part of the program and takes device
    memory.
    Raises: ShapeError for numbers that do not fit the dtype, an array whose sizes are not those of `shape`, and
      ragged lists.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.constant([2.0, 3.0, 5.0], mtf.Dimension("primes", 3)) * 2
      >>> mtf.simulate(mtf.lower({"y": y})).step()["y"].tolist()
      [4.0, 6.0, 10.0]
    """
    element_type = as_dtype(dtype)
    if isinstance(value, list | tuple):
        try:
            value = np.asarray(value)
        except ValueError:
            raise ShapeError(f"{at('constant')}: lists in a list must be of one length, got {value!r:.80}") from None
    if isinstance(value, np.ndarray):
        return table(current_graph("constant"), value, Shape(as_dims(shape, "constant")), element_type, name)
    fitted = fitting(value, element_type, "constant")
    return _constant(current_graph("constant"), fitted, Shape(as_dims(shape, "constant")), element_type, name)


def zeros(shape: Shape | Sequence[Dimension] | Dimension, dtype: object = "float32", name: str | None = None) -> Tensor:
    """A tensor of zeros.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.zeros("d:2", "int32")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [0 0]
    """
    return constant(0, shape, dtype, "zeros" if name is None else name)


def ones(shape: Shape | Sequence[Dimension] | Dimension, dtype: object = "float32", name: str | None = None) -> Tensor:
    """A tensor of ones.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.ones("d:2")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [1. 1.]
    """
    return constant(1, shape, dtype, "ones" if name is None else name)


def zeros_like(t: Tensor, name: str | None = None) -> Tensor:
    """Zeros of the shape and dtype of `t`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.zeros_like(mtf.ones("d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [0. 0.]
    """
    return _like(t, 0, "zeros", name)


def ones_like(t: Tensor, name: str | None = None) -> Tensor:
    """Ones of the shape and dtype of `t`.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.ones_like(mtf.zeros("d:2"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [1. 1.]
    """
    return _like(t, 1, "ones", name)


def _like(t: Tensor, value: int, what: str, name: str | None) -> Tensor:
    fitted = fitting(value, tensor(t, f"{what}_like").dtype, f"{what}_like")
    return _constant(beside(t), fitted, t.shape, t.dtype, what if name is None else name)


# ---------------------------------------------------------------- inputs and variables

INPUT = source("input", Kind.INPUT, _no_local, no_work, unique=True)
VARIABLE = source("variable", Kind.VARIABLE, _no_local, no_work, unique=True)


def _check_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not all(name.split("/")) or any(c.isspace() for c in name):
        raise GraphError(
            f"{at(what)}: the name must be a non-empty string without white space, its parts joined by single '/', "
            f"got {name!r}"
        )
    if name == "__metadata__":
        raise GraphError(f"{at(what)}: the name '__metadata__' is taken in checkpoint files; use another")
    return scoped_name(name)


def input(name: str, shape: Shape | Sequence[Dimension] | Dimension, dtype: object = "float32") -> Tensor:
    """A value fed at every step under `name`: `sim.step(images=x)`.

    Raises: GraphError if the name is taken by another input of the graph.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.input("x", "batch:2;d:2") * 2.0
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[[1.0, 2.0], [3.0, 4.0]])["y"])
      [[2. 4.]
       [6. 8.]]
    """
    graph = current_graph("input").root
    full = _check_name(name, "input")
    if full in graph.inputs:
        raise GraphError(
            f"input '{full}' is declared twice: at {graph.inputs[full].source} and at {source_line()}; "
            "pass the tensor on, or use another name or mtf.scope"
        )
    attrs = {"shape": Shape(as_dims(shape, f"input '{full}'")), "dtype": as_dtype(dtype)}
    op = build_source(graph, INPUT, attrs, exact_name=full)
    graph.inputs[full] = op
    return op.output


def variable(
    name: str,
    shape: Shape | Sequence[Dimension] | Dimension,
    initializer: initializers.Initializer | float | Array | None = None,
    dtype: object = "float32",
    slice_dtype: object | None = None,
    activation_dtype: object | None = None,
    trainable: bool = True,
) -> Tensor:
    """A value that persists between steps, named within the current scope.

    Args:
      name: unique in the graph; names are never numbered. To share a variable, pass the tensor.
      shape: dims of the variable.
      initializer: a function of `meshlib.core.initializers`, a number, an array, or None for
        `initializers.glorot_uniform()` (for int8 and int4 uniform integers over their range). Initial values depend on
        seed and name alone, never on a layout.
      dtype: dtype of `sim.state[name]`.
      slice_dtype: dtype stored on devices; by default `dtype`.
      activation_dtype: dtype of the returned tensor, by a cast; by default `slice_dtype`.
      trainable: whether optimizers update it.
    Returns: the variable's value.
    Raises: GraphError if the name is taken (names both lines). Inside `mtf.scope(..., reuse=True)` a variable of the
      name with the same dims and dtypes must exist, and is returned with its original initializer and `trainable`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.variable("w", "d:2", mtf.initializers.constant(3.0)) + 1.0
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      [4. 4.]
    """
    dims = Shape(as_dims(shape, f"variable '{name}'"))
    if not reusing():
        return make_variable(name, dims, initializer, dtype, slice_dtype, activation_dtype, trainable)
    value = _reused(name, dims, dtype, slice_dtype)
    return value if activation_dtype is None else _activation(value, name, activation_dtype)


def _reused(name: str, shape: Shape, dtype: object, slice_dtype: object | None) -> Tensor:
    inside = current_graph("variable")
    full, known = _check_name(name, "variable"), inside.root.variables
    if full not in known:
        raise GraphError(f"{at('variable')}: no variable '{full}' to reuse{nearest(full, known)}")
    op = known[full]
    public = as_dtype(dtype)
    stored = public if slice_dtype is None else as_dtype(slice_dtype)
    stacked = op.output.shape == Shape([*inside.stacking, *shape])
    same = (op.attrs["public_dtype"], op.output.dtype) == (public, stored)
    if not same or not (stacked or op.output.shape == shape):
        declared = f"{op.output.dtype}{op.output.shape}, read as {op.attrs['public_dtype']}"
        raise GraphError(
            f"{at('variable')}: '{full}' can't be reused as {stored}{shape}, read as {public}: it was declared at "
            f"{op.source} as {declared}"
        )
    return _slice_for(inside, op.output) if stacked else op.output


def make_variable(
    name: str,
    shape: Shape,
    initializer: initializers.Initializer | float | Array | None,
    dtype: object = "float32",
    slice_dtype: object | None = None,
    activation_dtype: object | None = None,
    trainable: bool = True,
    slot_of: str | None = None,
    on_host: bool = False,
) -> Tensor:
    """`variable`, or a slot of the variable named `slot_of`, to which `slots/` layout rules apply.

    With `on_host` it is stored in host memory; `from_host` copies its value to HBM.
    """
    inside = current_graph("variable")
    graph = inside.root
    full = _check_name(name, "variable")
    public = as_dtype(dtype)
    stored = as_dtype(slice_dtype) if slice_dtype is not None else public
    initial = initializers.as_initializer(initializer, full, shape, stored)
    stacks = inside.stacking
    for dim in stacks:
        if dim.name in shape:
            raise ShapeError(f"{at('variable')}: '{full}' has the dim {dim} of the loop that stacks it; rename it")
    attrs = {
        "shape": Shape([*stacks, *shape]),
        "dtype": stored,
        "public_dtype": public,
        "initializer": initializers.stacked(initial, len(stacks)) if stacks else initial,
        "trainable": flag(trainable, "variable", "trainable"),
        "slot_of": slot_of,
        **({"on_host": True} if on_host else {}),
    }
    if full == STEP:
        raise GraphError(f"variable name '{STEP}' is the step counter's; use mtf.step()")
    if full in graph.variables:
        raise GraphError(
            f"variable '{full}' is declared twice: at {graph.variables[full].source} and at {source_line()}; "
            "pass the tensor on to share it, or use another name or mtf.scope"
        )
    op = build_source(graph, VARIABLE, attrs, exact_name=full)
    graph.variables[full] = op
    value = _slice_for(inside, op.output)
    return value if activation_dtype is None else _activation(value, name, activation_dtype)


def _activation(value: Tensor, name: str, dtype: object) -> Tensor:
    from meshlib.ops.pointwise.casts import cast

    # The cast is next to the variable, outside loops; but inside loops over pipeline stages, which sum gradients in the
    # stored dtype.
    holding = [g for g in current_graph("variable").around if holds_stages(g) and value.graph in g.around]
    with holding[-1] if holding else value.graph:
        return cast(value, dtype, f"{name}/cast")


def holds_stages(graph: Graph) -> bool:
    """True if the graph is the body of a loop over pipeline stages."""
    return graph.loop_body is not None and bool(graph.loop_body.held)


def _slice_for(graph: Graph, value: Tensor) -> Tensor:
    """The tensor for a variable in `graph`: its slice, in the body of a loop that stacks its variables."""
    body = graph.loop_body
    if body is None:
        return value
    outer = _slice_for(body.parent, value)
    if body.chosen is not None:
        return _stage_part(graph, body.choices, outer, *body.chosen)
    if body.stacks is None or outer in body.stacked:
        return body.stacked.get(outer, outer)
    shape = Shape([d for d in outer.shape if d != body.stacks])
    inside = "/".join(graph.scope)
    with absolute_scope(inside):
        name = graph.unique_name(relative_name(value.name, inside))
    op = build_source(graph, INPUT, {"shape": shape, "dtype": value.dtype}, exact_name=name)
    graph.inputs[name] = op
    body.stacked[outer] = op.output
    body.outside[op.output] = outer
    return op.output


def _stage_part(graph: Graph, choices: dict[Tensor, Tensor], value: Tensor, dim: Dimension, index: Tensor) -> Tensor:
    """The part of a variable that the pipeline stages read in this trip: each stage its own index of `dim`."""
    from meshlib.ops.movement.indexing import gather

    if value not in choices:
        inside = "/".join(graph.scope)
        with graph, absolute_scope(inside):
            choices[value] = gather(value, index, dim, name=relative_name(value.name, inside))
    return choices[value]


def step() -> Tensor:
    """The int32 number of steps with updates run so far; incremented at the end of each such step.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.step()
      >>> print(mtf.simulate(mtf.lower({"y": y})).step()["y"])
      0
    """
    graph = current_graph("step").root
    if STEP not in graph.variables:
        dtype = as_dtype("int32")
        attrs = {
            "shape": Shape([]),
            "dtype": dtype,
            "public_dtype": dtype,
            "initializer": initializers.constant(0),
            "trainable": False,
            "slot_of": None,
        }
        graph.variables[STEP] = build_source(graph, VARIABLE, attrs, exact_name=STEP)
    return graph.variables[STEP].output
