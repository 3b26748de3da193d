"""`plan ... --emit`: a plan for another library."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from hardware.slices import Slice
from meshlib.command.configured import Configured
from meshlib.command.subject import Subject
from meshlib.command.tried_layouts import PlannedLayout
from meshlib.core.errors import GraphError
from meshlib.lowering import Program
from meshlib.models.maxtext.emission import Emission, emission_of
from meshlib.models.train import OFFLOAD
from meshlib.ops.control.remat import Remat
from meshlib.sharing.emission import Emitted, flax_rules, haliax_mappings, partition_specs, python_lines


def emitted(args: argparse.Namespace, subject: Subject, where: Slice, plans: Sequence[PlannedLayout]) -> int:
    """Print a plan for its target; returns 1 if the target cannot express all of it."""
    if args.rank > len(plans):
        raise GraphError(f"--rank {args.rank}: there {'is 1 plan' if len(plans) == 1 else f'are {len(plans)} plans'}")
    plan = plans[args.rank - 1]
    if plan.est is None:
        raise GraphError(f"there is no plan to emit: {plan.fault}")
    emission = _TARGETS[args.emit](subject, where, plan)
    print(emission)
    return 1 if emission.missing else 0


def _maxtext(subject: Subject, where: Slice, plan: PlannedLayout) -> Emission:
    assert plan.est is not None
    if isinstance(subject, Configured) and subject.run is not None:
        return Emission(subject.run.overrides, tuple(map(str, subject.run.unread)))
    if subject.config is None:
        raise GraphError(f"--emit maxtext is for models, not for {subject.name}")
    program, step = plan.est.program, dict(subject.step)
    parts, blocks = (int(str(step.pop(name, 1))) for name in ("accumulation", "loss_blocks"))
    norm, on_host = step.pop("max_norm", None), step.pop("slots_on_host", False)
    emission = emission_of(
        subject.config, program.mesh, program.layout, where, subject.sizes["batch"] // parts, subject.sizes["length"],
        _remat(plan.choices), subject.placement, None if norm is None else float(str(norm)), bool(on_host),
    )  # fmt: skip
    of_step = {"gradient_accumulation_steps": parts, "num_vocab_tiling": blocks}
    keys = {**emission.keys, **{key: value for key, value in of_step.items() if value != 1}}
    missing = [f"{name} {value}" for name, value in step.items() if (name, value) != ("optimizer", "adamw")]
    return Emission(keys, (*emission.missing, *missing))


def _remat(choices: Mapping[str, object]) -> str | Remat:
    remat = choices.get("remat", "full")
    if remat == OFFLOAD:
        return Remat(offload_carries=True)
    return remat if isinstance(remat, Remat) else str(remat)


def _of_program(write: Callable[[Program], Emitted]) -> Callable[[Subject, Slice, PlannedLayout], Emitted]:
    def emit(subject: Subject, where: Slice, plan: PlannedLayout) -> Emitted:
        assert plan.est is not None
        return write(plan.est.program)

    return emit


def _python(subject: Subject, where: Slice, plan: PlannedLayout) -> Emitted:
    assert plan.est is not None
    if isinstance(subject, Configured):
        assert subject.run is not None
        return python_lines(plan.est.program, where, run=subject.run)
    if subject.image is not None:
        return python_lines(plan.est.program, where, subject.image, subject.sizes)
    if subject.config is None:
        raise GraphError(f"--emit python is for models; {subject.name} is Python already")
    options = {"remat": "full", **subject.step, **plan.choices}
    return python_lines(plan.est.program, where, subject.config, subject.sizes, options=options)


_TARGETS: Mapping[str, Callable[[Subject, Slice, PlannedLayout], Emission | Emitted]] = {
    "maxtext": _maxtext,
    "flax": _of_program(flax_rules),
    "haliax": _of_program(haliax_mappings),
    "specs": _of_program(partition_specs),
    "python": _python,
}
