"""The compiling process: reads a task, compiles its programs for devices that need not be present, writes the results.

Run as `python -m meshlib.jax.compiling.worker`. Standard input has one pickled `CompileTask`; standard output gets
pickled messages, each preceded by its length: for each program in turn `Began`, then an `Answer` or `Failed`.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.experimental import mesh_utils, serialize_executable, topologies

import meshlib.jax.rows  # registers the library's own rows  # noqa: F401
from meshlib.core.subprocesses import kill_when_closed
from meshlib.jax.compiling.messages import Answer, Began, CompileTask, Failed
from meshlib.jax.executables import jax_versions
from meshlib.jax.step import Step
from meshlib.program.records import Program

MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def devices_of(task: CompileTask) -> list[Any]:
    """The devices of the topology, or this process's CPUs."""
    if task.topology is None:
        return list(jax.devices("cpu"))
    name, options = task.topology
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


def arranged(devices: Sequence[Any], program: Program, slices: int) -> list[Any]:
    """The devices in the order of a program's mesh, as JAX maps meshes to a torus."""
    sizes = program.mesh.sizes
    if devices[0].platform != "tpu":
        return list(devices)
    if slices > 1:
        across, rest = [], slices
        for size in sizes:  # the leading axes span the slow links
            part = np.gcd(size, rest)
            across.append(int(part))
            rest //= part
        inside = [n // k for n, k in zip(sizes, across, strict=True)]
        mesh = mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    else:
        try:
            mesh = mesh_utils.create_device_mesh(sizes, devices)
        except NotImplementedError:
            mesh = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return list(np.asarray(mesh, dtype=object).flat)


def compiled(task: CompileTask, number: int, devices: Sequence[Any], tell: Any) -> Answer:
    """Compile one program."""
    program = task.programs[number]
    begun = time.process_time()
    tell(Began(number, False))
    step = Step(program, arranged(devices, program, task.slices), checked=False)
    lowered = step.lowered()
    tell(Began(number, True))
    with tempfile.TemporaryDirectory() as folder:
        done = lowered.compile(compiler_options={"xla_dump_to": folder, **task.options})
        report = "".join(p.read_text() for p in sorted(Path(folder).glob("*memory-usage-report.txt"))[:1])
    stats = done.memory_analysis()
    sizes = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in MEMORY}
    sizes["peak"] = int(getattr(stats, "peak_memory_in_bytes", 0))
    return Answer(
        number,
        done.as_text(),
        report,
        sizes,
        serialize_executable.serialize(done)[0],
        str(devices[0].device_kind),
        jax_versions(),
        time.process_time() - begun,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def send(out: BinaryIO, message: object) -> None:
    """Write a message, preceded by its length."""
    body = pickle.dumps(message)
    out.write(len(body).to_bytes(8, "big") + body)
    out.flush()


def _end_with_parent() -> None:
    """Exit when the parent does, which keeps standard input open while it runs."""
    sys.stdin.buffer.read(1)
    os._exit(1)


def main() -> None:
    """Process the task on standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not mix with messages
    begun = time.process_time()
    task: CompileTask = pickle.load(sys.stdin.buffer)
    kill_when_closed(sys.stdin.fileno())
    threading.Thread(target=_end_with_parent, name="meshlib.parent", daemon=True).start()
    try:
        devices = devices_of(task)
    except Exception as fault:
        send(answers, Failed(-1, type(fault).__name__, str(fault), time.process_time() - begun))
        return
    for number in range(len(task.programs)):
        begun = time.process_time()
        try:
            send(answers, compiled(task, number, devices, lambda message: send(answers, message)))
        except Exception as fault:
            send(answers, Failed(number, type(fault).__name__, str(fault), time.process_time() - begun))


if __name__ == "__main__":
    main()
