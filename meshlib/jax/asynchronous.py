"""Steps that run asynchronously: results that are fetched when read, and timing without waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax

from meshlib.jax.placing import HostArray, whole


class Results(dict[str, Any]):
    """Outputs of a step that may still run: a dict of NumPy arrays, each copied to the host when read.

    >>> import jax.numpy as jnp
    >>> results = Results({"loss": jnp.ones(2)}, {"loss": "float32"})
    >>> results["loss"], type({**results}["loss"]).__name__
    (array([1., 1.], dtype=float32), 'ndarray')
    """

    def __init__(self, outputs: dict[str, Any], dtypes: dict[str, Any]) -> None:
        super().__init__(outputs)
        self._dtypes = dtypes

    def __getitem__(self, name: str) -> HostArray:
        x = super().__getitem__(name)
        if isinstance(x, jax.Array):
            x = whole(x).astype(self._dtypes[name])
            super().__setitem__(name, x)
        on_host: HostArray = x
        return on_host

    def __iter__(self) -> Iterator[str]:  # so that dict(results) and {**results} call __getitem__, too
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """As `dict.get`."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, *default: Any) -> Any:
        """As `dict.pop`."""
        if name in self:
            self[name]
        return super().pop(name, *default)

    def items(self) -> Any:
        """As `dict.items`; reads all arrays."""
        self._read()
        return super().items()

    def values(self) -> Any:
        """As `dict.values`; reads all arrays."""
        self._read()
        return super().values()

    def copy(self) -> dict[str, Any]:
        """A plain dict of all arrays."""
        return dict(self)

    def __eq__(self, other: object) -> bool:
        self._read()
        return super().__eq__(other)

    __hash__ = None

    def __repr__(self) -> str:
        self._read()
        return super().__repr__()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def _read(self) -> None:
        for name in self:
            self[name]


class Stopwatch:
    """Times consecutive asynchronous steps, from the first one since the last reading."""

    def __init__(self) -> None:
        self.begun = self.last = 0.0
        self.steps = 0
        self.marker: Any = None  # an output array of the last step

    def dispatched(self, begun: float, marker: Any) -> None:
        """Record a step handed to the devices: when its call began, and `marker`, one of its output arrays."""
        if not self.steps:
            self.begun = begun
        self.last, self.marker, self.steps = time.perf_counter(), marker, self.steps + 1

    def seconds(self) -> float | None:
        """Seconds per step since the last reading, after waiting for the last step; None if they cannot be determined.

        If the last step has already ended, its end time is unknown: then only the steps before it count, from call to
        call.
        """
        steps, marker = self.steps, self.marker
        self.steps, self.marker = 0, None
        if not steps or marker is None:
            return None
        if marker.is_ready():
            return (self.last - self.begun) / (steps - 1) if steps > 1 else None
        jax.block_until_ready(marker)
        return (time.perf_counter() - self.begun) / steps
