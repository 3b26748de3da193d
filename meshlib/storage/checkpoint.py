"""Checkpoints: variables, optimizer slots, step and seed in one safetensors file, written atomically.

    8 bytes             length of the header, little-endian
    header              JSON {name: {"dtype", "shape", "data_offsets"}, "__metadata__": {text: text}}, then blanks
    the rest            the tensors' bytes, little-endian, C order, without gaps

Any reader of the format can read the files, and `load` reads the files of any writer. State is global arrays: nothing
in a file depends on mesh, layout or executor. A tensor has the dtype stored on devices, so that a resumed run is
bit-exact; the format has no int4, which is written as I8, one byte per element. The format has no checksums; `save`
stores CRC-32s in the metadata, and `load` verifies them if present.

A file is written under a temporary name beside its target and renamed once it is synced to disk. A killed writer leaves
the old file, and at most a temporary one that the next `save` to that path removes: writers lock theirs, so an unlocked
one is stale.

Source of the format: github.com/huggingface/safetensors, README.md and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, BinaryIO, NoReturn

import numpy as np

from layouts import Shape
from layouts.parsing import is_iterable
from meshlib.core.dtypes import BFLOAT16, BOOL, INT4, INT32, DType
from meshlib.core.errors import CheckpointError, DamagedError, nearest
from meshlib.core.files import open_file, replace_file
from meshlib.simulation import Simulation
from meshlib.simulation.state import Processes
from meshlib.storage.safetensors import CODES, METADATA, Entry, Header, header_bytes, read_header

__all__ = ["load", "save"]

Array = np.ndarray[Any, Any]
Path = str | os.PathLike[str]
Types = Mapping[str, tuple[Shape, DType]]
Places = Mapping[str, tuple[int, Shape, DType]]  # offset of each tensor in the file, in bytes, and its entry

CHUNK = 1 << 18  # elements encoded, summed and written at once: fits a processor's cache
SEED, SUM = "seed", "crc32/"


# ---------------------------------------------------------------- writing


def save(sim: Simulation, path: Path, notes: Mapping[str, str] | None = None) -> None:
    """Write all variables, optimizer slots, the step and the seed of `sim` to `path`, in safetensors format.

    Atomic: `path` has either its old content or the whole new state; processes that have mapped the old file keep it.
    It needs memory for one block of a tensor, or for one tensor if the state has a transposed view.

    Args:
      sim: the simulation.
      path: the file; its folder must exist. A link stays a link, and its target is replaced.
      notes: name -> text stored with the variables, for `read_notes`; names must not begin with "crc32/".
    Raises: CheckpointError if the file can't be written.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w = mtf.variable("w", [mtf.Dimension("d", 4)], 1.0)
      ...     program = mtf.lower(updates=[mtf.assign(w, w * 2)], mesh="r:2", layout="d:r")
      >>> sim, other = mtf.simulate(program, seed=3), mtf.simulate(program)
      >>> _ = sim.step()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     mtf.save(sim, f"{folder}/w.safetensors")
      ...     mtf.load(f"{folder}/w.safetensors", other)
      {}
      >>> other.state["w"].tolist(), int(other.state["step"]), other.seed
      ([2.0, 2.0, 2.0, 2.0], 1, 3)
    """
    _check_simulation(sim, "save", "save(sim, path)")
    stored_notes = checked_notes(notes)
    with sim.state.lock:
        content = _Content(sim.state.stored, _types(sim), sim.seed, stored_notes)
        if sim.state.processes is None:
            replace_file(path, content.write, "save", CheckpointError)
        else:
            _save_together(sim.state.processes, content, path)


def checked_notes(notes: Mapping[str, str] | None) -> dict[str, str]:
    """Notes for `save`. Raises: CheckpointError for names or texts that can't be written."""
    checked = {} if notes is None else dict(notes)
    taken = {"format", "meshlib", SEED, METADATA}
    for name, text in checked.items():
        if not isinstance(name, str) or not isinstance(text, str) or name in taken or name.startswith(SUM):
            raise CheckpointError(f"save: notes must map names of your own to text, got {name!r:.80}: {text!r:.80}")
    return checked


class Snapshot:
    """A copy of a simulation's state on the host, which can be written while the simulation continues.

    Its memory is reused by every `take`: for a large state, allocating takes longer than copying.

    Raises: CheckpointError for a state shared by several processes, which write together.
    """

    def __init__(self, sim: Simulation) -> None:
        if sim.state.processes is not None:
            raise CheckpointError("save: several processes share the state, and write it together")
        self.types, self.seed = _types(sim), sim.seed
        self.arrays: dict[str, Array] = {}

    def prepare(self) -> None:
        """Allocate memory for the state ahead of `take`; may be called from any thread."""
        for name, (shape, dtype) in self.types.items():
            array = self.arrays.get(name)
            if array is None or (array.shape, array.dtype) != (shape.sizes, dtype.storage):
                self.arrays[name] = np.empty(shape.sizes, dtype.storage)
                self.arrays[name].fill(0)  # otherwise pages are allocated when first written

    def take(self, sim: Simulation) -> None:
        """Copy the current state. Must not be called while `save` is running."""
        with sim.state.lock:
            self.types, self.seed = _types(sim), sim.seed
            self.prepare()
            for name in self.types:
                sim.state.copy_to(name, self.arrays[name])

    def save(self, path: Path, notes: Mapping[str, str] | None = None) -> None:
        """Write it like `save`: the same bytes, atomically."""
        content = _Content(self.arrays.__getitem__, self.types, self.seed, checked_notes(notes))
        replace_file(path, content.write, "save", CheckpointError)


def write_state(sim: Simulation, file: BinaryIO) -> None:
    """Write the content of `save` into an open file."""
    with sim.state.lock:
        _Content(sim.state.stored, _types(sim), sim.seed, {}).write(file)


class _Content:
    """The content of a file: a header with the offsets of tensors, and the tensors, from `array`."""

    def __init__(self, array: Callable[[str], Array], types: Types, seed: int, notes: Mapping[str, str]) -> None:
        if METADATA in types:
            raise CheckpointError(f"save: variable '{METADATA}' has a name that the format reserves; rename it")
        self.array = array
        self.entries, begin = {}, 0
        for name in sorted(types, key=lambda n: (-types[n][1].public.itemsize, n)):
            shape, dtype = types[name]
            end = begin + shape.size * dtype.public.itemsize
            self.entries[name] = Entry(CODES[dtype.name], shape.sizes, begin, end)
            begin = end
        text = str(seed)
        self.metadata = {"format": "np", "meshlib": "1", SEED: text, SUM + METADATA: _sum(text.encode()), **notes}
        self.metadata.update({f"{SUM}{METADATA}/{name}": _sum(note.encode()) for name, note in notes.items()})
        # Sums have a fixed length, so that the header can be written before they are known, and again afterwards.
        self.header = self._header(dict.fromkeys(self.entries, 0))
        self.places = {name: (len(self.header) + e.begin, *types[name]) for name, e in self.entries.items()}

    def write(self, file: BinaryIO) -> None:
        """Write header and tensors."""
        self.write_by(file, lambda file, places: _write_all(self.array, file, places))

    def write_by(self, file: BinaryIO, tensors: Callable[[BinaryIO, Places], Mapping[str, int]]) -> None:
        """Write header and tensors, the latter by calling `tensors`, which returns their sums."""
        file.write(self.header)
        sums = tensors(file, self.places)
        file.seek(0)
        file.write(self._header(sums))

    def _header(self, sums: Mapping[str, int]) -> bytes:
        return header_bytes("save", self.entries, {**self.metadata, **{SUM + n: _hex(sums[n]) for n in self.entries}})


def _save_together(processes: Processes, content: _Content, path: object) -> None:
    """The first process creates the file; the others write into it."""
    fault = None
    try:
        if processes.first:
            replace_file(path, lambda file: content.write_by(file, processes.write), "save", CheckpointError)
        else:
            processes.follow(content.places)
    except Exception as found:  # on any exception: the others must not wait for ever
        fault = str(found) if isinstance(found, CheckpointError) else f"save: {type(found).__name__}: {found}"
    processes.agree(fault)


def _types(sim: Simulation) -> Types:
    return {name: _type(sim, name) for name in sim.state.arrays}


def _write_all(array: Callable[[str], Array], file: BinaryIO, places: Places) -> dict[str, int]:
    """Write all tensors in order; returns their CRC-32s."""
    sums = {}
    for name, (_, _, dtype) in places.items():
        total = 0
        for block in _encoded(array(name), dtype, name):
            total = zlib.crc32(block, total)
            file.write(block)
        sums[name] = total
    return sums


def _encoded(array: Array, dtype: DType, name: str) -> Iterator[memoryview]:
    """The bytes of a tensor in the file, block by block."""
    flat = np.ascontiguousarray(array).reshape(-1)
    for start in range(0, flat.size, CHUNK):
        block = flat[start : start + CHUNK]
        if dtype is BFLOAT16:  # stored as float32 of the same value: take its upper half
            bits = block.view(np.uint32)
            if np.any(bits & 0xFFFF):
                at = start + int(np.flatnonzero(bits & 0xFFFF)[0])
                raise CheckpointError(
                    f"save: variable '{name}' is bfloat16, but its element {at} is {flat[at]!r}, which is not"
                )
            block = (bits >> 16).astype("<u2")
        elif dtype.is_rounded:
            bits = block.astype(dtype.public)
            if not np.array_equal(bits.astype(block.dtype), block, equal_nan=True):
                at = start + int(np.flatnonzero(bits.astype(block.dtype) != block)[0])
                raise CheckpointError(
                    f"save: variable '{name}' is {dtype.name}, but its element {at} is {flat[at]!r}, which is not"
                )
            block = bits
        else:
            block = block.astype(block.dtype.newbyteorder("<"), copy=False)
        yield block.view(np.uint8).data


# ---------------------------------------------------------------- reading


def load(path: Path, sim: Simulation, *, strict: bool = True, only: Iterable[str] | None = None) -> dict[str, str]:
    """Restore the state in the file `path` into `sim`: all of it, or nothing on an error.

    The simulation may have another mesh, layout and executor than the saved one; only names, shapes and stored dtypes
    of the variables must match.

    Args:
      path: a file written by `save` or another writer of safetensors.
      sim: the simulation to change.
      strict: every tensor of the file and every variable of the simulation must have a counterpart of the same shape
        and dtype, and the file must have a seed. Otherwise tensors that do not match are skipped.
      only: names or patterns like "encoder/*" of the variables to load. The rest of the simulation, including its seed,
        is unchanged, and the rest of the file is ignored.
    Returns: skipped tensors, name -> reason; empty if strict.
    Raises: CheckpointError with all mismatches at once, or with the first fault of the file itself.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     w, v = mtf.variable("w", "d:4", 1.0), mtf.variable("v", "d:4", 2.0)
      ...     whole, part = mtf.lower({"y": w + v}), mtf.lower({"y": w + 0})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     mtf.save(mtf.simulate(whole, seed=3), f"{folder}/both.safetensors")
      ...     mtf.load(f"{folder}/both.safetensors", mtf.simulate(part), strict=False)
      {'v': 'not in the simulation; the file has F32 [4]'}
    """
    _check_simulation(sim, "load", "load(path, sim)")
    patterns = _patterns(only)
    with open_file(path, "load", CheckpointError) as (file, target):
        header = read_header(file, target, "load")
        fitting, skipped = _match(header, sim, patterns)
        seed = _seed(header, target) if patterns is None else None
        if patterns is None and seed is None:
            skipped[METADATA] = f"no '{SEED}' in it, only {', '.join(header.metadata) or 'nothing'}"
        if skipped and (strict or not fitting):
            _refuse(target, skipped, strict)
        arrays = _read_all(sim, file, header, fitting, target)
    with sim.state.lock:
        for name, array in arrays.items():
            sim.state.put(name, array)
        if seed is not None:
            sim.seed = sim.state.seed = seed
    return skipped


def read_notes(path: Path) -> dict[str, str]:
    """The `notes` given to `save`.

    Raises: CheckpointError for an invalid or damaged file.
    """
    with open_file(path, "load", CheckpointError) as (file, target):
        header = read_header(file, target, "load")
    metadata, mark = header.metadata, f"{METADATA}/"
    sums = {name.removeprefix(SUM): text for name, text in metadata.items() if name.startswith(SUM)}
    notes = {name.removeprefix(mark): metadata.get(name.removeprefix(mark)) for name in sums if name.startswith(mark)}
    for name, text in notes.items():
        if text is None or _sum(text.encode()) != sums[mark + name]:
            raise DamagedError(f"load: {target} is damaged: the note '{name}' has another CRC-32")
    if sums:  # written by `save`, with a sum for all but two names
        summed = {METADATA, *header.entries, *(mark + name for name in notes)}
        own = {"format", "meshlib", SEED, *notes, *(SUM + name for name in sums)}
        if odd := sorted((sums.keys() ^ summed) | (metadata.keys() - own)):
            raise DamagedError(f"load: {target} is damaged: '{odd[0]:.80}' and its CRC-32 do not match")
    return {name: str(text) for name, text in notes.items()}


def _read_all(sim: Simulation, file: BinaryIO, header: Header, names: list[str], target: str) -> Mapping[str, Array]:
    """The tensors. Of several processes each verifies some of them, and then reads its blocks."""
    processes = sim.state.processes
    if processes is None:
        return {name: _read(file, header, name, _type(sim, name), target) for name in names}
    fault = None
    try:
        for name in processes.mine(names):
            _read(file, header, name, _type(sim, name), target)
    except CheckpointError as found:
        fault = str(found)
    processes.agree(fault)
    places = {name: (header.data_start + header.entries[name].begin, *_type(sim, name)) for name in names}
    return processes.blocks(target, places)


def _match(header: Header, sim: Simulation, patterns: list[str] | None) -> tuple[list[str], dict[str, str]]:
    """The names to load, and for every other one the reason why it can't be loaded."""
    wanted, given = list(sim.state.arrays), list(header.entries)
    if patterns is not None:
        wanted = _matching(wanted, patterns)
        given = [name for name in given if name in wanted]
    fitting, skipped = [], {}
    spare_entries = [n for n in header.entries if n not in sim.state.arrays]
    spare_variables = [n for n in sim.state.arrays if n not in header.entries]
    for name in wanted:
        shape, dtype = _type(sim, name)
        expected = f"{CODES[dtype.name]} {list(shape.sizes)}"
        entry = header.entries.get(name)
        if entry is None:
            skipped[name] = f"not in the file; the simulation has {expected} {shape}{nearest(name, spare_entries)}"
        elif wrong := _differences(entry, CODES[dtype.name], shape.sizes):
            skipped[name] = f"other {' and '.join(wrong)}: the file has {entry}, the simulation {expected} {shape}"
        else:
            fitting.append(name)
    for name in given:
        if name not in sim.state.arrays:
            skipped[name] = (
                f"not in the simulation; the file has {header.entries[name]}{nearest(name, spare_variables)}"
            )
    return fitting, skipped


def _matching(names: list[str], patterns: list[str]) -> list[str]:
    """The variables that match any of the patterns, each of which must match one."""
    lost = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if lost:
        faults = [f"no variable of the simulation matches '{p}'{nearest(p, names)}" for p in lost]
        raise CheckpointError(f"load: {'; '.join(faults)}; variables: {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def _differences(entry: Entry, code: str, sizes: tuple[int, ...]) -> list[str]:
    pairs = (("shape", entry.shape, sizes), ("dtype", entry.code, code))
    return [what for what, a, b in pairs if a != b]


def _refuse(target: str, skipped: Mapping[str, str], strict: bool) -> NoReturn:
    head = f"load: nothing in {target} fits"
    if strict:
        remedy = "strict=False loads what fits and returns the rest; only=[...] loads named variables"
        head = f"load: {target} does not fit the simulation ({remedy})"
    faults = [f"'{name}': {why}" for name, why in skipped.items()]
    raise CheckpointError.listing(head, faults, most=len(faults))


def _read(file: BinaryIO, header: Header, name: str, kind: tuple[Shape, DType], target: str) -> Array:
    """A tensor in the simulation's storage format."""
    shape, dtype = kind
    entry = header.entries[name]
    out = np.empty(shape.sizes, dtype.storage)
    flat, total = out.reshape(-1), 0
    file.seek(header.data_start + entry.begin)
    for start in range(0, flat.size, CHUNK):
        part = flat[start : start + CHUNK]
        raw = file.read(part.size * dtype.public.itemsize)
        if len(raw) != part.size * dtype.public.itemsize:
            raise DamagedError(
                f"load: {target} became shorter while it was read: tensor '{name}' ends at byte {entry.end}, found "
                f"{entry.begin + start * dtype.public.itemsize + len(raw)}"
            )
        total = zlib.crc32(raw, total)
        if dtype is BFLOAT16:
            part.view(np.uint32)[:] = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
            continue
        if dtype.is_rounded:
            part[:] = np.frombuffer(raw, dtype.public)
            continue
        bits = np.frombuffer(raw, np.uint8 if dtype is BOOL else dtype.storage.newbyteorder("<"))
        if dtype is BOOL and bits.max() > 1:
            at = int(np.argmax(bits > 1))
            raise CheckpointError(
                f"load: {target}: element {start + at} of BOOL tensor '{name}' is {bits[at]}, not 0 or 1"
            )
        if dtype is INT4 and (bits.min() < -8 or bits.max() > 7):
            at = int(np.argmax((bits < -8) | (bits > 7)))
            raise CheckpointError(f"load: {target}: element {start + at} of int4 variable '{name}' is {bits[at]}")
        part[:] = bits
    expected = header.metadata.get(SUM + name)
    if expected not in (None, _hex(total)):
        raise DamagedError(
            f"load: {target} is damaged: bytes {entry.begin} to {entry.end}, tensor '{name}' {entry}, have the CRC-32 "
            f"{_hex(total)}, but were written with {expected}. If they were changed on purpose, drop the key "
            f"'{SUM}{name}' from {METADATA}"
        )
    return out


def _seed(header: Header, target: str) -> int | None:
    text = header.metadata.get(SEED)
    if text is None:
        return None
    expected = header.metadata.get(SUM + METADATA)
    if expected not in (None, _sum(text.encode())):
        raise DamagedError(
            f"load: {target} is damaged: '{SEED}' in {METADATA}, {text!r:.80}, has the CRC-32 {_sum(text.encode())}, "
            f"but was written with {expected}. If it was changed on purpose, drop the key '{SUM}{METADATA}'"
        )
    if not re.fullmatch(r"-?[0-9]{1,1000}", text):
        raise CheckpointError(f"load: {target}: '{SEED}' in {METADATA} should be an integer, but is {text!r:.80}")
    return int(text)


# ---------------------------------------------------------------- both


def _check_simulation(sim: object, what: str, call: str) -> None:
    if not isinstance(sim, Simulation):
        raise CheckpointError(
            f"{what}: expected a simulation from mtf.simulate, got {type(sim).__name__} {sim!r:.80}; write mtf.{call}"
        )


def _patterns(only: object) -> list[str] | None:
    if only is None:
        return None
    patterns: list[Any] = [only] if isinstance(only, str) or not is_iterable(only) else list(only)
    if not patterns or not all(isinstance(p, str) for p in patterns):
        raise CheckpointError(f"load: only takes names or patterns of variables, got {only!r:.80}")
    return patterns


def _sum(data: bytes) -> str:
    return _hex(zlib.crc32(data))


def _hex(total: int) -> str:
    return f"{total:08x}"


def _type(sim: Simulation, name: str) -> tuple[Shape, DType]:
    """Shape and stored dtype of a variable; the step, which has no slot, is an int32 scalar."""
    slot = sim.state.slots.get(name)
    return (slot.shape, slot.dtype) if slot else (Shape([]), INT32)
