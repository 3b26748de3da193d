"""Device memory of a compiled program: the compiler's own report, or its refusal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshlib.core.text import read_bytes

_SPACE = re.compile(r"^Memory Space: (\S+) \(color=(\d+)\)\s*\nTotal bytes: (\d+)", re.MULTILINE)
_VALUE = re.compile(r"^\s+\S+\(\s*\d+%\);\s*([\d.]+\w+);\s*\d+;\s*\d+;\s*(.+)$", re.MULTILINE)
_USED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", re.IGNORECASE),
    re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes of device memory of a compiled program.

    total_bytes      of HBM: arguments, results and temporaries, as the compiler has laid them out, padding included
    argument_bytes   variables and inputs; output_bytes: results, of which alias_bytes are written over arguments
    temporary_bytes  everything else in HBM: total less arguments, less results that do not alias them
    code_bytes       the program itself
    largest          the largest buffers: (bytes, what they hold)
    """

    total_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    largest: tuple[tuple[int, str], ...]

    @property
    def with_code_bytes(self) -> int:
        """Total of HBM and the program itself, which a plan's `needed_bytes` predicts."""
        return self.total_bytes + self.code_bytes


@dataclass(frozen=True)
class CompilerRefusal:
    """The compiler's refusal of a program that does not fit: bytes needed, and bytes available.

    The bytes needed are a lower bound if the temporaries alone do not fit: `temporaries_only`.
    """

    needed_bytes: int
    capacity_bytes: int
    temporaries_only: bool = False

    @property
    def over_bytes(self) -> int:
        """Bytes missing."""
        return self.needed_bytes - self.capacity_bytes


def memory_of(sizes: dict[str, int], report: str) -> CompiledMemory:
    """Memory of a compiled program.

    Args:
      sizes: figures of `memory_analysis` by name.
      report: the compiler's memory report, "" where it writes none: then peak bytes stand for the total.

    >>> sizes = {"argument": 64, "output": 32, "alias": 32, "temp": 8, "generated_code": 4, "peak": 80}
    >>> memory_of(sizes, "Memory Space: default (color=0)\\nTotal bytes: 96 (96B)").temporary_bytes
    32
    """
    space = next((m for m in _SPACE.finditer(report) if m[2] == "0"), None)
    total = int(space[3]) if space else sizes["peak"]
    arguments, extra = sizes["argument"], sizes["output"] - sizes["alias"]
    largest: list[tuple[int, str]] = []
    if space:
        end = report.find("Memory Space:", space.end())
        for size, shapes in _VALUE.findall(report[space.end() : end if end > 0 else len(report)]):
            largest.append((round(read_bytes(size) or 0), shapes.strip()))
    temporary = max(0, total - arguments - extra)
    return CompiledMemory(
        total, arguments, sizes["output"], sizes["alias"], temporary, sizes["generated_code"], tuple(largest[:8])
    )


def refusal_of(message: str) -> CompilerRefusal | None:
    """The compiler's refusal in an error message; None if compilation failed for another reason.

    >>> refusal_of("Ran out of memory in memory space hbm. Used 17.05G of 15.75G hbm.").over_bytes
    1395864371
    """
    for used, temporaries_only in zip(_USED, (False, True), strict=True):
        if m := used.search(message):
            return CompilerRefusal(_scaled(m[1], m[2]), _scaled(m[3], m[4]), temporaries_only)
    return None


def _scaled(number: str, unit: str) -> int:
    return round(float(number) * 1024.0 ** _UNITS[unit.upper()])
