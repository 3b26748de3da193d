"""Tasks on any `concurrent.futures.Executor`: a process pool of Python, Dask, Ray or MPI.

All tasks of one job share a payload, such as a program with its cached analyses. It is pickled once, and sent to a
process only if that does not have it: a task is first sent with the payload's digest alone.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from typing import Any

from meshlib.core.errors import GraphError

Function = Callable[[Any, Any], Any]  # (payload, argument of the task) -> result

ENGINES = (
    "concurrent",
    "distributed",
    "ray",
    "mpi4py",
    "multiprocessing",
)  # exceptions of these packages are faults of executors
PAYLOADS = 4  # payloads cached per process
POLL_SECONDS = 1.0  # how often to look for tasks that somebody else has cancelled
MISSING = "meshlib: the payload is not here"

_payloads: OrderedDict[str, Any] = OrderedDict()
_lock = threading.Lock()


class Tasks:
    """Tasks on an executor that share one payload; the executor stays the caller's and is not shut down.

    Args:
      what: the calling public function, for messages.
      executor: anything with `concurrent.futures`' interface.
      payload: shared by all tasks; must be picklable.
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
        """The results by argument, in their order; fewer if the deadline (`time.monotonic`) passes.

        Raises: the exception of a task, that of the first argument if several fail; GraphError if a worker dies.
        """
        order = list(arguments)
        waiting: dict[Future[Any], Any] = {self._submit(function, a, None): a for a in order}
        answer_of: dict[Any, Any] = {}
        faults: dict[Any, BaseException] = {}
        while waiting and not faults:
            left = math.inf if until is None else max(0.0, until - time.monotonic())
            done, _ = wait(waiting, min(left, POLL_SECONDS), FIRST_COMPLETED)
            done |= {future for future in waiting if future.cancelled()}  # of which `wait` is not told
            if not done and left <= POLL_SECONDS:
                break
            for future in done:
                argument = waiting.pop(future)
                fault = CancelledError("a task was cancelled") if future.cancelled() else future.exception()
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
            return self.executor.submit(_run_task, self.digest, body, function, argument)
        except Exception as fault:
            raise self._fault(fault) from None

    def _fault(self, fault: BaseException) -> BaseException:
        """A one-line error for a dead worker or an executor's refusal; exceptions of tasks are returned unchanged."""
        if type(fault).__module__.partition(".")[0] in ENGINES:
            first = str(fault).strip().split("\n", 1)[0]
            return GraphError(f"{self.what}: the executor gave up: {type(fault).__name__}: {first}")
        if isinstance(fault, RuntimeError) and "shutdown" in str(fault):
            return GraphError(f"{self.what}: the executor is shut down; give one that runs")
        return fault


def executor_of(workers: object) -> Executor | None:
    """`workers` if it is an executor, else None."""
    return workers if isinstance(workers, Executor) else None


def _run_task(digest: str, body: bytes | None, function: Function, argument: Any) -> Any:
    """Run one task in a worker if it has the payload; tasks are serialised, since payloads cache analyses."""
    with _lock:
        if digest not in _payloads:
            if body is None:
                return MISSING
            _payloads[digest] = pickle.loads(body)
            while len(_payloads) > PAYLOADS:
                _payloads.popitem(last=False)
        _payloads.move_to_end(digest)
        return function(_payloads[digest], argument)
