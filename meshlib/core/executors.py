"""Tasks on any `concurrent.futures.Executor`: a process pool of Python's, Dask's, Ray's or MPI's.

All tasks of one job share a payload, such as a program with all that is known of it. It is pickled once, and sent to a
process only when that has not got it: a task is first sent with the payload's digest alone.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any

from meshlib.core.errors import GraphError

Function = Callable[[Any, Any], Any]  # of the payload and a task's argument

ENGINES = ("concurrent", "distributed", "ray", "mpi4py", "multiprocessing")  # whose errors are not those of tasks
PAYLOADS = 4  # that a process keeps
MISSING = "meshlib: the payload is not here"

_payloads: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


class Tasks:
    """Tasks of one payload on an executor, which stays the caller's: nothing here shuts it down.

    Args:
      what: the public function that is at work, for messages.
      executor: anything with `concurrent.futures`' interface.
      payload: what all tasks have in common; it must be picklable.
    Raises: GraphError for a payload that can't be pickled.
    Example:
      >>> from concurrent.futures import ThreadPoolExecutor
      >>> import operator
      >>> with ThreadPoolExecutor(2) as pool:
      ...     Tasks("sum", pool, 10).answers(operator.add, [1, 2, 3])
      {1: 11, 2: 12, 3: 13}
    """

    def __init__(self, what: str, executor: Executor, payload: Any) -> None:
        self.what, self.executor = what, executor
        try:
            self.body = pickle.dumps(payload)
        except Exception as fault:
            raise GraphError(
                f"{what}: what the workers need can't be sent to them; define functions at the top of a module, not in "
                f"a function or as a lambda: {type(fault).__name__}: {fault}"
            ) from None
        self.digest = hashlib.sha256(self.body).hexdigest()

    def answers(self, function: Function, arguments: Iterable[Any], until: float | None = None) -> dict[Any, Any]:
        """The answer to each argument, in their order; to fewer if time runs out, by `time.monotonic`.

        Raises: what a task has raised, of several that of the first argument; GraphError if a worker ends by itself.
        """
        order = list(arguments)
        waiting: dict[Future[Any], Any] = {self._submit(function, a, None): a for a in order}
        answer_of: dict[Any, Any] = {}
        faults: dict[Any, BaseException] = {}
        while waiting and not faults:
            left = None if until is None else max(0.0, until - time.monotonic())
            done, _ = wait(waiting, left, FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                argument = waiting.pop(future)
                fault = future.exception()
                if fault is not None:
                    faults[argument] = fault
                    continue
                answer = future.result()
                if isinstance(answer, str) and answer == MISSING:
                    waiting[self._submit(function, argument, self.body)] = argument
                else:
                    answer_of[argument] = answer
        for future in waiting:
            future.cancel()
        if faults:
            raise self._fault(next(faults[a] for a in order if a in faults))
        return {a: answer_of[a] for a in order if a in answer_of}

    def _submit(self, function: Function, argument: Any, body: bytes | None) -> Future[Any]:
        try:
            return self.executor.submit(_run, self.digest, body, function, argument)
        except Exception as fault:
            raise self._fault(fault) from None

    def _fault(self, fault: BaseException) -> BaseException:
        """A worker's end, or a refusal of the executor, in a line; what a task has raised as it is."""
        if type(fault).__module__.partition(".")[0] in ENGINES:
            first = str(fault).strip().split("\n", 1)[0]
            return GraphError(f"{self.what}: the executor gave up: {type(fault).__name__}: {first}")
        if isinstance(fault, RuntimeError) and "shutdown" in str(fault):
            return GraphError(f"{self.what}: the executor is shut down; give one that runs")
        return fault


def executor_of(workers: object) -> Executor | None:
    """The executor that a `workers` argument is; None for anything else."""
    return workers if isinstance(workers, Executor) else None


def _run(digest: str, body: bytes | None, function: Function, argument: Any) -> Any:
    """In a worker: one task, if the payload is there. One after the other: payloads keep what they have learnt."""
    with _lock:
        if digest not in _payloads:
            if body is None:
                return MISSING
            _payloads[digest] = pickle.loads(body)
            while len(_payloads) > PAYLOADS:
                _payloads.popitem(last=False)
        _payloads.move_to_end(digest)
        return function(_payloads[digest], argument)
