"""Arguments of window operations: stride, dilation and padding per dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layouts import Dimension
from meshlib.core.arguments import at, choice, items, whole
from meshlib.core.errors import ShapeError
from meshlib.core.graph import Tensor, find_dim
from meshlib.ops.images.sliding import Range

PerDim = int | Sequence[int] | Mapping[Dimension | str, int]
Padding = str | int | Sequence[Any] | Mapping[Dimension | str, Any]
PADDINGS = ("SAME", "VALID")
MOST = 2**31 - 1  # positions are computed in 64-bit integers


def numbers_per_dim(value: object, dims: Sequence[Dimension], what: str, argument: str) -> list[int]:
    """Integers from 1 to `MOST` per dim: given as one for all, as a list, or by name (1 where missing)."""
    numbers = [whole(n, what, f"{argument} of dim '{d.name}'") for d, n in _per_dim(value, dims, what, argument, 1)]
    for d, n in zip(dims, numbers, strict=True):
        if n < 1:
            raise ShapeError(f"{at(what)}: {argument} of dim '{d.name}' must be at least 1, got {n}")
        if n > MOST:
            raise ShapeError(f"{at(what)}: {argument} of dim '{d.name}' must be at most {MOST}")
    return numbers


def paddings_per_dim(value: object, dims: Sequence[Dimension], what: str) -> list[str | Range]:
    """ "SAME", "VALID", or (before, after) per dim: given as one for all, as a list, or by name (0 where missing)."""
    paddings: list[str | Range] = []
    if len(dims) == 1 and isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        value = [value]  # with one dim a pair is unambiguous
    for d, given in _per_dim(value, dims, what, "padding", 0):
        if isinstance(given, str):
            paddings.append(choice(given, what, f"padding of dim '{d.name}'", PADDINGS))
            continue
        ends = [given, given] if not isinstance(given, Sequence) else list(given)
        if len(ends) != 2:
            raise ShapeError(
                f"{at(what)}: padding of dim '{d.name}' must be a number or (before, after), got {given!r:.80}"
            )
        before, after = (whole(n, what, f"padding of dim '{d.name}'") for n in ends)
        if min(before, after) < 0:
            raise ShapeError(f"{at(what)}: padding of dim '{d.name}' must not be negative, got ({before}, {after})")
        if max(before, after) > MOST:
            raise ShapeError(f"{at(what)}: padding of dim '{d.name}' must be at most {MOST}")
        paddings.append((before, after))
    return paddings


def _per_dim(
    value: object, dims: Sequence[Dimension], what: str, argument: str, missing: int
) -> list[tuple[Dimension, Any]]:
    if isinstance(value, Mapping):
        by_name = {(d.name if isinstance(d, Dimension) else d): n for d, n in value.items()}
        unknown = [str(d) for d in by_name if d not in [x.name for x in dims]]
        if unknown:
            names = ", ".join(f"'{d.name}'" for d in dims)
            raise ShapeError(f"{at(what)}: {argument} names {', '.join(unknown)}; the dims with windows are {names}")
        return [(d, by_name.get(d.name, missing)) for d in dims]
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [(d, value) for d in dims]
    given = items(value, what, argument)
    if len(given) != len(dims):
        rest = "; leave out those of batch and channels" if len(given) == len(dims) + 2 else ""
        raise ShapeError(f"{at(what)}: {argument} must have {len(dims)} entries, one per dim, got {value!r:.80}{rest}")
    return list(zip(dims, given, strict=True))


def dims_of(x: Tensor, given: object, what: str, argument: str) -> list[tuple[Dimension, Any]]:
    """Dims of `x` by the keys of a dict, with its values."""
    if not isinstance(given, Mapping) or not given:
        raise ShapeError(f"{at(what)}: {argument} must be a dict with an entry per dim, got {given!r:.80}")
    values_of_dims = [(find_dim(x, d, what), value) for d, value in given.items()]
    names = [d.name for d, _ in values_of_dims]
    if len(set(names)) < len(names):
        raise ShapeError(f"{at(what)}: {argument} names a dim twice: {', '.join(names)}")
    return values_of_dims
