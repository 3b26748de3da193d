"""Forked processes that run tasks, and inherit all that these need.

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
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, TypeVar

from meshlib.core.arguments import whole
from meshlib.core.errors import GraphError
from meshlib.core.subprocesses import describe_exit, exit_with_parent

T = TypeVar("T")
Result = TypeVar("Result")

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


def check_workers(workers: object, what: str) -> None:
    """Raise GraphError unless this is a number of processes that the system can fork."""
    count = whole(workers, what, "workers")
    if count < 1:
        raise GraphError(f"{what}: workers must be at least 1, got {workers}")
    if count > 1 and "fork" not in multiprocessing.get_all_start_methods():
        raise GraphError(f"{what}: several workers need a system that forks processes; use workers=1")


class Workers:
    """Processes that run named tasks, methods of `tasks`; `close` them. `what`: the calling function, for messages."""

    def __init__(self, count: int, tasks: object, what: str) -> None:
        self.what = what
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

    def answers(
        self, task: str, numbers: Iterable[Any], until: float | None, told: Callable[[Any], object] | None = None
    ) -> dict[Any, Any]:
        """The answer for each number, or batch of numbers; for fewer if time (`time.monotonic`) runs out, after which
        no more can be asked. `told` is called with each number once it is answered.

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
                if told is not None:
                    told(n)
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
                f"{self.what}: a worker process died ({describe_exit(process.exitcode)}); use fewer workers"
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


def mapped(
    what: str,
    workers: int,
    function: Callable[[T], Result],
    items: Sequence[T],
    told: Callable[[int], object] = lambda n: None,
) -> list[Result]:
    """The function's results for the items, in order, computed in forked processes, which inherit all that it needs.

    Items that take long come first. `told` is called with the place of each item that is done.

    >>> mapped("double", 1, lambda n: 2 * n, [1, 2])
    [2, 4]
    """
    if min(workers, len(items)) < 2:
        results = []
        for n, item in enumerate(items):
            results.append(function(item))
            told(n)
        return results
    pool = Workers(min(workers, len(items)), SimpleNamespace(result=lambda n: function(items[n])), what)
    try:
        answers = pool.answers("result", range(len(items)), None, told)
    finally:
        pool.close()
    return [answers[n] for n in range(len(items))]


def _serve(pipe: Connection, others: Sequence[Connection], tasks: object) -> None:
    """Main loop of a worker. `others`: the parent's ends of all pipes, which the worker must close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
    exit_with_parent()  # even in the middle of a task
    gc.freeze()  # memory shared with the parent stays shared
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
