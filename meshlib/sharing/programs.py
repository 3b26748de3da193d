"""Programs of exported models: variables by name, and forward passes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from layouts import Dimension, LayoutRules, Mesh
from layouts.mesh import MeshLike
from meshlib.core.arguments import at, shape_faults
from meshlib.core.errors import GraphError
from meshlib.core.graph import Graph
from meshlib.lowering import Program, Session, lower
from meshlib.lowering.assigned import refuse_faults
from meshlib.models.config import TransformerConfig
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.step import ImageConfig, classifier
from meshlib.models.images.tower import BATCH, image_dims
from meshlib.models.images.vit import ViTConfig
from meshlib.models.model import transformer
from meshlib.models.serving import prefill
from meshlib.ops.control.sources import input as given
from meshlib.ops.pointwise.reductions import softmax
from meshlib.simulation import Simulation, simulate
from meshlib.storage.checkpoint import load

SHOWN = 8  # faults listed in a message
Config = TransformerConfig | ImageConfig | Mapping[str, Any]
Build = Callable[..., Any]
Array = np.ndarray[Any, Any]


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


def kind_of(config: object, build: object, what: str) -> str:
    """Kind of model: "text", "images" or "own"."""
    if isinstance(config, Mapping):
        if not all(isinstance(name, str) for name in config):
            raise GraphError(f"{at(what)}: config must be arguments of build by name, got {config!r:.80}")
        if not callable(build):
            raise GraphError(
                f"{at(what)}: a config of your own needs build=, a function of {', '.join(config) or 'no arguments'} "
                f"that returns outputs by name, got {build!r:.80}"
            )
        return "own"
    if build is not None:
        raise GraphError(f"{at(what)}: build is for a config of your own; {type(config).__name__} says what it is")
    if isinstance(config, TransformerConfig):
        return "text"
    if isinstance(config, ResNetConfig | ViTConfig):
        return "images"
    raise GraphError(
        f"{at(what)}: config must be a TransformerConfig, ResNetConfig or ViTConfig, or arguments of build by name, "
        f"got {type(config).__name__} {config!r:.80}"
    )


def forward_program(config: Any, build: Build | None, mesh: MeshLike = "device:1", layout: object = "") -> Program:
    """A forward pass whose variables include everything that is trained."""
    if isinstance(config, TransformerConfig):
        plain = config.replace(numerics=replace(config.numerics, kernel_dtype=None))
        with Graph():
            return lower({"loss": transformer(plain, 1, 1, training=False).loss})
    if isinstance(config, Mapping):
        assert build is not None
        with Graph():
            outputs = build(**config)
            if not isinstance(outputs, Mapping):
                raise GraphError(f"{at('build')}: must return outputs by name, got {outputs!r:.80}")
            return lower(outputs, mesh=mesh, layout=layout)
    return image_program(config, 1, mesh, layout)


def check_layout(config: TransformerConfig, batch: int, mesh: MeshLike, layout: Any) -> None:
    """Raise LayoutError, as `mtf.lower` would, if the model does not fit; lengths of texts are taken to divide."""
    length = Mesh(mesh).size
    if config.max_length is not None:
        config = config.replace(max_length=max(config.max_length, 2 * length))
    with Graph():
        if config.kind == "encoder":
            session = Session({"loss": transformer(config, batch, length, training=False).loss})
        else:
            session = Session(*prefill(config, batch, length, 2 * length, length if config.encoder_decoder else None))
    refuse_faults(session.check(mesh, layout), session.subjects, Mesh(mesh), LayoutRules(layout))


def image_program(config: ImageConfig, batch: int, mesh: MeshLike, layout: object) -> Program:
    """The class probabilities of a batch of images."""
    with Graph():
        images = given("images", [Dimension(BATCH, batch), *image_dims(config)])
        logits, _ = classifier(config, images, False)
        return lower({"probabilities": softmax(logits, logits.shape.dim("classes"))}, mesh=mesh, layout=layout)
