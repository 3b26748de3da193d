"""Evaluation: a separate program on the variables in training, over a whole data set; batches with their position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from layouts.parsing import is_iterable
from meshlib.core.arguments import at
from meshlib.core.documents import COUNT
from meshlib.core.errors import FeedError, GraphError
from meshlib.data import Data, Feed
from meshlib.data.batches import Batches
from meshlib.program.records import Program, require_program
from meshlib.simulation import Simulation

MASK = "mask"
COUNTED = "count"


class Feeding(Protocol):
    """An iterator of batches with a state representable as JSON."""

    def __next__(self) -> Mapping[str, Any]: ...

    def state(self) -> dict[str, Any]:
        """The current position."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        ...


class _OfBatches:
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __next__(self) -> Mapping[str, Any]:
        return next(self.batches)

    def state(self) -> dict[str, Any]:
        return self.batches.state._asdict()

    def restore(self, state: Mapping[str, Any]) -> None:
        _of_this_kind(state, "epoch", "batch")
        self.batches.seek(state["epoch"], state["batch"])


class _Counted:
    """Other iterables of batches, which are resumed by skipping the batches already taken."""

    def __init__(self, batches: Iterable[Mapping[str, Any]]) -> None:
        self.batches: Iterator[Mapping[str, Any]] = iter(batches)
        self.taken = 0

    def __next__(self) -> Mapping[str, Any]:
        batch = next(self.batches)
        if not isinstance(batch, Mapping):
            raise FeedError(f"{at('train')}: batch {self.taken} must be a dict of names to arrays, got {batch!r:.80}")
        self.taken += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"batches": self.taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        _of_this_kind(state, "batches")
        for _ in islice(self.batches, state["batches"] - self.taken):
            self.taken += 1


def _of_this_kind(state: Mapping[str, Any], *names: str) -> None:
    if not isinstance(state, Mapping) or set(state) != set(names):
        raise FeedError(
            f"{at('train')}: the checkpoint is of a run on data of another kind: their state has {', '.join(state)}, "
            f"that of these {', '.join(names)}; give the data of that run, or another folder"
        )
    for name in names:
        if not COUNT.accepts(state[name]):
            raise FeedError(
                f"{at('train')}: the checkpoint's state of the data is damaged: '{name}' is {state[name]!r:.40}"
            )


def mask_of(data: object, batch: Mapping[str, Any]) -> Any:
    """The array of a batch that is 1 for valid rows; None if all are valid."""
    chain = data.data if isinstance(data, Feed) else data.batches if isinstance(data, _OfBatches) else data
    if isinstance(chain, Data | Batches):
        return None if chain.mask is None else batch.get(chain.mask)
    mask = batch.get(MASK)  # name of the mask in other batches
    return None if mask is None or np.ndim(mask) != 1 else mask


def examples_of(data: object, batch: Mapping[str, Any]) -> float:
    """The number of valid rows of a batch."""
    mask = mask_of(data, batch)
    if mask is not None:
        return float(np.sum(mask))
    first = next((x for x in batch.values() if np.ndim(x)), None)
    return 1.0 if first is None else float(len(first))


def feeding_of(data: Any) -> Feeding:
    """The `Feeding` for data of any kind. Raises: FeedError if they are not batches."""
    chain = data.data if isinstance(data, Feed) else data
    if isinstance(chain, Data) and chain.batching is None:
        raise FeedError(f"{at('train')}: the data are examples, not batches: {chain}; write data.batch(size)")
    if isinstance(data, Data | Feed):
        return iter(data)
    if isinstance(data, Batches):
        return _OfBatches(data)
    if not is_iterable(data) or isinstance(data, str | bytes | Mapping):
        raise FeedError(f"{at('train')}: data must be mtf.data, or an iterable of dicts, got {data!r:.80}")
    return _Counted(data)


Array = np.ndarray[Any, Any]
Batch = Mapping[str, Array]
Measure = Callable[[dict[str, Array], dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Options of evaluations during `mtf.train`; also callable: `evaluation(run)`.

    Args:
      program: a program with its own batch, mesh and layout, on variables of the same names.
      data: `mtf.data` batches of a finite number of epochs, or another iterable of dicts that restarts each time. Best
        with remainder="pad", whose mask excludes the padding of the last batch.
      every: number of steps between evaluations.
      measure: (outputs, batch) -> sums, name -> number, with the number of examples as "count". By default the
        program's scalar outputs: sums if "count" is among them, as for `mtf.models.image_evaluation`, otherwise means
        over the batch.
    Raises: GraphError, FeedError for invalid arguments.
    Example:
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x, w = mtf.input("x", "batch:4"), mtf.variable("w", [], 1.0)
      ...     program = mtf.lower({"loss": mtf.reduce_mean(mtf.square(x - w))})
      >>> data = mtf.data.arrays({"x": np.arange(8, dtype=np.float32)}).batch(4)
      >>> mtf.Evaluation(program=program, data=data, every=10)(mtf.simulate(program))
      {'loss': 11.5}
    """

    program: Program
    data: Data | Iterable[Batch]
    every: int
    measure: Measure | None = None

    def __post_init__(self) -> None:
        what = at("Evaluation")
        require_program(self.program, "Evaluation")
        if isinstance(self.every, bool) or not isinstance(self.every, int | np.integer) or self.every < 1:
            raise GraphError(f"{what}: every must be an integer >= 1, got {self.every!r:.80}")
        if not is_iterable(self.data) or iter(self.data) is self.data:
            raise FeedError(f"{what}: data must start over in each evaluation, as mtf.data does; got {self.data!r:.80}")
        if isinstance(self.data, Data) and (self.data.epochs is None or self.data.batching is None):
            fault = "repeat forever" if self.data.epochs is None else "are not in batches"
            raise FeedError(f"{what}: the data {fault}: {self.data}")
        if self.measure is not None and not callable(self.measure):
            raise GraphError(f"{what}: measure must be a function, got {self.measure!r:.80}")

    def __call__(self, run: Simulation) -> dict[str, float]:
        """The means over all examples. Raises: FeedError if there are none, GraphError for an invalid run."""
        given: object = run
        if not isinstance(given, Simulation):
            raise GraphError(f"{at('Evaluation')}: run must be a run from mtf.simulate or mtf.on_jax, got {run!r:.80}")
        totals: dict[str, float] = {}
        count = 0.0
        measure = self.measure or self._single_numbers
        for batch in self._batches(run):
            if self.measure is None:
                self._check_mask(batch)
            outputs = run.run(self.program, feeds_of(self.program, batch))
            measured: object = measure(outputs, dict(batch))
            if not isinstance(measured, Mapping):
                raise GraphError(f"{at('Evaluation')}: measure must return names and sums, got {measured!r:.80}")
            numbers = {name: float(value) for name, value in measured.items()}
            if COUNTED not in numbers:
                raise GraphError(
                    f"{at('Evaluation')}: measure must return '{COUNTED}' as well, got {', '.join(numbers)}"
                )
            count += numbers.pop(COUNTED)
            for name, value in numbers.items():
                totals[name] = totals.get(name, 0.0) + value
        if not count:
            raise FeedError(f"{at('Evaluation')}: the data have no example other than padding")
        return {name: total / count for name, total in totals.items()}

    def _batches(self, run: Simulation) -> Iterator[Batch]:
        """The batches. Of several processes each prepares the rows of its devices, unless `measure` may use all
        rows."""
        batches = iter(self.data)
        if not isinstance(batches, Feed):
            yield from batches
            return
        try:
            if self.measure is None and (rows := run.rows_here(self.program)) is not None:
                batches.only(rows)
            yield from batches
        finally:
            batches.close()

    def _check_mask(self, batch: Batch) -> None:
        """Raise for a program that ignores the mask, whose means would count padding rows."""
        mask = mask_of(self.data, batch)
        name = next((name for name, array in batch.items() if array is mask), None)
        if mask is not None and name not in self.program.inputs and not np.all(mask):
            raise FeedError(
                f"{at('Evaluation')}: {int(np.sum(np.asarray(mask) == 0))} of {len(mask)} rows are padding, "
                f"but the program has no input '{name}' that excludes them; give it one, or measure=, or data with "
                "remainder='drop'"
            )

    def _single_numbers(self, outputs: dict[str, Array], batch: dict[str, Any]) -> Mapping[str, float]:
        numbers = single_numbers(outputs)
        if COUNTED in numbers:
            return numbers
        if not numbers:
            raise GraphError(f"{at('Evaluation')}: no output of the program is a single number; give measure=")
        count = examples_of(self.data, batch)
        return {**{name: value * count for name, value in numbers.items()}, COUNTED: count}


def feeds_of(program: Program, batch: Batch) -> dict[str, Array]:
    """The inputs of a program from a batch."""
    return {name: batch[name] for name in program.inputs if name in batch}


def single_numbers(outputs: Mapping[str, Array]) -> dict[str, float]:
    """The scalar outputs."""
    return {name: float(y) for name, y in outputs.items() if np.ndim(y) == 0}
