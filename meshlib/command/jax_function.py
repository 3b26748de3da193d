"""A JAX function in a user's file as the program of a command: its arguments, dim names, and training."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import meshlib.jax as real
from layouts import Dimension
from layouts.checking import some
from meshlib.core.errors import GraphError, nearest
from meshlib.core.graph import Graph, Operation
from meshlib.core.replay import all_operations
from meshlib.core.source_lines import written_at
from meshlib.core.text import grid
from meshlib.optimize import AdamOptimizer, SgdOptimizer

if TYPE_CHECKING:
    from meshlib.jax.importing.imported import ImportedGraph

_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "s32": "int32",
    "i64": "int64", "i16": "int16", "i8": "int8", "i4": "int4", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "bool": "bool", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "c64": "complex64", "key": "key",
}  # fmt: skip
_ARRAY = re.compile(r"([A-Za-z]\w*)\[([\d,\s]*)\]")


def arguments_of(function: Callable[..., Any], texts: Sequence[str]) -> Callable[[], Mapping[str, Any]] | None:
    """A function that returns the arguments of a JAX function by name; None if neither command nor file gives them.

    Args:
      function: the function; `NAME_arguments`, or `arguments`, beside it in its file returns a tuple or a dict of its
        arguments: trees of arrays or of `jax.ShapeDtypeStruct`s.
      texts: NAME=DTYPE[SIZES] of the command line; a name with dots is one of a dict: "params.w=f32[4,8]".
    """
    beside: Mapping[str, Any] = getattr(function, "__globals__", {})
    own = beside.get(f"{getattr(function, '__name__', '')}_arguments", beside.get("arguments"))
    if texts:
        return lambda: _arguments_of_texts(texts)
    if not callable(own):
        return None

    def returned() -> Mapping[str, Any]:
        arguments = own()
        if isinstance(arguments, Mapping):
            return arguments
        if not isinstance(arguments, tuple):
            raise GraphError(f"{own.__name__} must return a tuple or a dict of arguments, got {arguments!r:.80}")
        names = [*inspect.signature(function).parameters]
        if len(arguments) > len(names):
            raise GraphError(f"{own.__name__} returns {len(arguments)} arguments, but the function takes {len(names)}")
        return dict(zip(names, arguments, strict=False))

    return returned


def _arguments_of_texts(texts: Sequence[str]) -> Mapping[str, Any]:
    tree: dict[str, Any] = {}
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        array = _ARRAY.fullmatch(value)
        if not equals or array is None or not all(word.isidentifier() or word.isdecimal() for word in path.split(".")):
            raise GraphError(
                f"--arg must be NAME=DTYPE[SIZES], such as x=f32[256,512,1024] or params.w=bf16[4,8], got {text!r}"
            )
        *groups, last = path.split(".")
        within = tree
        for word in groups:
            within = within.setdefault(word, {})
            if not isinstance(within, dict):
                raise GraphError(f"--arg {text}: {word} is an array already")
        if last in within:
            raise GraphError(f"--arg {text}: {path} is given twice")
        within[last] = _shape(array[1], array[2], text)
    return tree


def _shape(kind: str, sizes: str, text: str) -> Any:
    import jax

    if kind not in _DTYPES and kind not in _DTYPES.values():
        hint = nearest(kind, _DTYPES) or f"; there are {', '.join(_DTYPES)}"
        raise GraphError(f"--arg {text}: no dtype {kind!r}{hint}")
    shape = tuple(int(n) for n in sizes.split(",") if n.strip())
    if 0 in shape:
        raise GraphError(f"--arg {text}: sizes are 1 or more")
    dtype = _DTYPES.get(kind, kind)
    if dtype == "key":
        return jax.eval_shape(jax.random.key, 0) if not shape else jax.eval_shape(_keys(shape))
    return jax.ShapeDtypeStruct(shape, dtype)


def _keys(shape: tuple[int, ...]) -> Callable[[], Any]:
    def draw() -> Any:
        import jax

        return jax.random.split(jax.random.key(0), shape)

    return draw


def names_of(texts: Sequence[str]) -> dict[str, str]:
    """The `names=` of `mtf.from_jax`, from PATH=NAMES on the command line."""
    names = {}
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not path or not value:
            raise GraphError(
                f"--names must be PATH=NAMES, such as x='batch length d_model' or '*.wq'='d_model _', got {text!r}"
            )
        names[path] = value
    return names


def builder(
    function: Callable[..., Any], given: Callable[[], Mapping[str, Any]], args: argparse.Namespace
) -> Callable[..., Any]:
    """A function from settings to outputs and updates: the imported function, and its training step."""
    names, optimizer = names_of(args.names or ()), args.optimizer

    def build(**settings: Any) -> tuple[Any, Sequence[Operation]]:
        with written_at(_line_of(function)):  # of arguments and slots; operations have lines of their own
            graph = imported(function, given(), names, settings)
            first = next(iter(graph.outputs.values()))
            if optimizer == "none" or len(first.shape) or not first.dtype.is_float or not graph.variables:
                return graph.outputs, []
            with graph:
                how = AdamOptimizer(1e-3) if optimizer == "adam" else SgdOptimizer(0.1)
                return graph.outputs, how.minimize(graph.loss)

    return build


def _line_of(function: Callable[..., Any]) -> str:
    """The first line of a function, which a decorator may have wrapped; its name if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else type(function).__name__


def imported(
    function: Callable[..., Any], given: Mapping[str, Any], names: Mapping[str, str], settings: Mapping[str, Any]
) -> ImportedGraph:
    """The graph of a function whose arguments are given by name; settings among them are not arrays."""
    parameters = inspect.signature(function).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in (*given, *settings):
        if name not in parameters and not takes_more:
            raise GraphError(
                f"the function takes no {name!r}{nearest(name, parameters)}; it takes {', '.join(parameters)}"
            )
    lacking = [n for n, p in parameters.items() if p.default is p.empty and n not in given and n not in settings
               and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]  # fmt: skip
    if lacking:
        raise GraphError(
            f"say what {', '.join(lacking)} is: --arg {lacking[0]}=f32[256,512], or --set of what is not an array"
        )
    ordered = [n for n in parameters if n in given]
    fixed = functools.partial(function, **settings)

    def call(*arrays: Any) -> Any:
        return fixed(**dict(zip(ordered, arrays, strict=True)))

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ordered]
    )
    return real.from_jax(call, *(given[n] for n in ordered), names=names or None)


# ---------------------------------------------------------------- dims


def dims_text(graph: Graph) -> str:
    """The dims of a program, largest first in each kind, with sizes and origins."""
    rows = [("dim", "size", "where from")]
    for d, places in _places(graph).items():
        named = graph.named_dims is not None and d in graph.named_dims
        rows.append((d.name, f"{d.size:,}", f"{'named by you: ' if named else ''}{some(places)}"))
    return "\n".join(grid(rows, right=(1,)))


def _places(graph: Graph) -> dict[Dimension, list[str]]:
    """The places in which each dim occurs: axes of arguments, or otherwise the first operation that has it."""
    places: dict[Dimension, list[str]] = {}
    arguments = getattr(graph, "arguments", {})
    for name, argument in arguments.items():
        for n, dims in enumerate(argument.axes):
            for d in dims:
                whole = "" if len(dims) == 1 else f", of {' x '.join(str(e.size) for e in dims)}"
                places.setdefault(d, []).append(f"{name} axis {n}{whole}")
    if not arguments:
        for op in (*graph.variables.values(), *graph.inputs.values()):
            for d in op.output.shape:
                places.setdefault(d, []).append(op.name)
    inside: dict[Dimension, list[str]] = {}
    for op in all_operations(graph.operations):
        for y in op.outputs:
            for d in y.shape:
                if d not in places:
                    inside.setdefault(d, [f"inside, first in {op.name} ({op.source})"])
    return places | inside
