"""The traced function as records: values with axes, steps that compute them; calls inlined, constants folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from meshlib.core.errors import GraphError
from meshlib.jax.importing.axes import Axis

Array = np.ndarray[Any, Any]

# JAX dtype -> the library's dtype. Other integers are computed as int32; arguments in NARROW keep their dtype.
DTYPES = {
    **{name: name for name in ("float64", "float32", "bfloat16", "int32", "bool", "float8_e4m3fn", "float8_e5m2")},
    **dict.fromkeys(("int4", "int8", "int16", "int64", "uint8", "uint16", "uint32"), "int32"),
}
NARROW = ("int4", "int8")


def numpy_type(dtype: str) -> np.dtype[Any]:
    """The NumPy type of a JAX dtype."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


class NotImported(GraphError):
    """A JAX function has parts without a counterpart; the message lists all of them."""


@dataclass(eq=False, repr=False)
class Var:
    """One array of the traced function.

    `const`: its known elements, or one number if all are equal. `key`: it is a key of random
    numbers, which draws of the library do not need. `data`: it depends on an argument; `moves`: so that a gradient
    may pass to it. `level`: number of bodies, of loops and others, that contain it.
    """

    shape: tuple[int, ...]
    dtype: str
    space: int
    axes: list[Axis] = field(default_factory=list)
    const: Array | None = None
    key: bool = False
    data: bool = False
    moves: bool = False
    level: int = 0
    # for values in a loop body: the loop, and the value in each trip if known
    trips: tuple[int, Array] | None = None
    maker: CodeStep | None = None
    users: list[CodeStep] = field(default_factory=list)

    @property
    def number(self) -> Any:
        """The number that all elements equal, if known; otherwise None."""
        return self.const[()] if self.const is not None and not self.const.shape else None

    @property
    def elements(self) -> Array | None:
        """All elements, if known."""
        return None if self.const is None else np.broadcast_to(self.const, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    __repr__ = __str__


@dataclass(frozen=True)
class SourcePlace:
    """The source line of a step, "model.py:12", and the enclosing named scopes."""

    line: str
    scope: tuple[str, ...] = ()


@dataclass(eq=False)
class CodeStep:
    """One primitive of the traced function, or a construct with bodies: loop, checkpoint, branches."""

    kind: str
    ins: list[Var]
    outs: list[Var]
    params: Mapping[str, Any]
    place: SourcePlace
    bodies: tuple[Code, ...] = ()
    labels: list[Axis] = field(default_factory=list)  # axes of its index space that are absent from its results
    saved: str | None = None  # name under which a checkpoint policy saves its result
    on_host: bool = False  # whether it is saved in host memory
    memory: int | None = None  # for a product that computes attention scores: the keys' axis

    def within(self) -> Iterator[CodeStep]:
        """This step and all steps in its bodies."""
        yield self
        for body in self.bodies:
            for step in body.steps:
                yield from step.within()


@dataclass(eq=False)
class Code:
    """Steps in order. Bodies refer to outer values by the same `Var`; `ins` are the body's own arguments."""

    ins: list[Var]
    outs: list[Var]
    steps: list[CodeStep]

    def walk(self) -> Iterator[CodeStep]:
        """All steps; those of bodies follow the step that contains them."""
        for step in self.steps:
            yield from step.within()

    def vars(self) -> Iterator[Var]:
        """All values computed or received."""
        yield from self.ins
        for step in self.walk():
            yield from step.outs
            for body in step.bodies:
                yield from body.ins


def prune(code: Code, wanted: Iterable[Var] | None = None) -> set[Var]:
    """Drop unused steps and record the users of each value; returns the values that the code needs."""
    needed = {*(code.outs if wanted is None else wanted)}
    needed_steps: list[CodeStep] = []
    for step in reversed(code.steps):
        if any(out in needed for out in step.outs):
            needed_steps.append(step)
            needed.update(x for x in step.ins if not x.key)
            for body in step.bodies:
                needed |= prune(body)
    code.steps[:] = needed_steps[::-1]
    for step in code.steps:
        for x in {*step.ins}:
            x.users.append(step)
    return needed


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carries of a `scan` equation: JAX 0.11 keeps them as a structure."""
    if "ft_in" in params:
        consts, carries, _ = params["ft_in"].unpack()
        return len(consts), len(carries)
    return int(params["num_consts"]), int(params["num_carry"])
