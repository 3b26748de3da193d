"""Evaluation: a separate program on the variables in training, over a whole data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from layouts.parsing import is_iterable
from meshlib.core.arguments import at
from meshlib.core.errors import FeedError, GraphError
from meshlib.data import Data, Feed
from meshlib.program.records import Program, require_program
from meshlib.simulation import Simulation
from meshlib.training.feeding import examples_of, mask_of

COUNTED = "count"
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
