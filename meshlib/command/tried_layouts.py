"""The layouts of a plan: each lowered and estimated, or excluded by a bound of its memory, best first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import inf
from typing import Any

from hardware.slices import Slice
from layouts import Mesh
from meshlib.command.choices import REMAT
from meshlib.command.subject import Subject
from meshlib.core.errors import GraphError, MeshlibError
from meshlib.core.graph import FORWARD, Operation
from meshlib.core.text import bytes_text, seconds_text
from meshlib.estimation import DeviceMemory, Estimate, HostInput, estimate
from meshlib.estimation.memory.device_memory import memory_on
from meshlib.estimation.views.rows import names_of_forward
from meshlib.estimation.views.whole_run import WholeRun
from meshlib.program.instructions import Loop


@dataclass(frozen=True)
class PlannedLayout:
    """One layout of the program: its memory and, where it fits or was named, its estimate; or why there is none.

    `least_bytes`: a lower bound of its memory, if that excludes it.
    """

    name: str
    mesh: str
    choices: dict[str, object]
    est: Estimate | None = None
    fault: str = ""
    run: WholeRun | None = None
    memory: DeviceMemory | None = None
    least_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """True if the layout was lowered and fits."""
        return self.memory is not None and self.memory.fits

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: layouts that fit by step time, others by memory, those excluded by their bound, the rest."""
        if self.est is not None and self.fits:
            return (0, self.est.step_seconds)
        if self.memory is not None:
            return (1, self.memory.needed_bytes)
        return (2, self.least_bytes) if self.least_bytes else (3, 0.0)


@dataclass(frozen=True)
class WholeRunOptions:
    """Options of a whole run: arguments of `Estimate.run`, and the rate at which a host prepares examples."""

    how_long: dict[str, Any]
    evaluation_examples: int | None = None
    evaluate_every: int | None = None
    input: HostInput | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> WholeRunOptions:
        """The options of a command.

        Raises: GraphError for what does not go together.
        """
        names = ("tokens", "epochs", "steps", "examples")
        how_long = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        if not how_long and (args.evaluate_every or args.evaluation_examples):
            raise GraphError("evaluations are part of a whole run: give its length by --tokens, --epochs or --steps")
        if args.evaluate_every and not args.evaluation_examples:
            raise GraphError("--evaluate-every needs --evaluation-examples")
        if (args.epochs is None) != (args.examples is None):
            raise GraphError("--epochs and --examples, the examples of an epoch, go together")
        fed = None if args.input_rate is None else HostInput(examples_per_second=args.input_rate)
        return cls(how_long, args.evaluation_examples, args.evaluate_every, fed)

    def run(self, subject: Subject, est: Estimate, name: str, mesh: str) -> WholeRun | None:
        """The whole run of an estimated layout; None if no run was asked for."""
        if not self.how_long:
            return None
        more: dict[str, Any] = {}
        if self.evaluation_examples is not None:
            evaluation = estimate(subject.evaluation(name, mesh), est.slice, input=self.input)
            more = {"evaluation": evaluation, "evaluation_examples": self.evaluation_examples}
        return est.run(**self.how_long, **more, evaluate_every=self.evaluate_every)


NOTHING = WholeRunOptions({})
SHARES = 8  # of the memory: of layouts whose bounds differ by less, the one with the fewest mesh axes is lowered first
AMPLE = 0.5  # of the memory: where more is certainly used outside of loops, the most rematerialisation is tried first


def planned(
    subject: Subject, where: Slice, name: str, mesh: str, asked: WholeRunOptions = NOTHING, **choices: object
) -> PlannedLayout:
    """Lower and estimate one layout."""
    return timed(subject, where, _lowered(subject, where, name, mesh, choices), asked)


def _lowered(
    subject: Subject, where: Slice, name: str, mesh: str, choices: dict[str, object], most_bytes: float = inf
) -> PlannedLayout:
    """One layout with its memory; with a bound of it as soon as its loops alone show that it exceeds `most_bytes`."""
    loops: dict[Operation, Loop] = {}

    def told(loop: Loop) -> None:
        loops[loop.operation] = loop
        bound = subject.least_memory((name, mesh), **choices)
        least = bound.needed_bytes(subject.rules(name, mesh), Mesh(mesh), subject.compiler, lowered=loops)
        if least > most_bytes:
            raise _TooMuch(least)

    try:
        program = subject.lowered(name, mesh, told if most_bytes < inf else None, **choices)
    except _TooMuch as end:
        return _excluded(name, mesh, choices, end.least_bytes)
    except MeshlibError as fault:
        return PlannedLayout(name, mesh, choices, fault=str(fault))
    return PlannedLayout(name, mesh, choices, memory=memory_on(program, where))


class _TooMuch(Exception):
    """A lowering is ended, since its program needs at least `least_bytes`."""

    def __init__(self, least_bytes: float) -> None:
        super().__init__(least_bytes)
        self.least_bytes = least_bytes


def _excluded(name: str, mesh: str, choices: dict[str, object], least_bytes: float) -> PlannedLayout:
    fault = f"not lowered, since it needs at least {bytes_text(least_bytes)}"
    return PlannedLayout(name, mesh, choices, fault=fault, least_bytes=least_bytes)


def timed(subject: Subject, where: Slice, plan: PlannedLayout, asked: WholeRunOptions) -> PlannedLayout:
    """A lowered layout with its estimate."""
    if plan.memory is None or plan.est is not None:
        return plan
    try:
        est = estimate(plan.memory.program, where, input=asked.input, placement=subject.placement)
    except MeshlibError as fault:
        return PlannedLayout(plan.name, plan.mesh, plan.choices, fault=str(fault))
    vars(est)["memory"] = plan.memory  # a cached property
    return replace(plan, est=est, run=asked.run(subject, est, plan.name, plan.mesh))


def plans_of(
    batches: Iterable[tuple[Subject, Sequence[tuple[str, str]]]],
    where: Slice,
    remat: str | None,
    asked: WholeRunOptions = NOTHING,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
    named: bool = False,
) -> tuple[Subject, list[PlannedLayout]]:
    """The program with the first batch of which a layout fits, and the plans of its layouts, best first.

    Without `remat`, a model's layouts are tried with the least rematerialisation that fits. A layout that cannot fit is
    not lowered, and one that does not fit has no estimate, unless the user `named` it. Where no batch fits, that of
    the plan that needs the least memory. The layout of each batch that is likeliest to fit is tried before all others.
    """
    tried: list[_Tries] = []
    levels: list[dict[str, object]] = [{"remat": level} for level in ([remat] if remat else REMAT)]
    for subject, layouts in batches:
        choices = levels if subject.config is not None else [{}]
        is_named = named or len(layouts) * len(choices) == 1
        tried.append(_Tries(subject, where, choices, asked, is_named, progress, layouts, tried))
        if tried[-1].likeliest():
            break
    for tries in tried:
        tries.rest()
        if tries.fastest < inf:
            tries.faster()
            return tries.subject, tries.shown
    _closest(tried)
    best = min(tried, key=lambda tries: min(plan.order for plan in tries.plans))
    return best.subject, best.shown


def _closest(tried: Sequence[_Tries]) -> None:
    """Where none fits, lower those that may need the least memory, with any rematerialisation."""
    tried[0].show("none fits")
    unlowered = [(least, n, each) for n, tries in enumerate(tried) for least, each in tries.unlowered()]
    for least, n, (name, mesh, choices) in sorted(unlowered, key=lambda one: one[:2]):
        if least < (fewest := min(tries.least_needed for tries in tried)):
            tried[n].add(name, mesh, choices, fewest)


def with_more_rematerialisation(subject: Subject, where: Slice, plans: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """The plans, and the best one with more rematerialisation: slower, in less memory."""
    best, tried = plans[0], [(plan.name, plan.mesh, plan.choices) for plan in plans]
    levels = REMAT[: REMAT.index(str(best.choices["remat"]))] if best.choices.get("remat") in REMAT else ()
    wanted: list[tuple[str, str, dict[str, Any]]] = [(best.name, best.mesh, {"remat": level}) for level in levels]
    return [*plans, *(planned(subject, where, n, m, **c) for n, m, c in wanted if (n, m, c) not in tried)]


@dataclass
class _Tries:
    """Layouts tried in turn, each with the first of `choices`, the most rematerialisation, or with later ones.

    `batches`: the tries of all batches, the largest first.
    """

    subject: Subject
    where: Slice
    choices: Sequence[dict[str, object]]
    asked: WholeRunOptions
    named: bool
    progress: Callable[[int, int, str], None]
    layouts: Sequence[tuple[str, str]]
    batches: Sequence[_Tries]
    plans: list[PlannedLayout] = field(default_factory=list)
    waiting: list[tuple[str, str]] = field(default_factory=list)  # layouts not tried yet, or with the most alone
    _most: dict[tuple[str, str], bool] = field(default_factory=dict)
    _lightened: dict[tuple[str, str], bool] = field(default_factory=dict)

    @property
    def shown(self) -> list[PlannedLayout]:
        """The plans, best first, without those of a layout that its bounds exclude with less rematerialisation than
        fits."""
        fitting = {(plan.name, plan.mesh) for plan in self.plans if plan.fits}
        first = self.choices[0]
        shown = [p for p in self.plans if p.choices == first or not p.least_bytes or (p.name, p.mesh) in fitting]
        return sorted(shown, key=lambda p: p.order)

    @property
    def capacity(self) -> float:
        """Bytes of one device."""
        return self.where.usable_hbm_bytes_per_device

    @property
    def fastest(self) -> float:
        """The shortest step of the layouts that fit."""
        return min((plan.est.step_seconds for plan in self.plans if plan.est and plan.fits), default=inf)

    def likeliest(self) -> bool:
        """Try the layout with about the least bound that is lowered the soonest; returns whether it fits."""
        least = {} if self.named else {each: self._least_bytes(*each, self.choices[0]) for each in self.layouts}
        shares = {each: least[each] * SHARES // self.capacity for each in least}
        order = sorted(least, key=lambda each: (shares[each], len(Mesh(each[1])))) or self.layouts
        layout, *self.waiting = order
        if least.get(layout, inf) > self.capacity or not self._is_tight(*layout):
            self.usual(*layout)
        elif not self.most(*layout):
            self.waiting.append(layout)
        return self.fastest < inf

    def rest(self) -> None:
        """Try the other layouts."""
        for layout in self.waiting:
            self.usual(*layout)

    def usual(self, name: str, mesh: str) -> None:
        """Try a layout: until one fits with the least rematerialisation that may fit, later with the most.

        The most goes first, too, where much of the memory is certainly used: then less probably does not fit.
        """
        if self.named:
            self.most(name, mesh)
        elif not self.excluded(name, mesh, self.choices[0], lighter=True):
            first = self.fastest < inf or self._is_tight(name, mesh)
            if not (first and self.most(name, mesh)) and not self.lighter(name, mesh):
                self.most(name, mesh)

    def most(self, name: str, mesh: str) -> bool:
        """Try a layout with the most rematerialisation unless it cannot fit; returns whether it fits."""
        if (name, mesh) not in self._most:
            may = self.named or not self.excluded(name, mesh, self.choices[0])
            self._most[name, mesh] = may and self.add(name, mesh, self.choices[0]).fits
        return self._most[name, mesh]

    def _is_tight(self, name: str, mesh: str) -> bool:
        """True if so much is certainly in memory outside of loops that only the most rematerialisation may fit."""
        return self._least_bytes(name, mesh, self.choices[0], inside=False) > AMPLE * self.capacity

    @property
    def least_needed(self) -> float:
        """The fewest bytes that a lowered layout is known to need."""
        return min((plan.memory.needed_bytes for plan in self.plans if plan.memory is not None), default=inf)

    def unlowered(self) -> Iterator[tuple[float, tuple[str, str, dict[str, object]]]]:
        """Possible layouts that were not lowered, with every rematerialisation, each after a bound of its memory."""
        for name, mesh in self.layouts:
            for choices in self.choices:
                bounds = [p.least_bytes for p in self.plans if (p.name, p.mesh, p.choices) == (name, mesh, choices)]
                least = max(0.0, *bounds, self._least_bytes(name, mesh, choices))
                if all(bounds) and least:
                    yield least, (name, mesh, choices)

    def lighter(self, name: str, mesh: str) -> bool:
        """Try the least rematerialisation that may fit, then more, but not the most; returns whether one fits."""
        if (name, mesh) not in self._lightened:
            levels = takewhile(lambda choices: not self.excluded(name, mesh, choices, lighter=True), self.choices[1:])
            may = (choices for choices in [*levels][::-1] if not self.excluded(name, mesh, choices))
            self._lightened[name, mesh] = any(self.add(name, mesh, choices).fits for choices in may)
        return self._lightened[name, mesh]

    def faster(self) -> None:
        """Try less rematerialisation of layouts that could then be the fastest."""
        for plan in sorted(self.plans, key=lambda p: p.order):
            if plan.choices == self.choices[0] and _least_seconds(plan) < self.fastest:
                self.lighter(plan.name, plan.mesh)

    def add(self, name: str, mesh: str, choices: dict[str, object], most_bytes: float | None = None) -> PlannedLayout:
        """Lower a layout, and estimate it if it fits or was named; not wholly if it certainly needs more than
        `most_bytes`, by default those of a device."""
        most_bytes = inf if self.named else self.capacity if most_bytes is None else most_bytes
        plan = _lowered(self.subject, self.where, name, mesh, choices, most_bytes)
        others = [p for p in self.plans if (p.name, p.mesh, p.choices) != (name, mesh, choices)]
        self.plans = [*others, plan]
        if plan.fits and not any(each.fastest < inf for each in self.batches):
            self.show(f"fits: {name}")
        if plan.fits or self.named:
            self.plans[-1] = plan = timed(self.subject, self.where, plan, self.asked)
        fitting = next((min(each.plans, key=lambda p: p.order) for each in self.batches if each.fastest < inf), None)
        if fitting is not None and fitting.est is not None:
            self.show(f"fits: {fitting.name}, {seconds_text(fitting.est.step_seconds)}")
        else:
            self.show("none fits yet")
        return plan

    def show(self, verdict: str) -> None:
        """Show the verdict so far while others are tried."""
        tried = sum(plan.memory is not None for each in self.batches for plan in each.plans)
        self.progress(tried, max(tried, sum(len(each.layouts) for each in self.batches)), f"layouts; {verdict}")

    def excluded(self, name: str, mesh: str, choices: dict[str, object], lighter: bool = False) -> bool:
        """True if a layout cannot fit; that is then one of the plans. `lighter`: nor with less rematerialisation."""
        least = self._least_bytes(name, mesh, choices, inside=not lighter)
        over = least > self.capacity
        if over:
            self.plans.append(_excluded(name, mesh, choices, least))
        return over

    def _least_bytes(self, name: str, mesh: str, choices: dict[str, object], inside: bool = True) -> float:
        """Lower bound of a layout's memory; 0 for a layout that is impossible, which lowering reports."""
        try:
            bound = self.subject.least_memory((name, mesh) if inside else None, **choices)
            return bound.needed_bytes(self.subject.rules(name, mesh), Mesh(mesh), self.subject.compiler, inside)
        except MeshlibError:
            return 0.0


def batches_that_may_fit(
    subject: Subject, where: Slice, layouts: Sequence[tuple[str, str]], remat: str | None
) -> tuple[bool, bool]:
    """Whether one of a model's layouts may fit, and whether the state of one does, with gradients, at any batch."""
    least, capacity = subject.least_memory(remat=remat or REMAT[0]), where.usable_hbm_bytes_per_device
    try:
        placed = [(subject.rules(name, mesh), Mesh(mesh)) for name, mesh in layouts]
        fits = any(least.needed_bytes(*each, subject.compiler, inside=False) <= capacity for each in placed)
        return fits, any(least.state_bytes(*each, gradients=True) <= capacity for each in placed)
    except MeshlibError:  # lowering reports it
        return True, True


def _least_seconds(plan: PlannedLayout) -> float:
    """Rough lower bound of a fitting plan's step without recomputation and repeated gathers in its backward pass.
    Modelled."""
    if plan.est is None or not plan.fits:
        return inf
    forward = names_of_forward(plan.est.schedule)
    again = sum(r.total_seconds for r in plan.est.rows if r.phase != FORWARD and r.name in forward)
    return plan.est.step_seconds - again
