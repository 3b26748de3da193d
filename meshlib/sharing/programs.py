"""Forward passes of exported models, from their configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from layouts import Dimension, LayoutRules, Mesh
from layouts.mesh import MeshLike
from meshlib.core.arguments import at
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

Config = TransformerConfig | ImageConfig | Mapping[str, Any]
Build = Callable[..., Any]


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
