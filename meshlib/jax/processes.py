"""Checkpoints of several processes: each writes and reads the blocks of its own devices.

The first process creates the file; the others write into it under a temporary name. So a killed process leaves the old
file intact. Processes communicate over the devices, as everywhere.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from layouts import Shape
from meshlib.core.dtypes import DType
from meshlib.core.errors import CheckpointError

Places = Mapping[str, tuple[int, Shape, DType]]
READ_BYTES = 1 << 22  # read from a file per call


class JaxProcesses:
    """The processes of `jax.distributed`, for a state whose arrays are on their devices."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.first = jax.process_index() == 0
        self._told = False  # whether all processes know of a fault

    def write(self, file: BinaryIO, places: Places) -> dict[str, int]:
        """As `meshlib.simulation.state.Processes`."""
        end = max(begin + shape.size * dtype.public.itemsize for begin, shape, dtype in places.values())
        file.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, end)  # so that a full disk is an error here, not a bus error later
        file.truncate(end)
        self._share(os.fspath(file.name))
        return self._written(os.fspath(file.name), places)

    def follow(self, places: Places) -> None:
        """As `meshlib.simulation.state.Processes`."""
        path = self._share("")[0]
        self._written(path, places)

    def agree(self, fault: str | None) -> None:
        """As `meshlib.simulation.state.Processes`."""
        if fault is not None and self._told:  # all processes know already, so nobody waits
            self._told = False
            raise CheckpointError(fault)
        try:
            self._share("" if fault is None else f"!{fault}")
        finally:
            self._told = False

    def mine(self, names: Sequence[str]) -> list[str]:
        """As `meshlib.simulation.state.Processes`."""
        return list(names)[jax.process_index() :: jax.process_count()]

    def blocks(self, path: str, places: Places) -> dict[str, np.ndarray[Any, Any]]:
        """As `meshlib.simulation.state.Processes`."""
        return {name: _mapped(path, *place, "r") for name, place in places.items()}

    def _written(self, path: str, places: Places) -> dict[str, int]:
        """Write this process's blocks; returns checksums of all tensors, each computed by one process."""
        fault, sums = None, {}
        try:
            for name, place in places.items():
                self._write_blocks(path, name, place)
        except OSError as error:
            fault = f"save: {path:.200} can't be written: {error.strerror or error}"
        self._share("" if fault is None else f"!{fault}")
        for name in self.mine(list(places)):
            begin, shape, dtype = places[name]
            sums[name] = _sum(path, begin, shape.size * dtype.public.itemsize)
        return {name: n for text in self._share(json.dumps(sums)) for name, n in json.loads(text).items()}

    def _write_blocks(self, path: str, name: str, place: tuple[int, Shape, DType]) -> None:
        x = self.arrays[name]
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            if self.first:
                _mapped(path, *place, "r+")[...] = np.asarray(x)
            return
        held = None
        for shard in x.addressable_shards:
            if shard.replica_id == 0:  # one of the devices with the same block writes it
                held = _mapped(path, *place, "r+") if held is None else held
                held[shard.index] = np.asarray(shard.data)

    def _share(self, text: str) -> list[str]:
        """Exchange texts between all processes. Raises CheckpointError if one begins with '!'."""
        data = np.frombuffer(text.encode(), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size], np.int32))).reshape(-1)
        padded = np.zeros(max(1, int(sizes.max())), np.uint8)
        padded[: data.size] = data
        rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
        texts = [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
        faults = [t[1:] for t in texts if t.startswith("!")]
        if faults:
            self._told = True
            raise CheckpointError(faults[0])
        return texts


def _mapped(path: str, begin: int, shape: Shape, dtype: DType, mode: Any) -> np.ndarray[Any, Any]:
    """A memory-mapped tensor of a file."""
    flat = np.memmap(path, np.dtype(f"<u{dtype.public.itemsize}"), mode, begin, (shape.size,))
    held = dtype.storage if dtype.is_narrow_integer else dtype.public  # int4 takes one byte in a file
    return flat.view(held).reshape(shape.sizes)


def _sum(path: str, begin: int, count: int) -> int:
    total = 0
    with open(path, "rb") as file:
        file.seek(begin)
        while count > 0:
            part = file.read(min(count, READ_BYTES))
            if not part:
                break
            total, count = zlib.crc32(part, total), count - len(part)
    return total
