"""Image models with published dimensions, by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.models.images.resnet import RESNETS, ResNetConfig
from meshlib.models.images.vit import VITS, ViTConfig

IMAGE_PRESETS: MappingProxyType[str, ResNetConfig | ViTConfig] = MappingProxyType({**RESNETS, **VITS})


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
