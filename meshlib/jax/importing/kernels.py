"""Kernels and callbacks, whose code is not a jaxpr: the user gives equivalent JAX functions by name."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.core.source_lines import users_function
from meshlib.jax.importing.code import Array
from meshlib.jax.importing.naming import WHAT

Kernels = Mapping[str, Callable[..., Any]]
KINDS = ("pallas_call", "pure_callback", "io_callback")


def checked_kernels(given: object) -> Kernels:
    """Check `kernels` of `from_jax`: names and functions."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(n, str) and callable(f) for n, f in given.items()):
        raise GraphError(f"{at(WHAT)}: kernels must be a dict of names to JAX functions, got {given!r:.80}")
    return given


def kernel_name(eqn: Any) -> str:
    """Name of a kernel or callback: as given, otherwise that of its function."""
    params = eqn.params
    if "callback" in params:
        function = getattr(params["callback"], "callback_func", params["callback"])
        return str(getattr(function, "__name__", "callback"))
    given = params.get("name") or getattr(params.get("name_and_src_info"), "name", None)
    return str(given or getattr(params["jaxpr"].debug_info, "func_name", "kernel"))


def raised(eqn: Any, behind: bool) -> list[Array] | None:
    """What stands for the results of a callback that only raises, as in `equinox.error_if`, or is `behind` one.

    NaN, which is an error of a checked step; None for other callbacks, and without any float among the results.
    """
    avals = [v.aval for v in eqn.outvars]
    floats = [jax.numpy.issubdtype(a.dtype, np.floating) for a in avals]
    if not any(floats) or not (behind or _never_returns(eqn)):
        return None
    return [np.full(a.shape, np.nan if f else 0, a.dtype) for a, f in zip(avals, floats, strict=True)]


def _never_returns(eqn: Any) -> bool:
    code = getattr(getattr(eqn.params.get("callback"), "callback_func", None), "__code__", None)
    return code is not None and not any(i.opname.startswith("RETURN") for i in dis.get_instructions(code))


def without_kernel(eqn: Any) -> str:
    """Error text for a kernel that was not given."""
    name = kernel_name(eqn)
    return f"'{name}': say what it computes, as a JAX function: from_jax(..., kernels={{'{name}': function}})"


def traced_kernel(name: str, function: Callable[..., Any], eqn: Any) -> Any:
    """The jaxpr of the function that replaces a kernel.

    Raises: GraphError if its results are of other shapes and dtypes, or it is not a JAX function.
    """
    what = f"{at(WHAT)}: kernels: '{name}'"
    operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    with users_function(what):
        try:
            traced, results = jax.make_jaxpr(function, return_shape=True)(*operands)
        except jax.errors.TracerArrayConversionError:
            raise GraphError(
                f"{what} must be a JAX function (jax.numpy); it takes its operands for NumPy arrays"
            ) from None
        except TypeError as fault:
            raise GraphError(f"{what} takes {_types(operands)}: {str(fault).splitlines()[0]}") from None
    leaves, wanted = jax.tree_util.tree_leaves(results), [v.aval for v in eqn.outvars]
    if _types(leaves) != _types(wanted):
        raise GraphError(f"{what} returns {_types(leaves)}, the kernel {_types(wanted)}, of {_types(operands)}")
    return traced


def _types(avals: Sequence[Any]) -> str:
    return ", ".join(f"{a.dtype}{list(a.shape)}" for a in avals)


def refuse_unknown(kernels: Kernels, met: Sequence[str]) -> None:
    """Raise for names that match no kernel of the function."""
    for name in kernels:
        if name not in met:
            there = f"; it has {', '.join(dict.fromkeys(met))}" if met else ""
            raise GraphError(f"{at(WHAT)}: kernels: the function has none called {name!r}{nearest(name, met) or there}")
