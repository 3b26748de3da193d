"""State of a simulation: global arrays by variable name, independent of layout, checked when assigned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, BinaryIO, Protocol

import numpy as np

from layouts import Shape
from meshlib.core.arguments import is_masked, stored
from meshlib.core.dtypes import INT32, DType, kind_of
from meshlib.core.errors import FeedError, nearest
from meshlib.core.graph import Operation
from meshlib.core.initializers import make_key
from meshlib.ops.control.sources import STEP
from meshlib.program.records import Program

Array = np.ndarray[Any, Any]


def to_storage(array: object, shape: Shape, dtype: DType, what: str) -> Array:
    """`array` in storage form: C-contiguous, in the storage dtype.

    Floats of any width are taken for a float dtype, integers for an integer dtype if they fit; lists of Python numbers
    for either. Nothing else is converted.
    Raises: FeedError with both shapes or dtypes, or for what `stored` refuses.
    """
    if isinstance(array, list | tuple | bool | int | float) and not is_masked(array):
        try:
            array = np.asarray(array)
            if dtype.is_float and array.dtype.kind in "iu":
                array = array.astype(np.float64)  # Python numbers have no dtype to respect
        except (ValueError, OverflowError):
            raise FeedError(
                f"{what}: the nested list is not an array of shape {list(shape.sizes)}; its rows differ"
            ) from None
    if not isinstance(array, np.ndarray | np.generic):
        masked = " that holds a masked array" if is_masked(array) else ""
        raise FeedError(f"{what}: expected a NumPy array of {dtype.name}{shape}, got {type(array).__name__}{masked}")
    array = np.asanyarray(array)
    if array.shape != shape.sizes:
        raise FeedError(f"{what}: expected shape {list(shape.sizes)} for {shape}, got {list(array.shape)}")
    kinds = {"float": "f", "flag": "b", "integer": "iu"}[dtype.kind]
    if kind_of(array.dtype) not in kinds:
        raise FeedError(
            f"{what}: expected {dtype.name}, got {array.dtype}; convert it yourself, as in "
            f"array.astype(np.{'float32' if dtype.is_float else np.dtype(dtype.storage).name})"
        )
    return stored(array, dtype, what, FeedError)


def fed_arrays(program: Program, given: Mapping[str, Any]) -> dict[str, Array]:
    """Feeds of a program in storage form, after checking all names together."""
    unknown = [n for n in given if n not in program.inputs]
    missing = [n for n in program.inputs if n not in given]
    faults = [f"unknown feed '{n}'{nearest(n, program.inputs)}" for n in unknown]
    faults += [
        f"missing feed '{n}', {program.inputs[n].tensor.dtype.name}{program.inputs[n].tensor.shape} "
        f"({program.inputs[n].tensor.operation.source})"
        for n in missing
    ]
    if faults:
        raise FeedError("; ".join(faults) + f"; give the program's inputs: {', '.join(program.inputs) or 'none'}")
    fed = {}
    for name, v in program.inputs.items():
        t = v.tensor
        fed[name] = to_storage(given[name], t.shape, t.dtype, f"feed '{name}' ({t.operation.source})")
    return fed


@dataclass(frozen=True)
class Slot:
    """A variable's dims, storage dtype, and dtype seen by users."""

    shape: Shape
    dtype: DType
    public: DType
    source: str

    @classmethod
    def of(cls, op: Operation) -> Slot:
        """The slot of a `variable` operation."""
        return cls(op.attrs["shape"], op.attrs["dtype"], op.attrs["public_dtype"], op.source)


class Processes(Protocol):
    """Several processes with parts of one state each, which write and read one file together.

    `places` says of each tensor where in the file it begins, in bytes, and what it is. Each method is called in all
    processes; if it fails in one, it raises in all.
    """

    first: bool  # whether this process creates the file

    def write(self, file: BinaryIO, places: Mapping[str, tuple[int, Shape, DType]]) -> dict[str, int]:
        """Write this process's tensors to a file opened by the first process; returns their CRC-32s."""

    def follow(self, places: Mapping[str, tuple[int, Shape, DType]]) -> None:
        """Take part in `write`, from the other processes."""

    def agree(self, fault: str | None) -> None:
        """Wait for all processes; raise CheckpointError if one has failed."""

    def mine(self, names: Sequence[str]) -> list[str]:
        """The tensors that this process checks for damage."""

    def blocks(self, path: str, places: Mapping[str, tuple[int, Shape, DType]]) -> dict[str, Array]:
        """Tensors of a file, reading only the parts that are needed."""


class State(MutableMapping[str, Array]):
    """Variables by name, as plain global NumPy arrays: `sim.state["w1"]`, assignable.

    Reading gives a copy in the variable's declared dtype. Assigning checks shape and dtype. `processes`: those that
    share the state, if there are several.
    """

    processes: Processes | None = None

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.arrays: dict[str, Array] = {STEP: np.zeros((), np.int32)}
        self.slots: dict[str, Slot] = {}
        # Held during a step, which overwrites arrays that it gave to the state two steps before.
        self.lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            arrays = {name: array.copy(order="K") for name, array in self.arrays.items()}
        return {"seed": self.seed, "arrays": arrays, "slots": dict(self.slots)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=RLock())

    def declare(self, variables: Mapping[str, Operation]) -> None:
        """Register a program's variables; new ones get their initial value from seed and name."""
        for name, op in variables.items():
            slot = Slot.of(op)
            known = self.slots.get(name)
            if known is not None and (known.shape, known.dtype) != (slot.shape, slot.dtype):
                raise FeedError(
                    f"variable '{name}' is {known.dtype}{known.shape} ({known.source}) in this simulation, but "
                    f"{slot.dtype}{slot.shape} ({slot.source}) in the program to run"
                )
            if known is None:
                self.slots[name] = slot
                if name not in self.arrays:
                    initial_value = self._initial(name, slot, op)
                    what = f"initial value of variable '{name}' ({op.source})"
                    self.put(name, to_storage(np.asanyarray(initial_value), slot.shape, slot.dtype, what))

    def stored(self, name: str) -> Array:
        """A variable's whole array in storage form; not to be written to."""
        return self.arrays[name]

    def copy_to(self, name: str, out: Array) -> None:
        """Copy the storage form of a variable into an array of its shape and dtype."""
        np.copyto(out, self.arrays[name])

    def put(self, name: str, array: Array) -> None:
        """Assign an array that has the right shape and storage dtype."""
        self.arrays[name] = array

    def _initial(self, name: str, slot: Slot, op: Operation) -> object:
        try:
            return op.attrs["initializer"](make_key(self.seed, "variable", name), slot.shape, slot.dtype)
        except MemoryError:
            raise FeedError(
                f"variable '{name}' {slot.dtype}{slot.shape} ({op.source}) needs "
                f"{slot.dtype.size_bytes(slot.shape.size)} bytes, more than this machine has; lowering needs none"
            ) from None
        except (TypeError, ValueError) as fault:  # raised by the user's initializer
            raise FeedError(f"the initializer of variable '{name}' ({op.source}) failed: {fault}") from fault

    def __getitem__(self, name: str) -> Array:
        self._check_name(name)
        public = self.slots[name].public.public if name in self.slots else np.dtype(np.int32)
        with self.lock:
            return self.stored(name).astype(public)

    def __setitem__(self, name: str, value: Array) -> None:
        self._check_name(name)
        slot = self.slots.get(name)
        shape, dtype = (slot.shape, slot.dtype) if slot else (Shape([]), INT32)
        stored_value = to_storage(value, shape, dtype, f"state['{name}']").copy()
        with self.lock:
            self.put(name, stored_value)

    def __delitem__(self, name: str) -> None:
        raise FeedError(f"variable '{name}' can't be deleted; a program needs it")

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.arrays

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or name not in self.arrays:
            raise FeedError(f"no variable '{name}'{nearest(str(name), self.arrays)}; known: {', '.join(self.arrays)}")
