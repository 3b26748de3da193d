"""Parser of HLO text: computations, instructions, operands, source lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from meshlib.core.errors import MeshlibError, ProgramError

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->\s*.*)?\{\s*$")
_RESULT = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ")
_END = re.compile(r'\}(?:,\s*execution_thread="[^"]*")?\s*')
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FILE = re.compile(r'source_file="([^"]*)"')
_LINE = re.compile(r"source_line=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape: dtype, sizes, and bytes on one device without padding.

    >>> Array("bf16", (8, 128)).bytes
    2048
    """

    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        digits = re.search(r"\d+", self.dtype)
        bits = 8 if self.dtype == "pred" else 0 if digits is None else int(digits[0])
        return -(-prod(self.sizes) * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class HloInstruction:
    """One instruction of a computation.

    shape       of the result, as printed, without comments
    operands    names of the operands; of a constant or parameter its literal
    attributes  everything behind the operands, as printed
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The result arrays: one, or the elements of a tuple in order."""
        return arrays_of(self.shape)

    @property
    def op_name(self) -> str:
        """Path of named scopes and primitive in the user's program; "" if the compiler kept none."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    def called(self, role: str) -> str | None:
        """The computation named by an attribute such as `body` or `calls`."""
        match = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    @property
    def index(self) -> int | None:
        """The element index of a get-tuple-element."""
        match = re.search(r"\bindex=(\d+)", self.attributes)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class Computation:
    """A named computation: its instructions by name, in order."""

    name: str
    instructions: Mapping[str, HloInstruction]

    @cached_property
    def root(self) -> HloInstruction | None:
        """The instruction whose result is the computation's result."""
        return next((i for i in self.instructions.values() if i.is_root), None)

    @cached_property
    def users(self) -> Mapping[str, tuple[HloInstruction, ...]]:
        """Name of an instruction -> instructions that use it."""
        readers_of: dict[str, list[HloInstruction]] = {}
        for i in self.instructions.values():
            for x in dict.fromkeys(i.operands):
                readers_of.setdefault(x, []).append(i)
        return {name: tuple(readers) for name, readers in readers_of.items()}

    @cached_property
    def parameters(self) -> Mapping[int, HloInstruction]:
        """The parameters by number."""
        return {int(i.operands[0]): i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclass(frozen=True)
class Module:
    """A compiled module.

    devices     partitions times replicas, as the header says; 0 where it says nothing
    frames      stack frame -> its file, line and parent frame (0: none)
    """

    name: str
    entry: str
    computations: Mapping[str, Computation]
    devices: int
    frames: Mapping[int, tuple[str, int, int]] = field(repr=False, default_factory=dict)

    def source(self, i: HloInstruction, hidden: tuple[str, ...] = ()) -> str:
        """The source line of an instruction, as "file.py:12": the innermost frame whose file contains none of `hidden`.

        "" where the compiler kept none.
        """
        frame = _FRAME.search(i.attributes)
        if frame is not None:
            lines = list(self._stack(int(frame[1])))
            own = [line for line in lines if not any(part in line[0] for part in hidden)]
            chosen = own or lines
            return f"{_short(chosen[0][0])}:{chosen[0][1]}" if chosen else ""
        file, line = _FILE.search(i.attributes), _LINE.search(i.attributes)
        return f"{_short(file[1])}:{line[1]}" if file and line else ""

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        seen: set[int] = set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            file, line, parent = self.frames[frame]
            yield file, line
            frame = parent


@contextmanager
def damage_as_error(what: str) -> Iterator[None]:
    """Turn lookup errors of malformed text inside the block into a ProgramError."""
    try:
        yield
    except MeshlibError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as fault:
        raise ProgramError(
            f"{what}: the HLO text is damaged: {type(fault).__name__}: {fault!s:.120}; take it from the compiler again"
        ) from fault


def parse(text: str, what: str = "explain") -> Module:
    """Parse an HLO text, such as `compiled.as_text()` returns.

    Raises: ProgramError, which begins with `what`, for a text that is not compiled HLO.

    >>> module = parse('''HloModule m, num_partitions=2
    ... ENTRY %main (p: f32[8]) -> f32[8] {
    ...   %p = f32[8]{0} parameter(0)
    ...   ROOT %r = f32[8]{0} negate(%p), metadata={op_name="jit(f)/neg"}
    ... }''')
    >>> module.computations["main"].root.opcode, module.devices
    ('negate', 2)
    """
    if not text.lstrip().startswith("HloModule"):
        if "stablehlo." in text or "func.func" in text or text.lstrip().startswith("module "):
            raise ProgramError(
                f"{what}: this is StableHLO, which has no collectives of the partitioner yet; "
                "give the text of the compiled program: jax.jit(f).lower(...).compile().as_text()"
            )
        raise ProgramError(
            f"{what}: not an HLO text (it begins with {text.lstrip()[:40]!r}, not with 'HloModule'); "
            "give what compiled.as_text() returns, or a file *.after_optimizations.txt of --xla_dump_to"
        )
    computations: dict[str, Computation] = {}
    entry, current = "", ""
    body: list[str] = []
    for line in text.splitlines():
        if current:
            if _END.fullmatch(line):
                computations[current] = _computation(current, body, what)
                current = ""
            elif _RESULT.match(line) or not body:
                body.append(line)
            else:  # attributes of custom kernels continue on further lines
                body[-1] += "\n" + line
            continue
        header = None if line.startswith("HloModule") else _HEADER.match(line)
        if header is not None:
            current, body = header[2], []
            entry = current if header[1] else entry
    if entry not in computations:
        raise ProgramError(f"{what}: the HLO text has no whole ENTRY computation; it may be cut off")
    first = text.lstrip().split("\n", 1)[0]
    counts = [int(n[1]) for key in ("num_partitions", "replica_count") if (n := re.search(rf"{key}=(\d+)", first))]
    name = re.match(r"HloModule ([\w.\-]+)", first)
    return Module(name[1] if name else "", entry, computations, prod(counts) if counts else 0, _frames(text))


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The arrays of a printed shape.

    >>> [str(a) for a in arrays_of("(f32[4,8]{1,0:T(8,128)}, s32[])")]
    ['f32[4,8]', 's32[]']
    """

    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(n.lstrip("<=")) for n in text.split(",") if n)

    return tuple(Array(dtype, sizes(text)) for dtype, text in _ARRAY.findall(shape))


def _computation(name: str, lines: list[str], what: str) -> Computation:
    """Parse a computation. Raises: ProgramError for a line that is not an instruction, or a missing root."""
    instructions = {}
    for line in lines:
        i = _instruction(line)
        if i is None:
            raise ProgramError(f"{what}: not an instruction of HLO, in computation '{name}': {line.strip()[:120]}")
        instructions[i.name] = i
    computation = Computation(name, instructions)
    if computation.root is None:
        raise ProgramError(f"{what}: computation '{name}' has no ROOT; the HLO text may be cut off")
    return computation


def _instruction(line: str) -> HloInstruction | None:
    head = _RESULT.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else _blank(rest)
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    begin = opcode.end() - 1
    close = _closing(rest, begin)
    operands = tuple(_operand(part) for part in _parts(_COMMENT.sub("", rest[begin + 1 : close])))
    shape = _COMMENT.sub("", rest[:end])
    return HloInstruction(head[2], opcode[1], shape, operands, rest[close + 1 :], head[1] is not None)


def _blank(text: str) -> int:
    at = text.find(" ")
    return len(text) if at < 0 else at


def _closing(text: str, begin: int) -> int:
    """Position of the parenthesis that closes the one at `begin`; strings are skipped."""
    depth, quoted = 0, False
    for n in range(begin, len(text)):
        c = text[n]
        if c == '"' and text[n - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in "({[":
            depth += 1
        elif not quoted and c in ")}]":
            depth -= 1
            if depth == 0:
                return n
    return len(text)


def _parts(text: str) -> Iterator[str]:
    """The operands of a list, split at commas outside brackets."""
    depth, begin = 0, 0
    for n, c in enumerate(text):
        if c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
        elif c == "," and depth == 0:
            yield text[begin:n]
            begin = n + 1
    if text[begin:].strip():
        yield text[begin:]


def _operand(text: str) -> str:
    """The name in `%name`, `f32[8]{0} %name` or `name`; a literal as it is."""
    return text.split()[-1].lstrip("%") if text.split() else ""


def _short(file: str) -> str:
    return file.replace("\\", "/").rpartition("/")[2]


def _frames(text: str) -> dict[int, tuple[str, int, int]]:
    """Stack frame -> (file, line, parent), from the tables at the beginning of newer texts."""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line in _TABLES:
            current = tables.setdefault(line, {})
        elif not line:
            current = None
        elif current is not None:
            number, _, rest = line.partition(" ")
            if number.isdigit():
                current[int(number)] = rest.strip().strip('"')
    files = tables.get("FileNames", {})
    places = {n: dict(_FIELD.findall(rest)) for n, rest in tables.get("FileLocations", {}).items()}
    frames = {n: dict(_FIELD.findall(rest)) for n, rest in tables.get("StackFrames", {}).items()}
    # Some versions print the parent's number plus one; then a frame without parent is its own parent.
    shift = any(int(f.get("parent_frame_id", 0)) == n for n, f in frames.items())
    result = {}
    for n, f in frames.items():
        place = places.get(int(f.get("file_location_id", 0)), {})
        file = files.get(int(place.get("file_name_id", 0)), "")
        result[n] = (file, int(place.get("line", 0)), int(f.get("parent_frame_id", 0)) - shift)
    return result
