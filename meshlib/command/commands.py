"""The function behind each command: builds the program, calls the library, prints the answer.

A package that one command alone needs is imported there, so that the others start without it.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from hardware.chips import CHIPS
from hardware.slices import Slice, legal_slices
from layouts import Mesh
from meshlib.command.jax_function import dims_text
from meshlib.command.plan import Asked, Plan, is_maxtext, json_of, planned, plans_of, text_of
from meshlib.command.subject import Subject, named_layouts, slice_of, subject_of, tried_values
from meshlib.command.terminal import progress, progress_ends
from meshlib.core.compiler import COMPILERS
from meshlib.core.errors import GraphError, LayoutError
from meshlib.core.text import wrapped
from meshlib.estimation import estimate
from meshlib.lowering import Program
from meshlib.program.views.listing import explain as explained

if TYPE_CHECKING:
    from meshlib.searching import Found

GOOD, FAILED = 0, 1


def plan(args: argparse.Namespace) -> int:
    """The verdict, and the ranking."""
    where = slice_of(args.slice)
    if is_maxtext(args) and args.search:
        from meshlib.command.tuning import tuned

        return tuned(args, where)
    subject, plans, found = planned_of(args, where)
    if args.emit and plans:
        from meshlib.command.emitting import emitted

        return emitted(args, subject, where, plans)
    if not plans:
        assert found is not None
        return _told(args, found)  # there is nothing to plan: all is said by what was looked for
    best, compiled = plans[0].est, None
    if args.compile and best is not None:
        from meshlib.command.compiled import compiled_for

        (compiled,) = compiled_for([best.program], where, args)
    if args.json:
        more = {} if compiled is None else {"compiled": compiled.as_json()}
        print(json.dumps({**json_of(subject, where, plans), **more}, indent=2))
    else:
        print(text_of(subject, where, plans))
        if found is not None:
            print(f"\n{found}")
        if compiled is not None:
            print(f"\n{compiled}")
    fits = best is not None and best.fits if compiled is None else compiled.fits
    return GOOD if fits else FAILED


def planned_of(args: argparse.Namespace, where: Slice) -> tuple[Subject, list[Plan], Found | None]:
    """The subject, its plans, the best first, and the search, if there was one."""
    asked = Asked.of(args)
    if is_maxtext(args):
        from meshlib.command.configured import configured

        subject, name, mesh = configured(args, where)
        return subject, [planned(subject, where, name, mesh, asked)], None
    subject = subject_of(args, where)
    subject.session(**_choices(args, subject))  # what is wrong with the program itself is said once
    if args.search or (subject.config is None and not args.layout):
        found = _found(args, subject, where)
        if not found.ranking:
            return subject, [], found
        best = found.best.candidate
        subject = subject.sized(**dict(best.choices))
        return subject, [planned(subject, where, str(best.layout), str(best.mesh), asked, **dict(best.choices))], found
    layouts = named_layouts(args.layout, args.mesh) if args.layout else subject.usual(where.devices)
    return subject, plans_of(subject, where, layouts, args.remat, asked), None


def dims(args: argparse.Namespace) -> int:
    """The dims of a program."""
    outputs, updates = subject_of(args, slice_of(args.slice) if args.slice else None).session().asked
    print(dims_text(next(iter([*(t.graph for t in outputs.values()), *(op.graph for op in updates)]))))
    return GOOD


def search(args: argparse.Namespace) -> int:
    """The best mesh and layout."""
    where = slice_of(args.slice)
    return _told(args, _found(args, subject_of(args, where), where))


def _told(args: argparse.Namespace, found: Found) -> int:
    """What a search found."""
    print(json.dumps(found.as_json(), indent=2) if args.json else found)
    return GOOD if found.fits else FAILED


def _found(args: argparse.Namespace, subject: Subject, where: Slice) -> Found:
    from meshlib.searching import search

    tried = tried_values(args.tried or ())
    if args.remat:
        tried["remat"] = [args.remat]
    further = ("objective", "fix", "sizes", "forbid", "axes", "resume")
    given = {name: getattr(args, name) for name in further if hasattr(args, name)}
    if subject.config is not None:  # what steps of several sizes take is compared by the token
        given |= {**subject.sizes, "per": [name for name in subject.sizes if name in tried]}
    if args.layout:
        given["also"] = [(mesh, subject.rules(name, mesh)) for name, mesh in named_layouts(args.layout, args.mesh)]
    try:
        return search(
            subject.config or subject.built,
            where,
            choices=tried,
            seconds=args.seconds,
            workers=args.workers,
            compiler=subject.compiler,
            progress=lambda done, total, text: progress(done, total, f"best: {text}"),
            **given,
        )
    finally:
        progress_ends()


def explain(args: argparse.Namespace) -> int:
    """The listing with reasons; of a compiled program in a file, its collectives."""
    from meshlib.command.compiled import explained_hlo, hlo_text

    text = hlo_text(args.program)
    if text is not None:
        found = explained_hlo(text, args.slice, args.mesh)
        print(json.dumps(found.as_json(), indent=2) if args.json else found)
        return GOOD
    if args.json:
        raise GraphError("explain: --json is for compiled programs, files such as step.hlo.txt")
    for program in _lowered(args):
        print(explained(program))
    return GOOD


def estimated(args: argparse.Namespace) -> int:
    """The whole table."""
    fits = True
    for program in _lowered(args):
        est = estimate(program, slice_of(args.slice))
        print(est.table(args.rows or None))
        fits = fits and est.fits
    return GOOD if fits else FAILED


def profiled(args: argparse.Namespace) -> int:
    """Where the time goes, by unit."""
    found = [estimate(program, slice_of(args.slice)).profile() for program in _lowered(args)]
    print("\n\n".join(profile.table(args.rows or None) for profile in found))
    if args.plot:
        found[0].plot(args.plot)
    return GOOD


def compared(args: argparse.Namespace) -> int:
    """The first layout beside each other one."""
    programs = _lowered(args)
    if len(programs) < 2:
        raise GraphError("compare needs at least two --layout")
    first, *others = (estimate(program, slice_of(args.slice)) for program in programs)
    print("\n\n".join(first.compare(other) for other in others))
    return GOOD


def checked(args: argparse.Namespace) -> int:
    """All faults, and notes."""
    if args.compile and not args.slice:
        raise GraphError("check: --compile needs --slice, such as --slice v5e-16")
    subject, layouts = _laid(args)
    good = True
    sound: list[Program] = []
    for name, mesh in layouts:
        try:
            report = subject.session(**_choices(args, subject)).check(Mesh(mesh), subject.rules(name, mesh))
        except LayoutError as fault:  # no layout of that name can be made
            print(f"{name} on {mesh}: {fault}")
            good = False
            continue
        print(f"{name} on {mesh}: {'good' if report.ok else _faults(len(report.faults))}")
        for text in (*report.faults, *(f"note: {note}" for note in report.notes)):
            print("\n".join(f"  {line}" for line in text.splitlines()))
        good = good and report.ok
        if args.compile and report.ok:
            sound.append(subject.lowered(name, mesh, **_choices(args, subject)))
    if sound:
        from meshlib.command.compiled import compiled_for

        for compiled in compiled_for(sound, slice_of(args.slice), args):
            print(f"\n{compiled}")
            good = good and compiled.fits
    return GOOD if good else FAILED


def _faults(count: int) -> str:
    return f"{count} fault" + ("s" if count > 1 else "")


def verified(args: argparse.Namespace) -> int:
    """The numbers, against one core."""
    from meshlib.verification import verify

    subject, layouts = _laid(args)
    if subject.config is not None and subject.config.parameters > 1e7:
        raise GraphError(
            f"verify computes every number of {subject.name}: make it small, such as "
            "--set layers=2 --set d_model=64 --set heads=4 --set head_dim=16 --set d_ff=128 --set vocab=128"
        )
    made = verify(*subject.compared(), layouts=[(mesh, subject.rules(name, mesh)) for name, mesh in layouts])
    print(made.table())
    return GOOD if made.ok else FAILED


def traced(args: argparse.Namespace) -> int:
    """The schedule as a file."""
    (program, *others) = _lowered(args)
    if others:
        raise GraphError("trace writes one file: give one --layout")
    estimate(program, slice_of(args.slice)).save_trace(args.out)
    print(f"{args.out}: open it at ui.perfetto.dev")
    return GOOD


def validated(args: argparse.Namespace) -> int:
    """Predicted beside published."""
    from meshlib.validation.talks import talks
    from meshlib.validation.validating import validate

    if args.talks and (args.file or args.refit):
        raise GraphError("validate: --talks has facts of its own; leave out --file and --refit")
    print(talks() if args.talks else validate(args.file, args.refit, COMPILERS[args.compiler]))
    return GOOD


def slices(args: argparse.Namespace) -> int:
    """Names of slices."""
    for kind in [args.kind] if args.kind else sorted(CHIPS):
        names = legal_slices(kind)
        print("\n".join(wrapped(" ".join(names), f"{kind:<5} ", " ")))
    return GOOD


def _choices(args: argparse.Namespace, subject: Subject) -> dict[str, object]:
    return {"remat": args.remat or "full"} if subject.config is not None else {}


def _laid(args: argparse.Namespace) -> tuple[Subject, list[tuple[str, str]]]:
    """The subject, and the layouts that are named; of a model on a slice, else, the first usual one."""
    where = slice_of(args.slice) if args.slice else None
    if is_maxtext(args):
        from meshlib.command.configured import configured

        if where is None:
            raise GraphError("a MaxText configuration has a mesh for each slice: give --slice")
        configuration, name, mesh = configured(args, where)
        return configuration, [(name, mesh)]
    subject = subject_of(args, where)
    if args.layout:
        return subject, named_layouts(args.layout, args.mesh)
    if where is None:
        raise GraphError("say how it is laid out: --layout LAYOUT@MESH; of a model, --slice takes a usual one")
    usual = subject.usual(where.devices)
    return subject, usual if args.command == "compare" else usual[:1]


def _lowered(args: argparse.Namespace) -> list[Program]:
    subject, layouts = _laid(args)
    return [subject.lowered(name, mesh, **_choices(args, subject)) for name, mesh in layouts]


def recorded(args: argparse.Namespace) -> int:
    """Records of something else."""
    from meshlib.records import make

    shown = -1

    def told(done: int, total: int) -> None:
        nonlocal shown
        if 1000 * done // total > shown:
            shown = 1000 * done // total
            progress(done, total, "written")

    try:
        count, paths = make(
            args.source,
            args.target,
            labels=args.labels,
            columns=dict(args.column) if args.column else None,
            compression=args.compression,
            progress=told,
        )
    finally:
        progress_ends()
    where = paths[0] if len(paths) == 1 else f"{paths[0]} to {os.path.basename(paths[-1])}"
    print(f"{count:,} records in {where}")
    return GOOD
