"""Commands about one program under given layouts: explain, estimate, profile, compare, check, verify, trace, dims."""

from __future__ import annotations

import argparse
from typing import Any

from layouts import Mesh
from meshlib.command import figures
from meshlib.command.choices import is_maxtext
from meshlib.command.jax_function import dims_text
from meshlib.command.output import answer, create_folder, say, say_json, writable
from meshlib.command.planning import first_choices
from meshlib.command.subject import Subject, completed_layouts, named_layouts, slice_of, subject_of
from meshlib.command.terminal import FAILED, GOOD
from meshlib.core.errors import GraphError, LayoutError
from meshlib.core.slices import slice_for
from meshlib.core.text import count_text, counted, wrapped
from meshlib.estimation import Estimate, estimate
from meshlib.estimation.views.difference import difference
from meshlib.lowering import Program
from meshlib.program.views.listing import explain as explained
from meshlib.verification import verify

MOST_FLOPS = 1e11  # of a step that `verify` computes, about a minute in the order of the MXU


def explain(args: argparse.Namespace) -> int:
    """`meshlib explain`: the listing with reasons; for a compiled program in a file, its collectives."""
    from meshlib.command.compiled import explained_hlo, hlo_text

    text = hlo_text(args.program)
    if text is not None:
        compiled = explained_hlo(text, args.slice, args.mesh)
        answer(args.json, compiled.as_json, lambda: compiled)
        return GOOD
    programs = _programs(args, *_subject_and_layouts(args))
    answer(args.json, lambda: [*map(figures.of_program, programs)], lambda: "\n".join(map(explained, programs)))
    return GOOD


def estimated(args: argparse.Namespace) -> int:
    """`meshlib estimate`: the whole table."""
    estimates = _estimates(args)
    tables = (est.table(args.rows or None) for est in estimates)
    answer(args.json, lambda: [*map(figures.of_rows, estimates)], lambda: "\n".join(tables))
    return GOOD if all(est.fits for est in estimates) else FAILED


def profiled(args: argparse.Namespace) -> int:
    """`meshlib profile`: time by bottleneck."""
    estimates = _estimates(args)
    profiles = [est.profile() for est in estimates]
    if args.json:
        say_json([figures.of_profile(profile) for profile in profiles])
    else:
        for est, profile in zip(estimates, profiles, strict=True):
            say("\n".join([profile.table(args.rows or None), *(f"note: {note}" for note in est.program.notes), ""]))
    if args.plot:
        profiles[0].plot(args.plot)
    return GOOD


def compared(args: argparse.Namespace) -> int:
    """`meshlib compare`: the first layout or configuration beside each other one, with a sentence on what changed."""
    each: list[str] = []
    if is_maxtext(args):
        from meshlib.command.configured import compared_runs

        first, others, sentences = compared_runs(args, slice_of(args.slice))
    else:
        first, others, sentences, each = _compared(args)
    if args.json:
        figures_of_others = [
            {"sentence": sentence, "second": figures.of_estimate(other)}
            for sentence, other in zip(sentences, others, strict=True)
        ]
        say_json({"first": figures.of_estimate(first), "others": figures_of_others})
        return GOOD
    for sentence, other in zip(sentences, others, strict=True):
        notes = dict.fromkeys((*first.program.notes, *other.program.notes))
        say("\n".join([sentence, "", *each, first.compare(other), *(f"note: {note}" for note in notes), ""]))
    return GOOD


def _compared(args: argparse.Namespace) -> tuple[Estimate, list[Estimate], list[str], list[str]]:
    """The first layout; the other layouts, or it with other arguments; a sentence each; what all have in common."""
    subject, layouts = _subject_and_layouts(args)
    if not args.others:
        first, *others = _estimates_of(args, subject, layouts)
        if not others:
            raise GraphError("compare needs at least two --layout, or after -- what to change: -- --batch 64")
        names = [f"{name} on {mesh}" for name, mesh in layouts[1:]]
        sentences = [difference(first, other, name) for other, name in zip(others, names, strict=True)]
        remat = first_choices(args, subject).get("remat")
        each = [f"each:   {subject.batch_text}, remat {remat} (--remat)"] if subject.config is not None else []
        return first, others, sentences, each
    if args.layout and layouts[1:]:
        raise GraphError("compare takes several --layout, or one and after -- what to change")
    first, others, sentences = _estimates_of(args, subject, layouts[:1])[0], [], []
    for other_args, change in zip(args.others, args.changes, strict=True):
        if other_args.slice == args.slice and other_args.layout == args.layout and other_args.mesh == args.mesh:
            other_args.layout, other_args.mesh = ["@".join(layouts[0])], None
        other, its_layouts = _subject_and_layouts(other_args)
        others += _estimates_of(other_args, other, its_layouts[:1])
        count, unit = subject.counted or (1, "")
        other_count, other_unit = other.counted or (1, "")
        if unit != other_unit:
            raise GraphError(
                f"compare: {subject.name} takes {unit or 'no tokens'}, {other.name} {other_unit or 'none'}"
            )
        sentences.append(difference(first, others[-1], " ".join(change), (count, other_count), unit))
    return first, others, sentences, []


def checked(args: argparse.Namespace) -> int:
    """`meshlib check`: all faults, and notes."""
    if args.compile and not args.slice:
        raise GraphError("--compile needs --slice, such as --slice v5e-16")
    subject, layouts = _subject_and_layouts(args)
    entries: list[dict[str, Any]] = []
    sound: list[Program] = []
    for name, mesh in layouts:
        try:
            rules = subject.rules(name, mesh)
            report = subject.session(**first_choices(args, subject)).check(Mesh(mesh), rules)
        except LayoutError as fault:  # no layout of that name fits
            entries.append(
                {"layout": name, "mesh": mesh, "rules": None, "ok": False, "faults": [str(fault)], "notes": []}
            )
            continue
        faults, notes = [str(f) for f in report.faults], [str(n) for n in report.notes]
        entries.append(
            {"layout": name, "mesh": mesh, "rules": str(rules), "ok": report.ok, "faults": faults, "notes": notes}
        )
        if args.compile and report.ok:
            sound.append(subject.lowered(name, mesh, **first_choices(args, subject)))
    compiled = _compiled(args, sound) if sound else []
    parts = (*map(_checked_text, entries), *(f"\n{c}" for c in compiled))
    answer(
        args.json,
        lambda: {"layouts": entries, "compiled": [c.as_json() for c in compiled]},
        lambda: "\n".join(parts),
    )
    return GOOD if all(entry["ok"] for entry in entries) and all(c.fits for c in compiled) else FAILED


def _compiled(args: argparse.Namespace, programs: list[Program]) -> list[Any]:
    from meshlib.command.compiled import compiled_for

    return compiled_for(programs, slice_of(args.slice), args)


def _checked_text(entry: dict[str, Any]) -> str:
    faults, notes = entry["faults"], entry["notes"]
    lines = [f"{entry['layout']} on {entry['mesh']}: {'good' if entry['ok'] else counted(len(faults), 'fault')}"]
    if entry["rules"] not in (None, entry["layout"]):
        lines += wrapped(entry["rules"] or "nothing is split", "  rules ", ";")
    for text in (*faults, *(f"note: {note}" for note in notes)):
        lines += [f"  {line}" for line in text.splitlines()]
    return "\n".join(lines)


def verified(args: argparse.Namespace) -> int:
    """`meshlib verify`: the numbers of each layout against those of one core."""
    subject, layouts = _subject_and_layouts(args)
    if (config := subject.config) is not None:
        flops = config.flops_per_token(subject.sizes["length"]) * (subject.tokens or 0)
        if config.parameters > 1e7 or flops > MOST_FLOPS:
            raise GraphError(
                f"verify computes every number of {subject.name}, {count_text(flops)} flops a step: make it small, "
                "such as --batch 8 --length 16 --set layers=2 --set d_model=64 --set heads=4 --set head_dim=16 "
                "--set d_ff=128 --set vocab=128"
            )
    result = verify(*subject.compared(), layouts=[(mesh, subject.rules(name, mesh)) for name, mesh in layouts])
    answer(args.json, lambda: figures.of_verification(result), lambda: result)
    return GOOD if result.ok else FAILED


def traced(args: argparse.Namespace) -> int:
    """`meshlib trace`: the schedule as a file."""
    writable(args.out.removesuffix(".gz"), ".json")
    file = writable(args.out)
    (est, *others) = _estimates(args)
    if others:
        raise GraphError("trace writes one file: give one --layout")
    create_folder(file)
    est.save_trace(file)
    lines = [f"{args.out}: open it at ui.perfetto.dev", *(f"note: {note}" for note in est.program.notes)]
    answer(args.json, lambda: {"file": args.out, **figures.of_estimate(est)}, lambda: "\n".join(lines))
    return GOOD


def dims(args: argparse.Namespace) -> int:
    """`meshlib dims`: the dims of a program."""
    outputs, updates = subject_of(args, slice_of(args.slice) if args.slice else None).session().asked
    text = dims_text(next(iter([*(t.graph for t in outputs.values()), *(op.graph for op in updates)])))
    answer(args.json, lambda: {"text": text}, lambda: text)
    return GOOD


def _subject_and_layouts(args: argparse.Namespace) -> tuple[Subject, list[tuple[str, str]]]:
    """The subject, and its layouts: those named, or for a model on a slice the first usual one."""
    where = slice_of(args.slice) if args.slice else None
    if is_maxtext(args):
        from meshlib.command.configured import configured

        if where is None:
            raise GraphError("a MaxText configuration has a mesh for each slice: give --slice")
        configuration, name, mesh = configured(args, where)
        return configuration, [(name, mesh)]
    subject = subject_of(args, where)
    if args.layout:
        layouts = named_layouts(args.layout, args.mesh, subject)
    elif args.mesh:
        layouts = completed_layouts(subject, args.mesh)
    elif where is not None:
        layouts = subject.usual(where.devices)
    else:
        raise GraphError("say how it is laid out: --layout LAYOUT@MESH; of a model, --slice takes a usual one")
    for _, mesh in layouts if where is not None else ():
        slice_for(args.command, Mesh(mesh), where)
    return subject, layouts if args.layout or args.command == "compare" else layouts[:1]


def _programs(args: argparse.Namespace, subject: Subject, layouts: list[tuple[str, str]]) -> list[Program]:
    return [subject.lowered(name, mesh, **first_choices(args, subject)) for name, mesh in layouts]


def _estimates(args: argparse.Namespace) -> list[Estimate]:
    return _estimates_of(args, *_subject_and_layouts(args))


def _estimates_of(args: argparse.Namespace, subject: Subject, layouts: list[tuple[str, str]]) -> list[Estimate]:
    where = subject.slice(slice_of(args.slice))
    return [estimate(program, where, placement=subject.placement) for program in _programs(args, subject, layouts)]
