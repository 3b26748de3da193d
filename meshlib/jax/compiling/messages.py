"""What the compiling process is told, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshlib.program.records import Program


@dataclass(frozen=True)
class Task:
    """What to compile: programs, and for which devices; `topology` is None for CPUs."""

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
    """What the compiler made of a program.

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
    """What the compiler said of a program that it does not compile."""

    number: int
    kind: str
    message: str
    cpu_seconds: float
