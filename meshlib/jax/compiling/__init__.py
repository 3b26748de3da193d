"""`compile_for`: the real compiler's verdict on a program, for a slice that need not be present."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from layouts.parsing import is_iterable
from meshlib.core.arguments import POSITIVE, at, bounded
from meshlib.core.errors import GraphError, MissingError, ProgramError
from meshlib.core.slices import slice_for
from meshlib.core.text import bytes_text
from meshlib.estimation import estimate
from meshlib.jax.compiling.matching import differences_of
from meshlib.jax.compiling.memory import memory_of, refusal_of
from meshlib.jax.compiling.messages import Answer, CompileTask, Failed
from meshlib.jax.compiling.process import answers
from meshlib.jax.compiling.result import Compiled
from meshlib.jax.compiling.topologies import require_tpu_compiler, topology_of
from meshlib.jax.explaining import explain
from meshlib.jax.hlo.text import parse
from meshlib.jax.hlo.work import work_of
from meshlib.program.records import Program, require_program, walk

BACKENDS = ("tpu", "cpu")
Progress = Callable[[int, int, str], object]

# CPU seconds and memory of compilation, measured with libtpu 0.0.42 on 12 steps of 130 to 2,100 instructions: most time
# goes into trying fusions and tiles of what does not fit VMEM many times over.
INSTRUCTION_SECONDS, LARGE_SECONDS, LARGE_BYTES = 0.01, 0.15, 1 << 20
START_BYTES, INSTRUCTION_BYTES = 450 << 20, 1 << 20


def compile_for(
    program: Any,
    slice: Any,
    backend: str = "tpu",
    progress: Progress | None = None,
    timeout_seconds: float | None = None,
) -> Any:
    """Compile a program with the real compiler for a slice that need not be present.

    The step of `mtf.on_jax` is compiled in a separate process, which does not touch this one's JAX and environment.
    Large models take minutes: the first call of `progress` gives an estimate. The TPU compiler comes with `pip install
    libtpu`, under its own terms; it is not part of this library.

    Args:
      program: a program returned by `mtf.lower`, or a list of them.
      slice: a name like "v5e-16", "v5p-4x4x8" or "2*v5e-256", or a Slice of a published chip.
      backend: "tpu", or "cpu" for XLA's compiler for CPUs, which needs no libtpu: another compiler, on as many devices.
      progress: called with (number of programs done, number of programs, current activity), about once a second.
      timeout_seconds: limit for each program; by default none.
    Returns: a `Compiled`, or a list of them for a list of programs: `print` it; `.fits`, `.memory`, `.explained`,
      `.differences`, `.work`, `.save(path)`. If a program does not fit, `.fits` is False and `.refusal` has the bytes
      missing.
    Raises: MissingError without JAX or libtpu; SliceError for an unknown slice, one of another size than the mesh, or
      one that the compiler does not know; ProgramError for a program that does not compile for another reason.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "batch:8;k:4")
      ...     y = mtf.reduce_sum(mtf.square(x))
      ...     program = mtf.lower({"y": y}, mesh="data:4", layout="batch:data")
      >>> compiled = mtf.compile_for(program, "v5e-4", backend="cpu")
      >>> compiled.fits, compiled.sent_bytes == program.sent_bytes, len(compiled.differences)
      (True, True, 0)
    """
    one = isinstance(program, Program)
    programs = (program,) if one else tuple(program) if is_iterable(program) else (program,)
    if not programs:
        raise GraphError(f"{at('compile_for')}: give a program, or a list with at least one")
    for p in programs:
        require_program(p, "compile_for")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise GraphError(f"{at('compile_for')}: backend must be 'tpu' or 'cpu', got {backend!r:.40}")
    if timeout_seconds is not None:
        timeout_seconds = bounded(timeout_seconds, "compile_for", "timeout_seconds", POSITIVE)
    slices = {slice_for("compile_for", p.mesh, slice) for p in programs}
    (slice_,) = slices
    if find_spec("jax") is None:
        raise MissingError("compile_for needs JAX, which is not installed: pip install 'meshlib-tpu[jax]'")
    topology = None
    if backend == "tpu":
        named = topology_of(slice_)
        topology = named.name, named.options
        require_tpu_compiler()
    task = CompileTask(programs, topology, slice_.slices, {})
    results: list[Compiled] = []

    def tell(text: str) -> None:
        if progress is not None:
            progress(len(results), len(programs), text)

    tell("; ".join(expectation(p) for p in programs) if len(programs) < 4 else f"{len(programs)} programs to compile")
    for answer in answers(task, tell, timeout_seconds):
        results.append(result_of(programs[len(results)], slice_, backend, answer))
    return results[0] if one else results


def expectation(program: Program) -> str:
    """Expected compile time and memory for TPUs, as text: "about 60 CPU s and 1.2 GiB"."""
    seconds, memory = expected_cost(program)
    return f"compiling takes about {seconds:.0f} CPU s and {bytes_text(memory)}"


def expected_cost(program: Program) -> tuple[float, int]:
    """Expected CPU seconds and bytes of compiling a program for TPUs, within a factor of three or so."""
    instructions = [i for i, _, _ in walk(program)]
    large = sum(any(y.local_bytes >= LARGE_BYTES for y in i.outputs) for i in instructions)
    seconds = INSTRUCTION_SECONDS * len(instructions) + LARGE_SECONDS * large
    return seconds, START_BYTES + INSTRUCTION_BYTES * len(instructions)


def result_of(program: Program, slice_: Any, backend: str, answer: Answer | Failed) -> Compiled:
    """The `Compiled` for an answer of the compiling process.

    Raises: ProgramError if the compiler refused the program for another reason than its memory.
    """
    planned = estimate(program, slice_).memory
    versions = _versions(backend)
    if isinstance(answer, Failed):
        refusal = refusal_of(answer.message)
        if refusal is None:
            text = answer.message.strip().split("\n", 1)[0][:400]
            raise ProgramError(f"compile_for: the compiler refuses the program on {slice_.name}: {answer.kind}: {text}")
        ran = answer.cpu_seconds
        return Compiled(program, slice_, backend, versions, None, refusal, planned, None, (), None, "", b"", "", ran, 0)
    explained = explain(answer.text, slice_, program.mesh)
    return Compiled(
        program,
        slice_,
        backend,
        {**versions, **answer.versions},
        memory_of(answer.sizes, answer.report),
        None,
        planned,
        explained,
        differences_of(program, explained),
        work_of(parse(answer.text, "compile_for")),
        answer.text,
        answer.executable,
        answer.device_kind,
        answer.cpu_seconds,
        answer.resident_bytes,
    )


def _versions(backend: str) -> dict[str, str]:
    try:
        return {"libtpu": version("libtpu")} if backend == "tpu" else {}
    except PackageNotFoundError:
        return {}
