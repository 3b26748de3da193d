"""Workers of a search: forked processes, or tasks on a user's executor.

Workers are forked once, after the first candidates have been estimated, and inherit the caches of the session. A task
is the number of a candidate, or those of a batch, and its answer depends on nothing else: results are independent of
which worker computes them, and when.

A fork has only the thread that called it, and locks held by other threads stay locked. So by default nothing is forked
in a process with several Python threads, or with a runtime that has threads of its own. Threads of NumPy's BLAS don't
count: BLAS libraries have fork handlers, and tasks multiply no matrices.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from meshlib.core.errors import GraphError
from meshlib.core.subprocesses import describe_exit, exit_with_parent
from meshlib.searching.outcomes import Outcome
from meshlib.searching.programs import Objective, SearchProblem
from meshlib.searching.space import Candidate, Choices

THREADED = ("jax", "tensorflow")  # runtimes whose threads may hold locks at any time


def usual_workers(most: int) -> int:
    """Default number of processes: one per available core where forking is safe."""
    safe = (
        sys.platform == "linux"
        and threading.active_count() == 1
        and not multiprocessing.current_process().daemon
        and not any(name in sys.modules for name in THREADED)
    )
    return min(most, len(os.sched_getaffinity(0))) if safe else 1


def check_forks(workers: int) -> None:
    """Raise GraphError if the system cannot fork this many processes."""
    if workers > 1 and "fork" not in multiprocessing.get_all_start_methods():
        raise GraphError("search: several workers need a system that forks processes; use workers=1")


class Workers:
    """Processes that run named tasks; `close` them."""

    def __init__(self, count: int, tasks: SearchTasks) -> None:
        context = multiprocessing.get_context("fork")
        self.processes = []
        self.pipes: list[Connection] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about the threads of BLAS
            for _ in range(count):
                here, there = context.Pipe()
                self.pipes.append(here)
                process = context.Process(target=_serve, args=(there, [*self.pipes], tasks), daemon=True)
                process.start()
                there.close()
                self.processes.append(process)

    def answers(self, task: str, numbers: Iterable[Any], until: float | None) -> dict[Any, Any]:
        """The answer for each number, or batch of numbers; for fewer if time (`time.monotonic`) runs out, after which
        no more can be asked.

        Raises: what a task has raised, of several the one of the first number.
        """
        left = [*numbers][::-1]
        order = {n: place for place, n in enumerate(reversed(left))}
        answer_of: dict[Any, Any] = {}
        faults: dict[Any, BaseException] = {}
        busy: dict[Connection, Any] = {}
        free = [*self.pipes]
        while busy or (left and not faults):
            while left and free and not faults:
                pipe, n = free.pop(), left.pop()
                pipe.send((task, n))
                busy[pipe] = n
            ready = wait([*busy], None if until is None else max(0.0, until - time.monotonic()))
            if not ready:
                self.close()
                break
            for pipe in [pipe for pipe in busy if pipe in ready]:
                n = busy.pop(pipe)
                good, answer = self._received(pipe)
                (answer_of if good else faults)[n] = answer
                free.append(pipe)
        if faults:
            raise faults[min(faults, key=order.__getitem__)]
        return answer_of

    def _received(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv()  # type: ignore[no-any-return]
        except EOFError:
            process = self.processes[self.pipes.index(pipe)]
            process.join()
            raise GraphError(
                f"search: a worker process died ({describe_exit(process.exitcode)}); use fewer workers"
            ) from None

    def close(self) -> None:
        """Kill the processes at once; they hold nothing of value."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def _serve(pipe: Connection, others: Sequence[Connection], tasks: SearchTasks) -> None:
    """Main loop of a worker. `others`: the parent's ends of all pipes, which the worker must close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is handled by the search
    exit_with_parent()  # even in the middle of a task
    gc.freeze()  # memory shared with the search stays shared
    for other in others:
        other.close()
    while True:
        try:
            task, n = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(tasks, task)(n)
        except BaseException as fault:
            answer = False, _sendable(fault)
        pipe.send(answer)


def _sendable(fault: BaseException) -> BaseException:
    """The exception, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(fault))
    except Exception:
        return GraphError(f"{type(fault).__name__}: {fault}")
    return fault


class CandidateBatch(NamedTuple):
    """Candidates of one problem that are bounded together.

    limit    the value above which their bounds may be loose
    numbers  their places in the space
    """

    limit: float
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class SearchTasks:
    """The tasks of a search, as methods, with what they need; `given`: the user's objective."""

    problems: Mapping[Choices, SearchProblem]
    space: Sequence[Candidate]
    bounds: Sequence[float]
    given: object

    @cached_property
    def objective(self) -> Objective:
        """The objective."""
        return Objective.named(self.given)

    def __reduce__(self) -> tuple[type[SearchTasks], tuple[object, ...]]:
        return SearchTasks, (self.problems, self.space, self.bounds, self.given)  # each process names its own objective

    def estimate(self, n: int) -> Outcome:
        """Lower and estimate one candidate."""
        return self._problem(n).estimated(self.space[n], self.objective, self.bounds[n])

    def bound(self, n: int) -> float:
        """A candidate's closer bound."""
        return self._problem(n).closer_bound(self.space[n], self.objective)

    def together(self, batch: CandidateBatch) -> list[tuple[float, float]]:
        """Bounds of candidates, and on their bytes."""
        candidates = [self.space[n] for n in batch.numbers]
        return self._problem(batch.numbers[0]).bounds_together(candidates, self.objective, batch.limit)

    def _problem(self, n: int) -> SearchProblem:
        return self.problems[self.space[n].choices]
