"""Search for the best mesh and layout of a program on a slice, with a certificate and reasons against the others.

Time is modelled: a layout is certified as the best under the model; the model's own error is reported with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import Parameter, signature
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from hardware.checks import HardwareError
from hardware.slices import Slice
from layouts import LayoutRules, Mesh
from meshlib.core.arguments import items, number, whole
from meshlib.core.compiler import XLA_TPU, Compiler, require_compiler
from meshlib.core.errors import GraphError, LayoutError, MeshlibError, SliceError, nearest
from meshlib.core.executors import executor_of
from meshlib.core.forks import check_workers
from meshlib.core.wording import argument
from meshlib.models import TransformerConfig, layout, train_step, usual_layouts
from meshlib.models.train import OFFLOAD, transformer_builder
from meshlib.searching.exploration import Search, SearchInterrupted
from meshlib.searching.programs import Build, Objective, SearchProblem, problem_of
from meshlib.searching.result import Found
from meshlib.searching.resume_file import KeptEstimates, keys_of
from meshlib.searching.roles import roles_of, space_of
from meshlib.searching.space import Candidate, Choices, Fixed, candidates, laid, lighter_ones

__all__ = ["Candidate", "Found", "SearchInterrupted", "search"]

LINE = 300  # maximum length of an error shown among others
REMAT = ("none", "matmuls", "full", OFFLOAD)  # each recomputes or transfers more than the one before


def _candidates_of(
    problem: SearchProblem, chosen: Choices, slices: Sequence[Slice], fixed: Fixed, axes: int
) -> Iterator[Candidate]:
    """The candidates of one choice of builder arguments on all slices."""
    free = [d for d in problem.dims if d not in fixed.rules.dims or d in _scoped(fixed)]
    roles = roles_of(problem.tensors, free, problem.batch)
    given = replace(fixed, named=problem.named)
    for where in slices:
        yield from candidates(chosen, where, roles, problem.tensors.sizes, given, axes)


def _nothing_divides(problems: Iterable[SearchProblem], slices: Sequence[Slice]) -> GraphError:
    dims = dict.fromkeys(f"{d}:{p.tensors.sizes[d]}" for p in problems for d in p.dims)
    return GraphError(
        f"search: no mesh of {', '.join(where.name for where in slices)} divides the program's dims "
        f"({', '.join(dims) or 'it has none'}); use a smaller slice, allow more axes, or fix less"
    )


def _check_run(
    axes: int, seconds: float | None, workers: int | Executor | None, progress: object, resume: object
) -> None:
    """Check the arguments of a run."""
    if axes < 0:
        raise GraphError(f"search: axes must not be negative, got {axes}")
    if seconds is not None and number(seconds, "search", "seconds") <= 0:
        raise GraphError(f"search: seconds must be more than 0, or None, got {seconds}")
    if workers is not None and executor_of(workers) is None:
        check_workers(workers, "search")
    if progress is not None and not callable(progress):
        raise GraphError(f"search: progress must be a function of (done, all, text), got {progress!r:.80}")
    if resume is not None and not isinstance(resume, str | Path):
        raise GraphError(f"search: resume must be the name of a file, got {resume!r:.80}")


def search(
    build: Build | TransformerConfig,
    slice: Any,
    *,
    batch: int | None = None,
    length: int | None = None,
    choices: Mapping[str, Iterable[object]] | None = None,
    fix: Any = "",
    sizes: Any = "",
    forbid: str | Sequence[str] = (),
    also: Iterable[tuple[Any, Any]] = (),
    axes: int = 3,
    objective: str | Callable[..., float] = "step_seconds",
    per: str | Sequence[str] = (),
    seconds: float | None = 60.0,
    workers: int | Executor | None = None,
    progress: Callable[[int, int, str], object] | None = None,
    resume: str | Path | None = None,
    compiler: Compiler = XLA_TPU,
) -> Found:
    """The mesh and layout under which a program is fastest on a slice, or best by another objective.

    Args:
      build: a function of the arguments in `choices` that returns (outputs, updates), as for `mtf.lower`; or a model
        config with `batch` and `length`, for its training step. The search of a model includes remat: for time or
        cost, each layout with the least recomputation that fits.
      slice: a slice or its name, or a list of them.
      choices: arguments of `build` with the values to try, such as {"remat": ["full", "matmuls"], "batch": [64, 128]};
        for a model those of `mtf.models.train_step` ("offload" as remat keeps layer inputs in host memory), and
        "stages" and "microbatches" of a pipeline. Combinations that `build` refuses are left out and reported.
      fix: rules of every layout, such as "batch:data"; the sizes of their axes are searched, unless given by `sizes`,
        such as "data:16".
      forbid: dims that only `fix` may split.
      also: known layouts, as (mesh, layout), which are estimated first: the result is at least as good. For a model
        they include the usual ones (`mtf.models.usual_layouts`).
      axes: maximum number of mesh axes beyond those of `fix`. Their possible roles are derived from the program.
      objective: the quantity to minimise: "step_seconds", "usd" (of a step), "memory" (the peak alone, as in Mesh
        TensorFlow's auto layout), another figure of `Estimate`, or a function of it. Candidates that do not fit rank
        last under any objective.
      per: dims whose sizes divide the objective, such as ["batch", "length"] for time or cost per token.
      seconds: time limit, after which (and after at least one candidate and the layouts of `also`) the best so far is
        returned, with the gap to the lower bound of the rest; None: exhaustive.
      workers: number of forked processes; 1: none. By default one per core, up to eight, but none where forks are
        unsafe: outside Linux, with several Python threads, and where JAX is imported. Or any
        `concurrent.futures.Executor`, such as a ProcessPoolExecutor, Dask's `client.get_executor()` or MPI's, which
        stays open; `build` and `objective` must then be picklable. Results are independent of workers, unless time
        runs out.
      progress: called with (done, all, the best so far as text).
      resume: a file of estimates to reuse and extend. It is valid for the same program, slices, compiler, objective
        and version of the library; GraphError names the one that differs.
      compiler: the compiler that candidates are lowered and scheduled for.
    Returns: `Found`: `.best .ranking .pareto .certificate`; print it.
    Raises: GraphError for bad arguments, SliceError for an unknown slice, LayoutError for an impossible `fix`.
    Example:
      >>> import meshlib as mtf
      >>> def build():
      ...     batch, pixels, hidden = (mtf.Dimension(*d) for d in (("batch", 512), ("pixels", 784), ("hidden", 1024)))
      ...     x, w = mtf.input("x", [batch, pixels]), mtf.variable("w", [pixels, hidden])
      ...     loss = mtf.reduce_mean(mtf.relu(mtf.einsum([x, w])))
      ...     return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)
      >>> result = mtf.search(build, "v3-8", axes=2, seconds=None)
      >>> str(result.best.candidate.mesh), str(result.best.candidate.layout), result.gap
      ('model:8', 'hidden:model', 0.0)
    """
    begun = time.monotonic()
    make, options = _builder(build, batch, length, choices)
    slices = _slices(slice)
    fixed = _fixed(fix, sizes)
    known = _known(also, slices)
    per, forbid = _names(per, "per"), _names(forbid, "forbid")
    axes = whole(axes, "search", "axes")
    _check_run(axes, seconds, workers, progress, resume)
    measure = Objective.named(objective)
    require_compiler(compiler, "search")
    _check_choices(build, options)
    problems: dict[Choices, SearchProblem] = {}
    refused: dict[Choices, MeshlibError] = {}
    space: list[Candidate] = []
    first: list[Candidate] = []
    for values in product(*options.values()):
        chosen: Choices = tuple(zip(options, values, strict=True))
        try:
            beside = next(iter(problems.values()), None)
            problem = problems[chosen] = problem_of(make, chosen, per, forbid, compiler, beside)
        except MeshlibError as fault:
            refused[chosen] = fault
            continue
        space += _candidates_of(problem, chosen, slices, fixed, axes)
        for where in slices:
            usual = _usual(build, where, problem) if not fixed.rules and not forbid and axes else []
            first += [laid(chosen, where, *pair, problem.named) for pair in (*known[where], *usual)]
    if not problems:
        raise next(iter(refused.values()))
    _check_dims("fix", fixed.rules, problems.values())
    for _, rules in (pair for pairs in known.values() for pair in pairs):
        _check_dims("also", rules, problems.values())
    _check_sizes(fixed, slices)
    space = [*first, *space]
    if not space:
        raise _nothing_divides(problems.values(), slices)
    stored_estimates = None if resume is None else KeptEstimates(resume, keys_of(problems.values(), slices, measure))
    lighter = lighter_ones(space, "remat", REMAT) if isinstance(build, TransformerConfig) and measure.closer else {}
    run = Search(
        make, problems, space, len(first), lighter, measure, seconds, workers, progress, stored_estimates, begun
    )
    largest = max((p.dims for p in problems.values()), key=len)
    left_out = {chosen: " ".join(str(fault).split())[:LINE] for chosen, fault in refused.items()}
    recomputed = "; of each layout the least recomputation that fits" if lighter else ""
    declared = space_of(largest, axes) + recomputed
    try:
        return replace(run.run(), left_out=left_out, space=declared)
    except SearchInterrupted as stop:
        stop.result = replace(stop.result, left_out=left_out, space=declared)
        raise


def _builder(build: object, batch: object, length: object, choices: object) -> tuple[Build, dict[str, list[object]]]:
    """The builder, and the values to try for each of its arguments."""
    if choices is not None and not isinstance(choices, Mapping):
        raise GraphError(f"search: choices must be a dict of arguments to the values to try, got {choices!r:.80}")
    options = {str(name): items(values, "search", f"choices[{name!r}]") for name, values in (choices or {}).items()}
    for name, values in options.items():
        if not values:
            raise GraphError(f"search: choices[{name!r}] is empty; give at least one value, or leave it out")
        try:
            options[name] = list(dict.fromkeys(values))
        except TypeError:
            raise GraphError(
                f"search: choices[{name!r}] must be hashable values, such as numbers, text or tuples, "
                f"got {values!r:.80}"
            ) from None
    if isinstance(build, TransformerConfig):
        for name, value in (("batch", batch), ("length", length)):
            if name not in options and (value is None or whole(value, "search", name) < 1):
                raise GraphError(f"search: a model needs {name}, at least 1, got {value}")
        options.setdefault("remat", list(REMAT))
        return transformer_builder(build, batch, length), options  # type: ignore[arg-type]
    if batch is not None or length is not None:
        raise GraphError("search: batch and length are for a model's config; a builder gets its arguments from choices")
    if not callable(build):
        raise GraphError(
            "search: build must be a function that returns (outputs, updates), or a model's config "
            f"(mtf.models.preset), got {build!r:.80}"
        )
    return build, options


def _check_choices(build: object, options: Iterable[str]) -> None:
    """Check that the builder has arguments of these names."""
    model = isinstance(build, TransformerConfig)
    try:
        taken = signature(train_step if model else build).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # some functions have no signature
        return
    names = [name for name in taken if not model or name not in ("config", "pipeline")]
    names += ["stages", "microbatches"] if model else []
    if any(p.kind is Parameter.VAR_KEYWORD for p in taken.values()):
        return
    for name in options:
        if name not in names:
            what = "a model's training step" if model else "build"
            hint = nearest(name, names) or f"; it has {', '.join(names) or 'none'}"
            raise GraphError(f"search: {what} has no argument {name!r}{hint}")


def _slices(given: Any) -> list[Slice]:
    several = given if isinstance(given, list | tuple) else [given]
    if not several:
        raise SliceError("search: slice is empty; name at least one, such as 'v5e-64'")
    try:
        return list(dict.fromkeys(s if isinstance(s, Slice) else Slice(s) for s in several))
    except HardwareError as fault:
        raise SliceError(f"search: {fault}") from None


def _known(also: object, slices: Sequence[Slice]) -> dict[Slice, list[tuple[Mesh, LayoutRules]]]:
    """The layouts given by the user, by the slices whose number of devices their meshes have."""
    layouts_of: dict[Slice, list[tuple[Mesh, LayoutRules]]] = {where: [] for where in slices}
    for pair in items(also, "search", "also"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise GraphError(f"search: also must be pairs of a mesh and a layout, got {pair!r:.80}")
        mesh, rules = Mesh(pair[0]), LayoutRules(pair[1])
        fitting = [where for where in slices if where.devices == mesh.size]
        if not fitting:
            counts = ", ".join(f"{where.name} has {where.devices}" for where in slices)
            raise GraphError(f"search: mesh {mesh} in also= has {mesh.size} devices; {counts}")
        try:
            mesh.group_size(rules.axes)
        except LayoutError as fault:
            raise LayoutError(f"search: layout {rules} in also=: {fault}") from None
        for where in fitting:
            layouts_of[where].append((mesh, rules))
    return layouts_of


def _usual(build: object, where: Slice, problem: SearchProblem) -> list[tuple[Mesh, LayoutRules]]:
    """The usual layouts of a model on a slice that divide; for a pipeline, those of a stage."""
    if not isinstance(build, TransformerConfig):
        return []
    sizes, pairs = problem.tensors.sizes, []
    stages = sizes.get("stage", 1)
    if where.devices % stages:
        return []
    for name, mesh in usual_layouts(build, where.devices, sizes["batch"], stages):
        with suppress(LayoutError):
            pairs.append((Mesh(mesh), layout(name, build, mesh)))
    return pairs


def _fixed(fix: Any, sizes: Any) -> Fixed:
    with _named("fix"):
        rules = LayoutRules(fix)
    with _named("sizes"):
        given = dict(Mesh(sizes).sizes_by_axis) if sizes else {}
    for axis in given:
        if axis not in rules.axes:
            raise GraphError(
                f"search: {argument('sizes')} has axis {axis!r}, which no rule of {argument('fix')} "
                f"({rules or 'none'}) has; add one, such as {argument('fix', f'DIM:{axis}')}"
            )
    return Fixed(rules, given)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors of rules and meshes with the argument that they are of."""
    try:
        yield
    except LayoutError as fault:
        fault.args = (f"search: {argument(name)}: {fault}",)
        raise


def _check_dims(name: str, rules: LayoutRules, problems: Iterable[SearchProblem]) -> None:
    """Raise GraphError for a rule with a dim that occurs in no program."""
    dims = dict.fromkeys(dim for problem in problems for dim in problem.tensors.sizes)
    for rule in rules.rules:
        if rule.dim not in dims and not rule.optional:
            hint = nearest(rule.dim, dims) or f"; there are {', '.join(dims)}"
            raise GraphError(
                f"search: {argument(name)} has a rule for dim {rule.dim!r}, which the program does not have{hint}"
            )


def _check_sizes(fixed: Fixed, slices: Sequence[Slice]) -> None:
    """Raise GraphError if the given axis sizes fit no slice."""
    taken = prod(fixed.sizes.values())
    if all(where.devices % taken for where in slices):
        counts = ", ".join(f"{where.name} has {where.devices}" for where in slices)
        raise GraphError(
            f"search: {argument('sizes')} take {taken} devices, which must divide those of a slice; {counts}"
        )


def _scoped(fixed: Fixed) -> set[str]:
    """Dims that the fixed rules split in a single scope only."""
    return {r.dim for r in fixed.rules.rules} - {r.dim for r in fixed.rules.rules if r.scope is None}


def _names(given: object, of: str) -> tuple[str, ...]:
    if isinstance(given, str):
        given = given.replace(",", " ").replace(";", " ").split()
    names = items(given, "search", argument(of))
    for name in names:
        if not isinstance(name, str):
            raise GraphError(f"search: {argument(of)} must be names of dims, got {name!r:.80}")
    return tuple(names)
