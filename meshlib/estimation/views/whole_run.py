"""A whole run: steps, input, evaluations, checkpoints and failures; hours and dollars.

    seconds = start + steps * step + evaluations * evaluation + checkpoints * checkpoint + expected cost of failures

Steps and evaluations take as long as their input where hosts are slower (`HostInput`). Evaluations and checkpoints are
periodic, with one after the last step. Startup (compiling, filling queues) depends on software: 0 unless given.
Failures cost (`hardware.goodput`) steps repeated from the last checkpoint, restarts, and standstill while more slices
are under repair than there are spares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from meshlib.core.arguments import POSITIVE, at, bounded, whole
from meshlib.core.compiler import Compiler
from meshlib.core.errors import GraphError, SliceError
from meshlib.core.text import count_text, counted, grid, seconds_text, usd_text
from meshlib.estimation.time.host_input import BATCH
from meshlib.estimation.views.failures import Failures, Faults
from meshlib.program.records import Program

if TYPE_CHECKING:
    from meshlib.estimation.result import Estimate

WHAT = "Estimate.run"
LENGTH = "length"


@dataclass(frozen=True, repr=False)
class WholeRun:
    """Cost of a whole run. Created by `Estimate.run`. Counts are exact, times modelled, the price is the list price.

    Attributes:
      steps: training steps; examples, tokens: examples and tokens per step, None if inputs have no dim "batch" (and
        "length").
      training_seconds: of all steps, including input_wait_seconds, the stalls for input.
      evaluations, evaluation_seconds; checkpoints, checkpoint_seconds: their numbers and total times.
      start_seconds: time before the first step.
      failures: expected failures of the whole machine; None if they are not modelled.
      usd_per_hour: price of the slice, or None without a published price.
      slice: its name; compiler: the compiler whose schedule is modelled.
    """

    steps: int
    examples: int | None
    tokens: int | None
    training_seconds: float
    input_wait_seconds: float
    evaluations: int
    evaluation_seconds: float
    checkpoints: int
    checkpoint_seconds: float
    start_seconds: float
    usd_per_hour: float | None
    slice: str
    compiler: Compiler
    failures: Failures | None = None

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        lost = 0.0 if self.failures is None else self.failures.lost_seconds
        return self.start_seconds + self.training_seconds + self.evaluation_seconds + self.checkpoint_seconds + lost

    @property
    def goodput(self) -> float:
        """Share of the total time spent on training steps that count."""
        return self.training_seconds / self.seconds

    @property
    def hours(self) -> float:
        """Hours from start to end."""
        return self.seconds / 3600

    @property
    def usd(self) -> float:
        """Cost at the slice's list price, in US dollars.

        Raises: SliceError for a chip without a published price.
        """
        if self.usd_per_hour is None:
            raise SliceError(f"{at('WholeRun.usd')}: no list price of {self.slice} is published")
        return self.usd_per_hour * self.hours

    def __repr__(self) -> str:
        price = "" if self.usd_per_hour is None else f", {usd_text(self.usd)}*"
        return f"<WholeRun: {self._trained()}, {long_text(self.seconds)}*{price}; {self.slice}>"

    def __str__(self) -> str:
        parts = [
            ("start", self.start_seconds, ""),
            ("training", self.training_seconds, self._trained()),
            ("evaluations", self.evaluation_seconds, f"{self.evaluations:,}"),
            ("checkpoints", self.checkpoint_seconds, f"{self.checkpoints:,}"),
        ]
        if self.failures is not None:
            parts.append(("failures", self.failures.lost_seconds, str(self.failures)))
        shown = [part for part in parts if part[1] or part[0] == "training"]
        cells = [("", "time*", "share*", "")]
        cells += [(f"  {name}", long_text(s), f"{s / self.seconds:.1%}", about) for name, s, about in shown]
        price = "" if self.usd_per_hour is None else f", {usd_text(self.usd)}* at list price"
        return "\n".join(
            [
                f"a whole run on {self.slice}, compiler {self.compiler}: {long_text(self.seconds)}*{price}",
                *grid(cells, right=(1, 2)),
            ]
        )

    def _trained(self) -> str:
        text = counted(self.steps, "step")
        if self.tokens:
            text += f" of {count_text(self.tokens)} tokens"
        elif self.examples:
            text += f" of {self.examples:,} examples"
        if self.input_wait_seconds:
            text += f"; waits for input {long_text(self.input_wait_seconds)}*"
        return text

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "compiler": str(self.compiler),
            "steps": self.steps,
            "evaluations": self.evaluations,
            "checkpoints": self.checkpoints,
            "seconds_modelled": self.seconds,
            "training_seconds_modelled": self.training_seconds,
            "input_wait_seconds_modelled": self.input_wait_seconds,
            "evaluation_seconds_modelled": self.evaluation_seconds,
            "checkpoint_seconds": self.checkpoint_seconds,
            "goodput_modelled": self.goodput,
            "failures": None if self.failures is None else asdict(self.failures),
            "usd_modelled": None if self.usd_per_hour is None else self.usd,
        }


def long_text(seconds: float) -> str:
    """A duration in hours, with days if it is long.

    >>> long_text(59), long_text(5400), long_text(10 * 86400)
    ('59 s', '1.5 hours', '10 days')
    """
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size or (unit == "hours" and seconds >= size):
            return f"{seconds / size:.4g} {unit}"
    return seconds_text(seconds)


def whole_run(
    est: Estimate,
    steps: object,
    epochs: object,
    examples: object,
    tokens: object,
    evaluation: object,
    evaluation_examples: object,
    evaluate_every: object,
    checkpoint_every: object,
    checkpoint_seconds: object,
    start_seconds: object,
    faults: Faults | None = None,
) -> WholeRun:
    """`Estimate.run`."""
    batch, length = sizes_of(est.program)
    count = _steps(est.program, steps, epochs, examples, tokens, batch, length)
    if (evaluation is None) != (evaluation_examples is None):
        raise GraphError(f"{at(WHAT)}: evaluation and evaluation_examples go together; give both or neither")
    if evaluation is None and evaluate_every is not None:
        raise GraphError(f"{at(WHAT)}: evaluate_every needs evaluation, the estimate of one of its steps")
    evaluations, each = 0, 0.0
    if evaluation is not None:
        if not isinstance(evaluation, type(est)):
            raise GraphError(f"{at(WHAT)}: evaluation must be an Estimate, got {type(evaluation).__name__}")
        evaluations = _times(count, evaluate_every, "evaluate_every")
        each = evaluation_steps(evaluation, evaluation_examples) * evaluation.step_seconds
    each_checkpoint = bounded(checkpoint_seconds, WHAT, "checkpoint_seconds")
    work = count * est.step_seconds + evaluations * each
    if faults is not None and checkpoint_every is None:
        checkpoint_every = faults.best_every(count, work, each_checkpoint)
    checkpoints = 0 if checkpoint_every is None else _times(count, checkpoint_every, "checkpoint_every")
    return WholeRun(
        count,
        batch,
        None if batch is None or length is None else batch * length,
        count * est.step_seconds,
        count * est.input_wait_seconds,
        evaluations,
        evaluations * each,
        checkpoints,
        checkpoints * each_checkpoint,
        bounded(start_seconds, WHAT, "start_seconds"),
        est.slice.usd_per_hour,
        est.slice.name,
        est.compiler,
        None if faults is None else faults.cost(count, work, checkpoints, each_checkpoint),
    )


def sizes_of(program: Program) -> tuple[int | None, int | None]:
    """(examples per step, tokens per example), from dims "batch" and "length" of the inputs."""
    shapes = [v.tensor.shape for v in program.inputs.values()]
    batches = [s.dim(BATCH).size for s in shapes if BATCH in s.names]
    both = [s for s in shapes if BATCH in s.names and LENGTH in s.names]
    own = program.inputs.get("tokens")
    if own is not None and own.tensor.shape in both:  # of an encoder-decoder: the target sequence
        both = [own.tensor.shape]
    return max(batches, default=None), max((s.dim(LENGTH).size for s in both), default=None)


def evaluation_steps(evaluation: Estimate, examples: object) -> int:
    """Evaluation steps for this many examples, the last one padded."""
    count = whole(examples, WHAT, "evaluation_examples", 1)
    batch, _ = sizes_of(evaluation.program)
    if batch is None:
        raise GraphError(f"{at(WHAT)}: no input of the evaluation has a dim '{BATCH}', so its steps can't be counted")
    return ceil(count / batch)


def _steps(
    program: Program,
    steps: object,
    epochs: object,
    examples: object,
    tokens: object,
    batch: int | None,
    length: int | None,
) -> int:
    given: Mapping[str, object] = {"steps": steps, "epochs": epochs, "tokens": tokens}
    stated = [name for name, value in given.items() if value is not None]
    if len(stated) != 1:
        raise GraphError(f"{at(WHAT)}: say how long by one of steps, epochs (with examples) or tokens; got {stated}")
    if (epochs is None) != (examples is None):
        raise GraphError(f"{at(WHAT)}: epochs and examples, those of one epoch, go together")
    if steps is not None:
        return whole(steps, WHAT, "steps", 1)
    names = ", ".join(map(repr, program.inputs)) or "none"
    if batch is None or (tokens is not None and length is None):
        lost = BATCH if batch is None else LENGTH
        raise GraphError(f"{at(WHAT)}: no input of the program has a dim '{lost}' (its inputs: {names}); give steps")
    if tokens is not None:
        assert length is not None
        return ceil(bounded(tokens, WHAT, "tokens", POSITIVE) / (batch * length))
    return ceil(bounded(epochs, WHAT, "epochs", POSITIVE) * whole(examples, WHAT, "examples", 1) / batch)


def _times(steps: int, interval: object, argument: str) -> int:
    """Occurrences of an event every `every` steps and at the end."""
    return 1 if interval is None else ceil(steps / whole(interval, WHAT, argument, low=1))
