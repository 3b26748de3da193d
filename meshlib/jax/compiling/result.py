"""`Compiled`: a compiled program beside its plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hardware.slices import Slice
from meshlib.core.errors import ProgramError
from meshlib.core.text import bytes_text, count_text, counted, grid, wrapped
from meshlib.estimation import DeviceMemory
from meshlib.estimation.work.communication import Communication
from meshlib.jax.compiling.matching import Difference, kept_moves, merged_launches
from meshlib.jax.compiling.memory import CompiledMemory, CompilerRefusal
from meshlib.jax.executables import write_executable
from meshlib.jax.explaining import Explained
from meshlib.jax.hlo.work import CompiledWork
from meshlib.program.instructions import Instruction
from meshlib.program.records import Program

SHOWN = 12  # differences shown in the table
CLOCK_HZ = 1.5e9  # clock at which cycles are shown as time


class SentByKind(NamedTuple):
    """Collectives of one kind over some axes in a step: runs, and bytes sent by a device, planned and compiled."""

    kind: str
    over: str
    planned_runs: int
    planned_bytes: float
    compiled_runs: int
    compiled_bytes: float


@dataclass(frozen=True)
class Compiled:
    """A compiled program beside its plan; `print` it.

    backend      "tpu" or "cpu"; versions: of jax, jaxlib and the compiler
    memory       of a device, as laid out by the compiler; None if it refuses the program: see `refusal`
    planned      the plan's memory, padding to tiles included
    explained    the collectives: `.collectives`, `.sent_bytes`; None if the program is refused
    differences  deviations of the bytes sent from the plan, largest first; they add up
    work         FLOPs of products, and the compiler's own cycles
    text         the HLO; executable: for `save`
    cpu_seconds, resident_bytes  cost of compiling

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     y = mtf.reduce_sum(mtf.input("x", "batch:8;k:4"))
      ...     program = mtf.lower({"y": y}, mesh="data:4", layout="batch:data")
      >>> compiled = mtf.compile_for(program, "v5e-4", backend="cpu")
      >>> compiled.backend, compiled.fits, [(c.kind, c.axes) for c in compiled.explained.collectives]
      ('cpu', True, [('all_reduce', ('data',))])
    """

    program: Program = field(repr=False)
    slice: Slice
    backend: str
    versions: dict[str, str]
    memory: CompiledMemory | None
    refusal: CompilerRefusal | None
    planned: DeviceMemory = field(repr=False)
    explained: Explained | None = field(repr=False)
    differences: tuple[Difference, ...] = field(repr=False)
    work: CompiledWork | None
    text: str = field(repr=False)
    executable: bytes = field(repr=False)
    device_kind: str
    cpu_seconds: float
    resident_bytes: int

    @property
    def fits(self) -> bool:
        """True if it fits according to the compiler; for CPUs, if it would fit the slice's memory."""
        if self.refusal is not None or self.memory is None:
            return False
        return self.backend == "tpu" or self.memory.total_bytes <= self.planned.capacity_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a device's memory."""
        if self.refusal is not None:
            return self.refusal.needed_bytes
        return self.memory.total_bytes if self.memory else 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends per step."""
        return self.explained.sent_bytes if self.explained else 0.0

    @property
    def headline(self) -> str:
        """The verdict in one line.

        "fits, according to the compiler: 8.54 GiB of 15.75 GiB", or "does not fit, by 1.3 GiB".
        """
        if self.refusal is not None:
            r = self.refusal
            needs = f"{bytes_text(r.needed_bytes)} of {bytes_text(r.capacity_bytes)}, according to the compiler"
            if r.temporaries_only:
                return f"does not fit, by at least {bytes_text(r.over_bytes)}: temporaries alone need {needs}"
            return f"does not fit, by {bytes_text(r.over_bytes)}: needs {needs}"
        capacity = self.planned.capacity_bytes
        if not self.fits:
            over = bytes_text(self.peak_bytes - capacity)
            return f"does not fit, by {over}: {bytes_text(self.peak_bytes)} of {bytes_text(capacity)}"
        whose = "the compiler" if self.backend == "tpu" else "XLA's compiler for CPUs"
        return f"fits, according to {whose}: {bytes_text(self.peak_bytes)} of {bytes_text(capacity)}"

    def sent_by_kind(self) -> list[SentByKind]:
        """Runs and bytes of each kind of collective over each set of axes, planned and compiled, the largest first.

        Empty for a program that the compiler refused.
        """
        if self.explained is None:
            return []
        planned, compiled = _by_kind(self.program.collectives), _by_kind(self.explained.collectives)
        keys = sorted({*planned, *compiled}, key=lambda k: -max(planned[k][1], compiled[k][1]))
        return [SentByKind(*key, *planned[key], *compiled[key]) for key in keys]

    def kept_moves(self) -> Mapping[Instruction, tuple[Communication, ...]]:
        """Collectives compiled for each instruction, as priced by `mtf.estimate(..., compiled=...)`.

        Raises: ProgramError for a program that the compiler refused.
        """
        if self.explained is None:
            raise ProgramError(f"estimate: the compiler refused the program: {self.headline}")
        return kept_moves(self.program, self.explained)

    def save(self, path: Any) -> None:
        """Write the compiled step to a file, which `mtf.on_jax(program, executable=path)` runs on real devices.

        Raises: ProgramError for a program that the compiler refused, or a file that can't be written.
        """
        if not self.executable:
            raise ProgramError(f"save: there is no executable, for the program {self.headline}")
        write_executable(path, self)

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "slice": self.slice.name,
            "backend": self.backend,
            "versions": self.versions,
            "fits": self.fits,
            "needed_bytes": self.peak_bytes,
            "planned_peak_bytes": self.planned.peak_bytes,
            "planned_needed_bytes": self.planned.needed_bytes,
            "sent_bytes": self.sent_bytes,
            "planned_sent_bytes": self.program.sent_bytes,
            "flops": self.work.flops if self.work else None,
            "planned_flops": self.program.work.mxu_flops,
            "compiler_cycles": self.work.cycles if self.work else None,
            "collectives": self.explained.as_json()["collectives"] if self.explained else [],
            "differences": [
                {
                    "what": d.what, "op": d.op, "source": d.source, "planned_bytes": d.planned_bytes,
                    "compiled_bytes": d.compiled_bytes,
                }
                for d in self.differences
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.program.headline} on {self.slice.name}", f"  {self.headline}"]
        by = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines.append(f"  compiled by {by} for {self.backend.upper()} in {self.cpu_seconds:.0f} CPU s")
        if self.memory is None or self.explained is None or self.work is None:
            lines.append(f"  the plan has {bytes_text(self.planned.peak_bytes)} at its peak")
            return "\n".join(lines)
        lines += grid([("", "plan", "compiled", "compiled / plan"), *self._rows()], right=(1, 2, 3))
        if self.backend == "tpu":
            lines.append("* modelled; all else is exact")
        lines += [*self._work_lines(), *self._difference_lines()]
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        assert self.memory is not None
        assert self.explained is not None
        assert self.work is not None
        m, kinds = self.memory, self.program.memory.by_kind
        resident = kinds["variables"] + kinds["slots"] + kinds["inputs"]
        yield _row("memory of a device", self.planned.peak_bytes, m.total_bytes, bytes_text)
        if self.backend == "tpu":
            needed = self.planned.needed_bytes
            yield _row("  with code and what compiling adds*", needed, m.with_code_bytes, bytes_text)
        yield _row("  arguments", resident, m.argument_bytes, bytes_text)
        yield _row("  temporaries", self.planned.peak_bytes - resident, m.temporary_bytes, bytes_text)
        yield _row("  program code", None, m.code_bytes, bytes_text)
        yield _row("sent by a device", float(self.program.sent_bytes), self.sent_bytes, bytes_text)
        for row in self.sent_by_kind():
            name = f"  {row.kind} over {row.over}, {row.planned_runs:,} -> {row.compiled_runs:,} runs"
            yield _row(name, row.planned_bytes, row.compiled_bytes, bytes_text)
        yield _row("FLOPs of products", self.program.work.mxu_flops, self.work.flops, count_text)

    def _work_lines(self) -> Iterator[str]:
        assert self.work is not None
        if self.work.kernels:
            yield f"custom kernels: {counted(self.work.kernels, 'run')}, whose FLOPs are not counted"
        if self.work.cycles:
            at = f"{self.work.cycles / CLOCK_HZ * 1e3:.4g} ms at {CLOCK_HZ / 1e9:g} GHz"
            yield f"cycles of one core that the compiler expects: {count_text(self.work.cycles)}, {at}"

    def _difference_lines(self) -> list[str]:
        assert self.explained is not None
        lines = []
        if any(c.count is None for c in self.explained.collectives):
            lines.append("the trips of some loops depend on data; they are counted once")
        values, launches = merged_launches(self.explained)
        if launches:
            lines.append(f"merged: {values:,} values go in {counted(launches, 'collective')}")
        if not self.differences:
            return [*lines, "sends just what was planned"]
        lines.append(f"differences in what is sent ({len(self.differences)}):")
        for d in self.differences[:SHOWN]:
            head, _, rest = str(d).partition("  ")
            lines += wrapped(rest, f"  {head:>11}  ", " ", 100)
        more = self.differences[SHOWN:]
        if more:
            lines.append(f"  {len(more)} more, {bytes_text(abs(sum(d.more_bytes for d in more)))} in all: .differences")
        return lines


def _by_kind(collectives: Sequence[Any]) -> defaultdict[tuple[str, str], tuple[int, float]]:
    """(kind, axes) -> runs per step, bytes sent."""
    by_kind: defaultdict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    launches = set()
    for c in collectives:
        key = c.kind, "+".join(dict.fromkeys(a.partition(":")[0] for a in c.axes or ("?",)))
        count = 1 if c.count is None else c.count
        runs, sent = by_kind[key]
        again = getattr(c, "launch", None) in launches
        launches.add(getattr(c, "launch", object()))
        by_kind[key] = runs + (0 if again else count), sent + count * c.sent_bytes
    return by_kind


def _row(name: str, plan: float | None, compiled: float, text: Any) -> tuple[str, ...]:
    if plan is None:
        return name, "", text(compiled), ""
    ratio = f"{compiled / plan:.4f}" if plan else ""
    return name, text(plan), text(compiled), ratio
