"""Image models with published dimensions, and their layouts, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from layouts import LayoutRules, Mesh
from layouts.errors import LayoutError
from layouts.mesh import MeshLike
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.models.images.resnet import RESNETS, ResNetConfig
from meshlib.models.images.tower import BATCH, CHANNELS, HEIGHT, WIDTH
from meshlib.models.images.vit import VITS, ViTConfig

IMAGE_PRESETS: MappingProxyType[str, ResNetConfig | ViTConfig] = MappingProxyType({**RESNETS, **VITS})
_AXES = {"data": "data", "zero1": "data", "spatial": "spatial", "channels": "model"}


def image_preset(name: str) -> Any:
    """The model of `IMAGE_PRESETS` with that name; `.replace(...)` changes fields of it.

    Raises: GraphError for an unknown name, with the nearest one.
    Example:
      >>> import meshlib as mtf
      >>> mtf.models.image_preset("resnet-50").parameters
      25557032
    """
    if isinstance(name, str) and name in IMAGE_PRESETS:
        return IMAGE_PRESETS[name]
    hint = nearest(name, IMAGE_PRESETS) if isinstance(name, str) else ""
    raise GraphError(f"{at('image_preset')}: no model {name!r:.80}{hint or '; there are ' + ', '.join(IMAGE_PRESETS)}")


IMAGE_LAYOUTS: MappingProxyType[str, str] = MappingProxyType(
    {
        "data": "the batch is split over axis 'data', every device has all weights",
        "zero1": "data, and each device keeps and updates its part of the optimizer's slots",
        "spatial": "rows of images and features over axis 'spatial', and columns over 'columns' if the mesh has it",
        "channels": "the channels of features and kernels, of a ViT heads and d_ff, are split over axis 'model'",
    }
)


class Splittable(Protocol):
    """The fields of a config that layouts use."""

    @property
    def name(self) -> str: ...
    @property
    def spatial_split(self) -> int: ...
    @property
    def split_dims(self) -> Mapping[str, int]: ...


def image_layout(name: str, config: Splittable, mesh: MeshLike) -> LayoutRules:
    """The layout rules of an image model on a mesh.

    Args:
      name: a name of `IMAGE_LAYOUTS`, or several joined by "+", such as "data+spatial". A mesh of one axis serves a
        single part whatever the axis is called.
      config: the model, which limits the shards of height, width and channels.
      mesh: the mesh.
    Raises: LayoutError for an unknown name, a mesh without the axis, and sizes that do not divide, with the remedy.
    Example:
      >>> import meshlib as mtf
      >>> config = mtf.models.image_preset("resnet-50")
      >>> print(mtf.models.image_layout("data+spatial", config, "data:64;spatial:2"))
      batch:data;height:spatial
    """
    what = "image_layout"
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    if not isinstance(name, str):
        raise LayoutError(f"{at(what)}: expected a name such as 'data+spatial', got {name!r:.80}")
    parts = list(dict.fromkeys(part.strip() for part in name.split("+")))
    for part in parts:
        if part not in IMAGE_LAYOUTS:
            hint = nearest(part, IMAGE_LAYOUTS) or f"; there are {', '.join(IMAGE_LAYOUTS)}, and any joined by '+'"
            raise LayoutError(f"{at(what)}: no layout {part!r}{hint}")
    rules: list[str] = []
    for part in parts:
        axis = mesh.axes[0] if len(parts) == len(mesh.axes) == 1 else _AXES[part]
        if axis not in mesh:
            raise LayoutError(f"{at(what)} {name!r}: {part!r} needs an axis '{axis}', but the mesh is {mesh}")
        rules += _rules(part, axis, config, mesh)
    return LayoutRules(";".join(dict.fromkeys(rules)))


def _rules(part: str, axis: str, config: Splittable, mesh: Mesh) -> list[str]:
    size = mesh.axis_size(axis)
    if part == "data":
        return [f"{BATCH}:{axis}"]
    if part == "zero1":
        return [f"{BATCH}:{axis}", f"slots/{CHANNELS}_out:{axis}?", f"slots/{CHANNELS}:{axis}?"]
    if part == "channels":
        faults = [f"{dim}: {n} % {size} = {n % size}" for dim, n in config.split_dims.items() if n % size]
        if faults:
            raise LayoutError(
                f"{at('image_layout')}: {config.name} does not divide over axis '{axis}': {'; '.join(faults)}; use a "
                "smaller axis"
            )
        return [f"{dim}:{axis}" for dim in config.split_dims]
    rules = []
    for dim, along in ((HEIGHT, axis), (WIDTH, "columns")):
        if along not in mesh:
            continue
        size = mesh.axis_size(along)
        if config.spatial_split % size:
            raise LayoutError(
                f"{at('image_layout')}: {config.name} is made for {config.spatial_split} parts of '{dim}', not for the "
                f"{size} of axis '{along}': use a smaller axis, or a ResNet with replace(spatial_split={size})"
            )
        rules.append(f"{dim}:{along}")
    return rules
