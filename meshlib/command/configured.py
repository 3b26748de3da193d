"""MaxText configurations as subjects of commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from hardware.slices import Slice
from meshlib.command.subject import Subject, refuse_arguments
from meshlib.core.compiler import COMPILERS
from meshlib.core.errors import GraphError
from meshlib.core.text import wrapped
from meshlib.estimation import Estimate, estimate
from meshlib.estimation.memory.remedies import CARRIES, HALF, LOSS, RECOMPUTE, SLOTS, microbatches
from meshlib.estimation.views.difference import difference
from meshlib.lowering import Program
from meshlib.models.maxtext.run import MaxTextRun, read_maxtext
from meshlib.models.maxtext.settings import parsed
from meshlib.program.instructions import Loop

WIDTH = 80
# Options for which a configuration has keys.
_KEYS = {"batch": "per_device_batch_size=", "length": "max_target_length=", "remat": "remat_policy=", "set": "KEY="}


@dataclass(eq=False)
class Configured(Subject):
    """A MaxText configuration on a slice, with the mesh and layout that it defines."""

    run: MaxTextRun | None = None
    where: Slice | None = None

    def lowered(
        self, name: str, mesh: str, told: Callable[[Loop], object] | None = None, /, **choices: object
    ) -> Program:
        """The program of the configuration, which is the only one; `told` of no loop."""
        assert self.run is not None
        assert self.where is not None
        return self.run.program(self.where, self.compiler)

    def slice(self, where: Slice) -> Slice:
        """The slice, with the configuration's attention kernels."""
        assert self.run is not None
        return self.run.slice(where)

    def remedy(self, words: str) -> str:
        """A memory remedy in terms of MaxText's keys, where there are such keys."""
        assert self.run is not None
        s = self.run.settings
        each = s.number("per_device_batch_size")
        if (parts := microbatches(words)) is not None:
            steps = parts * self.run.accumulation
            return f"per_device_batch_size={each / parts:g} gradient_accumulation_steps={steps}"
        keys = {
            RECOMPUTE: "remat_policy=full", SLOTS: "optimizer_memory_host_offload=true",
            HALF: f"per_device_batch_size={each / 2:g}", LOSS: f"num_vocab_tiling={8 * s.size('num_vocab_tiling')}",
        }  # fmt: skip
        if self.run.remat == "full":
            keys[CARRIES] = "remat_policy=custom decoder_layer_input=offload"
        return next((lines for start, lines in keys.items() if words.startswith(start)), words)


def run_of(args: argparse.Namespace, serving: bool = False) -> MaxTextRun:
    """The run that the arguments describe; `serving` also allows a run of inference.

    Raises: GraphError for options that a configuration has keys for, and as `read_maxtext`.
    """
    for option, key in _KEYS.items():
        if getattr(args, option, None):
            raise GraphError(f"--{option} is for models by name; a MaxText configuration takes {key}... after the file")
    if getattr(args, "layout", None) or getattr(args, "mesh", None):
        raise GraphError(
            "--layout and --mesh are for models by name; a MaxText configuration has ici_*, dcn_* and rules"
        )
    refuse_arguments(args, "a MaxText configuration")
    return read_maxtext(args.program, parsed(args.overrides), getattr(args, "models", None), serving)


def configured(args: argparse.Namespace, where: Slice) -> tuple[Subject, str, str]:
    """The subject of a configuration, with its layout and mesh as text."""
    run = run_of(args)
    run.check(where)
    sizes = {"batch": run.batch(where), "length": run.length}
    subject = Configured(
        run.config.name, lambda **choices: run.built(where), {}, run.config, sizes, COMPILERS[args.compiler],
        run.placement(where), notes_of(run, where), run=run, where=where,
    )  # fmt: skip
    return subject, str(run.layout_on(where)), str(run.mesh(where))


def compared_runs(args: argparse.Namespace, where: Slice) -> tuple[Estimate, list[Estimate], list[str]]:
    """Estimates of the run that the arguments describe and of those with each set of other overrides; a sentence each.

    Raises: GraphError without other overrides, and as `run_of`; what is wrong with one set names it.
    """
    if not args.changes or not all(args.changes):
        raise GraphError(
            "compare takes a MaxText configuration and, after --, what to change: meshlib compare base.yml KEY=VALUE "
            "-- remat_policy=full --slice v5e-256"
        )
    given = parsed(args.overrides)
    runs = [run_of(args)]
    runs += [read_maxtext(args.program, given | parsed(change), getattr(args, "models", None))
             for change in args.changes]  # fmt: skip
    compiler = COMPILERS[args.compiler]
    first, *others = (
        estimate(run.program(where, compiler), run.slice(where), placement=run.placement(where)) for run in runs
    )
    tokens = [run.batch(where) * run.length for run in runs]
    sentences = [
        difference(first, other, " ".join(change), (tokens[0], count))
        for other, change, count in zip(others, args.changes, tokens[1:], strict=True)
    ]
    return first, others, sentences


def notes_of(run: MaxTextRun, where: Slice) -> str:
    """The parts of a configuration that the plan does not reflect."""
    lines: list[str] = []
    for one in run.unread:
        lines += wrapped(str(one), "not expressed: ", " ")
    for weight in run.translation(where).differing:
        lines.append(f"laid out in another way than MaxText's rules say: {weight}")
    return "\n".join(lines)
