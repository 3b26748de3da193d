"""Hugging Face config.json files of image classifiers, read as a `ViTConfig` or `ResNetConfig`.

Source: huggingface/transformers 4.57: configuration_vit.py, configuration_resnet.py and modeling_resnet.py, names and
defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from meshlib.core.arguments import at
from meshlib.core.documents import FLAG, RECORD, SIZE, TEXT, FieldKind, Schema, check_fields, read_json
from meshlib.core.errors import CheckpointError, GraphError
from meshlib.models.images.resnet import EXPANSION, ResNetConfig
from meshlib.models.images.vit import ViTConfig
from meshlib.sharing.foreign_config import model_file, model_name

Fields = Mapping[str, Any]
WHAT, _SOUND = "read_image_config", "Hugging Face's config.json with a model_type"
_SIDE = FieldKind("an integer of at least 1 or a list of two", lambda x: all(map(SIZE.accepts, _sides(x))))
_SIZES = FieldKind("a list of integers of at least 1", lambda x: isinstance(x, list) and all(map(SIZE.accepts, x)))
_COMMON: Schema = {
    **{"num_channels": SIZE.optional(), "num_labels": SIZE.optional(), "id2label": RECORD.optional()},
    "hidden_act": TEXT.optional(),
}
SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        "vit": {
            **_COMMON,
            **{n: SIZE.optional() for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
            **{"intermediate_size": SIZE.optional(), "image_size": _SIDE.optional(), "patch_size": _SIDE.optional()},
            "qkv_bias": FLAG.optional(),
        },
        "resnet": {
            **_COMMON,
            **{"depths": _SIZES.optional(), "hidden_sizes": _SIZES.optional(), "embedding_size": SIZE.optional()},
            **{"layer_type": TEXT.optional(), "downsample_in_bottleneck": FLAG.optional()},
            "downsample_in_first_stage": FLAG.optional(),
        },
    }
)


def read_image_config(path: str | os.PathLike[str], name: str | None = None) -> ViTConfig | ResNetConfig:
    """The classifier of images that a Hugging Face config.json describes, of type "vit" or "resnet".

    Args:
      path: the file, or its folder.
      name: name of the model; by default that of the file, or of the folder of a `config.json`.
    Classes are the labels that the file counts; Hugging Face's default is 2.
    Raises: CheckpointError for an invalid file; GraphError for another model_type, and for a ResNet whose stages do not
      double their channels.
    Example:
      >>> import json, tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = Path(folder, "small.json").write_text(json.dumps({"model_type": "vit", "num_labels": 1000}))
      ...     config = mtf.sharing.read_image_config(f"{folder}/small.json")
      >>> config.name, config.layers, config.parameters
      ('small', 12, 86567656)
    """
    return _read(path, name)[0]


def _read(path: str | os.PathLike[str], name: str | None = None) -> tuple[ViTConfig | ResNetConfig, Fields]:
    """The model of a file, and its fields."""
    given, target = read_json(model_file(path), WHAT, CheckpointError, _SOUND, {"model_type": TEXT})
    kind = given["model_type"]
    if kind not in SCHEMAS:
        raise GraphError(f"{at(WHAT)}: {target} has model_type {kind!r:.40}; classifiers read are {', '.join(SCHEMAS)}")

    def fail(fault: str) -> NoReturn:
        raise CheckpointError(f"{WHAT}: {target}: {fault}")

    check_fields(given, SCHEMAS[kind], fail)
    labels = given.get("num_labels") or len(given.get("id2label") or ()) or 2
    try:
        return _READERS[kind](given, name=name or model_name(Path(target)), classes=labels), given
    except GraphError as fault:
        raise GraphError(f"{at(WHAT)}: {target}: {fault}") from None


def image_config_notes(path: str | os.PathLike[str]) -> list[str]:
    """The features of a classifier's config.json that the model of `read_image_config` lacks.

    Raises: as `read_image_config`.
    Example:
      >>> import json, tempfile
      >>> from pathlib import Path
      >>> import meshlib as mtf
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     written = {"model_type": "vit", "num_labels": 9, "qkv_bias": False}
      ...     _ = Path(folder, "small.json").write_text(json.dumps(written))
      ...     mtf.sharing.image_config_notes(f"{folder}/small.json")
      ['qkv_bias=False: queries, keys and values have biases here']
    """
    notes, given = [], _read(path)[1]
    if given.get("qkv_bias") is False:
        notes.append("qkv_bias=False: queries, keys and values have biases here")
    usual = {"vit": "gelu", "resnet": "relu"}[given["model_type"]]
    if given.get("hidden_act") not in (None, usual):
        notes.append(f"hidden_act={given['hidden_act']}: {usual} here")
    if not (given.get("num_labels") or given.get("id2label")):
        notes.append("no labels: 2 classes, Hugging Face's default; --set classes=N gives others")
    return notes


def is_of_images(path: str | os.PathLike[str]) -> bool:
    """Whether a config.json describes a classifier of images that is read here."""
    given, _ = read_json(model_file(path), "read_config", CheckpointError, _SOUND)
    return given.get("model_type") in SCHEMAS


def _vit(fields: Fields, **called: Any) -> ViTConfig:
    height, width = _sides(fields.get("image_size") or 224)
    patch, other = _sides(fields.get("patch_size") or 16)
    if patch != other:
        raise GraphError(f"patch_size is {patch}x{other}; patches here are square")
    return ViTConfig(
        layers=fields.get("num_hidden_layers") or 12,
        d_model=fields.get("hidden_size") or 768,
        heads=fields.get("num_attention_heads") or 12,
        d_ff=fields.get("intermediate_size") or 3072,
        patch=patch,
        height=height,
        width=width,
        channels=fields.get("num_channels") or 3,
        **called,
    )


def _resnet(fields: Fields, **called: Any) -> ResNetConfig:
    widths, blocks = fields.get("hidden_sizes") or (256, 512, 1024, 2048), fields.get("depths") or (3, 4, 6, 3)
    kind = fields.get("layer_type") or "bottleneck"
    if kind not in ("bottleneck", "basic"):
        raise GraphError(f"layer_type is {kind!r:.40}; blocks here are 'bottleneck' or 'basic'")
    bottleneck = kind == "bottleneck"
    features, rest = divmod(widths[0], EXPANSION) if bottleneck else (widths[0], 0)
    doubled = [widths[0] * 2**stage for stage in range(len(blocks))]
    if rest or [*widths] != doubled or fields.get("embedding_size", features) != features:
        raise GraphError(
            f"hidden_sizes is {[*widths]}, embedding_size {fields.get('embedding_size', features)}: the {len(blocks)} "
            f"stages here double their channels and begin with {features}, so {doubled}"
        )
    if fields.get("downsample_in_first_stage"):
        raise GraphError("downsample_in_first_stage is true; the first stage here keeps rows and columns")
    return ResNetConfig(
        blocks=tuple(blocks),
        bottleneck=bottleneck,
        version="1" if fields.get("downsample_in_bottleneck") else "1.5",
        features=features,
        channels=fields.get("num_channels") or 3,
        **called,
    )


def _sides(size: int | Sequence[int]) -> Sequence[int]:
    """Rows and columns of a square, or of a list of two."""
    return size if isinstance(size, list) and len(size) == 2 else (size, size)  # type: ignore[return-value]


_READERS: MappingProxyType[str, Callable[..., ViTConfig | ResNetConfig]] = MappingProxyType(
    {"vit": _vit, "resnet": _resnet}
)
