"""The arrays among arguments, by path; other leaves are passed through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError


def is_array(x: object) -> bool:
    """True if a value is an array, or the shape and dtype of one."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def explicit_sharding(x: Any) -> Any:
    """How an array is split over a mesh with explicit axes, which is part of its type in JAX; otherwise None."""
    sharding = getattr(x, "sharding", None)
    types = getattr(getattr(sharding, "mesh", None), "axis_types", None) or ()
    return sharding if jax.sharding.AxisType.Explicit in types else None


def parameter_names(fn: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Parameter names of a function; `arg_<n>` where they are unknown."""
    try:
        parameters = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(named[n] if n < len(named) else f"arg_{n}" for n in range(count))


def check_call(fn: Callable[..., Any], args: Sequence[Any], what: str) -> None:
    """Raise GraphError where a function cannot be called with that many arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # no signature available
    try:
        signature.bind(*args)
    except TypeError as fault:
        raise GraphError(
            f"{at(what)}: the function takes {signature!s:.200}, got {len(args)} arguments: {fault}; give an array or "
            "a jax.ShapeDtypeStruct for each"
        ) from None


def leaves_of(names: Sequence[str], args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every array among arguments, with its name as variable or input, as in "params/layers/wq"."""
    yield from ((path, leaf) for path, leaf, _ in named_leaves(names, args))


def named_leaves(names: Sequence[str], args: Sequence[Any]) -> Iterator[tuple[str, Any, tuple[str, ...] | None]]:
    """As `leaves_of`, with axis names that arrays already have: from Haliax, or Flax's boxes."""
    flatten = jax.tree_util.tree_flatten_with_path
    for name, arg in zip(names, args, strict=True):
        for path, held in flatten(arg, is_leaf=lambda x: _axis_names(x) is not None)[0]:
            for inner, leaf in flatten(held)[0]:
                if is_array(leaf):
                    own = _axis_names(held)
                    fits = own is not None and len(own) == len(leaf.shape)
                    whole = "/".join((name, *words((*path, *inner))))
                    for part, array in parts_of_array(leaf):
                        yield whole + part, array, own if fits else None


COMPLEX = ("/real", "/imag")


def parts_of_array(x: Any) -> list[tuple[str, Any]]:
    """(suffix, array) of an array, or of both parts of a complex one."""
    if not str(x.dtype).startswith("complex"):
        return [("", x)]
    kind = "float64" if str(x.dtype) == "complex128" else "float32"
    array = concrete(x)
    if array is None:
        return [(part, jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(kind))) for part in COMPLEX]
    return [(part, np.ascontiguousarray(half)) for part, half in zip(COMPLEX, (array.real, array.imag), strict=True)]


def _axis_names(x: Any) -> tuple[str, ...] | None:
    """Axis names from a wrapper of one array; "_" for unnamed axes."""
    if hasattr(x, "axes") and hasattr(x, "array") and isinstance(x.axes, tuple):
        axis_names = [getattr(a, "name", None) for a in x.axes]
    elif isinstance(getattr(x, "names", None), tuple) and hasattr(x, "value") and hasattr(x, "unbox"):
        axis_names = list(x.names)
    else:
        return None
    return tuple(n if isinstance(n, str) and n.isidentifier() else "_" for n in axis_names)


def words(path: Sequence[Any]) -> Iterator[str]:
    """The words of a leaf's path (keys, attributes, indices), without blanks, dots and slashes."""
    for key in path:
        word = next((getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)), key)
        text = "_".join(str(word).split()).strip(".")
        yield from (part for part in text.replace("/", ".").split(".") if part)


def concrete(x: Any) -> np.ndarray[Any, Any] | None:
    """The elements of an array; None for keys and for mere shapes."""
    if not hasattr(x, "__array__") or str(x.dtype).startswith("key<"):
        return None
    return np.asarray(x)
