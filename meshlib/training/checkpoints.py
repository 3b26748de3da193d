"""Checkpoints of a run in one folder: the last few and the best, each an atomic file written in the background."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from meshlib.core.documents import COUNT, RECORD, TEXT, FieldKind, Schema, parse_json
from meshlib.core.errors import CheckpointError, DamagedError
from meshlib.core.files import claimed, make_folder, remove_file, remove_stale
from meshlib.simulation import Simulation
from meshlib.storage.checkpoint import Snapshot, load, read_notes, save

NOTE = "training"  # name of the note with the position of the loop
BEST = "best.safetensors"
LOCK = "train.pid"  # lock file of the training process
ON_DAMAGE = ("error", "previous")


class Background:
    """Runs one task at a time in a thread; a task's exception is raised by the next call of `check` or `wait`.

    As a context manager it waits for the last task on exit. If another exception ends the context, the task's error
    becomes a note of that exception.

    Example:
      >>> with Background() as background:
      ...     background.start(lambda: print("saved"))
      ...     background.wait()
      saved
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._task: Future[object] | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Start a task after the previous one has ended. Raises: the error of the previous task."""
        self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "meshlib.background")
        self._task = self._thread.submit(task)

    def check(self) -> None:
        """Raise the error of a finished task."""
        if self._task is not None and self._task.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the task to end. Raises: its error."""
        if self._task is not None:
            self._task.exception()  # an interrupt while waiting leaves the task for the next call
            task, self._task = self._task, None
            task.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as unseen:
            if fault is None:
                raise
            fault.add_note(f"besides: {unseen}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None


def _float(x: Any) -> bool:
    """True for a float, including NaN, which means of losses may be, or a count."""
    return isinstance(x, float) or COUNT.accepts(x)


def _has(x: Any, **fields: Callable[[Any], bool]) -> bool:
    return isinstance(x, dict) and set(x) == set(fields) and all(accepts(x[name]) for name, accepts in fields.items())


_SUMS = FieldKind("an object of numbers", lambda x: isinstance(x, dict) and all(map(_float, x.values())))
_BEST = FieldKind("a step and a value", lambda x: _has(x, step=COUNT.accepts, value=_float))
_BEST_BY = FieldKind("two texts", lambda x: isinstance(x, list) and len(x) == 2 and all(map(TEXT.accepts, x)))
_SKIPPED = FieldKind(
    "a list of steps, each with why",
    lambda x: isinstance(x, list) and all(_has(one, step=COUNT.accepts, why=TEXT.accepts) for one in x),
)
LOOP: Schema = {
    **dict.fromkeys(("step", "counted", "since_best"), COUNT),
    "sums": _SUMS,
    "data": RECORD,
    "skipped": _SKIPPED,
    "best": _BEST.optional(),
    "best_by": _BEST_BY.optional(),
}
_NAME = re.compile(r"step_([0-9]{9,})\.safetensors")


class Keeper:
    """Writes checkpoints into a folder and keeps the last `keep`; of several processes the first removes old ones."""

    def __init__(self, folder: str | os.PathLike[str], keep: int, on_damage: str = "error") -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise CheckpointError(
                f"train: folder must be the path of one, got {folder!r:.80}; the working directory is '.'"
            )
        self.folder, self.keep, self.on_damage = Path(folder), keep, on_damage
        self.background = Background()
        self.snapshot: Snapshot | None = None
        make_folder(folder, "train", CheckpointError)

    def there(self) -> list[Path]:
        """The checkpoints in the folder, oldest first."""
        path_of_step = {int(m[1]): p for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))}
        return [path_of_step[step] for step in sorted(path_of_step)]

    @contextmanager
    def alone(self, run: Simulation) -> Iterator[None]:
        """Lock the folder against other runs, and remove files of killed ones; with several processes the first does.

        On exit it waits for a checkpoint being written.

        Raises: CheckpointError if another process is training in it, with its id.
        """
        processes = run.state.processes
        if processes is not None and not processes.first:
            processes.agree(None)
            yield
            return
        try:
            claim = claimed(str(self.folder / LOCK))
            holder = claim.__enter__()
        except OSError as fault:
            raise CheckpointError(f"train: {self.folder / LOCK} can't be written: {fault.strerror or fault}") from fault
        try:
            taken = None
            if holder is not None:
                taken = (
                    f"train: process {holder or 'unknown'} trains in the folder {self.folder} already; "
                    "wait for it or end it, or give this run another folder"
                )
            else:
                remove_stale(str(self.folder))
            if processes is not None:
                processes.agree(taken)
            elif taken is not None:
                raise CheckpointError(taken)
            with self.background:
                yield
        finally:
            claim.__exit__(None, None, None)

    def newest(self, run: Simulation) -> dict[str, Any] | None:
        """Restore the newest checkpoint into `run`; returns the position of the loop, or None without a checkpoint.

        With `on_damage="previous"` damaged or unreadable ones are skipped with a warning, and renamed to end in
        `.damaged`.

        Raises: DamagedError for a damaged one, CheckpointError for one of another program.
        """
        damaged: list[tuple[Path, CheckpointError]] = []
        there = self.there()
        for path in reversed(there):
            try:
                noted = self._restored(path, run)
            except CheckpointError as fault:
                if not isinstance(fault, DamagedError) and not isinstance(fault.__cause__, OSError):
                    raise  # it is intact, but of another program
                if self.on_damage != "previous":
                    older = len(there) > 1
                    raise DamagedError(
                        f"{fault}; "
                        + (f"on_damage='previous' continues from {there[-2].name}" if older else "no other is older")
                    ) from None
                damaged.append((path, fault))
                continue
            self._set_aside(run, [path for path, _ in damaged])
            for _, damage in damaged:
                warnings.warn(f"{damage}; training continues from {path.name}", stacklevel=2)
            return noted
        if damaged:
            raise DamagedError(f"{damaged[0][1]}; all {len(damaged)} checkpoints of the folder are damaged")
        return None

    def _restored(self, path: Path, run: Simulation) -> dict[str, Any]:
        """Restore a checkpoint into `run`; returns the position of the loop."""
        text = read_notes(path).get(NOTE)
        if text is None:
            raise CheckpointError(f"train: {path} was not written by mtf.train; use another folder, or mtf.load")

        def fail(fault: str) -> NoReturn:
            raise DamagedError(f"train: the note of {path} is damaged: {fault}") from None

        noted: dict[str, Any] = parse_json(text, fail, LOOP, constants=True)
        if odd := sorted(noted.keys() ^ LOOP.keys()):
            fail(f"it should have the fields {', '.join(LOOP)}; '{odd[0]:.40}' is missing, or none of them")
        load(path, run)
        return noted

    def _set_aside(self, run: Simulation, damaged: list[Path]) -> None:
        """Rename damaged checkpoints, so that they do not count among the kept ones."""
        if run.state.processes is None or run.state.processes.first:
            for path in damaged:
                path.replace(path.with_suffix(".damaged"))

    def save(self, run: Simulation, step: int, loop: dict[str, Any] | None, best: dict[str, Any] | None) -> None:
        """Write a checkpoint of a step, the best one, or both, in the background, and remove outdated ones.

        Returns once the previous checkpoint is on disk and the state is copied. Several processes that share the state
        write it together, and wait until it is on disk.

        Args:
          loop: position of the loop; None writes no checkpoint of the step.
          best: step and value of an evaluation, if it is the best so far.
        Raises: CheckpointError if it or the previous one can't be written.
        """
        files = {} if best is None else {BEST: {"best": json.dumps(best)}}
        if loop is not None:
            files[f"step_{step:09d}.safetensors"] = {NOTE: json.dumps(loop)}
        if run.state.processes is not None:
            for name, notes in files.items():
                save(run, self.folder / name, notes)
            if run.state.processes.first:
                self._remove_old()
            return
        self.background.wait()  # the previous one is written from the same memory
        snapshot = self.snapshot = self.snapshot or Snapshot(run)
        snapshot.take(run)

        def write() -> None:
            for name, notes in files.items():
                snapshot.save(self.folder / name, notes)
            self._remove_old()

        self.background.start(write)

    def prepare(self, run: Simulation) -> None:
        """Allocate memory for a copy of the state in the background, ahead of the first save."""
        if run.state.processes is None:
            self.snapshot = Snapshot(run)
            self.background.start(self.snapshot.prepare)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written."""
        self.background.check()

    def wait(self) -> None:
        """Wait until all checkpoints are on disk. Raises: CheckpointError if one can't be written."""
        self.background.wait()

    def _remove_old(self) -> None:
        for path in self.there()[: -self.keep]:
            remove_file(str(path))
