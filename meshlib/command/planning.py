"""`meshlib plan`, `search` and `report`: the usual layouts compared, or a whole space searched."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hardware.slices import Slice
from layouts import Mesh
from meshlib.command.choices import is_maxtext
from meshlib.command.figures import of_search
from meshlib.command.output import answer, create_folder, say, say_json, say_verdict, writable
from meshlib.command.plan import json_of, next_commands, text_of
from meshlib.command.subject import (
    TOKENS_OF_A_DEVICE,
    Subject,
    completed_layouts,
    named_layouts,
    of_model,
    slice_of,
    subject_of,
    tried_values,
)
from meshlib.command.terminal import FAILED, GOOD, INTERRUPTED, Progress
from meshlib.command.tried_layouts import (
    PlannedLayout,
    WholeRunOptions,
    batches_that_may_fit,
    planned,
    plans_of,
    timed,
    with_more_rematerialisation,
)
from meshlib.core.errors import GraphError
from meshlib.core.slices import slice_for
from meshlib.core.text import seconds_text, wrapped

if TYPE_CHECKING:
    from meshlib.report.alternatives import Alternative
    from meshlib.searching import Found

SEEDS = 3  # usual layouts that seed a model's search


def plan(args: argparse.Namespace) -> int:
    """`meshlib plan`: the verdict, and the ranking; of several slices the best plan of each."""
    if "," in args.slice:
        from meshlib.command.slices_compared import compared_slices

        return compared_slices(args)
    where = slice_of(args.slice)
    if is_maxtext(args) and args.search:
        from meshlib.command.tuning import tuned

        return tuned(args, where)
    subject, plans, search_result = planned_of(args, where)
    if args.emit and plans:
        from meshlib.command.emitting import emitted

        return emitted(args, subject, where, plans)
    if not plans:
        assert search_result is not None
        return _print_search(args, search_result)  # no plan: the search reports why
    best, compiled = plans[0], None
    fits = best.est is not None and best.est.fits
    if args.compile and best.est is not None:
        from meshlib.command.compiled import compiled_for

        (compiled,) = compiled_for([best.est.program], where, args)
        fits = compiled.fits
    if args.json:
        say_json({**json_of(subject, where, plans), **({} if compiled is None else {"compiled": compiled.as_json()})})
        return GOOD if fits else FAILED
    first, _, rest = text_of(subject, where, plans).partition("\n")
    say_verdict(first, fits)
    say(rest)
    if search_result is not None:
        say(f"\n{search_result}")
    if compiled is not None:
        say(f"\n{compiled}")
    if not args.quiet:
        say("\n".join(["", "next:", *next_commands(args, subject, best)]))
    return GOOD if fits else FAILED


def planned_of(args: argparse.Namespace, where: Slice) -> tuple[Subject, list[PlannedLayout], Found | None]:
    """The subject, its plans (best first), and the search, if there was one."""
    asked = WholeRunOptions.of(args)
    _refuse_lonely(args)
    if is_maxtext(args):
        from meshlib.command.configured import configured

        _refuse_effort(args)
        subject, name, mesh = configured(args, where)
        return subject, [planned(subject, subject.slice(where), name, mesh, asked)], None
    subject = subject_of(args, where)
    subject.session(**first_choices(args, subject))  # report faults of the program itself once
    unnamed = subject.config is None and subject.image is None and not args.layout
    if args.search or (unnamed and not args.mesh):
        subject, result = searched_of(args, subject, where)
        if not result.ranking:
            return subject, [], result
        best = result.best.candidate
        subject = subject.sized(**dict(best.choices))
        choices = dict(best.choices)
        return subject, [planned(subject, where, str(best.layout), str(best.mesh), asked, **choices)], result
    _refuse_effort(args)
    subject, plans = _usual_plans(args, subject, where, asked)
    return subject, plans, None


def _refuse_lonely(args: argparse.Namespace) -> None:
    """Raise GraphError for options that need another one, or exclude it."""
    once = getattr(args, "given_once", ())
    if getattr(args, "emit", None) and args.json:
        raise GraphError("--emit prints a plan in another form; leave out --json")
    for name, other in (("rank", "emit"), ("backend", "compile")):
        if name in once and not getattr(args, other, None):
            raise GraphError(f"--{name} goes with --{other}")


def _refuse_effort(args: argparse.Namespace) -> None:
    """Raise GraphError for options of a search on a plan without one."""
    once = getattr(args, "given_once", ())
    given = [f"--{name}" for name in ("seconds", "workers") if name in once]
    if given or args.tried:
        raise GraphError(f"{(given or ['--try'])[0]} is for a search; add --search, or use meshlib search")


def _usual_plans(
    args: argparse.Namespace, subject: Subject, where: Slice, asked: WholeRunOptions
) -> tuple[Subject, list[PlannedLayout]]:
    """The layouts named, or the usual ones, ranked, with the largest of `_batches` that fits."""
    first = subject
    with Progress(args.quiet, at_once=True) as bar:  # the first verdict shows while others are tried
        batches = ((each, _layouts(args, each, where)) for each in _batches(args, subject, where))
        subject, plans = plans_of(batches, where, args.remat, asked, bar, bool(args.layout))
    plans[0] = timed(subject, where, plans[0], asked)
    if (memory := plans[0].memory) is not None and memory.verdict == "tight" and not args.remat:
        plans = sorted(with_more_rematerialisation(subject, where, plans), key=lambda plan: plan.order)
    if args.layout and plans[0].est is None:
        raise GraphError(plans[0].fault)
    if subject is not first:
        batch, reduced = first.sizes["batch"], subject.sizes["batch"]
        rest = "" if plans[0].fits else ", which do not fit either"
        note = f"the usual batch here, {batch:,} sequences, does not fit: reduced to {reduced:,}{rest}; --batch sets it"
        lines = [*first.notes.splitlines(), *wrapped(note, "note: ", " ")]
        subject = replace(subject, settings=first.settings, notes="\n".join(lines))
    return subject, plans


def _layouts(args: argparse.Namespace, subject: Subject, where: Slice) -> list[tuple[str, str]]:
    if not args.layout and not args.mesh:
        return subject.usual(where.devices)
    layouts = named_layouts(args.layout, args.mesh, subject) if args.layout else completed_layouts(subject, args.mesh)
    for _, mesh in layouts:
        slice_for(args.command, Mesh(mesh), where)
    return layouts


def _batches(args: argparse.Namespace, subject: Subject, where: Slice) -> Iterator[Subject]:
    """The subject, then with a batch that was not asked for halved: once, or to as many tokens as a device usually has.

    A batch of which no layout may fit is left out if there is a smaller one. Where the variables, slots and gradients
    alone do not fit, the others are left out.
    """
    config, sizes = subject.config, subject.sizes
    if args.layout or config is None or subject.given_batch:
        yield subject
        return
    usual = where.devices * TOKENS_OF_A_DEVICE // sizes["length"]
    least = max(1, min(sizes["batch"] // 2, usual))
    while True:
        fits, state_fits = batches_that_may_fit(subject, where, _layouts(args, subject, where), args.remat)
        batch = subject.sizes["batch"] // 2
        if fits or batch < least or not state_fits:
            yield subject
        if batch < least or not state_fits:
            return
        subject = of_model(config, {**sizes, "batch": batch}, subject.step, subject.compiler, given_batch=True)


def first_choices(args: argparse.Namespace, subject: Subject) -> dict[str, object]:
    """The arguments with which a model is built first."""
    return {"remat": args.remat or "full"} if subject.config is not None else {}


# ------------------------------------------------------------ search


def search(args: argparse.Namespace) -> int:
    """`meshlib search`: the best mesh and layout."""
    where = slice_of(args.slice)
    return _print_search(args, searched_of(args, subject_of(args, where), where)[1])


def _print_search(args: argparse.Namespace, result: Found) -> int:
    """Print the result of a search; returns the exit status."""
    answer(args.json, lambda: of_search(result), lambda: result)
    if result.stopped:
        return INTERRUPTED
    return GOOD if result.fits else FAILED


def searched_of(args: argparse.Namespace, subject: Subject, where: Slice) -> tuple[Subject, Found]:
    """The search that the arguments describe, and its subject.

    A model's search is seeded with the usual layouts that fit, at the batch that `plan` uses for them.
    """
    if args.mesh and not args.layout:
        raise GraphError("--mesh of a search: give the sizes of axes by meshlib search --sizes, such as data:16")
    tried = tried_values(args.tried or ())
    fixed = {name: f"--{name}" for name in ("batch", "length", "remat") if getattr(args, name)}
    for name, flag in {**dict.fromkeys([*subject.settings, *subject.step], "--set"), **fixed}.items():
        if name in tried:
            raise GraphError(f"--try {name}: also given by {flag}; leave out one of them")
    further = ("fix", "sizes", "forbid", "resume", "layout")
    begins = subject.config is not None and not tried and not any(getattr(args, name, None) for name in further)
    if not begins:
        return subject, search_of(args, subject, where, tried)
    subject, plans = _usual_plans(args, subject, where, WholeRunOptions({}))
    names = dict.fromkeys((plan.name, plan.mesh) for plan in plans if plan.fits)
    try:
        return subject, search_of(args, subject, where, tried, [*names][:SEEDS])
    except KeyboardInterrupt:
        best = plans[0]
        if best.est is not None and best.fits and not args.json:
            say(f"best so far: {best.name} on {best.mesh}, {seconds_text(best.est.step_seconds)}* a step, as by plan")
        raise


def search_of(
    args: argparse.Namespace,
    subject: Subject,
    where: Slice,
    tried: dict[str, list[object]],
    seeds: Sequence[tuple[str, str]] = (),
) -> Found:
    """The search that the arguments describe; an interrupted one returns its result so far."""
    from meshlib.searching import SearchInterrupted
    from meshlib.searching import search as searched

    if args.remat:
        tried["remat"] = [args.remat]
    if subject.config is not None:
        tried = {**{name: [value] for name, value in subject.step.items()}, **tried}
    further = ("objective", "fix", "sizes", "forbid", "axes", "resume")
    given: dict[str, Any] = {name: getattr(args, name) for name in further if hasattr(args, name)}
    if subject.config is not None:  # steps of different sizes are compared per token
        given |= {**subject.sizes, "per": [name for name in subject.sizes if name in tried]}
    known = named_layouts(args.layout, args.mesh, subject) if args.layout else seeds
    if known:
        given["also"] = [(mesh, subject.rules(name, mesh)) for name, mesh in known]
    with Progress(args.quiet) as bar:
        try:
            return searched(
                subject.config or subject.built,
                where,
                choices=tried,
                seconds=args.seconds,
                workers=args.workers,
                compiler=subject.compiler,
                progress=lambda done, total, text: bar(done, total, f"layouts; best: {text}"),
                **given,
            )
        except SearchInterrupted as stop:
            return replace(stop.result, stopped=True)


# ------------------------------------------------------------ report


def report(args: argparse.Namespace) -> int:
    """`meshlib report`: write a page about the best plan, with the others as alternatives."""
    file = writable(args.out, ".html")
    from meshlib.report.alternatives import alternatives_of
    from meshlib.report.page import page, write_page
    from meshlib.report.verdict import headline

    where = slice_of(args.slice)
    subject, plans, result = planned_of(args, where)
    best = plans[0] if plans else None
    if best is None or best.est is None:
        raise GraphError(f"{subject.name} on {where.name}: no layout could be estimated: {_faults(plans)}")
    if result is None and not args.remat:
        plans = with_more_rematerialisation(subject, where, plans)
    options, certificate = (
        (_alternatives(plans), "") if result is None else (alternatives_of(result), result.certificate)
    )
    compiled = None
    if args.compile:
        from meshlib.command.compiled import compiled_for

        (compiled,) = compiled_for([best.est.program], where, args)
    title = f"{subject.name} on {where.name}"
    create_folder(file)
    write_page(file, page(best.est, title, options, certificate, compiled), "report")
    line = f"{args.out}: {headline(best.est)}"
    answer(args.json, lambda: {"file": args.out, **json_of(subject, where, plans)}, lambda: line)
    return GOOD if best.est.fits else FAILED


def _faults(plans: Sequence[PlannedLayout]) -> str:
    return plans[0].fault if plans else "see meshlib search for what was refused"


def _alternatives(plans: Sequence[PlannedLayout]) -> list[Alternative]:
    from meshlib.report.alternatives import Alternative

    options = []
    for n, plan in enumerate(plan for plan in plans if plan.est is not None):
        assert plan.est is not None
        choices = " ".join(f"{name} {value}" for name, value in plan.choices.items())
        step, needed = plan.est.step_seconds, plan.est.memory.needed_bytes
        options.append(Alternative(f"{plan.name} on {plan.mesh}", step, needed, plan.est.fits, n == 0, choices))
    return options
