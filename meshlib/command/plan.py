"""`meshlib plan`: verdict, cost, communication, and the other layouts."""

from __future__ import annotations

import argparse
import shlex
from collections import defaultdict
from collections.abc import Sequence
from math import ceil, prod
from typing import Any

from hardware.slices import Slice
from meshlib.command.choices import is_maxtext
from meshlib.command.figures import of_step, picked
from meshlib.command.step_settings import optimizer_title
from meshlib.command.subject import Subject, completed_layouts
from meshlib.command.tried_layouts import PlannedLayout, planned
from meshlib.core.errors import MeshlibError
from meshlib.core.slices import assumed_figures
from meshlib.core.text import PRICED, bytes_text, count_text, ending, grid, seconds_text, usd_text, width, wrapped
from meshlib.estimation import DeviceMemory, Estimate
from meshlib.estimation.memory.remedies import RECOMPUTE, Remedy
from meshlib.estimation.views.near_ties import near_tie
from meshlib.estimation.views.rows import Row

CAUSES, REMEDIES = 4, 3  # collectives and remedies shown in a plan


# ------------------------------------------------------------ text


def text_of(subject: Subject, where: Slice, plans: Sequence[PlannedLayout]) -> str:
    """The plan as text: verdict, figures, causes, ranking."""
    best = plans[0]
    if best.est is None:
        return "\n".join([f"{subject.name} on {where.name}: NOT POSSIBLE", best.fault])
    parts = ["\n".join(_verdict(subject, plans, best.est)), _notes(subject, best, best.est), str(best.run or "")]
    parts.append("\n".join(_causes(best.est)))
    if len(plans) > 1:
        parts.append("\n".join(_ranking(subject, plans)))
    parts += [subject.notes] if subject.notes else []
    parts.append("* modelled; all others exact")
    return "\n\n".join(part for part in parts if part)


def _verdict(subject: Subject, plans: Sequence[PlannedLayout], est: Estimate) -> list[str]:
    plan, where, memory = plans[0], est.slice, est.memory
    over = memory.needed_bytes - memory.capacity_bytes
    fits = "fits" if est.fits else f"DOES NOT FIT, {bytes_text(over)}* too much"
    if memory.verdict == "tight":
        fits = f"fits, but a whole run is {bytes_text(memory.run_bytes - memory.capacity_bytes)}* over: tight"
    lines = [f"{subject.name} on {where.name}: {fits}"]
    needs, plain, run = (bytes_text(n) for n in (memory.needed_bytes, memory.plain_jit_bytes, memory.run_bytes))
    about = f"needs {needs}* of {bytes_text(memory.capacity_bytes)} on each of"
    lines.append(f"  memory     {about} {where.devices} device{'s' * (where.devices != 1)}")
    lines.append(f"             {plain}* under plain jit, {run}* in a whole run")
    kinds = sorted(((size, kind) for kind, size in memory.by_kind.items() if size), reverse=True)[:3]
    most = ", ".join(f"{bytes_text(size)} {kind}" for size, kind in kinds)
    lines += wrapped(f"{bytes_text(memory.peak_bytes)}, most of it {most}", "  peak       ", " ")
    if memory.verdict != "yes":
        safer = _safer(plans, memory)
        recompute = safer is None and not _recomputed_in_vain(plans)
        lines += [*_state_line(est), *_remedies(subject, est, recompute), *_safer_line(safer)]
    lines.append(f"  step       {seconds_text(est.step_seconds)}*, MFU {est.mfu:.1%}*{_rates(subject, est)}")
    shares = sorted(est.bound_seconds.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {seconds / est.step_seconds:.0%}" for name, seconds in shares if seconds)
    lines.append(f"  bound by   {named}; waits for collectives {seconds_text(est.exposed_comm_seconds)}*")
    lines += wrapped(at_work, "  at work    ", " ") if (at_work := near_tie(est)) else []
    if where.usd_per_hour is not None:
        lines.append(f"  price      {usd_text(where.usd_per_hour)} an hour{_price(subject, est)}")
    if subject.tokens:
        lines.append(f"  one step   {subject.batch_text}: forward, backward, {optimizer_title(subject.step)}")
    if subject.image is not None:
        lines.append(f"  one step   {subject.batch_text}: forward, backward, momentum")
        lines.append(f"  model      {subject.image.parameters:,} parameters")
    if (config := subject.config) is not None:
        active = f", {config.active_parameters:,} active" if config.experts is not None else ""
        lines.append(f"  model      {config.parameters:,} parameters{active}")
    lines.append(f"  mesh       {est.program.mesh}")
    lines += wrapped(str(est.program.layout) or "(nothing is split)", "  layout     ", ";")
    lines += [f"  {name:<10} {value}" for name, value in plan.choices.items()]
    if subject.step:
        lines += wrapped(" ".join(f"{name}={value}" for name, value in subject.step.items()), "  set        ", " ")
    lines.append(f"  compiler   {est.compiler}")
    for line in assumed_figures([est.slice]):
        lines += wrapped(line, "  chip       ", ",")
    return lines


def _safer(plans: Sequence[PlannedLayout], best: DeviceMemory) -> PlannedLayout | None:
    """Beside a best plan that is tight, the fastest of which a whole run fits."""
    others = plans[1:] if best.verdict == "tight" else ()
    return next((plan for plan in others if plan.est is not None and plan.est.memory.verdict == "yes"), None)


def _recomputed_in_vain(plans: Sequence[PlannedLayout]) -> bool:
    """Whether the layout of the best plan, lowered with all recomputed, needs no less."""
    best, *others = plans
    full = [p for p in others if (p.name, p.mesh) == (best.name, best.mesh) and p.choices.get("remat") == "full"]
    return any(p.memory and best.memory and p.memory.needed_bytes >= best.memory.needed_bytes for p in full)


def _safer_line(plan: PlannedLayout | None) -> list[str]:
    if plan is None or plan.est is None:
        return []
    chosen = "".join(f", {name} {value}" for name, value in plan.choices.items())
    text = f"{plan.name} on {plan.mesh}{chosen}: {seconds_text(plan.est.step_seconds)}* a step, a whole run fits"
    return wrapped(text, "  safer      ", " ")


def _price(subject: Subject, est: Estimate) -> str:
    if subject.counted is None:
        return f", {usd_text(est.usd(1000))}* a thousand steps"
    number, what = subject.counted
    size, many = PRICED[what]
    return f", {usd_text(est.usd() / number * size)}* {many} {what}"


def _notes(subject: Subject, plan: PlannedLayout, est: Estimate) -> str:
    """Notes on mesh axes that the layout leaves unused, their cost, and a layout that uses them."""
    lines = [line for note in est.program.notes for line in wrapped(note, "note: ", " ")]
    program = est.program
    named = {axis for rule in program.layout.rules for axis in rule.axes}
    copies = prod(size for axis, size in program.mesh.sizes_by_axis.items() if axis not in named)
    if copies > 1:
        lines += wrapped(f"{copies} groups of {program.mesh.size // copies} devices do the same work", "      ", " ")
        lines += wrapped(_that_uses_all(subject, plan, est), "      ", " ")
    return "\n".join(lines)


def _that_uses_all(subject: Subject, plan: PlannedLayout, est: Estimate) -> str:
    """The fastest usual layout that splits something over every axis of the mesh, and its step time; "" if none."""
    if subject.config is None and subject.image is None:
        return ""
    try:
        names = [name for name, _ in completed_layouts(subject, plan.mesh)]
    except MeshlibError:
        return ""
    choices: dict[str, Any] = dict(plan.choices)
    others = [planned(subject, est.slice, name, plan.mesh, **choices) for name in names if name != plan.name]
    best = min(others, key=lambda p: p.order, default=None)
    if best is None or best.est is None or best.est.step_seconds >= est.step_seconds:
        return ""
    taken = f"{seconds_text(best.est.step_seconds)}* instead of {seconds_text(est.step_seconds)}*"
    fits = "" if best.est.fits else ", but does not fit"
    return f"--layout '{best.name}@{plan.mesh}' uses all axes: {taken} a step{fits}"


def _state_line(est: Estimate) -> list[str]:
    """A line if no batch fits: the devices that variables, slots and gradients alone need, or their parts if split."""
    memory, state, devices = est.memory, est.program.variables.values(), est.slice.devices
    if memory.state_bytes <= memory.capacity_bytes:
        return []
    whole_bytes = sum(v.tensor.dtype.size_bytes(v.tensor.shape.size) for v in state)
    once_bytes = memory.state_bytes * whole_bytes / sum(v.local_bytes for v in state)
    text = f"{bytes_text(memory.state_bytes)} variables, slots and gradients: no batch fits"
    needed = ceil(once_bytes / memory.capacity_bytes)
    each = f" this layout; split over all {devices:,} devices they take {bytes_text(once_bytes / devices)} on each"
    text += f"; they need {needed:,} devices or slots on the host" if needed > devices else each
    return wrapped(text, "  at least   ", " ")


def _remedies(subject: Subject, est: Estimate, recompute: bool) -> list[str]:
    """The remedies that save most, those with a flag first; `recompute`: with rematerialisation, if that is one."""

    def has_flags(remedy: Remedy) -> bool:
        return all(subject.remedy(part) != part for part in remedy.parts)

    lines: list[str] = []
    remedies = [r for r in est.memory.remedies if recompute or not any(p.startswith(RECOMPUTE) for p in r.parts)]
    for remedy in sorted(remedies, key=has_flags, reverse=True)[:REMEDIES]:
        text = f"{remedy.worded(subject.remedy)}: saves about {bytes_text(remedy.gain_bytes)}"
        lines += wrapped(text, " " * 13 + "- " if lines else "  do         - ", " ")
    return lines


def _rates(subject: Subject, est: Estimate) -> str:
    if subject.counted is None:
        return ""
    number, what = subject.counted
    return f", {count_text(number / est.step_seconds)} {what}/s*"


def _causes(est: Estimate) -> list[str]:
    """The slowest collectives on the wire, grouped by cause."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    sent: dict[tuple[str, str], float] = defaultdict(float)
    largest: dict[tuple[str, str], Row] = {}
    for row in est.rows:
        if row.kind == "collective":
            key = row.opcode, "+".join(row.axes)
            seconds[key] += row.total_seconds
            sent[key] += row.sent_bytes * row.count
            if key not in largest or row.total_seconds > largest[key].total_seconds:
                largest[key] = row
    if not seconds:
        return ["sends nothing"]
    lines = [f"sends {bytes_text(est.sent_bytes)} from each device in a step:"]
    keys = sorted(seconds, key=lambda key: -seconds[key])[:CAUSES]
    cells = [
        (f"  {k} over {axes}", bytes_text(sent[k, axes]), f"{seconds_text(seconds[k, axes])}*") for k, axes in keys
    ]
    for key, text in zip(keys, grid(cells, right=(1, 2)), strict=True):
        lines.append(f"{text}  {ending(largest[key].name, max(12, width() - len(text) - 2))}")
    return lines


def next_commands(args: argparse.Namespace, subject: Subject, plan: PlannedLayout) -> list[str]:
    """Follow-up commands: the plan as a page, as a check in CI, a wider search."""
    given = ["--slice", args.slice]
    if "batch" in subject.sizes and subject.given_batch:
        given += ["--batch", str(subject.sizes["batch"])]
    if args.length:
        given += ["--length", str(args.length)]
    for flag, texts in (("--set", args.set), ("--arg", args.arg), ("--names", args.names)):
        given += [word for text in texts or () for word in (flag, text)]
    if is_maxtext(args):
        about = [args.program, *args.overrides, "--slice", args.slice]
        commands = [["report", *about, "--out", "plan.html"], ["init", *about], ["plan", *about, "--search"]]
        return [line for words in commands for line in _command_lines(["meshlib", *map(shlex.quote, words)])]
    chosen = ["--layout", f"{plan.name}@{plan.mesh}"]
    chosen += ["--remat", str(plan.choices["remat"])] if "remat" in plan.choices else []
    commands = [
        ["report", args.program, *given, *chosen, "--out", "plan.html"],
        ["init", args.program, *given, *chosen],
        ["search", args.program, *given],
    ]
    return [line for words in commands for line in _command_lines(["meshlib", *map(shlex.quote, words)])]


def _command_lines(words: Sequence[str]) -> list[str]:
    """A shell command wrapped to the width, with a backslash at the end of each line but the last."""
    lines = [f"  {words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > width():
            lines[-1] += " \\"
            lines.append(f"      {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def _ranking(subject: Subject, plans: Sequence[PlannedLayout]) -> list[str]:
    cells = [("", "step*", "MFU*", "needs*", *plans[0].choices, "layout", "mesh")]
    faults = dict[str, None]()
    for n, plan in enumerate(plans, start=1):
        est, step, mfu = plan.est, "-", "-"
        if est is not None:
            step, mfu = seconds_text(est.step_seconds), f"{est.mfu:.1%}"
        needs = f"> {bytes_text(plan.least_bytes)} !" if plan.least_bytes else "-"
        if plan.memory is not None:
            needs = bytes_text(plan.memory.needed_bytes) + ("" if plan.fits else " !")
        elif not plan.least_bytes:
            faults |= dict.fromkeys(["", f"{plan.name} on {plan.mesh}: {plan.fault}"])
        chosen = [str(value) for value in plan.choices.values()]
        cells.append((str(n), step, mfu, needs, *chosen, plan.name, plan.mesh))
    note = ["! does not fit"] if any((p.memory is not None and not p.fits) or p.least_bytes for p in plans) else []
    return [*grid(cells, right=(1, 2, 3)), *note, *_notes_on_others(plans), *faults]


def _notes_on_others(plans: Sequence[PlannedLayout]) -> list[str]:
    """The notes of all programs but the best, which is shown with its own, with their numbers in the ranking."""
    numbers: dict[str, list[str]] = {}
    for n, plan in enumerate(plans, start=1):
        for text in plan.memory.notes if plan.memory is not None else ():
            numbers.setdefault(text, []).append(str(n))
    others = {text: ns for text, ns in numbers.items() if ns[0] != "1"}
    return [line for text, ns in others.items() for line in wrapped(text, f"note on {', '.join(ns)}: ", " ")]


# ------------------------------------------------------------ JSON


def json_of(subject: Subject, where: Slice, plans: Sequence[PlannedLayout]) -> dict[str, Any]:
    """The plan as JSON, with the same figures."""
    head = {"program": subject.name, "slice": where.name, "compiler": str(subject.compiler), **subject.sizes}
    head |= {"step": dict(subject.step)} if subject.step else {}
    return {**head, "plans": [_entry(p) for p in plans]}


def _entry(plan: PlannedLayout) -> dict[str, Any]:
    head = {"name": plan.name, "mesh": plan.mesh, **plan.choices}
    if plan.memory is None:
        least = {"fits": False, "least_bytes_modelled": plan.least_bytes} if plan.least_bytes else {}
        return {**head, **least, "fault": plan.fault}
    exact, modelled = "state_bytes", "verdict needed_bytes plain_jit_bytes"
    figures = {} if plan.est is None else of_step(plan.est)
    if plan.est is None:
        figures = {"layout": str(plan.memory.program.layout)}
        exact = f"peak_bytes capacity_bytes fits {exact}"
    return {
        **head,
        **figures,
        **picked(plan.memory, exact, modelled),
        "whole_run_bytes_modelled": plan.memory.run_bytes,
        **({} if plan.run is None else {"run": plan.run.as_json()}),
    }
