"""Loops, checkpoints and branches. Their bodies refer to outer values directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib.core.graph import Tensor, current_graph
from meshlib.jax.importing.axes import Axes
from meshlib.jax.importing.code import Code, CodeStep, Var
from meshlib.jax.importing.table import RULES, give, rule, same_axes
from meshlib.jax.importing.writing import StepWriter
from meshlib.ops.control.custom_gradients import recompute_grad
from meshlib.ops.control.loops import make_loop
from meshlib.ops.control.remat import PartialPolicy, Policy, Remat
from meshlib.ops.movement.indexing import range as positions
from meshlib.ops.pointwise.binary import equal
from meshlib.ops.pointwise.selection import where


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


def _scan(w: StepWriter, step: CodeStep) -> Sequence[Tensor | None]:
    (body,) = step.bodies
    carries, length = step.params["num_carry"], step.params["length"]
    begins, xs = step.ins[:carries], step.ins[carries:]
    (trip,) = step.labels
    carried = [n for n, x in enumerate(body.ins[:carries]) if not x.key]
    starts = [w.full(w.under(begins[n], body.ins[n].axes), body.ins[n].axes) for n in carried]
    sliced = [(inside, x) for inside, x in zip(body.ins[carries:], xs, strict=True) if not inside.key]
    stacked_results = [n for n, y in enumerate(body.outs[carries:]) if not y.key]
    if length == 1:
        w.tensors.update(zip((body.ins[n] for n in carried), starts, strict=True))
        w.tensors.update((inside, w.under(x, [trip, *inside.axes])) for inside, x in sliced)
        w.run(body)
        ends = [w.under(body.outs[n], body.ins[n].axes) for n in carried]
        return _placed(
            step, carries, carried, ends, stacked_results, [w.tensor(body.outs[carries + n]) for n in stacked_results]
        )
    dim = w.whole_dim(trip)
    stacked, given = [], dict[Var, Tensor]()
    for inside, x in sliced:
        t = w.merge(w.under(x, [trip, *inside.axes]), trip) if x.const is None or x.axes else w.tensor(x)
        if dim in t.shape:
            stacked.append((inside, t))
        else:
            given[inside] = t  # invariant over trips
    # Only keys may remain, and draws in a loop need none.
    counter = [] if starts or stacked else [positions(dim)]
    parts = PartialPolicy()

    def trip_of(held: Sequence[Tensor], slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        inner = StepWriter(w.axes, {**w.tensors, **given}, w.constraints, parts)
        inner.tensors.update(zip((body.ins[n] for n in carried), held, strict=True))
        inner.tensors.update(zip((inside for inside, _ in stacked), slices, strict=False))
        inner.run(body)
        ends = [inner.full(inner.under(body.outs[n], body.ins[n].axes), body.ins[n].axes) for n in carried]
        return ends, [inner.tensor(body.outs[carries + n]) for n in stacked_results]

    finals, stacks = make_loop(
        "scan",
        trip_of,
        starts,
        [*(t for _, t in stacked), *counter],
        dim,
        bool(step.params["reverse"]),
        None,
        remat=parts,
    )
    return _placed(step, carries, carried, finals, stacked_results, [w.apart(y, trip) for y in stacks])


def _placed(
    step: CodeStep, carries: int, carried: list[int], ends: Sequence[Tensor], kept: list[int], ys: Sequence[Tensor]
) -> list[Tensor | None]:
    tensors: list[Tensor | None] = [None] * len(step.outs)
    for n, t in (*zip(carried, ends, strict=True), *zip((carries + n for n in kept), ys, strict=True)):
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
