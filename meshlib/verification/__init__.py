"""Verification of layouts against the unsharded program: values, updated variables, gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from layouts import LayoutRules, Mesh
from meshlib.core.arguments import bounded, choice, whole
from meshlib.core.errors import FeedError, GraphError
from meshlib.core.executors import Tasks, executor_of
from meshlib.core.graph import Operation
from meshlib.lowering.session import Session, fetched_outputs
from meshlib.lowering.simplification import simplify
from meshlib.ops.control.state import assigned
from meshlib.verification.candidates import Borrowed, all_gradients, legal_layouts
from meshlib.verification.job import Job
from meshlib.verification.report import Divergence, LayoutRow, Verification

__all__ = ["Divergence", "Row", "Verification", "legal_layouts", "verify"]


def _legal_pairs(
    operations: Sequence[Operation], layouts: Any, mesh: Mesh, seed: int
) -> list[tuple[Mesh, LayoutRules]]:
    """All legal layouts of operations on a mesh, or the requested number of them."""
    number = None if layouts == "all" else layouts
    return [(mesh, rules) for rules in legal_layouts(operations, mesh, number, seed)]


def _results(
    job: Job, pairs: Sequence[tuple[Mesh, LayoutRules]], searched: bool, workers: Executor | None
) -> list[LayoutRow | str | None]:
    """One row, or the reason of a refusal, per layout."""
    if workers is None:
        return [job.row(one, rules, searched) for one, rules in pairs]
    tasks = Tasks("verify", workers, (job, pairs, searched))
    return list(tasks.answers(_row, range(len(pairs))).values())


def verify(
    outputs: Any = None,
    updates: Sequence[Operation] = (),
    inputs: Mapping[str, Any] | None = None,
    layouts: Any = 24,
    mesh: Any = None,
    *,
    precision: str = "highest",
    executor: str = "exact",
    state: Mapping[str, Any] | None = None,
    steps: int | None = None,
    seed: int = 0,
    rtol: float | None = None,
    workers: Executor | None = None,
) -> Verification:
    """Run many layouts and compare each with the unsharded program, naming the first operation that diverges.

    It compares the fetched values, the new values of variables, and, without updates, the gradients of the float
    outputs (for random cotangents) with respect to trainable variables and float inputs. A layout that supports
    everything but these gradients is compared without them, with a note.

    Args:
      outputs, updates: as in `mtf.lower`.
      inputs: feeds by name; unused ones are ignored. Missing ones are drawn from the seed: floats normal, booleans
        even, integers below the size of the dims that one_hot, gather and others index with them (otherwise below 8).
      layouts: (mesh, layout) pairs; or, with `mesh`, a list of layouts, "all" or a number of legal layouts to draw
        (see `legal_layouts`); by default 24.
      mesh: see `layouts`. The exact executor is meant for up to about 16 cores.
      precision: "highest", or "default", whose rounding for the MXU makes the comparison 2**8 times coarser.
      executor: "exact" or "fast".
      state: values of variables by name. Others have their initial values; constant trainable ones (zeros, ones) get
        additional normal noise of 0.1, because constants hide faults.
      steps: number of steps, each from the unsharded program's state; by default 2 with updates (slots are zero in the
        first), otherwise 1.
      seed: of drawn inputs, initial values, random operations and drawn layouts.
      rtol: allowed difference relative to the largest magnitude in each array; by default derived (see
        meshlib/verification/rounding.py).
      workers: a `concurrent.futures.Executor` that runs layouts in parallel, such as a ProcessPoolExecutor or Dask's
        `client.get_executor()`; it stays open. By default they run sequentially.
    Returns: a Verification: `.ok`, `.rows`, `.table()`, `.raise_for_failures()`. The graph is unchanged.
    Raises: LayoutError for an invalid layout; FeedError for invalid feeds; GraphError for other arguments. A layout
      whose run fails otherwise is a failing row.
    Example:
      >>> import meshlib as mtf
      >>> batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", 6)
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [batch, d])
      ...     y = mtf.reduce_sum(mtf.tanh(x) * mtf.variable("w", [d]), reduced_dim=d, name="y")
      >>> found = mtf.verify({"y": y}, layouts="all", mesh="p:2")
      >>> found.ok, found.compared
      (True, ('y', 'd w', 'd x'))
      >>> [row.layout for row in found.rows]
      ['', 'batch:p', 'batch:p;d:p?', 'd:p', 'd:p;batch:p?']
    """
    _check_arguments(inputs, state, precision, executor, steps, seed, rtol)
    if workers is not None and executor_of(workers) is None:
        raise GraphError(f"verify: workers must be a concurrent.futures.Executor, got {workers!r:.80}")
    fetched, graph = fetched_outputs(outputs, updates)
    written = assigned(updates)
    pairs = _given_pairs(layouts, mesh)
    searched = mesh is not None and not pairs
    notes: list[str] = []
    with Borrowed(graph):
        extra = {} if written else all_gradients(graph, fetched, notes)
        compared = {**fetched, **extra}
        if searched:
            simple = simplify(graph, compared.values(), written.values())
            pairs = _legal_pairs(simple.operations, layouts, Mesh(mesh), seed)
        updates = list(written.values())
        own = Session({n: y for n, y in compared.items() if n not in extra}, updates) if extra else None
        job = Job(graph, Session(compared, updates), own, precision, executor, seed, rtol)
        job.prepare([m for m, _ in pairs], inputs or {}, state or {}, steps or (2 if written else 1))
        results = _results(job, pairs, searched, workers)
    rows = tuple(r for r in results if isinstance(r, LayoutRow))
    refused = tuple(r for r in results if isinstance(r, str))
    notes += [*job.notes, *job.weaknesses()]
    return Verification(rows, job.names, precision, executor, seed, len(job.reference), tuple(notes), refused)


def _row(payload: tuple[Job, Sequence[tuple[Mesh, LayoutRules]], bool], n: int) -> LayoutRow | str:
    """The row of one layout, computed in a worker."""
    job, pairs, searched = payload
    return job.row(*pairs[n], searched)


def _check_arguments(
    inputs: object, state: object, precision: object, executor: object, steps: object, seed: object, rtol: object
) -> None:
    for name, value in (("inputs", inputs), ("state", state)):
        if value is not None and not isinstance(value, Mapping):
            raise FeedError(f"verify: {name} must be a dict of names to arrays, got {type(value).__name__}")
    choice(precision, "verify", "precision", ("default", "highest"))
    choice(executor, "verify", "executor", ("exact", "fast"))
    for name, count, least in (("steps", steps, 1), ("seed", seed, 0)):
        if count is not None:
            whole(count, "verify", name, low=least)
    if rtol is not None:
        bounded(rtol, "verify", "rtol")


def _given_pairs(layouts: Any, mesh: Any) -> list[tuple[Mesh, LayoutRules]]:
    """The given layouts as pairs; empty if they are to be searched."""
    if mesh is not None:
        if isinstance(layouts, list | tuple):
            if not layouts:
                raise GraphError("verify: the list of layouts is empty")
            return [(Mesh(mesh), LayoutRules(x)) for x in layouts]
        if layouts != "all" and (isinstance(layouts, bool) or not isinstance(layouts, int) or layouts < 1):
            raise GraphError(f"verify: layouts must be 'all', a number of at least 1, or a list, got {layouts!r:.80}")
        return []
    wanted = "give layouts=[(mesh, layout), ...], or mesh=... with layouts='all' or a number"
    if not isinstance(layouts, list | tuple) or not layouts:
        raise GraphError(f"verify: {wanted}; got layouts={layouts!r:.80} and no mesh")
    for x in layouts:
        if not isinstance(x, list | tuple) or len(x) != 2:
            raise GraphError(f"verify: {wanted}; {x!r:.80} is not a pair")
    return [(Mesh(m), LayoutRules(x)) for m, x in layouts]
