"""Parent's side of the compiling process: its environment, its messages, its end."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from meshlib.core.errors import GraphError, ProgramError
from meshlib.core.replay import Rewrite
from meshlib.core.subprocesses import describe_exit
from meshlib.jax.compiling.messages import Answer, Began, CompileTask, Failed
from meshlib.jax.compiling.topologies import ENVIRONMENT

TICK_SECONDS = 1.0  # seconds between progress messages about one program

Tell = Callable[[str], None]


class _TaskPickler(pickle.Pickler):
    """Pickles programs without custom gradients, often local functions: compiling differentiates nothing."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Rewrite):
            return copyreg.__newobj__, (Rewrite,), {**vars(obj), "gradient": None}  # type: ignore[attr-defined]
        return NotImplemented


def _pickled(task: CompileTask) -> bytes:
    body = io.BytesIO()
    _TaskPickler(body).dump(task)
    return body.getvalue()


def answers(task: CompileTask, tell: Tell, timeout_seconds: float | None) -> Iterator[Answer | Failed]:
    """The compiler's answer for each program, in order, as soon as it is available.

    Raises: GraphError for a program that can't be sent to another process; ProgramError if the process ends early or
      takes too long.
    """
    try:
        body = _pickled(task)
    except Exception as fault:
        raise GraphError(
            "compile_for: the program can't be sent to the compiling process; define the functions that it uses in a "
            f"module, not in a function or a lambda: {type(fault).__name__}: {fault}"
        ) from None
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshlib.jax.compiling.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(task),
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(body)
                process.stdin.flush()  # stays open, because the process ends when it is closed
            yield from _messages(process, task, tell, timeout_seconds, errors)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def _messages(
    process: subprocess.Popen[bytes], task: CompileTask, tell: Tell, timeout_seconds: float | None, errors: IO[bytes]
) -> Iterator[Answer | Failed]:
    inbox: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, inbox), name="meshlib.compiled", daemon=True).start()
    begun, doing, answered = time.monotonic(), "starting the compiler", 0
    while answered < len(task.programs):
        try:
            message = inbox.get(timeout=TICK_SECONDS)
        except queue.Empty:
            passed = time.monotonic() - begun
            if timeout_seconds is not None and passed > timeout_seconds:
                raise ProgramError(
                    f"compile_for: {doing} has taken more than the {timeout_seconds:g} s given; give more "
                    "timeout_seconds, or a smaller program"
                ) from None
            tell(f"{doing}, {passed:.0f} s")
            continue
        if message is None:
            code = process.wait()
            errors.seek(0)
            last = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()][-1:]
            reason = f": {last[0]}" if last else ""
            raise ProgramError(f"compile_for: the compiling process ended with {describe_exit(code)}{reason}")
        if isinstance(message, Began):
            doing = f"{'compiling' if message.compiling else 'lowering'} program {message.number + 1}"
            tell(doing)
            continue
        if isinstance(message, Failed) and message.number < 0:
            raise ProgramError(f"compile_for: the compiler does not start: {message.kind}: {_first_line(message)}")
        answered += 1
        yield message


def _first_line(message: Failed) -> str:
    return message.message.strip().split("\n", 1)[0][:300]


def _read(pipe: IO[bytes] | None, inbox: queue.Queue[Any]) -> None:
    """Put messages into the inbox as they arrive, then None."""
    assert pipe is not None
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        while len(head := pipe.read(8)) == 8:
            inbox.put(pickle.loads(pipe.read(int.from_bytes(head, "big"))))
    inbox.put(None)


def _environment(task: CompileTask) -> dict[str, str]:
    """This process's environment without JAX and XLA settings, plus those of the compiler."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TPU_", "LIBTPU_"))}
    clean |= ENVIRONMENT
    clean["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    if task.topology is None:
        most = max(p.mesh.size for p in task.programs)
        clean["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={most}"
    return clean
