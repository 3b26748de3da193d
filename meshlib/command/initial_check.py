"""`meshlib init`: a CI test that guards a plan: it fits, and its collectives, bytes and dollars."""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path
from string import Template

from meshlib.command import jax_function
from meshlib.command.choices import is_maxtext
from meshlib.command.output import answer, create_folder, writable
from meshlib.command.plan import json_of
from meshlib.command.planning import planned_of
from meshlib.command.subject import Subject, is_hugging_face, slice_of, subject_of
from meshlib.command.terminal import FAILED, GOOD
from meshlib.core.compiler import XLA_TPU
from meshlib.core.errors import GraphError
from meshlib.core.files import replace_file
from meshlib.models.train import source_texts
from meshlib.testing import assert_snapshot

_VERDICTS = {
    "yes": "",
    "tight": "; the plan is tight: a whole run may not fit",
    "no": "; it fails: the plan does not fit",
}
MARGIN = 1.02  # budgets relative to the plan
TEST = Template('''\
"""The plan of $name on $slice: it fits, sends what it sent, costs what it cost. Written by meshlib init."""

from pathlib import Path

import pytest

import meshlib as mtf

SLICE = "$slice"
SENT_BYTES = $sent  # of each device in a step: $percent above the plan
$dollars

$build


@pytest.fixture(scope="module")
def program() -> mtf.Program:
$lowered


def test_its_dims_collectives_and_memory_are_as_they_were(program: mtf.Program) -> None:
    # MESHLIB_UPDATE_SNAPSHOTS=1 writes the file again; review the difference.
    mtf.testing.assert_snapshot(program, Path(__file__).with_name("$snapshot"))


def test_it_fits(program: mtf.Program) -> None:
    mtf.testing.assert_fits(program, SLICE$tight


def test_it_sends_no_more_than_its_budget(program: mtf.Program) -> None:
    mtf.testing.assert_sent_at_most(program, SENT_BYTES)
$cost''')
PRICES = """\
USD_PER_1000_STEPS = {:.4g}  # of modelled time, the same
PLANNED = "{:.4g} s a step at ${:.2f} an hour\""""
COST = """

def test_it_costs_no_more_than_its_budget(program: mtf.Program) -> None:
    estimate = mtf.estimate(program, SLICE$placement)
    usd = estimate.usd(1000)
    price = f"{estimate.step_seconds:.4g} s a step at ${estimate.slice.usd_per_hour:.2f} an hour"
    message = f"1,000 steps cost {usd:.4g} dollars, more than {USD_PER_1000_STEPS}: {price}, planned {PLANNED}"
    assert usd <= USD_PER_1000_STEPS, f"{message}\\n{estimate.profile()}"
"""
LOWERED = """\
    with mtf.Graph():
        outputs, updates = build()
        return mtf.lower(outputs, updates, mesh=MESH, layout=LAYOUT{})"""


def init(args: argparse.Namespace) -> int:
    """`meshlib init`: write the test and its snapshot."""
    where, path = slice_of(args.slice), writable(args.out, ".py")
    if path.exists() and not args.force:
        raise GraphError(f"{path} exists already; --out names another file, --force overwrites it")
    if ".py" in args.program and (written := subject_of(args, where)).build.__module__ == jax_function.__name__:
        raise GraphError(
            f"{written.name} is a JAX function, for which no test is written: import it by mtf.from_jax in one of "
            "your own, and use mtf.testing.assert_fits and assert_sent_at_most"
        )
    subject, plans, _ = planned_of(args, where)
    best = plans[0] if plans else None
    if best is None or best.est is None:
        raise GraphError(f"{subject.name} on {where.name}: there is no plan to check; see meshlib plan")
    est = best.est
    from_models = _build(args, subject, best.choices, path.absolute().parent)
    if not is_maxtext(args):
        from_models = f'MESH, LAYOUT = "{est.program.mesh}", "{est.program.layout}"\n\n\n{from_models}'
    priced = est.slice.usd_per_hour is not None
    snapshot = path.with_suffix(".snapshot.txt")
    configuration = is_maxtext(args)
    compiler = "" if args.compiler == XLA_TPU.name else f', compiler=mtf.COMPILERS["{args.compiler}"]'
    lowered = f"    return RUN.program(SLICE{compiler})" if configuration else LOWERED.format(compiler)
    text = TEST.substitute(
        name=subject.name, slice=est.slice.name, lowered=lowered,
        sent=f"{round(est.sent_bytes * MARGIN):_}", snapshot=snapshot.name, build=from_models,
        dollars=PRICES.format(est.usd(1000) * MARGIN, est.step_seconds, est.slice.usd_per_hour) if priced else "",
        percent=f"{MARGIN - 1:.0%}",
        tight=", tight=True)  # a whole run may not fit" if est.memory.verdict == "tight" else ")",
        cost=COST.replace("$placement", ", placement=RUN.placement(SLICE)" * configuration) if priced else "",
    )  # fmt: skip
    create_folder(path)
    replace_file(path, lambda file: file.write(text.encode()), "init", GraphError)
    assert_snapshot(est.program, snapshot, update=True)
    answer(
        args.json,
        lambda: {"files": [str(path), str(snapshot)], **json_of(subject, where, plans)},
        lambda: f"wrote {path} and {snapshot}: run pytest {path}{_missing()}{_VERDICTS[est.memory.verdict]}",
    )
    return GOOD if est.fits else FAILED


def _missing() -> str:
    return "" if find_spec("pytest") is not None else " (pip install pytest)"


def _build(args: argparse.Namespace, subject: Subject, choices: dict[str, object], folder: Path) -> str:
    """Source of the test's function that builds the program; file paths are relative to the test."""
    if is_maxtext(args):
        from meshlib.models.maxtext.settings import parsed

        overrides = parsed(args.overrides)
        models = f", models={_from(folder, args.models)}" if args.models else ""
        return f"RUN = mtf.models.read_maxtext({_from(folder, args.program)}, {overrides!r}{models})"
    settings = ", ".join(f"{name}={value!r}" for name, value in subject.settings.items())
    images = subject.image is not None
    if images or subject.config is not None:
        read = f'mtf.models.{"image_preset" if images else "preset"}("{args.program}")'
        if is_hugging_face(args.program):
            read = f"mtf.sharing.{'read_image_config' if images else 'read_config'}({_from(folder, args.program)})"
        read += f".replace({settings})" if settings else ""
        sizes = ", ".join(f"{name}={size}" for name, size in subject.sizes.items())
        chosen = "".join(f", {text}" for text in source_texts({**subject.step, **choices}))
        step = f"image_step({read}, {sizes}, optimizer=mtf.optimize.MomentumOptimizer(0.1))"
        return "def build():\n    return mtf.models." + (step if images else f"train_step({read}, {sizes}{chosen})")
    path, _, function = args.program.partition(".py")
    name = function.lstrip(":") or "build"
    return (
        "import sys\n\n"
        f"sys.path.insert(0, str({_from(folder, os.path.dirname(path) or '.')}))\n"
        f"from {os.path.basename(path)} import {name} as written  # noqa: E402\n\n\n"
        f"def build():\n    return written({settings})"
    )


def _from(folder: Path, path: str) -> str:
    """Expression for a file's path relative to the test, so that both can be moved or checked out together."""
    return f"Path(__file__).parent / {json.dumps(Path(os.path.relpath(path, folder)).as_posix())}"
