"""Worker processes: they end with their parent, and one that ends by itself is named."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import draws
from tests.paths import ROOT
from tests.running import children, is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

# Prints a line when its workers are at work, which they are for minutes, some without giving up the interpreter's lock.
PARENTS = {
    "data": """
import numpy as np, meshlib as mtf

def slow(example):
    if example["x"] >= 40:
        sum(range(10**11))
    return example

if __name__ == "__main__":
    feed = iter(mtf.data.arrays({"x": np.arange(64)}).map(slow).parallel(2, "processes"))
    print(next(feed), flush=True)
    [*feed]
""",
    "imports": """
import time

if __name__ == "__mp_main__":  # a worker that imports the script
    time.sleep(1000)
import numpy as np, meshlib as mtf

if __name__ == "__main__":
    feed = iter(mtf.data.arrays({"x": np.arange(64)}).map(dict).parallel(2, "processes"))
    print("started", flush=True)
    [*feed]
""",
    "search": """
from types import SimpleNamespace
from meshlib.core.forks import Workers

workers = Workers(2, SimpleNamespace(slow=lambda n: sum(range(10**11))), "slow")
print("started", flush=True)
workers.answers("slow", range(4), None)
""",
    "search, pipes held by another process": """
import os, time
from types import SimpleNamespace
from meshlib.core.forks import Workers

workers = Workers(2, SimpleNamespace(slow=lambda n: time.sleep(1000)), "slow")
if not os.fork():  # a process that is not a child of this one outlives it
    if not os.fork():
        time.sleep(4)
    os._exit(0)
os.wait()
print("started", flush=True)
workers.answers("slow", range(4), None)
""",
}


# Of data, the third is the resource tracker.
@pytest.mark.parametrize(("kind", "count"), [(kind, 2 if "search" in kind else 3) for kind in PARENTS])
def test_workers_end_with_their_parent(kind: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "parent.py"
    path.write_text(PARENTS[kind])
    for _ in range(draws(1, 12)):
        command, environment = [sys.executable, str(path)], {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline()
            begun = time.monotonic()
            while len(workers := children(parent.pid)) < count or time.monotonic() < begun + 0.5 * (kind == "imports"):
                assert time.monotonic() < begun + 30
                time.sleep(0.02)
            parent.kill()
            end = time.monotonic() + 2
        while any(map(is_running, workers)) and time.monotonic() < end:
            time.sleep(0.02)
        left = [pid for pid in workers if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def fatal(example: dict[str, Any]) -> dict[str, Any]:
    if example["x"] == 70:
        os.kill(os.getpid(), signal.SIGKILL)
    return example


def leaving(example: dict[str, Any]) -> dict[str, Any]:
    os._exit(3)


def x(count: int = 96) -> mtf.data.Data:
    return mtf.data.arrays({"x": np.arange(count)})


def killed_between() -> object:
    """A worker is killed while nobody waits for it, so that the next request meets a pool that is broken already."""
    before = multiprocessing.active_children()
    feed = iter(x(400).map(dict).parallel(1, "processes"))
    next(feed)
    (worker,) = (one for one in multiprocessing.active_children() if one not in before)
    os.kill(worker.pid or 0, signal.SIGTERM)  # with what the executor ends the others, too
    worker.join()
    time.sleep(0.2)
    return [*feed]


@pytest.mark.parametrize(
    ("use", "how"),
    [
        (lambda: list(x().map(fatal).parallel(2, "processes")), "SIGKILL, perhaps for want of memory"),
        (lambda: list(x().map(fatal).batch(8).parallel(1, "processes").prefetch(2)), "SIGKILL"),
        (lambda: list(x().map(leaving).parallel(1, "processes")), "status 3"),
        (killed_between, "SIGTERM"),
    ],
)
def test_a_worker_that_ends_by_itself_is_named(use: Callable[[], object], how: str) -> None:
    message = rf"data: worker process \d of [12] \(pid \d+, {how}.* died while making examples of arrays"
    with pytest.raises(mtf.DataError, match=message):
        use()
