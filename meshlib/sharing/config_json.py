"""Configs of exported models as JSON, and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

from meshlib.core.errors import CheckpointError, nearest
from meshlib.layers.numerics import Numerics
from meshlib.layers.positions import RotaryScaling
from meshlib.layers.routing import Routing
from meshlib.models.config import TransformerConfig
from meshlib.models.config_parts import Experts, LatentAttention
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.vit import ViTConfig
from meshlib.ops.control.remat import Remat

TYPE = "type"
_MODELS = (TransformerConfig, ResNetConfig, ViTConfig)
_PARTS = (Numerics, Experts, Routing, LatentAttention, Remat, RotaryScaling)
RECORDS: MappingProxyType[str, type[Any]] = MappingProxyType({kind.__name__: kind for kind in (*_MODELS, *_PARTS)})


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
