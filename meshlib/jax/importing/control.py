"""Loops, checkpoints and branches. Their bodies refer to outer values directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshlib.core.graph import Tensor, current_graph
from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.code import Code, CodeStep, Var
from meshlib.jax.importing.table import RULES, give, rule, same_axes
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.custom_gradients import recompute_grad
from meshlib.ops.control.loops import make_loop
from meshlib.ops.control.remat import PartialPolicy, Policy, Remat
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.pointwise.arithmetic import equal, where


def unify(axes: Axes, code: Code) -> None:
    """Unify the axes of all values in a piece of code."""
    for step in code.steps:
        if not all(out.key for out in step.outs):
            RULES[step.kind].axes(axes, step)


# ---------------------------------------------------------------- loops


def _scan_axes(axes: Axes, step: CodeStep) -> None:
    (body,) = step.bodies
    carries, length = step.params["num_carry"], step.params["length"]
    begins, xs = step.ins[:carries], step.ins[carries:]
    trip = axes.new(length)
    # No value inside the loop has its dim.
    for x in body.vars():
        axes.hold(x.space, [trip])
    for inside, begin in zip(body.ins[:carries], begins, strict=True):
        if not inside.key:
            give(axes, inside, [axes.new(n) for n in inside.shape])
            if begin.axes:
                for a, b in zip(inside.axes, begin.axes, strict=True):
                    axes.tie(a, b)
    for inside, x in zip(body.ins[carries:], xs, strict=True):
        if not inside.key:
            if x.axes:
                axes.tie(trip, x.axes[0])
                give(axes, inside, x.axes[1:])
            else:
                give(axes, inside, [axes.new(n) for n in inside.shape])
    unify(axes, body)
    for inside, end, out in zip(body.ins[:carries], body.outs[:carries], step.outs[:carries], strict=True):
        if not inside.key:
            for a, b in zip(inside.axes, end.axes, strict=False):
                axes.tie(a, b)
            give(axes, out, inside.axes)
    for y, out in zip(body.outs[carries:], step.outs[carries:], strict=True):
        if not y.key:
            give(axes, out, [trip, *(y.axes or [axes.new(n) for n in y.shape])])
    step.labels = [trip]


def _stack_of(w: StepWriter, inside: Var, x: Var, trip: Axis) -> Tensor:
    """The tensor that a loop slices, with the trips as one dim."""
    return w.merge(w.under(x, [trip, *inside.axes]), trip) if x.const is None or x.axes else w.tensor(x)


@dataclass(frozen=True)
class _TripBody:
    """The body of a scan, written once for all trips: carries by place, sliced arguments, and invariant ones."""

    writer: StepWriter
    code: Code
    carried: Mapping[int, Var]
    sliced: Sequence[Var]
    given: Mapping[Var, Tensor]
    results: Sequence[int]
    parts: PartialPolicy

    def run(self, carries: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The carries after a trip, and its other results."""
        w, outs = self.writer, self.code.outs
        inner = StepWriter(w.axes, {**w.tensors, **self.given}, w.constraints, self.parts)
        inner.tensors.update(zip(self.carried.values(), carries, strict=True))
        inner.tensors.update(zip(self.sliced, slices, strict=False))
        inner.run(self.code)
        ends = [inner.full(inner.under(outs[n], x.axes), x.axes) for n, x in self.carried.items()]
        return ends, [inner.tensor(outs[n]) for n in self.results]


def _run_once(
    w: StepWriter, body: Code, carried: Mapping[int, Var], starts: Sequence[Tensor], results: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """The carries after the only trip of a loop, and its other results."""
    w.tensors.update(zip(carried.values(), starts, strict=True))
    w.run(body)
    return [w.under(body.outs[n], x.axes) for n, x in carried.items()], [w.tensor(body.outs[n]) for n in results]


def _scan(w: StepWriter, step: CodeStep) -> Sequence[Tensor | None]:
    (body,) = step.bodies
    carries, length = step.params["num_carry"], step.params["length"]
    begins, xs = step.ins[:carries], step.ins[carries:]
    (trip,) = step.labels
    carried = [n for n, x in enumerate(body.ins[:carries]) if not x.key]
    carried_vars = {n: body.ins[n] for n in carried}
    starts = [w.full(w.under(begins[n], x.axes), x.axes) for n, x in carried_vars.items()]
    sliced = [(inside, x) for inside, x in zip(body.ins[carries:], xs, strict=True) if not inside.key]
    results = [n for n in range(carries, len(body.outs)) if not body.outs[n].key]
    if length == 1:
        w.tensors.update((inside, w.under(x, [trip, *inside.axes])) for inside, x in sliced)
        ends, ys = _run_once(w, body, carried_vars, starts, results)
        return _placed(step, carried, ends, results, ys)
    dim = w.whole_dim(trip)
    whole = {inside: _stack_of(w, inside, x, trip) for inside, x in sliced}
    stacked = {inside: t for inside, t in whole.items() if dim in t.shape}
    given = {inside: t for inside, t in whole.items() if inside not in stacked}  # invariant over trips
    # Only keys may remain, and draws in a loop need none.
    counter = [] if starts or stacked else [positions(dim)]
    parts = PartialPolicy()

    trip_body = _TripBody(w, body, carried_vars, list(stacked), given, results, parts)
    finals, stacks = make_loop(
        "scan",
        trip_body.run,
        starts,
        [*stacked.values(), *counter],
        dim,
        bool(step.params["reverse"]),
        None,
        remat=parts,
    )
    return _placed(step, carried, finals, results, [w.apart(y, trip) for y in stacks])


def _placed(
    step: CodeStep, carried: list[int], ends: Sequence[Tensor], results: list[int], ys: Sequence[Tensor]
) -> list[Tensor | None]:
    tensors: list[Tensor | None] = [None] * len(step.outs)
    for n, t in (*zip(carried, ends, strict=True), *zip(results, ys, strict=True)):
        tensors[n] = t
    return tensors


rule("scan", axes=_scan_axes, write=_scan)


# ---------------------------------------------------------------- checkpoints


def _body_axes(axes: Axes, step: CodeStep) -> None:
    unify(axes, step.bodies[0])
    for inside, out in zip(step.bodies[0].outs, step.outs, strict=True):
        if not out.key:
            same_axes(axes, CodeStep(step.kind, [inside], [out], {}, step.place))


def _checkpoint(w: StepWriter, step: CodeStep) -> Sequence[Tensor | None]:
    (body,) = step.bodies
    inputs = [x for x in dict.fromkeys(step.ins) if x.const is None and not x.key]
    live = [n for n, out in enumerate(body.outs) if not out.key]
    remat = _without_pruned_names(step.params["remat"], body)
    if not inputs or w.parts is not None:
        graph = current_graph("checkpoint")
        before = len(graph.operations)
        w.run(body)
        if w.parts is not None:  # recomputed by the enclosing loop
            w.parts.add(graph.operations[before:], remat)
        return [w.tensor(out) if not out.key else None for out in body.outs]

    def function(*given: Tensor) -> list[Tensor]:
        w.tensors.update(zip(inputs, given, strict=True))
        w.run(body)
        return [w.tensor(body.outs[n]) for n in live]

    recomputed = recompute_grad(function, [w.tensor(x) for x in inputs], remat)
    tensors: list[Tensor | None] = [None] * len(step.outs)
    for n, t in zip(live, recomputed, strict=True):
        tensors[n] = t
    return tensors


rule("checkpoint", axes=_body_axes, write=_checkpoint)


# jax.checkpoint policy -> this library's name.
_POLICIES: dict[str, Policy] = {
    "nothing_saveable": "full",
    "everything_saveable": "none",
    "dots_with_no_batch_dims_saveable": "matmuls",
    "checkpoint_dots_with_no_batch_dims": "matmuls",
}


def policy_of(policy: Any, body: Code) -> Policy:
    """The values that a checkpoint keeps for its gradient, according to JAX's policy.

    A policy that is none of the usual ones has been queried for each step; the steps it saves were given names.
    """
    if policy is None:
        return "full"
    name = getattr(policy, "__name__", "")
    if name in _POLICIES:
        return _POLICIES[name]
    return _by_names(body, None)


def _by_names(body: Code, among: set[str] | None) -> Policy:
    """Policy that saves the named steps of a body, without attention scores, which are never stored."""
    steps = [s for s in body.walk() if s.saved is not None and s.memory is None and (among is None or s.saved in among)]
    save, offload = ([s.saved for s in steps if s.saved and s.on_host == host] for host in (False, True))
    return Remat(save=save, offload=offload) if steps else "full"


def _without_pruned_names(remat: Policy, body: Code) -> Policy:
    """The policy without the names of steps that were pruned."""
    return _by_names(body, {*remat.save, *remat.offload}) if isinstance(remat, Remat) else remat


# ---------------------------------------------------------------- branches


def _cond_axes(axes: Axes, step: CodeStep) -> None:
    for body in step.bodies:
        unify(axes, body)
    for n, out in enumerate(step.outs):
        if not out.key:
            branches = [body.outs[n] for body in step.bodies]
            same_axes(axes, CodeStep(step.kind, branches, [out], {}, step.place))


def _cond(w: StepWriter, step: CodeStep) -> Sequence[Tensor | None]:
    """Compute all branches and select: all cores of a program run in lockstep."""
    which = w.tensor(step.ins[0])
    for body in step.bodies:
        w.run(body)
    results: list[Tensor | None] = []
    for n, out in enumerate(step.outs):
        if out.key:
            results.append(None)
            continue
        cases = [w.as_tensor(w.operand(body.outs[n], out.axes), out) for body in step.bodies]
        selected = cases[0]
        for number, case in enumerate(cases[1:], start=1):
            chosen = which if which.dtype.name == "bool" else equal(which, number)
            selected = where(chosen, case, selected)
        results.append(selected)
    return results


rule("cond", axes=_cond_axes, write=_cond)
