"""Print: values shown on the host while a program runs."""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.core.arguments import at, items
from meshlib.core.errors import GraphError
from meshlib.core.graph import Operation, Tensor
from meshlib.core.opdef import Array, Factor, Kind, Linear, Role, Storage, operation
from meshlib.ops.building import build, tensor
from meshlib.ops.rules import named_factors, no_work


def _roles(op: Operation) -> tuple[Factor, ...]:
    x, *data = op.inputs
    return named_factors(op, {d.name: Role.WHOLE for t in data for d in t.shape if d.name not in x.shape})


def _show(op: Operation, data: Sequence[Array]) -> None:
    for t, value in zip(op.inputs[1:], data, strict=True):
        print(f"{op.attrs['message']}{t} = {value}", flush=True)


PRINT = operation(
    "print",
    kind=Kind.VIEW,
    shape=lambda types, attrs: types[0],
    roles=_roles,
    local=lambda block, x, *data: x,
    grad=lambda op, dy: [dy, *(None for _ in op.inputs[1:])],
    linear=lambda op: Linear((0,)),
    work=no_work,  # passes x through; the host's work is not counted
    storage=Storage.ALIAS,
    exact=True,
    show=_show,
)


def Print(x: Tensor, data: Sequence[Tensor], message: str = "", name: str | None = None) -> Tensor:
    """`x`, with the values of `data` printed to standard output whenever a simulation computes it.

    Both executors print each value unsharded, once per step (in a loop once per trip), whatever the layout. A line is
    the message, the tensor with its type, " = ", and the value as NumPy prints it. If `x` is unused nothing is printed;
    equal prints are merged. Gradients pass through without being printed, and recomputation does not print again.
    `mtf.verify` prints in each run. Estimates count only the resharding of `data`.

    Args:
      x: any tensor.
      data: the tensors to print. Their dims that x lacks are gathered on every device.
      message: the beginning of each line.
      name: of the operation, in listings.
    Returns: x.
    Raises: GraphError for a message that is not a str.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("d", 4)])
      ...     y = mtf.Print(x * 2.0, [x, mtf.reduce_max(x, name="top")], "step: ")
      >>> program = mtf.lower({"y": y}, mesh="p:2", layout="d:p")
      >>> mtf.simulate(program).step(x=[1, 2, 3, 4])["y"].tolist()
      step: x: f32[d:4] = [1. 2. 3. 4.]
      step: top: f32[] = 4.0
      [2.0, 4.0, 6.0, 8.0]
    """
    if not isinstance(message, str):
        raise GraphError(f"{at('Print')}: message must be a text, got {type(message).__name__} {message!r:.80}")
    operands = [tensor(t, "Print") for t in (x, *items(data, "Print", "data"))]
    return build(PRINT, operands, {"message": message}, name)
