"""What exported models are made of: configs, variables by name, forward passes, preprocessing of pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from layouts import Dimension, LayoutRules, Mesh
from layouts.mesh import MeshLike
from meshlib.core.arguments import at, items, number, shape_faults
from meshlib.core.errors import CheckpointError, DataError, FeedError, GraphError, nearest
from meshlib.core.graph import Graph
from meshlib.layers.numerics import Numerics
from meshlib.layers.positions import RotaryScaling
from meshlib.layers.routing import Routing
from meshlib.lowering import Program, Session, lower
from meshlib.lowering.assigned import refuse_faults
from meshlib.models.config import TransformerConfig
from meshlib.models.config_parts import Experts, LatentAttention
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.step import ImageConfig, classifier
from meshlib.models.images.tower import BATCH, image_dims
from meshlib.models.images.vit import ViTConfig
from meshlib.models.model import transformer
from meshlib.models.serving import prefill
from meshlib.ops.control.remat import Remat
from meshlib.ops.control.sources import input as given
from meshlib.ops.pointwise.reductions import softmax
from meshlib.records.images import read_image
from meshlib.simulation import Simulation, simulate
from meshlib.storage.checkpoint import load

TYPE = "type"
RECORDS: MappingProxyType[str, type[Any]] = MappingProxyType(
    {
        record.__name__: record
        for record in (
            *(TransformerConfig, ResNetConfig, ViTConfig, Numerics, Experts, Routing, LatentAttention, Remat),
            RotaryScaling,
        )
    }
)
SHOWN = 8  # faults listed in a message
Config = TransformerConfig | ImageConfig | Mapping[str, Any]
Build = Callable[..., Any]


def as_json(value: object) -> Any:
    """A record, or one of its field values, as JSON types.

    Raises: TypeError for a value that has no such form.
    """
    if is_dataclass(value) and type(value).__name__ in RECORDS:
        return {TYPE: type(value).__name__, **{f.name: as_json(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value) and TYPE not in value:
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} {value!r:.80} can't be written as JSON")


def from_json(value: object, where: str) -> Any:
    """The inverse of `as_json`, except that lists become tuples.

    Raises: CheckpointError for an unknown record, or one with other fields; its message begins with `where`.
    """
    if isinstance(value, list):
        return tuple(from_json(inner, where) for inner in value)
    if not isinstance(value, Mapping):
        return value
    inside = {name: from_json(inner, where) for name, inner in value.items() if name != TYPE}
    if TYPE not in value:
        return inside
    name = value[TYPE]
    if not isinstance(name, str) or name not in RECORDS:
        hint = nearest(name, RECORDS) if isinstance(name, str) else ""
        raise CheckpointError(f"{where}: there is no config {name!r:.40}{hint}; known: {', '.join(RECORDS)}")
    known = {f.name for f in fields(RECORDS[name])}
    strange = [field for field in inside if field not in known]
    if strange:
        raise CheckpointError(f"{where}: {name} has no field {strange[0]!r:.40}{nearest(strange[0], known)}")
    try:
        return RECORDS[name](**inside)
    except TypeError as fault:
        raise CheckpointError(f"{where}: {fault}") from None


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


@dataclass(frozen=True)
class ImageInput:
    """Normalisation of pixels, (pixel - mean) / deviation for pixels in 0 to 1, and names of classes.

    Args:
      mean, deviation: one number for all channels, or one per channel.
      classes: their names, in the order of the logits; by default their numbers.
    Raises: GraphError for other values.
    Example:
      >>> ImageInput((0.5,), (0.25,)).normalised(np.full((1, 1, 1), 255, np.uint8)).tolist()
      [[[2.0]]]
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        what = "ImageInput"
        for name in ("mean", "deviation"):
            given = tuple(number(x, what, name) for x in items(getattr(self, name), what, name))
            if not given or (name == "deviation" and min(given) <= 0):
                raise GraphError(f"{at(what)}: {name} must be a positive number for each channel, got {given}")
            object.__setattr__(self, name, given)
        names = tuple(items(self.classes, what, "classes"))
        if not all(isinstance(name, str) for name in names):
            raise GraphError(f"{at(what)}: classes must be names, got {names!r:.80}")
        object.__setattr__(self, "classes", names)

    def check(self, channels: int, classes: int, what: str) -> None:
        """Raise GraphError unless these fit a model of this many channels and classes."""
        for name in ("mean", "deviation"):
            count = len(getattr(self, name))
            if count not in (1, channels):
                raise GraphError(f"{at(what)}: images has {count} numbers of {name}, the model {channels} channels")
        if self.classes and len(self.classes) != classes:
            raise GraphError(f"{at(what)}: images names {len(self.classes)} classes, the model has {classes}")

    def normalised(self, pixels: Array) -> Array:
        """Pixels [height, width, channels], integers of 0 to 255 or floats of 0 to 1, as float32."""
        scaled = pixels / np.float32(255) if pixels.dtype.kind in "ui" else pixels
        normalised_pixels: Array = ((scaled - np.array(self.mean)) / np.array(self.deviation)).astype(np.float32)
        return normalised_pixels


def pixels_of(picture: object, sizes: Sequence[int], what: str) -> Array:
    """A picture as an array [height, width, channels]: such an array as it is, or an image file resized to it.

    A file is cropped at its centre to the aspect ratio, as in training: see `mtf.records.read_image`.
    Raises: FeedError for an array of another shape or range, a file that is not a picture; MissingError without Pillow.
    """
    height, width, channels = sizes
    if isinstance(picture, np.ndarray):
        if picture.shape == (height, width) and channels == 1:
            picture = picture[..., None]
        if picture.shape != (height, width, channels) or picture.dtype.kind not in "uif":
            raise FeedError(
                f"{what}: expected a picture of shape {[height, width, channels]}, integers of 0 to 255 or floats of 0 "
                f"to 1, got {picture.dtype} {list(picture.shape)}"
            )
        low, high = (picture.min(), picture.max()) if picture.size else (0, 0)
        most = 1 if picture.dtype.kind == "f" else 255
        if not (low >= 0 and high <= most):
            raise FeedError(
                f"{what}: the picture holds {low} to {high}; {picture.dtype} must be 0 to {most}, see mtf.ImageInput"
            )
        return picture
    if not isinstance(picture, str | os.PathLike | bytes):
        raise FeedError(
            f"{what}: expected the path of a picture, its bytes or an array, got {type(picture).__name__} "
            f"{picture!r:.80}"
        )
    if channels not in (1, 3):
        raise FeedError(f"{what}: files of pictures have 1 or 3 channels, the model {channels}; give it an array")
    try:
        return read_image(picture, (height, width), channels)
    except DataError as fault:
        raise FeedError(f"{what}: {fault}") from None
