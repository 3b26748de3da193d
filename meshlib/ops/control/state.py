"""Identity, stop_gradient, constrain and assign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from layouts import LayoutRules
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, ShapeError, nearest
from meshlib.core.graph import UPDATE, Operation, Tensor, region
from meshlib.core.opdef import NONLINEAR, GradRule, Home, Kind, Linear, OpDef, Storage, operation
from meshlib.ops.building import build, named_factors, no_work, not_differentiable, tensor
from meshlib.ops.control.remat import FROM_HOST


def _define(name: str, grad: GradRule, linear: Linear, kind: Kind = Kind.VIEW, **traits: Any) -> OpDef:
    return operation(
        name,
        kind=kind,
        shape=lambda types, attrs: types[0],
        roles=named_factors,
        local=lambda block, x: x,
        grad=grad,
        linear=lambda op: linear,
        work=no_work,
        storage=Storage.ALIAS,
        exact=True,
        **traits,
    )


# These affect the gradient only; nothing runs.
IDENTITY = _define("identity", lambda op, dy: [dy], Linear((0,)), home=Home.OPERAND)
STOP_GRADIENT = _define("stop_gradient", not_differentiable, Linear((0,)), home=Home.OPERAND)
CONSTRAIN: OpDef = _define("constrain", lambda op, dy: [build(CONSTRAIN, [dy], op.attrs)], NONLINEAR, home=Home.GIVEN)
ASSIGN = _define("assign", not_differentiable, NONLINEAR, Kind.COMMIT, home=Home.OPERAND, unique=True)


def identity(x: Tensor, name: str | None = None) -> Tensor:
    """`x` under another name.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.identity(mtf.input("x", "d:4"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 1. 2. 0.]
    """
    return build(IDENTITY, [tensor(x, "identity")], {}, name)


def stop_gradient(x: Tensor, name: str | None = None) -> Tensor:
    """`x`, with no gradient flowing through.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.stop_gradient(mtf.input("x", "d:4"))
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 1. 2. 0.]
    """
    return build(STOP_GRADIENT, [tensor(x, "stop_gradient")], {}, name)


def constrain(x: Tensor, layout: object, name: str | None = None) -> Tensor:
    """`x` with a binding sharding from the rules `layout`: `mtf.constrain(x, "length:model")`.

    These rules replace the program's for this tensor and for its cotangent.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.constrain(mtf.input("x", "d:4"), "")
      >>> print(mtf.simulate(mtf.lower({"y": y})).step(x=[3.0, 1.0, 2.0, 0.0])["y"])
      [3. 1. 2. 0.]
    """
    rules = LayoutRules(layout)  # type: ignore[arg-type]
    tensor(x, "constrain")
    unknown = [d for d in rules.dims if d not in x.shape]
    if unknown:
        hint = nearest(unknown[0], x.shape.names)
        raise ShapeError(f"{at('constrain')}: {x} has no dim '{unknown[0]}' of the layout {rules}{hint}")
    return build(CONSTRAIN, [x], {"layout": rules}, name)


def assign(variable: Tensor, value: Tensor, name: str | None = None) -> Operation:
    """The update that writes `value` to `variable` at the end of a step of a program with it in `updates`.

    Reads in the same step see the state before it. `variable` is a tensor returned by `mtf.variable`.
    Raises: GraphError if it is not, ShapeError if shapes differ.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", mtf.initializers.zeros())
      ...     program = mtf.lower({}, [mtf.assign(w, w + 1.0)])
      >>> sim = mtf.simulate(program)
      >>> _ = sim.step()
      >>> print(sim.state["w"])
      [1. 1.]
    """
    target = stored(variable)
    old = target.output
    tensor(value, "assign")
    if set(value.shape) != set(old.shape):
        raise ShapeError(f"{at('assign')} to variable '{target.name}': the value {value} has other dims than {old}")
    if value.dtype is not old.dtype and not (value.dtype.is_float and old.dtype.is_float):
        raise ShapeError(
            f"{at('assign')} to variable '{target.name}': the value {value} does not fit {old}; cast it with mtf.cast"
        )
    with region(UPDATE, target):
        if value.shape != old.shape:
            from meshlib.ops.movement.shape import transpose

            value = transpose(value, old.shape)
        if value.dtype is not old.dtype:
            from meshlib.ops.pointwise.casts import cast

            value = cast(value, old.dtype)
        return build(ASSIGN, [value], {"variable": target.name}, name).operation


def assign_add(variable: Tensor, value: Tensor | float, name: str | None = None) -> Operation:
    """The update that adds `value` to `variable`, like `assign`; dims that `value` lacks are broadcast.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", mtf.initializers.zeros())
      ...     program = mtf.lower({}, [mtf.assign_add(w, mtf.ones("d:2"))])
      >>> sim = mtf.simulate(program)
      >>> _ = sim.step()
      >>> print(sim.state["w"])
      [1. 1.]
    """
    from meshlib.ops.pointwise.arithmetic import add

    return _assign_changed(add, variable, value, "assign_add", name)


def assign_sub(variable: Tensor, value: Tensor | float, name: str | None = None) -> Operation:
    """The update that subtracts `value` from `variable`, like `assign`; dims that `value` lacks are broadcast.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", "d:2", mtf.initializers.zeros())
      ...     program = mtf.lower({}, [mtf.assign_sub(w, mtf.ones("d:2"))])
      >>> sim = mtf.simulate(program)
      >>> _ = sim.step()
      >>> print(sim.state["w"])
      [-1. -1.]
    """
    from meshlib.ops.pointwise.arithmetic import subtract

    return _assign_changed(subtract, variable, value, "assign_sub", name)


def _assign_changed(
    change: Callable[..., Tensor], variable: Tensor, value: Tensor | float, what: str, name: str | None
) -> Operation:
    target = stored(variable)
    old = target.output
    with region(UPDATE, target):
        if isinstance(value, Tensor) and value.dtype.is_float and old.dtype.is_float:
            from meshlib.ops.pointwise.casts import cast

            value = cast(value, old.dtype)
        new = change(old, value)
    if set(new.shape) != set(old.shape):
        raise ShapeError(f"{at(what)} to variable '{target.name}': the value {value} has other dims than {old}")
    return assign(variable, new, what if name is None else name)


def stored(variable: Tensor) -> Operation:
    """The `variable` operation of a variable's value, looking through a cast and a copy from the host."""
    op = tensor(variable, "variable").operation
    from meshlib.ops.control.sources import VARIABLE
    from meshlib.ops.pointwise.casts import CAST

    while op.opdef in (CAST, FROM_HOST) and op.inputs[0].operation.opdef in (CAST, FROM_HOST, VARIABLE):
        op = op.inputs[0].operation
    if op.opdef is not VARIABLE:
        raise GraphError(
            f"{at('expected a variable')}: {variable} ({op.source}) is not a variable; pass the tensor returned "
            "by mtf.variable"
        )
    return op


def assigned(updates: Sequence[Operation]) -> dict[str, Operation]:
    """The updates by variable name; two writes to one variable are an error that names both lines."""
    update_of: dict[str, Operation] = {}
    for update in updates:
        if not isinstance(update, Operation) or update.opdef is not ASSIGN:
            raise GraphError(f"updates must be those returned by mtf.assign or an optimizer, got {update!r:.80}")
        name = update.attrs["variable"]
        if name in update_of and update_of[name] is not update:
            raise GraphError(
                f"variable '{name}' is written twice in one step: at {update_of[name].source} and at {update.source}"
            )
        update_of[name] = update
    return update_of
