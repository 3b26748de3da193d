"""Names and shapes of a model's variables without arrays, and their values from a state or file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshlib.core.arguments import at, shape_faults
from meshlib.core.errors import GraphError
from meshlib.core.graph import Graph
from meshlib.lowering import Program
from meshlib.models.config import TransformerConfig
from meshlib.models.model import transformer
from meshlib.simulation import Simulation, simulate
from meshlib.storage.checkpoint import load

Array = np.ndarray[Any, Any]
SHOWN = 8  # faults listed in a message


def variables_of(config: TransformerConfig, scan: bool = True) -> dict[str, tuple[int, ...]]:
    """Names and shapes of trained variables; with `scan`, those of layers are stacked."""
    with Graph() as graph:
        transformer(config, 1, 1, scan=scan, training=False)
    return {name: v.output.shape.sizes for name, v in graph.variables.items()}


def values_of(
    trained: object, wanted: Mapping[str, tuple[int, ...]], program: Callable[[], Program], what: str
) -> dict[str, Array]:
    """Arrays of all wanted variables, from a simulation, arrays by name, or the path of a checkpoint.

    `program` returns a program with these variables; it is called only to read a file.
    Raises: GraphError with all variables that are missing or of another shape; CheckpointError for an invalid file.
    """
    given: Mapping[str, Any]
    if isinstance(trained, Simulation):
        given = trained.state
    elif isinstance(trained, str | os.PathLike):
        sim = simulate(program())
        load(trained, sim, only=list(wanted))
        given = sim.state
    elif isinstance(trained, Mapping):
        given = trained
    else:
        raise GraphError(
            f"{at(what)}: trained must be a simulation, arrays by name or the path of a checkpoint, got "
            f"{type(trained).__name__} {trained!r:.80}"
        )
    given = {**given, **_stacked(given, wanted)}
    faults = shape_faults(given, wanted)
    if faults:
        raise GraphError.listing(f"{at(what)}: the variables are not those of the model", faults)
    return {name: np.asarray(given[name]) for name in wanted}


def _stacked(given: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Variables of stacked layers, stacked from those of unrolled layers."""
    stacked = {}
    for name, shape in wanted.items():
        before, layers, after = name.rpartition("layers/")
        parts = [f"{before}layer_{n}/{after}" for n in range(shape[0])] if layers and shape else []
        if name not in given and parts and all(part in given for part in parts):
            stacked[name] = np.stack([given[part] for part in parts])
    return stacked
