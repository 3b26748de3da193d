"""Messages to and from the compiling process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshlib.program.records import Program


@dataclass(frozen=True)
class CompileTask:
    """Programs to compile, and the target devices; `topology` is None for CPUs."""

    programs: tuple[Program, ...]
    topology: tuple[str, dict[str, Any]] | None
    slices: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Began:
    """Program `number` is being lowered to StableHLO, or (`compiling`) compiled."""

    number: int
    compiling: bool


@dataclass(frozen=True)
class Answer:
    """The result of compiling a program.

    text        HLO; report: of its memory, "" where the compiler writes none
    sizes       bytes by name, as `memory_analysis` has them
    executable  serialised, for devices of this kind
    """

    number: int
    text: str
    report: str
    sizes: dict[str, int]
    executable: bytes
    device_kind: str
    versions: dict[str, str]
    cpu_seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class Failed:
    """The compiler's error for a program that does not compile."""

    number: int
    kind: str
    message: str
    cpu_seconds: float
