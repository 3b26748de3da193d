"""The training loop: evaluation, checkpoints, history, and a state that a later run resumes bit for bit.

The whole state of the loop is stored in one file with the variables: the step, the position in the data, the sums of
steps since the last row of the history, the best evaluation. A killed run resumes from the last such file and repeats
exactly the same steps, so that rows written twice are equal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from meshlib.core.arguments import at, choice, flag, whole
from meshlib.core.errors import FeedError, GraphError, NotFiniteError
from meshlib.data import Feed, Stats
from meshlib.program.records import Program
from meshlib.simulation import Simulation, simulate
from meshlib.training.checkpoints import ON_DAMAGE, Keeper
from meshlib.training.evaluation import Evaluation, feeds_of, single_numbers
from meshlib.training.feeding import Feeding, examples_of, feeding_of
from meshlib.training.history import TIMES, History, ProgressBar, Row
from meshlib.training.signals import noted

__all__ = ["Trained", "train"]

ON_NAN = ("stop", "skip")
BEST = "loss"  # the default metric of evaluations to compare
BETTER = ("lower", "higher")
TOGETHER_BYTES = 256 * 2**20  # feeds on the devices at once
SKIPS_IN_A_ROW = 10  # consecutive skipped steps after which a run is stopped


@dataclass(eq=False)
class Trained:
    """Result of a training run.

    run        the simulation or devices, with the variables
    step       total number of steps, including those of earlier runs
    history    rows of metrics; `.plot(path)`, `.save_csv(path)`
    stopped    reason of the end: "steps", "data" (exhausted), or "early"
    best       {"step", "value"} of the best evaluation; None without evaluations
    skipped    {"step", "why"} of the steps without an update, under on_nan="skip"
    stats      input statistics, if the data are `mtf.data`

    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [], 1.0)
      ...     loss = mtf.reduce_mean(mtf.square(mtf.input("x", "batch:4") - w))
      ...     program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))
      >>> data = mtf.data.arrays({"x": np.zeros(8, np.float32)}).batch(4).repeat()
      >>> trained = mtf.train(program, data, steps=3, progress=False)
      >>> trained.step, trained.stopped, round(float(trained.run.state["w"]), 3)
      (3, 'steps', 0.512)
    """

    run: Simulation
    step: int
    history: History
    stopped: str
    best: dict[str, Any] | None
    skipped: list[dict[str, Any]]
    stats: Stats | None

    def __repr__(self) -> str:
        return f"<Trained: step {self.step}, stopped by {self.stopped!r}; {self.run!r}>"


def _simulation(run: object) -> Simulation:
    """The run itself, or a simulation of a program."""
    if isinstance(run, Program):
        return simulate(run)
    if not isinstance(run, Simulation):
        raise GraphError(f"{at('train')}: run must be a run from mtf.simulate or mtf.on_jax, got {run!r:.80}")
    return run


def _check_program(program: Program) -> None:
    """Raise unless a program trains something, with output names that differ from the history's metrics."""
    if not program.updates:
        raise GraphError(
            f"{at('train')}: the program updates no variable, so there is nothing to train; lower it with "
            "updates, as in mtf.lower(outputs, optimizer.minimize(loss))"
        )
    taken = [name for name in ("step", *TIMES) if name in program.outputs]
    if taken:
        raise GraphError(f"{at('train')}: the history has its own '{taken[0]}'; lower that output under another name")


def _check_options(options: TrainOptions, run: Simulation) -> None:
    """Raise for incompatible options."""
    if not isinstance(options.best, str):
        raise GraphError(f"{at('train')}: best must be the name of a figure, got {options.best!r:.80}")
    if options.report is not None and not callable(options.report):
        raise GraphError(f"{at('train')}: report must be a function of a row, got {options.report!r:.80}")
    if (options.patience is not None or options.best != BEST) and options.evaluation is None:
        name = "patience" if options.patience is not None else f"best={options.best!r:.80}"
        raise GraphError(f"{at('train')}: {name} needs evaluations; give evaluation=mtf.Evaluation(...)")
    if options.on_nan == "skip" and not run.check_nan:
        raise GraphError(f"{at('train')}: on_nan='skip' needs a run that checks for NaN: check_nan=True, checked=True")


def train(
    run: Simulation | Program,
    data: Any,
    steps: int,
    *,
    evaluation: Evaluation | None = None,
    folder: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: int = 3,
    on_damage: str = "error",
    best: str = BEST,
    better: str = "lower",
    patience: int | None = None,
    on_nan: str = "stop",
    log_every: int = 100,
    steps_per_run: int = 1,
    report: Callable[[Row], object] | None = None,
    progress: bool = True,
) -> Trained:
    """Train: run steps on batches, evaluate, save checkpoints, and resume an earlier run.

    Args:
      run: a simulation or a run on JAX; a program is simulated.
      data: `mtf.data` batches, `mtf.Batches`, or another iterable of dicts, which must be the same each time to resume
        a run. The program is fed its inputs from each batch; with `mtf.data` each of several processes prepares only
        the rows of its devices, if these are known in advance (see `Feed.only`).
      steps: total number of steps, including earlier runs in `folder`.
      evaluation: see `mtf.Evaluation`.
      folder: for checkpoints (`step_000000100.safetensors`, `best.safetensors`), `history.jsonl` and `history.csv`. If
        it has a checkpoint, the run resumes from there, with the next batch.
      save_every: steps between checkpoints, by default 1,000; one is always written at the end. Steps wait while the
        state is copied, and for the previous checkpoint to reach the disk; writing runs in parallel with them, and its
        errors are raised at the next step. Several processes wait until theirs is on disk.
      keep: number of checkpoints to keep, besides the best.
      on_damage: if the newest checkpoint is damaged: "error", or "previous": warn, rename it to end in `.damaged`, and
        resume from the newest intact one.
      best: the metric of evaluation that determines the best step; better: "lower" or "higher".
      patience: stop after this many evaluations without an improvement.
      on_nan: if a step yields NaN: "stop" with NotFiniteError, which names the operation, keeping the last checkpoint;
        or "skip" the update, and stop after 10 such steps in a row.
      log_every: number of steps per row of the history, which has means of the program's scalar outputs.
      steps_per_run: number of steps run at once, without checking signals, the terminal or due actions in between; on
        JAX devices without returning to the host, unless a step detects a fault.
      report: called with each row of the history, such as {"step": 100, "loss": 0.3, "examples_per_second": ...}.
      progress: a progress bar, if standard error is a terminal, with measured examples/s and the prediction for the
        slice.
    Raises: GraphError and FeedError for invalid arguments, CheckpointError for a folder of another run, and exceptions
      of steps and data. Ctrl-C and SIGTERM end the run after a step and a checkpoint, and then have their usual effect.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, w = mtf.input("x", [mtf.Dimension("batch", 4)]), mtf.variable("w", [], 1.0)
      ...     loss = mtf.reduce_mean(mtf.square(x - w), name="loss")
      ...     program = mtf.lower({"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss))
      >>> data = mtf.data.arrays({"x": np.arange(8, dtype=np.float32)}).shuffle(seed=0).batch(4).repeat()
      >>> trained = mtf.train(program, data, steps=40, log_every=20)
      >>> trained.step, trained.stopped, [row["step"] for row in trained.history.rows]
      (40, 'steps', [20, 40])
    """
    what = "train"
    run = _simulation(run)
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise GraphError(f"{at(what)}: evaluation must be an mtf.Evaluation, got {evaluation!r:.80}")
    options = TrainOptions(
        steps=whole(steps, "train", "steps", low=1),
        evaluation=evaluation,
        save_every=whole(1000 if save_every is None else save_every, "train", "save_every", low=1),
        best=best,
        better=choice(better, what, "better", BETTER),
        patience=None if patience is None else whole(patience, "train", "patience", low=1),
        on_nan=choice(on_nan, what, "on_nan", ON_NAN),
        log_every=whole(log_every, "train", "log_every", low=1),
        steps_per_run=whole(steps_per_run, "train", "steps_per_run", low=1),
        report=report,
    )
    whole(keep, "train", "keep", low=1)
    _check_program(run.program)
    _check_options(options, run)
    if save_every is not None and folder is None:
        raise GraphError(f"{at(what)}: save_every needs a folder to save in")
    bar = flag(progress, what, "progress")
    choice(on_damage, what, "on_damage", ON_DAMAGE)
    keeper = None if folder is None else Keeper(folder, keep, on_damage)
    feeding = feeding_of(data)
    feed = feeding if isinstance(feeding, Feed) else None
    own_feed = None if feeding is data else feed  # created here, so closed here
    if own_feed is not None and (rows := run.rows_here()) is not None:
        own_feed.only(rows)
    shown = ProgressBar(run, options.steps) if bar else None
    try:
        with nullcontext() if keeper is None else keeper.alone(run):
            loop = _Loop(run, feeding, options, keeper, shown)
            stopped = loop.run_all()
            if not loop.at.step:
                raise FeedError(f"{at(what)}: data yielded no batch, so no step was run")
    finally:
        for opened in (own_feed, shown):
            if opened is not None:
                opened.close()
    stats = None if feed is None else feed.stats
    return Trained(run, loop.at.step, loop.history, stopped, loop.at.best, loop.at.skipped, stats)


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train`."""

    steps: int
    evaluation: Evaluation | None
    save_every: int
    best: str
    better: str
    patience: int | None
    on_nan: str
    log_every: int
    steps_per_run: int
    report: Callable[[Row], object] | None


@dataclass
class Standing:
    """State of the loop, besides variables and data."""

    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)  # sums since the last row
    counted: int = 0
    best: dict[str, Any] | None = None
    best_by: list[str] | None = None  # the metric, and its direction
    since_best: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)


class _Loop:
    def __init__(
        self, run: Simulation, feeding: Feeding, options: TrainOptions, keeper: Keeper | None, bar: ProgressBar | None
    ) -> None:
        self.run, self.feeding, self.options, self.keeper, self.bar = run, feeding, options, keeper, bar
        self.at = Standing()
        self.alone = run.state.processes is None
        self.writes = self.alone or bool(run.state.processes and run.state.processes.first)
        self.history = History(None if keeper is None or not self.writes else Path(keeper.folder) / "history.jsonl")
        self.saved: int | None = None  # step of the last checkpoint
        self.begun, self.examples, self.waited = time.perf_counter(), 0, 0.0
        if keeper is not None:
            checkpoint_note = keeper.newest(run)
            if checkpoint_note is not None:
                feeding.restore(checkpoint_note.pop("data"))
                self.at = Standing(**checkpoint_note)
                if self.at.best_by not in (None, [options.best, options.better]):  # not compared by this metric
                    self.at.best, self.at.since_best = None, 0
                self.saved = self.at.step
            self.history.resume(self.at.step)
            keeper.prepare(run)

    def run_all(self) -> str:
        """Run steps until there is a reason to stop, which is returned."""
        options = self.options
        stopped = None
        with noted(catch=self.alone) as interruption:
            while stopped is None:
                before = self.at.step
                stopped = self._reason() or self._steps(min(options.steps_per_run, options.steps - before))
                self._after(before)
                if interruption.number is not None:
                    self._save_last()
                    raise interruption.error()
        self._log()
        self._save_last()
        if self.writes and self.keeper is not None:
            self.history.save_csv(self.keeper.folder / "history.csv")
        return stopped

    def _reason(self) -> str | None:
        """Reason to stop, if any."""
        if self.at.step >= self.options.steps:
            return "steps"
        patience = self.options.patience
        return "early" if patience is not None and self.at.since_best >= patience else None

    def _steps(self, count: int) -> str | None:
        """Run this many steps; returns "data" if these are exhausted."""
        done = 0
        while done < count:
            batches = self._taken(count - done)
            if not batches:
                return "data"
            given = [feeds_of(self.run.program, batch) for batch in batches]
            step_feeds = self.run.several(given) if len(given) > 1 else None
            for n, batch in enumerate(batches):
                self._step(batch, given[n], None if step_feeds is None else step_feeds[n])
            done += len(batches)
        return None

    def _taken(self, most: int) -> list[Any]:
        """The next batches: one, or as many as the devices run at once."""
        first = next(self.feeding, None)
        if first is None or not self.run.runs_several:
            return [] if first is None else [first]
        size = sum(np.asarray(x).nbytes for x in feeds_of(self.run.program, first).values())
        room = min(most, max(1, TOGETHER_BYTES // max(1, size)))
        return [first, *islice(iter(self.feeding.__next__, None), room - 1)]

    def _step(self, batch: Any, feeds: Any, outputs_ready: dict[str, Any] | None) -> None:
        """Run a step, or use its outputs if it has run; add its metrics to the sums, or record it as skipped."""
        where = self.at
        try:
            outputs = self.run.step(feeds) if outputs_ready is None else outputs_ready
        except NotFiniteError as fault:
            in_a_row = sum(s["step"] > where.step - SKIPS_IN_A_ROW for s in where.skipped)
            if self.options.on_nan == "stop" or in_a_row >= SKIPS_IN_A_ROW:
                self._log()
                raise
            where.skipped.append({"step": where.step + 1, "why": str(fault)})
        else:
            for name, value in single_numbers(outputs).items():
                where.sums[name] = where.sums.get(name, 0.0) + value
            where.counted += 1
        where.step += 1
        self.examples += int(examples_of(self.feeding, batch))

    def _after(self, before: int) -> None:
        """Actions due after steps."""
        options, step = self.options, self.at.step
        if self.keeper is not None:
            self.keeper.check()
        if _due(options.log_every, before, step):
            self._log()
        improved = False
        if options.evaluation is not None and _due(options.evaluation.every, before, step):
            improved = self._evaluate(options.evaluation)
        self._save(checkpoint=_due(options.save_every, before, step), best=improved)
        if self.bar is not None:
            self.bar.show(step, self.history.rows)

    def _log(self) -> None:
        """Add a row for the steps since the last one."""
        where = self.at
        if not where.counted:
            return
        now, waited = time.perf_counter(), self._waited_seconds()
        row: Row = {"step": where.step, **{name: total / where.counted for name, total in where.sums.items()}}
        row["examples_per_second"] = round(self.examples / max(now - self.begun, 1e-9), 1)
        row["waited_seconds"] = round(waited - self.waited, 6)
        where.sums, where.counted = {}, 0
        self._add(row)
        self.begun, self.examples, self.waited = time.perf_counter(), 0, waited

    def _evaluate(self, evaluation: Evaluation) -> bool:
        """Add a row of an evaluation; returns whether it is the best so far."""
        begun = time.perf_counter()
        figures = evaluation(self.run)
        options, where = self.options, self.at
        if options.best not in figures:
            names = ", ".join(figures)
            raise GraphError(f"{at('train')}: evaluation returns {names}, not '{options.best}'; choose one with best=")
        value = figures[options.best]
        old = None if where.best is None else where.best["value"]
        improved = not np.isnan(value) and (old is None or (value < old if options.better == "lower" else value > old))
        if improved:
            where.best, where.since_best = {"step": where.step, "value": value}, 0
            where.best_by = [options.best, options.better]
        else:
            where.since_best += 1
        self._add({"step": where.step, **{f"eval_{name}": value for name, value in figures.items()}})
        self.begun += time.perf_counter() - begun  # the rate is that of training
        return improved

    def _add(self, row: Row) -> None:
        self.history.add(row)
        if self.options.report is not None:
            self.options.report(row)

    def _save(self, checkpoint: bool, best: bool) -> None:
        """Start writing a checkpoint of this step, the best one, or both from one copy of the state."""
        checkpoint = checkpoint and self.saved != self.at.step
        if self.keeper is None or not (checkpoint or best):
            return
        loop = {**vars(self.at), "data": self.feeding.state()} if checkpoint else None
        self.keeper.save(self.run, self.at.step, loop, self.at.best if best else None)
        if checkpoint:
            self.saved = self.at.step

    def _save_last(self) -> None:
        """Write a checkpoint of this step, if there is none, and wait until it is on disk."""
        self._save(checkpoint=True, best=False)
        if self.keeper is not None:
            self.keeper.wait()

    def _waited_seconds(self) -> float:
        return self.feeding.stats.waited_seconds if isinstance(self.feeding, Feed) else 0.0


def _due(interval: int, before: int, step: int) -> bool:
    return step // interval > before // interval
