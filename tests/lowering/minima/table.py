"""What the rows of the table are made of: a program, where it lies, and the fewest bytes a device has to send.

On a ring of n devices a value of b bytes costs (b is that of the whole value, or of the partial sum on one device)
    all_gather, reduce_scatter   b (n-1)/n
    all_reduce                   2 b (n-1)/n
    all_to_all                   (b/n) (n-1)/n: each device has a block of b/n and keeps an n-th of it
and a permute what its busiest sender gives away. Bytes are integers: sizes divide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import meshlib as mtf
from meshlib.core.graph import Operation, Tensor

D = mtf.Dimension
F32, INT = 4, 4  # bytes
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """A program under a layout, and its minimum.

    kinds  how many collectives of each kind an expert places, where that is part of what is asked
    """

    outputs: Mapping[str, Tensor] | None
    updates: Sequence[Operation]
    mesh: str
    layout: str
    minimum: int
    kinds: Mapping[str, int] | None = None


Build = Callable[[str], Case]  # takes the dtype that values are computed in, one of DTYPES


ROWS: dict[str, Build] = {}


def row(build: Build) -> Build:
    """Put a program into the table, under its name."""
    assert build.__name__ not in ROWS, f"two rows {build.__name__}"
    ROWS[build.__name__] = build
    return build


# ---------------------------------------------------------------- bytes


def width(t: str) -> int:
    """Bytes of an element."""
    return {"float32": 4, "bfloat16": 2}[t]


def elements(*xs: Tensor) -> int:
    """Of all of them, whole."""
    return sum(prod(x.shape.sizes) for x in xs)


def parts(b: int, n: int) -> int:
    """(n-1)/n of b bytes."""
    assert b * (n - 1) % n == 0, f"{b} bytes over {n} devices"
    return b * (n - 1) // n


def all_gather(n: int, b: int) -> int:
    """Put b bytes together from n parts."""
    return parts(b, n)


def reduce_scatter(n: int, b: int) -> int:
    """Sum b bytes over n devices, an n-th of the sum to each."""
    return parts(b, n)


def all_reduce(n: int, b: int) -> int:
    """Sum b bytes over n devices, all of the sum to each: a reduce_scatter and an all_gather."""
    return parts(2 * b, n)


def all_to_all(n: int, b: int) -> int:
    """Split b bytes by another dim."""
    assert b % n == 0, f"{b} bytes over {n} devices"
    return parts(b // n, n)


# ---------------------------------------------------------------- programs


def given(name: str, dims: Sequence[mtf.Dimension], t: str = "float32") -> Tensor:
    """What is fed at every step."""
    return mtf.input(name, dims, t)


def weight(name: str, dims: Sequence[mtf.Dimension], t: str, trainable: bool = True) -> Tensor:
    """A float32 variable, computed with in the dtype `t`: a cast, whose gradient is summed in `t`."""
    return mtf.variable(name, dims, activation_dtype=t, trainable=trainable)


def product(x: Tensor, w: Tensor, *dims: mtf.Dimension) -> Tensor:
    """The einsum of two tensors."""
    return mtf.einsum([x, w], output_shape=dims)


def half_square(y: Tensor) -> Tensor:
    """A loss in float32 that needs y itself, not a partial sum of it."""
    return mtf.reduce_sum(mtf.square(mtf.cast(y, "float32"))) * 0.5


def sgd(loss: Tensor) -> Sequence[Operation]:
    """One step of plain gradient descent on all trainable variables that the loss depends on."""
    return mtf.optimize.SgdOptimizer(0.1).minimize(loss)
