"""Steps that are not waited for: their results until somebody reads them, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax

from meshlib.jax.placing import HostArray, whole


class Results(dict[str, Any]):
    """The fetched outputs of a step that may still run: a dict of NumPy arrays, each brought to the host when read.

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

    def __iter__(self) -> Iterator[str]:  # so that dict(results) and {**results} read by __getitem__, too
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict."""
        if name in self:
            self[name]
        return super().pop(name, *default)

    def items(self) -> Any:
        """As of a dict; reads all."""
        self._read()
        return super().items()

    def values(self) -> Any:
        """As of a dict; reads all."""
        self._read()
        return super().values()

    def copy(self) -> dict[str, Any]:
        """A plain dict of all."""
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
    """Seconds of steps that follow one another without being waited for, from the first since the last look."""

    def __init__(self) -> None:
        self.begun = self.last = 0.0
        self.steps = 0
        self.marker: Any = None  # an array of the last step

    def dispatched(self, begun: float, marker: Any) -> None:
        """A step has been handed to the devices; its call began then, and `marker` is an array that it makes."""
        if not self.steps:
            self.begun = begun
        self.last, self.marker, self.steps = time.perf_counter(), marker, self.steps + 1

    def seconds(self) -> float | None:
        """Of one step, of those since the last look; waits for the last. None where nothing tells.

        Where the last has long ended, when is not known: then the steps before it count, from one call to the next.
        """
        steps, marker = self.steps, self.marker
        self.steps, self.marker = 0, None
        if not steps or marker is None:
            return None
        if marker.is_ready():
            return (self.last - self.begun) / (steps - 1) if steps > 1 else None
        jax.block_until_ready(marker)
        return (time.perf_counter() - self.begun) / steps
