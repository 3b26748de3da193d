"""Import of unchanged JAX functions: axes become named dims, primitives become operations of the library.

`jax.make_jaxpr` traces it; nothing is computed or allocated. Axes are named by unification over the primitives
(`axes`), steps are written in the library's own operations (`writing`, and a table of rules by primitive), attention
that is written out becomes the kernel it is (`scores`). Gradients are the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from layouts import Shape
from meshlib.core.arguments import at, flag, whole
from meshlib.core.dtypes import as_dtype
from meshlib.core.errors import GraphError
from meshlib.core.garbage import uncollected
from meshlib.core.initializers import Initializer, zeros
from meshlib.core.replay import all_operations, needed
from meshlib.core.source_lines import UNKNOWN_LINE, users_function
from meshlib.jax.importing import (  # registers the rules by primitive
    control,
    convolution,
    draws,
    elementwise,
    indexing,
    passing,
    ragged,
    shapes,
    windows,
)
from meshlib.jax.importing.axes import Axes
from meshlib.jax.importing.code import DTYPES, NARROW, Code, NotImported, SourcePlace, Var, numpy_type, prune
from meshlib.jax.importing.constraints import Constraints
from meshlib.jax.importing.contraction import mark_scores
from meshlib.jax.importing.imported import Argument, Call, ImportedGraph
from meshlib.jax.importing.integers import same_bits
from meshlib.jax.importing.kernels import checked_kernels, refuse_unknown
from meshlib.jax.importing.layers import tie_layers
from meshlib.jax.importing.leaves import (
    COMPLEX,
    check_call,
    concrete,
    explicit_sharding,
    is_array,
    leaves_of,
    named_leaves,
    parameter_names,
    parts_of_array,
    words,
)
from meshlib.jax.importing.naming import WHAT, Leaf, assign_names, name_all, name_arguments, name_factors, name_tiles
from meshlib.jax.importing.pairs import flat as flat_parts
from meshlib.jax.importing.pairs import packed, parts_of
from meshlib.jax.importing.raw_keys import raw_keys
from meshlib.jax.importing.table import RULES
from meshlib.jax.importing.tracing import Tracing
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.sources import input, variable
from meshlib.ops.pointwise.casts import cast

_ROWS = (control, convolution, draws, elementwise, indexing, passing, ragged, shapes, windows)


@uncollected
def from_jax(
    fn: Callable[..., Any],
    *args: Any,
    names: Mapping[str, Any] | None = None,
    argnums: int | Sequence[int] = 0,
    constraints: bool = False,
    most_trips: int | None = None,
    float16: str | None = None,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
) -> ImportedGraph:
    """Import a JAX function as a graph, for use with layouts, estimates and everything else in the library.

    Args:
      fn: a function of arrays and trees of them, such as a loss: the forward pass alone. It may use jit, scan,
        checkpoint, vmap, derivative rules (`jax.custom_vjp`, `jax.custom_jvp`, which gradients follow), and libraries
        built on these.
      args: arrays, or `jax.ShapeDtypeStruct`s, in trees as `fn` takes them. Other leaves (numbers, flags, functions,
        None) are passed to `fn` unchanged.
      names: names of axes, for use in layouts, in addition to those that arrays have (Haliax, Flax's boxes of logical
        names): {"params.layers.wq": "layers d_model heads head_dim"}. Keys are paths: the name of the argument, then
        keys, attributes or indices; "*" matches anything. Values have a name for each axis, "_" for none, "(heads
        head_dim)" for an axis that the function splits. Other names are generated, see `meshlib.jax.importing.naming`.
      argnums: the arguments that are variables, as for `jax.grad`; others are inputs. Variables have the given values,
        if any, as initial values; float ones are trainable.
      constraints: whether `jax.lax.with_sharding_constraint` is binding, as `mtf.constrain`; the mesh then needs the
        axes that it names. In any case `.constraints` lists all constraints, each with its rules.
      most_trips: number of trips of a `while_loop` whose condition depends on data alone. All of them are counted and
        computed; results of trips after the condition has failed are discarded.
      float16: "bfloat16" replaces float16 by bfloat16, which has the same size and fewer digits. TPUs have no float16,
        so it is refused otherwise.
      kernels: replacements for `pallas_call`, `pure_callback` and `io_callback` by their names, as JAX functions of the
        same operands: {"flash_attention": lambda q, k, v: ...}. Values, gradients and costs are those of the function;
        a derivative rule around the kernel is imported with it.
    Returns: an `ImportedGraph`: `.outputs`, `.loss`, `.variables`, `.inputs`; `.feeds(*args)` and `.state(*args)`
      convert arguments for a simulation, `.layout(*specs)` converts PartitionSpecs to layout rules. An axis that `fn`
      splits or merges is a product of several dims; axes of length 1 have none. A complex argument or result becomes
      two, `z/real` and `z/imag`, whose gradients are the real part and the negative imaginary part of JAX's. Random
      keys are not results.
    Raises: NotImported with everything that is not supported, and its lines; GraphError for bad arguments; MissingError
      where JAX is not installed.
    Example:
      >>> import jax, jax.numpy as jnp
      >>> import meshlib as mtf
      >>> def loss(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["w1"]) @ params["w2"])
      >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
      >>> graph = mtf.from_jax(loss, {"w1": shape(4, 8), "w2": shape(8, 2)}, shape(16, 4),
      ...                      names={"x": "batch features", "params.w1": "features hidden"})
      >>> print(graph.variables["params/w2"].output.shape)
      [hidden:8, w2_1:2]
      >>> program = mtf.lower(graph.outputs, mesh="rows:4;cols:2", layout="batch:rows;hidden:cols")
      >>> [(c.kind, c.axes) for c in program.collectives]
      [('all_reduce', ('rows', 'cols'))]
    """
    if not callable(fn):
        raise GraphError(f"{at(WHAT)}: expected a function, got {fn!r:.80}")
    check_call(fn, args, WHAT)
    numbers = _argnums(argnums, len(args))
    own = parameter_names(fn, len(args))
    axes = Axes()
    tracing = Tracing(
        axes, None if most_trips is None else whole(most_trips, WHAT, "most_trips", low=1), _half(float16)
    )
    tracing.kernels = checked_kernels(kernels)
    call, held = _in_arrays(fn, own, args)
    closed, results = _traced(call)
    leaves = _leaves(tracing, own, args, numbers, closed)
    ins = packed([leaf.var for leaf in leaves], [v.aval for v in closed.jaxpr.invars])
    outs = flat_parts(tracing.inline(closed, ins, SourcePlace(UNKNOWN_LINE), inherit=False))
    refuse_unknown(tracing.kernels, tracing.met)
    code = Code([leaf.var for leaf in leaves], outs, tracing.levels[0].steps)
    used = prune(code)
    _check(code, leaves, results, tracing.refused)
    assign_names(names, leaves)
    waiting = name_arguments(axes, leaves)
    mark_scores(code)
    control.unify(axes, code)
    name_factors(axes, waiting)
    name_tiles(axes)
    tie_layers(axes, leaves)
    name_all(axes, code, leaves)
    met = Constraints(flag(constraints, WHAT, "constraints"))
    graph = _graph(axes, code, leaves, held, used, own, results, met)
    graph.call = call
    return graph


def _half(given: object) -> str:
    if given not in (None, "bfloat16"):
        raise GraphError(f"{at(WHAT)}: float16 must be 'bfloat16' or left out, got {given!r:.40}")
    return "float16" if given is None else "bfloat16"


def _argnums(argnums: object, count: int) -> tuple[int, ...]:
    given = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise GraphError(f"{at(WHAT)}: argnums must be a number or several, got {argnums!r:.80}")
    for n in given:
        if not isinstance(n, int) or isinstance(n, bool) or not -count <= n < max(count, 1):
            raise GraphError(f"{at(WHAT)}: argnums {n!r:.40} must be in {-count} to {count - 1}, of {count} arguments")
    return tuple(n % count for n in given) if count else ()


def _leaves(
    tracing: Tracing, own: Sequence[str], args: Sequence[Any], numbers: Sequence[int], closed: Any
) -> list[Leaf]:
    """The arrays among the arguments of the traced function, each with new axes."""
    named_parts = []
    avals = [v.aval for v in closed.jaxpr.invars]
    keys = iter([key for aval, key in zip(avals, raw_keys(closed), strict=True) for _ in parts_of([aval])])
    for n, (name, arg) in enumerate(zip(own, args, strict=True)):
        for path, leaf, known in named_leaves([name], [arg]):
            var = tracing.var(leaf, of_keys=next(keys))
            if 0 in var.shape:
                tracing.set_known(var, np.zeros(var.shape, numpy_type(var.dtype)))
            elif not var.key:
                var.axes = [tracing.axes.new(size) for size in var.shape]
                tracing.axes.hold(var.space, var.axes)
            tokens = None if known is None else [None if word == "_" else ((word, None),) for word in known]
            named_parts.append(Leaf(path.replace("/", "."), var, n in numbers, tokens, path.endswith(COMPLEX)))
    return named_parts


def _in_arrays(fn: Callable[..., Any], own: Sequence[str], args: Sequence[Any]) -> tuple[Call, list[Any]]:
    """The function of its arrays alone, and these arrays."""
    flat, tree = jax.tree_util.tree_flatten(args)
    held = [leaf for leaf in flat if is_array(leaf)]

    def of_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        return fn(*jax.tree_util.tree_unflatten(tree, [next(rest) if is_array(x) else x for x in flat]))

    odd = next((x for x in held if getattr(x.dtype, "kind", "V") in "OSUMm"), None)
    if odd is not None:
        raise GraphError(f"{at(WHAT)}: an argument is an array of {odd.dtype} {list(odd.shape)}; give numbers or flags")
    specs = tuple(
        jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True), sharding=explicit_sharding(x)
        )
        for x in held
    )
    names = [
        "/".join((name, *words(path)))
        for name, arg in zip(own, args, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]
        if is_array(leaf)
    ]
    return Call(of_arrays, specs, tuple(names)), held


def _traced(call: Call) -> tuple[Any, Any]:
    """The jaxpr of the function without unused steps, such as initial values that it replaces; its results by name."""
    with users_function(f"{at(WHAT)}: JAX's trace of the function"):
        closed, out = jax.make_jaxpr(call.function, return_shape=True)(*call.shapes)
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    closed = ClosedJaxpr(live, closed.consts)
    named = [name.replace("/", ".") for name, _ in leaves_of(["output"], [out])]  # complex results as two parts
    return closed, [name.removeprefix("output.") if isinstance(out, dict) else name for name in named]


def _check(code: Code, leaves: Sequence[Leaf], results: Sequence[str], refused: Mapping[str, int]) -> None:
    """Raise NotImported with everything that has no counterpart."""
    faults = dict(refused)
    for step in code.walk():
        if all(out.key for out in step.outs):
            continue
        for why in _faults(step):
            faults[why] = faults.get(why, 0) + 1
    if all(out.key for out in code.outs):
        raise GraphError(f"{at(WHAT)}: the function returns no array")
    for name, out in zip(results, code.outs, strict=True):
        if 0 in out.shape:
            faults[f"result {name}, {list(out.shape)}: of no elements"] = 1
    if faults:
        lines = [f"{why}{f', {n} times' if n > 1 else ''}" for why, n in faults.items()]
        raise NotImported(("\n  " if len(lines) > 1 else " ").join([f"{at(WHAT)}: there is no counterpart of", *lines]))


_INSTEAD = {"float16": "; use bfloat16 or float32, or from_jax(..., float16='bfloat16')"}


def _faults(step: Any) -> list[str]:
    where = f"{step.kind.removeprefix('jit:')} ({step.place.line})"
    rule = RULES.get(step.kind)
    if rule is None:
        hint = "; draw by jax.random.uniform, normal or randint" if step.kind.startswith("random_") else ""
        return [f"{where}: an unknown primitive{hint or '; use functions that have one: meshlib/jax/README.md'}"]
    fault = rule.fault(step)
    faults = [] if fault is None else [f"{where}: {fault}"]
    if any(x.key for x in step.ins) and len(step.outs) == 1 and not step.bodies and step.kind not in draws.DRAWS:
        faults.append(f"{where}: it reads the bits of a random key, which has none here")
    if any(_exceeds_int32(x) for x in step.ins):
        faults.append(f"{where}: of integers beyond int32")
    return faults + [f"{where}: of dtype {dtype}{_INSTEAD.get(dtype, '')}" for dtype in _unknown_dtypes(step)]


def _unknown_dtypes(step: Any) -> list[str]:
    strange = {x.dtype for x in step.outs if not x.key and x.dtype not in DTYPES}
    if not step.kind.startswith(("jit:_", "random", "scan", "checkpoint", "cond")):
        strange |= {x.dtype for x in step.ins if x.dtype not in DTYPES and x.const is None and not x.key}
    return sorted(strange)


def _exceeds_int32(x: Any) -> bool:
    """True if a constant has integers outside int32."""
    if x.const is None or x.dtype != "int64":
        return False
    limits = np.iinfo("int32")
    return bool(x.const.max() > limits.max or x.const.min() < limits.min)


def _write_argument(graph: ImportedGraph, writer: StepWriter, leaf: Leaf, array: Any) -> None:
    """Add an input, or a variable with the values of `array`, for an argument."""
    shape = writer.shape(leaf.var.axes)
    parts = tuple(writer.shape([a]) for a in leaf.var.axes)
    if leaf.var.dtype == "uint32":
        graph.unsigned.add(leaf.name)
    graph.arguments[leaf.name] = Argument(leaf.name, leaf.var.shape, shape, leaf.variable, parts)
    dtype = leaf.var.dtype if leaf.var.dtype in NARROW else DTYPES[leaf.var.dtype]
    if leaf.variable:
        start = _initial(array, shape, dtype)
        value = variable(leaf.name, shape, start, dtype, trainable=as_dtype(dtype).is_float)
    else:
        value = input(leaf.name, shape, dtype)
    writer.tensors[leaf.var] = cast(value, DTYPES[leaf.var.dtype])


def _named_axes(leaves: Sequence[Leaf]) -> list[Any]:
    """The axes of arguments that users named."""
    return [
        a
        for leaf in leaves
        if leaf.of_user and leaf.tokens is not None
        for a, token in zip(leaf.var.axes, leaf.tokens, strict=False)
        if token is not None
    ]


def _factor_remedies(axes: Axes, leaves: Sequence[Leaf]) -> dict[str, str]:
    """Remedies if the dim that has the user's name for an axis, one of several factors, can't be split."""
    remedies = {}
    for leaf in leaves:
        for axis, token in zip(leaf.var.axes, (leaf.tokens or ()) if leaf.of_user else (), strict=False):
            dims = axes.dims(axis)
            if token is not None and len(token) == 1 and len(dims) > 1:
                factors = " x ".join(f"{d.name}:{d.size}" for d in dims)
                remedies[token[0][0]] = (
                    f"The function takes this axis of {leaf.path}, {axis.size} long, as {factors}: split another of "
                    f"these, named as in '({' '.join(str(d.name) for d in dims)})'"
                )
    return remedies


def _graph(
    axes: Axes,
    code: Code,
    leaves: Sequence[Leaf],
    held: Sequence[Any],
    read: set[Var],
    own: tuple[str, ...],
    results: Sequence[str],
    constraints: Constraints,
) -> ImportedGraph:
    """Write the program."""
    graph = ImportedGraph()
    graph._parameters = own
    writer = StepWriter(axes, {}, constraints)
    used = [leaf for leaf in leaves if leaf.var in read and not leaf.var.key and 0 not in leaf.var.shape]
    own_parts = [part for x in held for _, part in parts_of_array(x)]
    arrays = dict(zip(leaves, own_parts, strict=True))
    graph.unused = tuple(leaf.name for leaf in leaves if leaf not in used and not leaf.var.key)
    with graph:
        for leaf in used:
            _write_argument(graph, writer, leaf, arrays[leaf] if leaf.variable else None)
        writer.run(code)
        for name, out in zip(results, code.outs, strict=True):
            if out.key:
                continue
            graph.outputs[name] = writer.full(writer.tensor(out), out.axes)
            graph.shapes[name] = out.shape
            if out.dtype == "uint32":
                graph.unsigned.add(name)
            graph.result_axes[name] = tuple(writer.shape([a]) for a in out.axes)
    graph.constraints = tuple(constraints.recorded)
    graph.named_dims = frozenset(map(writer.dim, axes.flat(_named_axes(leaves))))
    graph.remedies.update(_factor_remedies(axes, leaves))
    _drop_unused(graph)
    _mark_runs(graph)
    return graph


def _drop_unused(graph: ImportedGraph) -> None:
    """Remove arguments that no result turns out to depend on."""
    live = needed(y.operation for y in graph.outputs.values())
    for there in (graph.inputs, graph.variables):
        for name in [name for name, op in there.items() if op not in live]:
            graph.operations.remove(there.pop(name))
            del graph.arguments[name]
            graph.unused = (*graph.unused, name)


def _mark_runs(graph: ImportedGraph) -> None:
    """Let slices of an argument's dim, which have the dim's name, be split only as far as their length allows.

    The function cannot rename such dims. Arguments, and all tensors with their whole dims, are checked strictly.
    """
    whole = {d for argument in graph.arguments.values() for d in argument.shape}
    names = {d.name for d in whole}
    for op in all_operations(graph.operations):
        if any(d.name in names and d not in whole for y in op.outputs for d in y.shape):
            op.graph.inner.add(op)


def _initial(value: Any, shape: Shape, dtype: str) -> Initializer | np.ndarray[Any, Any] | None:
    array = concrete(value)
    if array is None:
        return None if as_dtype(dtype).is_float else zeros()
    return same_bits(array).reshape(shape.sizes)
