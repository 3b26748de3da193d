"""Manifests of the two kinds of file sets in a folder: an exported model, and weights by Hugging Face's names.

    config.json                    names the files of a model that `export` wrote
    model.safetensors.index.json   names the shards of `write_weights`; of one file of weights there is no manifest

Both use `model.safetensors`. Whichever was written last replaces the other (`meshlib.core.file_sets`), and readers of
the other kind say so. A config.json or an index of another library is left alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from meshlib.core.errors import CheckpointError
from meshlib.core.file_sets import TAG, Manifest, checked, plain_name, replaced_by

FORMAT, VERSION = "meshlib model", 2
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
VARIABLES, VOCABULARY = ("model", ".safetensors"), ("tokenizer", ".json")
SHARD = rf"model(-[0-9]{{5}}({TAG})?-of-[0-9]{{5}})?\.safetensors"  # matches other writers' names, too


def _files_of_model(raw: bytes) -> list[str]:
    record = json.loads(raw)
    if record["format"] != FORMAT:
        raise ValueError(record["format"])
    names = [entry["name"] for entry in record["files"].values()]
    return [name for name in names if plain_name(name) in ("".join(VARIABLES), "".join(VOCABULARY))]


def _shards(raw: bytes) -> list[str]:
    names = dict.fromkeys(json.loads(raw)["weight_map"].values())
    return [name for name in names if re.fullmatch(SHARD, name)]


def _own_shards(raw: bytes) -> list[str]:
    return _shards(raw) if json.loads(raw)["metadata"]["files"] else []


def _replaced_by_shards(raw: bytes) -> list[Any]:
    return list(json.loads(raw)["metadata"]["replaces"])


_TAGGED = rf"model{TAG}\.safetensors|tokenizer{TAG}\.json"
_TAGGED_SHARDS = rf"model-[0-9]{{5}}{TAG}-of-[0-9]{{5}}\.safetensors|model\.safetensors"
MODEL = Manifest(CONFIG, _files_of_model, _TAGGED, lambda raw: json.loads(raw)["replaces"])
SHARDS = Manifest(INDEX, _shards, _TAGGED_SHARDS, _replaced_by_shards)
# an exported model replaces only shards of this library
OWN_SHARDS = Manifest(INDEX, _own_shards, _TAGGED_SHARDS, _replaced_by_shards)


def check_holds_weights(folder: Path, what: str) -> None:
    """Raise CheckpointError if the latest set in a folder is an exported model."""
    if (folder / INDEX).is_file():
        exported = bool(replaced_by(folder, SHARDS, [MODEL]))
    else:
        exported = _is_whole_model(folder, what)
    if exported:
        raise CheckpointError(
            f"{what}: the latest set in {folder} is a model that mtf.export wrote; read it with mtf.load_model, or "
            "name a file of weights"
        )


def check_holds_model(folder: Path, what: str) -> None:
    """Raise CheckpointError if the latest set in a folder is weights of `write_weights`."""
    weights = any((folder / name).is_file() for name in (INDEX, SINGLE))
    if replaced_by(folder, MODEL, [SHARDS]) or (weights and not (folder / CONFIG).exists()):
        raise CheckpointError(
            f"{what}: the latest set in {folder} has weights under Hugging Face names, not a model of "
            "mtf.export; read it with mtf.sharing.read_weights, or export the model again"
        )


def _is_whole_model(folder: Path, what: str) -> bool:
    """True if config.json belongs to an exported model all of whose files were written with it."""
    if not MODEL.members(str(folder)):
        return False
    try:
        for entry in json.loads((folder / CONFIG).read_bytes())["files"].values():
            checked(folder, entry, what, CheckpointError)
    except (CheckpointError, OSError, ValueError, LookupError, AttributeError):
        return False  # overwritten by weights in one file, or being replaced now
    return True
